"""One size of `benchmark_scaling.py`: seconds by phase and derived values."""

from dataclasses import dataclass, field, replace
from statistics import median

from parallel.layout import Layout
from verl_megatron.observe.timeline import TRACE_FILE, Timeline
from verl_megatron.observe.tracking import read_metrics
from verl_megatron.planner.machine import MACHINES
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.seconds import plan_work

MEASURED, MODELLED = "measured", "modelled"
# by phase: the model whose layout it has
MODEL_OF = {
    "reward": "reward",
    "log_probs": "actor",
    "values": "critic",
    "critic_update": "critic",
    "actor_update": "actor",
}
UPDATES = ("critic_update", "actor_update")
FORWARD = ("reward", "log_probs", "values")
STEADY = 0.03  # share of an iteration by which a phase may vary between iterations without a remark


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An iteration on a number of GPUs (on a CPU: ranks)."""

    source: str  # MEASURED or MODELLED
    gpus: int
    actor: str  # layout
    critic: str  # empty without a critic
    rollout: str  # replicas and their tensor-parallel size
    rows: int  # samples of an iteration
    tokens: int  # of these samples, prompts included
    seconds: dict[str, float]  # by phase
    planned: dict[str, float] = field(default_factory=dict)  # the planner's, if it knows the machine
    flops: dict[str, float]  # of all GPUs together, by phase in which models compute
    # idle share of a pipeline stage, by the same phases
    bubbles: dict[str, float]
    reshard_bytes: float | None = None  # of all ranks together, as the run reports it
    memory_bytes: float | None = None  # at the end of the fullest phase, on the fullest rank
    phases_of_wall: float | None = None  # share of the last iteration inside phases
    waiting: float | None = (
        # share of the last iteration's phases in which a rank waits for others at their ends
        None
    )
    # of measured seconds by phase: the shortest and the longest
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def iteration_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.tokens / self.iteration_s / self.gpus

    @property
    def bubble(self) -> float:
        """Return the bubble share over the phases in which models compute, weighted by their seconds."""
        total = sum(self.seconds[phase] for phase in self.bubbles)
        return sum(share * self.seconds[phase] for phase, share in self.bubbles.items()) / total

    def flops_per_s_gpu(self, phases: tuple[str, ...]) -> float:
        """Return the model FLOPs per second of one GPU over those of `phases` that exist.

        Counted as in `verl_megatron.planner`: matrix products and the causal half of attention, a backward
        pass twice. Not counted: the input embedding, logits of unneeded tokens, recomputation and generation.
        """
        there = [phase for phase in phases if phase in self.flops]
        return (
            sum(self.flops[phase] for phase in there)
            / sum(self.seconds[phase] for phase in there)
            / self.gpus
        )


def bubble_share(layout: Layout, micro_batches: int) -> float:
    """Return the share of a pass in which a pipeline stage waits: (p-1) / (v·m + p-1).

    Idle time over ideal time is (p-1) / (v·m) for p stages, v chunks each and m micro-batches (Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2); this is idle time over the sum of both.
    """
    return (layout.pp - 1) / (layout.vpp * micro_batches + layout.pp - 1)


def bubbles_of(run: PlannedRun) -> dict[str, float]:
    """Return the bubble share of each phase in which models compute.

    Without gradients, all mini-batches go through in one pass, actor and reference together.
    """
    roles, shares = {role.name: role for role in run.roles}, {}
    for phase in flops_of(run):
        role = roles[MODEL_OF[phase]]
        passes = (
            1
            if phase in UPDATES
            else run.config.algorithm.num_mini_batches * (1 + (phase == "log_probs" and "reference" in roles))
        )
        shares[phase] = bubble_share(role.layout, passes * run.micro_batches(role)[0])
    return shares


def flops_of(run: PlannedRun) -> dict[str, float]:
    """Return the planner's model FLOPs by phase; they do not depend on the machine."""
    return plan_work(run, MACHINES["h200"]).flops


