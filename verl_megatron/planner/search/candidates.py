"""Layout search: all layouts of a run, ranked by predicted seconds, and the reasons why others do not fit.

A candidate has the choices of `choices`. It also chooses vLLM's tensor-parallel size, how weights are kept,
and what is offloaded for rollout. gpu_memory_utilization follows from them: the need of the samples that a
replica decodes concurrently, or what is left.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import ceil, floor, inf

from parallel.weights.architecture import Architecture, read_architecture
from verl_megatron.checks.models import layout_problems
from verl_megatron.checks.problems import refuse
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import is_separate, num_rollout_ranks, shares_dtype
from verl_megatron.planner.machine import GIB, Machine
from verl_megatron.planner.memory import IDLE, MemoryPlan, Problem, plan_memory, problems_of
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.decoding import samples_at_once
from verl_megatron.planner.rollout.lengths import Lengths
from verl_megatron.planner.rollout.serving import cached_tokens, kv_bytes_per_token, vllm_working_bytes
from verl_megatron.planner.search.choices import (
    ALWAYS_SAID,
    MODES,
    OFFLOADS,
    Settings,
    activation_options,
    configured,
    frozen_layouts,
    layouts,
    serves,
    setting_of,
    spelled,
    tensor_sizes,
)
from verl_megatron.planner.seconds import TimePlan, Work, plan_seconds, plan_work

MARGIN = 0.05  # share of a GPU that stays free: above most prediction errors of measured runs
# Memory given to vLLM beyond its samples: partially filled blocks, and what its own profiling run reserves.
CACHE_SHARE, ENGINE_BYTES = 1.1, 2 * GIB
# Causes that depend on reshard.mode and reshard.offload.
ON_HOLDING = ("start", "weights_awake", "rollout", "KV cache", "host memory")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings with their predicted memory and time."""

    settings: Settings  # that a user has to set
    run: PlannedRun
    memory: MemoryPlan
    problems: tuple[Problem, ...]
    time: TimePlan | None = None  # None where something does not fit

    @property
    def seconds(self) -> TimePlan:
        """Predicted time of a candidate that fits."""
        assert self.time is not None, "something does not fit"
        return self.time

    @property
    def line(self) -> str:
        """The settings for the command line of verl_megatron.train, or a recipe."""
        return " ".join(f"{name}={spelled(value)}" for name, value in self.settings.items())


@dataclass(slots=True)
class Search:
    """Candidates that fit, fastest first, one for each pair of layouts; and those that do not."""

    fitting: list[Candidate] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return len(self.fitting) + len(self.refused)

    def refused_by_cause(self) -> dict[str, list[Candidate]]:
        """Group rejected candidates by the first thing that does not fit, nearest to fitting first."""
        found: dict[str, list[Candidate]] = {}
        for candidate in self.refused:
            found.setdefault(candidate.problems[0].cause, []).append(candidate)
        return {
            cause: sorted(group, key=lambda each: each.problems[0].needed_bytes)
            for cause, group in found.items()
        }


def search(
    base: TrainerConfig,
    *,
    world_size: int,
    machine: Machine,
    ranks_per_host: int = 8,
    read: Callable[[str], Architecture] = read_architecture,
    lengths: Lengths | None = None,
) -> Search:
    """Try every layout of `base`'s models on `world_size` ranks, replicated and fully sharded.

    Args:
        read: returns the architecture of a model path.
        lengths: of the responses; None: all are as long as allowed.

    Raises:
        ValueError: a model that cannot be read, or settings with which no layout is valid.
    """
    make = _Maker(base, world_size, ranks_per_host, machine, read, lengths)
    arch, result = read(base.actor.path), Search()
    sizes = [
        tp
        for tp in tensor_sizes(ranks_per_host)
        if num_rollout_ranks(base, world_size) % tp == 0 and serves(base, arch, tp)
    ]
    divisors = [tp for tp in tensor_sizes(ranks_per_host) if world_size % tp == 0]
    impossible = None
    for layout in layouts(base, world_size, ranks_per_host, read):
        layout |= frozen_layouts(configured(base, layout), machine, divisors, read)
        best: dict[int, Candidate] = {}  # keyed by vLLM's tensor-parallel size
        for option in activation_options(base):
            try:
                training = make.training(layout | option)
            except ValueError as error:
                impossible, training = error, None
            if training is None:
                break
            if training.problems:
                result.refused.append(training)
                if training.problems[0].cause == IDLE:
                    break  # fewer activations would not help
                continue
            # Micro-batches that follow the memory depend on what vLLM and offloading leave.
            work = None if base.engine.dynamic_batching else plan_work(_at_rest(training.run), machine)
            for tp in sizes:
                found = make.with_rollout(layout | option, tp, work)
                if found.problems:
                    result.refused.append(found)
                elif tp not in best or seconds_of(found) < seconds_of(best[tp]):
                    best[tp] = found
        result.fitting += best.values()
    if impossible is not None and not result.tried:
        raise impossible
    result.fitting.sort(key=seconds_of)
    return result


def seconds_of(candidate: Candidate) -> float:
    """Seconds of an iteration, as candidates are ranked by them."""
    return round(candidate.seconds.iteration, 2)  # finer differences do not decide


