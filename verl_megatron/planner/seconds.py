"""Predicted seconds of each phase of an iteration, and model FLOPs utilization."""

from dataclasses import dataclass, field, replace

from verl_megatron.model_specs import is_separate, scores_ahead
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.memory import MemoryPlan
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.decoding import pipeline_of, rollout_seconds
from verl_megatron.planner.rollout.simulation import Pipeline
from verl_megatron.planner.training import forward_flops, infer_seconds, step_seconds
from verl_megatron.planner.weight_sync import (
    adopt_seconds,
    arrival_seconds,
    leaving_seconds,
    publish_seconds,
    reshard_seconds,
    return_seconds,
)


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds and model FLOPs (over all GPUs) of the phases in which models compute."""

    seconds: dict[str, float]
    flops: dict[str, float]


@dataclass(frozen=True, slots=True)
class TimePlan:
    """Predicted time of an iteration."""

    seconds: dict[str, float]  # by phase, in order
    flops: dict[str, float]  # of the phases in which models compute
    gpus: int
    peak_flops: float  # of one GPU
    staleness: int = 0  # above 0 the next samples are generated while the other phases train
    scoring: dict[str, float] = field(default_factory=dict)  # seconds of each scoring world, by name
    pipeline: Pipeline | None = None  # without pause; None: the rollout ends with each iteration's samples

    @property
    def training(self) -> float:
        """Seconds of all phases but the rollout."""
        return sum(self.seconds.values()) - self.seconds["rollout"]

    @property
    def overlaps(self) -> bool:
        """Whether both sides work at the same time."""
        return self.staleness > 0 or self.pipeline is not None

    @property
    def iteration(self) -> float:
        """Seconds of an iteration: both sides after each other, or the slowest of all worlds."""
        if self.pipeline is not None:
            return self.pipeline.seconds
        rollout, training = self.seconds["rollout"], self.training
        return max(rollout, training, *self.scoring.values()) if self.overlaps else rollout + training

    def mfu(self, *phases: str) -> float:
        """Model FLOPs utilization over `phases` (none: all in which models compute).

        It is relative to the vendor's rate. It counts matrix products and the causal half of attention, twice
        for a backward pass. It does not count the input embedding, logits of tokens other than the targets,
        recomputation, or generation.
        """
        phases = phases or tuple(self.flops)
        return (
            sum(self.flops[phase] for phase in phases)
            / sum(self.seconds[phase] for phase in phases)
            / self.gpus
            / self.peak_flops
        )


def plan_work(run: PlannedRun, machine: Machine) -> Work:
    """Predict forward passes and updates, which do not depend on vLLM's settings.

    Of offloading, only reshard.offload=steps matters.
    """
    seconds: dict[str, float] = {}
    flops: dict[str, float] = {}
    steps = run.config.algorithm.epochs * run.config.algorithm.num_mini_batches
    for phase, passes in (
        ("reward", [(["reward"], 1.0)]),
        ("log_probs", _log_prob_passes(run)),
        ("values", [(["critic"], 1.0)]),
    ):
        for names, share in passes:
            if roles := [role for role in run.roles if role.name in names]:
                known = seconds.get(phase, machine.phase_s)
                seconds[phase] = known + share * infer_seconds(run, machine, roles)
                done = share * sum(forward_flops(run, role) for role in roles)
                flops[phase] = flops.get(phase, 0.0) + done
    for role in reversed([role for role in run.roles if role.trainable]):  # the critic comes first
        phase = f"{role.name}_update"
        seconds[phase] = machine.phase_s + steps * step_seconds(run, machine, role)
        flops[phase] = 3 * run.config.algorithm.epochs * forward_flops(run, role)
    return Work(seconds, flops)


def _log_prob_passes(run: PlannedRun) -> list[tuple[list[str], float]]:
    """Models of each log-prob pass, and the share of the samples in it; follows verl_megatron/learner.py."""
    share = run.old_logprob_share
    passes = [(["actor", "reference"], 1.0)] if share == 1 else [(["reference"], 1.0), (["actor"], share)]
    return [each for each in passes + [(["teacher"], 1.0)] if each[1]]


def plan_seconds(run: PlannedRun, machine: Machine, memory: MemoryPlan, work: Work | None = None) -> TimePlan:
    """Predict every phase; `work` is the result of `plan_work` if it is known already."""
    run = replace(run, budgets=memory.budgets)
    work = work or plan_work(run, machine)
    staleness = run.config.async_.max_staleness
    rollout = 0.0 if run.streams else rollout_seconds(run, machine, memory.kv_cache_bytes)
    if is_separate(run.config):
        arrival = 0.0 if staleness else arrival_seconds(run, machine)
        before = {
            "reshard": publish_seconds(run, machine),
            "rollout": arrival + adopt_seconds(run, machine) + rollout,
        }
    else:
        before = {
            "reshard": reshard_seconds(run, machine),
            "rollout": rollout,
            "return": return_seconds(run, machine),
        }
    seconds = before | work.seconds
    # The critic's optimizer state makes room for the actor's.
    seconds["actor_update"] += sum(
        leaving_seconds(run, machine, role) for role in run.roles if role.name == "critic"
    )
    scoring = scoring_seconds(run, machine)
    if scoring and not scores_ahead(run.config):
        # Scored beside the passes of the training ranks, which do not wait for scores.
        beside = sum(seconds.get(phase, 0.0) for phase in ("log_probs", "values"))
        seconds["scores"] = max(0.0, max(scoring.values()) - beside)
    time = TimePlan(seconds, work.flops, run.gpus, machine.peak_flops, staleness, scoring)
    if not run.streams:
        return time
    training_s = max(time.training, *scoring.values(), 0.0)
    found = pipeline_of(run, machine, memory.kv_cache_bytes, training_s)
    return replace(time, seconds=seconds | {"rollout": found.busy}, pipeline=found)


def scoring_seconds(run: PlannedRun, machine: Machine) -> dict[str, float]:
    """Return the seconds in which each scoring world passes over an iteration's samples, by its name."""
    found: dict[str, float] = {}
    for planned in run.scoring:
        passes = (machine.phase_s + infer_seconds(run, machine, [role]) for role in planned.roles)
        found[planned.world.name] = sum(passes)
    return found
