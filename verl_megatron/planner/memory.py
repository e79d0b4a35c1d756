"""Predicted bytes of each phase on each kind of rank, on the GPU and on its host."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from parallel.layout import Layout
from verl_megatron.config.rollout import GRADIENTS_LEAVE, OPTIMIZER_LEAVES
from verl_megatron.model_specs import is_separate, rollout_devices
from verl_megatron.planner.activations import (
    fit_budgets,
    fp8_weight_bytes,
    inference_bytes,
    row_by_row,
    training_bytes,
)
from verl_megatron.planner.machine import GIB, Machine
from verl_megatron.planner.planned_run import (
    PlannedRole,
    PlannedRun,
    PlannedWorld,
    communicators,
)
from verl_megatron.planner.rollout import serving
from verl_megatron.planner.static import StaticBytes, static_bytes

SERVING = ("vllm weights", "kv cache", "window")  # the cache includes vLLM's working memory
PARTS = ("process", "weights", "gradients", "optimizer", "activations", "versions", *SERVING)
UPDATES = ("critic_update", "actor_update")
SCORES = "scores"  # phase of the scoring worlds
IDLE, KV_CACHE = "the idle models", "KV cache"
HOST_MEMORY = "host memory"  # of a Problem
Phases = dict[str, dict[str, float]]  # bytes by phase and part


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks with the same memory use, and that use."""

    ranks: tuple[int, ...]
    phases: Phases
    host_bytes: float  # of one such rank
    own_rollout_bytes: float  # vLLM's weights that share no memory with Megatron's
    kv_cache_bytes: float  # available to vLLM for keys and values; infinite on ranks that only train

    def total(self, phase: str) -> float:
        """Bytes of a phase; 0 if these ranks have no part in it."""
        return sum(self.phases.get(phase, {}).values())

    @property
    def fullest(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def idle_bytes(self) -> float:
        """Bytes in use while nothing is computed and vLLM sleeps."""
        parts = self.phases.get("weights_awake", {})
        return sum(size for part, size in parts.items() if part not in SERVING)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted memory of all ranks."""

    kinds: tuple[RankKind, ...]
    host_bytes: float  # of the fullest host
    budgets: Mapping[str, int] = field(default_factory=dict)  # of the run, once they are fitted

    @property
    def peak(self) -> RankKind:
        """The kind of rank with the highest peak."""
        return max(self.kinds, key=lambda kind: kind.total(kind.fullest))

    @property
    def peak_bytes(self) -> float:
        return self.peak.total(self.peak.fullest)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(phase for kind in self.kinds for phase in kind.phases))

    @property
    def idle_bytes(self) -> float:
        """Bytes in use on the fullest rank while nothing is computed and vLLM sleeps."""
        return max(kind.idle_bytes for kind in self.kinds)

    def phase_bytes(self, phase: str) -> float:
        """Bytes in use at the end of a phase on the fullest rank, including PyTorch's cached blocks.

        A run reports it as memory/PHASE_mb.
        """
        return max(kind.total(phase) for kind in self.kinds)

    def free_bytes(self, phases: Collection[str], gpu_bytes: float) -> float:
        """Bytes of a GPU that the given phases leave on the fullest of the ranks that generate."""
        return gpu_bytes - max(
            kind.total(phase) for kind in self.kinds for phase in phases if kind.kv_cache_bytes < inf
        )

    @property
    def kv_cache_bytes(self) -> float:
        """Smallest KV cache of a rank."""
        return min(kind.kv_cache_bytes for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class RoleOnRank:
    """A model's part on one kind of rank."""

    role: PlannedRole
    stage: int  # pipeline stage
    static: StaticBytes


def _heaviest(run: PlannedRun, role: PlannedRole) -> RoleOnRank:
    """Return a model's part on the pipeline stage with the most weights."""
    stages = (RoleOnRank(role, stage, static_bytes(run, role, stage)) for stage in range(role.layout.pp))
    return max(stages, key=lambda model: model.static.weights)


def _sum_of(part: str, models: list[RoleOnRank], names: Collection[str] | None = None) -> float:
    """Bytes of `part` over the models called `names`; None: over all."""
    return sum(getattr(model.static, part) for model in models if names is None or model.role.name in names)


def plan_memory(run: PlannedRun, machine: Machine) -> MemoryPlan:
    """Predict the memory of every phase on every kind of rank, with the micro-batches that fit.

    All samples count as long as allowed.
    """
    run = run.longest
    run = fit_budgets(run, machine.gpu_bytes, lambda smallest: _kinds_of(smallest, machine))
    kinds = _kinds_of(run, machine)
    host_of = {rank: kind.host_bytes for kind in kinds for rank in kind.ranks}
    hosts: dict[int, float] = {}
    for rank, size in host_of.items():
        hosts[rank // run.ranks_per_host] = hosts.get(rank // run.ranks_per_host, 0) + size
    return MemoryPlan(kinds, max(hosts.values()), run.budgets)


def _kinds_of(run: PlannedRun, machine: Machine) -> tuple[RankKind, ...]:
    kinds = [_rank_kind(run, machine, ranks, parts) for ranks, parts in _rank_groups(run)]
    if is_separate(run.config):
        kinds = [*(_training_kind(run, kind) for kind in kinds), _rollout_kind(run, machine)]
    return (*kinds, *(_scoring_kind(run, machine, planned) for planned in run.scoring))


def _rank_groups(run: PlannedRun) -> Iterator[tuple[tuple[int, ...], tuple[tuple[PlannedRole, int], ...]]]:
    """Group world ranks that have the same stages of the same models; yield the ranks with these stages."""
    stages = [_stage_of_rank(role.layout) for role in run.roles]
    found: dict[tuple, list[int]] = {}
    for rank in range(run.world_size):
        found.setdefault(tuple(stage.get(rank) for stage in stages), []).append(rank)
    for parts, ranks in found.items():
        yield (
            tuple(ranks),
            tuple((role, stage) for role, stage in zip(run.roles, parts) if stage is not None),
        )


def _stage_of_rank(layout: Layout) -> dict[int, int]:
    """Return the pipeline stage of each of the layout's ranks."""
    ranks_of_stage = len(layout.ranks) // layout.pp
    return {rank: index // ranks_of_stage for index, rank in enumerate(layout.ranks)}


def _rank_kind(
    run: PlannedRun, machine: Machine, ranks: tuple[int, ...], parts: tuple[tuple[PlannedRole, int], ...]
) -> RankKind:
    models = [RoleOnRank(role, stage, static_bytes(run, role, stage)) for role, stage in parts]
    own = serving.own_rollout_bytes(run, next((stage for role, stage in parts if role is run.actor), None))
    awake = serving.serving_bytes(run, machine, own)
    settled = {"process": machine.process_bytes + machine.communicator_bytes * communicators(run)}
    settled |= {part: _sum_of(part, models) for part in ("weights", "gradients", "optimizer")}
    host = machine.process_host_bytes + _offloaded_to_host(run, models) + _saved_from_host(run, models)
    return RankKind(
        ranks=ranks,
        phases=_phases(run, models, settled, awake),
        host_bytes=host,
        own_rollout_bytes=own,
        kv_cache_bytes=serving.kv_cache_bytes(run, machine, own),
    )


def _training_kind(run: PlannedRun, kind: RankKind) -> RankKind:
    """Return a kind of rank without vLLM, which has ranks of its own, and with a snapshot of the weights."""
    stage = _stage_of_rank(run.actor.layout).get(kind.ranks[0])
    snapshot = 0.0 if stage is None else run.snapshot_bytes(stage)
    phases = {}
    for phase, parts in kind.phases.items():
        phases[phase] = {part: size for part, size in parts.items() if part not in SERVING}
        phases[phase]["versions"] = snapshot
    return replace(kind, phases=phases, own_rollout_bytes=0.0, kv_cache_bytes=inf)


def _rollout_kind(run: PlannedRun, machine: Machine) -> RankKind:
    """Return the ranks of `rollout.devices`: vLLM, and the back buffer that its next weights arrive in."""
    own = serving.own_rollout_bytes(run, None)
    parts = {
        "process": machine.process_bytes + machine.communicator_bytes * communicators(run),
        "versions": serving.arriving_bytes(run),
    } | serving.serving_bytes(run, machine, own)
    return RankKind(
        ranks=rollout_devices(run.config),
        phases={"start": parts, "rollout": parts},
        host_bytes=machine.process_host_bytes,
        own_rollout_bytes=own,
        kv_cache_bytes=serving.kv_cache_bytes(run, machine, own),
    )


def _scoring_kind(run: PlannedRun, machine: Machine, planned: PlannedWorld) -> RankKind:
    """Return the ranks of frozen models, as if each held the largest stage of every model."""
    stages = [(role, stage) for role in planned.roles for stage in range(role.layout.pp)]
    largest = [_heaviest(run, role) for role in planned.roles]
    built = {"process": machine.process_bytes + machine.communicator_bytes}
    at_work = built | {
        "weights": _sum_of("weights", largest),
        "activations": max(inference_bytes(run, *each) for each in stages),
    }
    phases = {"build": built | {"weights": _most_weights(run, largest)}, SCORES: at_work}
    return RankKind(planned.world.ranks, phases, machine.process_host_bytes, 0.0, inf)


def _phases(
    run: PlannedRun, models: list[RoleOnRank], settled: dict[str, float], awake: dict[str, float]
) -> Phases:
    """Bytes by phase and part, in the order of a run.

    A phase's activations include blocks that PyTorch caches from earlier phases. "start" is vLLM's start,
    with the models built before it; "build" is when the last model has been built, with the most weights of
    any moment until then. "weights_awake" is the moment of the weight sync in which vLLM has its weights;
    where both do not fit, offloading happens before it. The others are the phases of an iteration.
    """
    config, window = run.config, run.config.reshard.window_mib << 20
    asleep = {} if config.rollout.sleep else awake  # what vLLM keeps during training
    freed = {part: 0.0 for part, modes in _OFFLOADED.items() if config.reshard.offload in modes}
    if run.is_fully_sharded:
        freed["gradients"] = 0.0  # they are there during updates only
    has_messages = run.world_size > run.ranks_per_host or not run.reads_peer_memory
    staged = window * (config.reshard.mode == "swap" or has_messages)
    staged += window * (config.rollout.weight_dtype == "fp8")
    phases = {
        "start": {"process": settled["process"]} | _built_before_vllm(run, models, freed) | awake,
        "build": settled | _while_building(run, models, freed) | asleep,
        "weights_awake": settled
        | freed
        | (asleep or {"vllm weights": awake["vllm weights"]})
        | {"window": staged},
        "rollout": settled | freed | awake,
    }
    for phase, parts in _training_phases(run, models, freed).items():
        phases[phase] = settled | asleep | parts
    return phases


def _built_before_vllm(run: PlannedRun, models: list[RoleOnRank], freed: Collection[str]) -> dict[str, float]:
    """Bytes by part when vLLM starts: on an empty GPU with `keep`, else next to the actor without moments."""
    if run.config.reshard.mode == "keep":
        return {}
    actor = next((model.static for model in models if model.role is run.actor), StaticBytes(0))
    built = {"weights": actor.weights, "gradients": actor.gradients, "optimizer": actor.masters}
    return {part: 0.0 if part in freed else size for part, size in built.items()}


def _while_building(run: PlannedRun, models: list[RoleOnRank], freed: Collection[str]) -> dict[str, float]:
    """Bytes by part when the last model has been built; models are built one after the other."""
    built = {
        "gradients": [model.static.gradients for model in models],
        "optimizer": [model.static.masters for model in models],
    }
    parts = {part: max(sizes, default=0.0) if part in freed else sum(sizes) for part, sizes in built.items()}
    return parts | {"weights": _most_weights(run, models)}


def _most_weights(run: PlannedRun, models: list[RoleOnRank]) -> float:
    """Bytes of the weights when the largest model is built: fully sharded, it is whole at first."""
    most = before = 0.0
    for model in models:
        whole = 0.0
        if run.is_fully_sharded:
            whole = model.role.elements[model.stage] * run.element_bytes
        most = max(most, before + max(whole, model.static.weights))
        before += model.static.weights
    return most


def _training_phases(run: PlannedRun, models: list[RoleOnRank], freed: Collection[str]) -> Phases:
    """Bytes by phase of activations, and of what was offloaded and is back."""
    # The optimizer state of the model that is trained first returns after rollout.
    first = "critic" if any(role.name == "critic" for role in run.roles) else "actor"
    phases: Phases = {}
    activations = 0.0  # with those cached from earlier phases, unless micro-batches need all memory
    for phase, names, measure in _WORK:
        if not any(role.name in names for role in run.roles):
            continue
        if working := [model for model in models if model.role.name in names]:
            # Models alternate within a pass and keep their fp8 copies.
            waiting = sum(fp8_weight_bytes(run, each.role, each.stage, copies=1) for each in working[1:])
            own = measure(run, working[0].role, working[0].stage) + waiting
            activations = own if run.budgets else max(activations, own)
        there = {
            "gradients": names if phase in UPDATES else (),
            "optimizer": () if run.steps_only else ("actor",) if phase == UPDATES[-1] else (first,),
        }
        phases[phase] = {"activations": activations}
        phases[phase] |= {part: _sum_of(part, models, there[part]) for part in freed}
        # A step has optimizer state, and no longer the activations.
        if run.steps_only and phase in UPDATES:
            if (state := _sum_of("optimizer", models, names)) > activations:
                phases[phase] |= {"activations": 0.0, "optimizer": state}
    return phases


# Values of reshard.offload that offload each part.
_OFFLOADED = {"gradients": GRADIENTS_LEAVE, "optimizer": OPTIMIZER_LEAVES}
_WORK = (
    ("reward", ("reward",), inference_bytes),
    ("log_probs", ("actor", "reference", "teacher"), inference_bytes),
    ("values", ("critic",), inference_bytes),
    ("critic_update", ("critic",), training_bytes),
    ("actor_update", ("actor",), training_bytes),
)


def _offloaded_to_host(run: PlannedRun, models: list[RoleOnRank]) -> float:
    """Pinned host bytes of a rank."""
    return _sum_of("optimizer", models) if run.config.reshard.offload in OPTIMIZER_LEAVES else 0.0


def _saved_from_host(run: PlannedRun, models: list[RoleOnRank]) -> float:
    """Host bytes of the copies from which a checkpoint is written, for all models.

    They are float32 weights and moments, divided among data-parallel ranks.
    """
    if not run.config.run.save_interval:
        return 0.0
    return sum(
        12 * model.role.elements[model.stage] / (model.role.layout.dp * model.role.layout.cp)
        for model in models
        if model.role.trainable
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """A memory need that does not fit."""

    cause: str  # a phase, IDLE, KV_CACHE or HOST_MEMORY
    needed_bytes: float
    room_bytes: float

    def __str__(self) -> str:
        remedy = (
            " for a sample; raise rollout.gpu_memory_utilization or rollout.tp"
            if self.cause == KV_CACHE
            else ""
        )
        return (
            f"{self.cause}: {self.needed_bytes / GIB:,.1f} GiB needed,"
            f" {self.room_bytes / GIB:,.1f} there{remedy}"
        )


def problems_of(
    run: PlannedRun, machine: Machine, memory: MemoryPlan, *, margin: float = 0.0
) -> list[Problem]:
    """Return what does not fit; empty if everything fits.

    Args:
        margin: share of a GPU and of a host that has to stay free; a negative margin lets a need exceed them
            by that share.
    """
    run = run.longest
    if run.config.engine.dynamic_batching:  # whose micro-batches become smaller where memory is short
        memory = replace(memory, kinds=_kinds_of(row_by_row(run), machine))
    room = machine.gpu_bytes * (1 - margin)
    needs = {IDLE: memory.idle_bytes} | {phase: memory.phase_bytes(phase) for phase in memory.phases}
    found = [
        Problem(cause, needed, min(room, machine.gpu_bytes))
        for cause, needed in needs.items()
        if needed > room
    ]
    sample = serving.kv_bytes_per_token(run) * (run.prompt_tokens + run.response_tokens)
    if memory.kv_cache_bytes < sample:
        found.append(Problem(KV_CACHE, sample, max(0.0, memory.kv_cache_bytes)))
    if host := host_problem(memory, machine, margin=margin):
        found.append(host)
    return found


def host_problem(memory: MemoryPlan, machine: Machine, *, margin: float = 0.0) -> Problem | None:
    """Return what does not fit a host, with the margin of `problems_of`."""
    room = machine.host_bytes * (1 - margin)
    if memory.host_bytes > room:
        return Problem(HOST_MEMORY, memory.host_bytes, min(room, machine.host_bytes))
    return None