@dataclass(frozen=True, slots=True)
class _Maker:
    """Builds candidates from choices."""

    base: TrainerConfig
    world_size: int
    ranks_per_host: int
    machine: Machine
    read: Callable[[str], Architecture]
    lengths: Lengths | None

    def modes(self, chosen: Settings) -> tuple[str, ...]:
        """Reshard modes to try; memory is shared only on the same ranks, and by weights of the same dtype."""
        config = configured(self.base, chosen)
        alike = shares_dtype(config) and config.rollout.weight_dtype == "auto"
        whole = config.engine.sharding != "full"
        return MODES if alike and whole and not is_separate(config) else MODES[:1]

    @property
    def offloads(self) -> tuple[str, ...]:
        """Offload settings to try; offloading makes room for a vLLM that sleeps on the same ranks."""
        return OFFLOADS if self.base.rollout.sleep and not is_separate(self.base) else OFFLOADS[:1]

    def planned(self, chosen: Settings) -> PlannedRun:
        return PlannedRun.of(
            configured(self.base, chosen),
            world_size=self.world_size,
            ranks_per_host=self.ranks_per_host,
            read=self.read,
            lengths=self.lengths,
        )

    def training(self, chosen: Settings) -> Candidate | None:
        """Check everything that is independent of vLLM, with maximal offload.

        None if the samples do not split this way; ValueError if a model does not, or must not.
        """
        run = self.planned(
            chosen
            | {"rollout.tp": 1, "rollout.gpu_memory_utilization": 0.0, "reshard.offload": self.offloads[-1]}
        )
        for role in chain(run.roles, *(planned.roles for planned in run.scoring)):
            refuse(layout_problems(run.config, role.name, role.layout, role.arch))
        if any(
            role.layout.dp > run.samples // run.config.algorithm.num_mini_batches
            for role in run.roles
            if role.trainable
        ):
            return None
        memory = plan_memory(run, self.machine)
        problems = tuple(
            problem
            for problem in problems_of(run, self.machine, memory, margin=MARGIN)
            if problem.cause not in ON_HOLDING
        )
        return Candidate(self._said(chosen), run, memory, problems)

    def with_rollout(self, chosen: Settings, tp: int, work: Work | None) -> Candidate:
        """Find the fastest way to keep vLLM's weights at tensor-parallel size `tp`.

        The search stops at the simplest way that decodes all samples concurrently.
        """
        best = None
        for mode, offload in product(self.modes(chosen), self.offloads):
            holding = chosen | {
                "rollout.tp": tp,
                "reshard.mode": mode,
                "reshard.offload": offload,
                "rollout.gpu_memory_utilization": 0.0,
            }
            run = self.planned(holding)
            empty = plan_memory(run, self.machine)
            share, wanted = self._shares(run, empty)
            holding["rollout.gpu_memory_utilization"] = share
            run = replace(run, config=configured(run.config, {"rollout.gpu_memory_utilization": share}))
            memory = plan_memory(run, self.machine)
            problems = tuple(problems_of(run, self.machine, memory, margin=MARGIN))
            time = None if problems else self._seconds(run, memory, work)
            found = Candidate(self._said(holding), run, memory, problems, time)
            if best is None or (
                best.problems and (not problems or problems[0].needed_bytes < best.problems[0].needed_bytes)
            ):
                best = found
            elif not problems and not best.problems and seconds_of(found) < seconds_of(best):
                best = found
            if not problems and share >= wanted:
                break
        assert best is not None
        return best

    def _seconds(self, run: PlannedRun, memory: MemoryPlan, work: Work | None) -> TimePlan:
        # steps that copy optimizer state both ways take longer
        return plan_seconds(run, self.machine, memory, None if run.steps_only else work)

    def _shares(self, run: PlannedRun, empty: MemoryPlan) -> tuple[float, float]:
        """gpu_memory_utilization in hundredths, and the value that all samples need.

        The first is what the rest of the run leaves free, capped at that need. `empty` is the plan without
        vLLM's share.
        """
        awake = (
            ("start", "rollout") if run.config.rollout.sleep else empty.phases
        )  # phases with vLLM's weights and cache on the GPU
        room = empty.free_bytes(awake, self.machine.gpu_bytes * (1 - MARGIN))
        own = max(kind.own_rollout_bytes for kind in empty.kinds)
        cached = cached_tokens(run, samples_at_once(run, inf)) * kv_bytes_per_token(run)
        wanted = (
            ceil(
                100
                * (own + vllm_working_bytes(run, self.machine) + CACHE_SHARE * cached + ENGINE_BYTES)
                / self.machine.gpu_bytes
            )
            / 100
        )
        return max(0.01, min(wanted, floor(100 * room / self.machine.gpu_bytes) / 100)), wanted

    def _said(self, chosen: Settings) -> Settings:
        """Select the settings to report: those always reported, and others that differ from the base."""
        return {
            name: value
            for name, value in chosen.items()
            if name in ALWAYS_SAID or setting_of(self.base, name) != value
        }


def _at_rest(run: PlannedRun) -> PlannedRun:
    """Return the run with its optimizer state on the GPU."""
    return replace(run, config=configured(run.config, {"reshard.offload": "none"}))