def described(run: PlannedRun) -> dict:
    """Return the fields of a `Row` that its settings determine."""
    layouts = {role.name: str(role.layout) for role in run.roles}
    return {
        "gpus": run.world_size,
        "actor": layouts["actor"],
        "critic": layouts.get("critic", ""),
        "rollout": f"{run.replicas} x tp{run.config.rollout.tp}",
        "rows": run.samples,
        "tokens": run.samples * (run.prompt_tokens + run.response_tokens),
        "flops": flops_of(run),
        "bubbles": bubbles_of(run),
    }


def measured_row(run: PlannedRun, output_dir, planned: dict[str, float]) -> Row:
    """Return medians over the iterations of a run, without the first, which compiles and allocates.

    Raises:
        ValueError: fewer than two iterations, or responses not all of the given length.
    """
    rows = [row for row in read_metrics(output_dir) if "time/rollout_s" in row]
    lengths = {row["rollout/response_tokens_mean"] for row in rows}
    if len(rows) < 2:
        raise ValueError(
            f"{output_dir} holds {len(rows)} iterations, of which the first does not count; run at least two"
        )
    if lengths != {run.response_tokens}:
        raise ValueError(
            f"responses in {output_dir} have {sorted(lengths)} tokens on average and not "
            f"{run.response_tokens} each; is rollout.ignore_eos off?"
        )
    rows, timeline = rows[1:], Timeline.read(f"{output_dir}/{TRACE_FILE}")
    phases = _phase_seconds(rows)
    memory_mib = [_median_of(rows, key) for key in rows[0] if key.startswith("memory/")]
    return Row(
        source=MEASURED,
        seconds={phase: median(seconds) for phase, seconds in phases.items()},
        ranges={phase: (min(seconds), max(seconds)) for phase, seconds in phases.items()},
        planned=planned,
        reshard_bytes=_median_of(rows, "reshard/bytes"),
        memory_bytes=max(memory_mib) * 2**20,
        phases_of_wall=timeline.phases_s / timeline.wall_s,
        waiting=timeline.waiting_share,
        **described(run),
    )


def _phase_seconds(rows: list[dict]) -> dict[str, list[float]]:
    """Return the seconds of all iterations, by phase."""
    seconds = {}
    for key in rows[0]:
        if key.startswith("time/"):
            phase = key[len("time/") : -len("_s")]
            seconds[phase] = [row[key] for row in rows]
    return seconds


def _median_of(rows: list[dict], key: str) -> float:
    return median(row[key] for row in rows)


def disturbance(row: Row) -> str:
    """Return a remark if a phase varies between iterations by more than `STEADY` of one; else empty.

    All iterations have the same work.
    """
    phase = max(row.ranges, key=lambda phase: row.ranges[phase][1] - row.ranges[phase][0], default="")
    if not phase or row.ranges[phase][1] - row.ranges[phase][0] <= STEADY * row.iteration_s:
        return ""
    shortest, longest = row.ranges[phase]
    what = f"on {row.gpus} ranks {phase} took from {shortest:.2f} to {longest:.2f} s"
    return (
        f"{what}: something else disturbed it, and what is modelled from it says little; repeat it with more "
        "--steps."
    )


def efficiency(row: Row, first: Row) -> float:
    """Return tokens per second and GPU relative to the smallest size: 1 is a linear speed-up."""
    return row.tokens_per_s_gpu / first.tokens_per_s_gpu


def at_best(rows: list[Row]) -> str:
    """Return the efficiency of measured sizes by each phase's shortest time, to exclude disturbances."""
    quickest = [_with_shortest_times(row) for row in rows]
    shares = ", ".join(f"{efficiency(row, quickest[0]):.1%} on {row.gpus}" for row in quickest)
    return f"with the shortest time of every phase in place of its median efficiency is {shares}."


def _with_shortest_times(row: Row) -> Row:
    return replace(row, seconds={phase: shortest for phase, (shortest, _) in row.ranges.items()})


def ideal_seconds(row: Row, first: Row) -> float:
    """Return the seconds of an iteration in which every GPU computes its share at the smallest size's speed.

    Bubbles are left out. Generation, forward passes and updates count; weight sync, scores and advantages
    take no time.
    """
    work = first.seconds["rollout"] + sum(
        first.seconds[phase] * (1 - share) for phase, share in first.bubbles.items()
    )
    return work * (row.rows / row.gpus) / (first.rows / first.gpus)
