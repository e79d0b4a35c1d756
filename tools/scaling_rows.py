"""What `benchmark_scaling.py` says of one size: seconds by phase and what follows from them."""

from dataclasses import dataclass, field, replace
from statistics import median

from parallel.layout import Layout
from verl_megatron.observe.timeline import TRACE_FILE, Timeline
from verl_megatron.observe.tracking import read_metrics
from verl_megatron.planner import MACHINES, Case
from verl_megatron.planner.seconds import plan_work

MEASURED, MODELLED = "measured", "modelled"
MODEL_OF = {
    "reward": "reward",
    "log_probs": "actor",
    "values": "critic",
    "critic_update": "critic",
    "actor_update": "actor",
}  # by phase: whose layout it has
UPDATES = ("critic_update", "actor_update")
FORWARD = ("reward", "log_probs", "values")
STEADY = 0.03  # share of an iteration by which a phase may differ between iterations without a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An iteration on a number of GPUs (on a CPU: ranks)."""

    source: str  # MEASURED or MODELLED
    gpus: int
    actor: str  # layout
    critic: str  # empty without one
    rollout: str  # replicas and their tensor-parallel size
    rows: int  # of an iteration
    tokens: int  # of these rows, prompts included
    seconds: dict[str, float]  # by phase
    planned: dict[str, float] = field(default_factory=dict)  # the planner's, where it knows the machine
    flops: dict[str, float]  # of all GPUs together, by phase in which models compute
    bubbles: dict[
        str, float
    ]  # share of a phase in which a pipeline stage has nothing to do, by the same phases
    reshard_bytes: float | None = None  # of all ranks together, as the run reports it
    memory_bytes: float | None = None  # at the end of the fullest phase, on the fullest rank
    phases_of_wall: float | None = None  # share of the last iteration that lies inside phases
    waiting: float | None = (
        None  # share of the last iteration's phases in which a rank waits for others at their ends
    )
    ranges: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # of measured seconds by phase: the shortest and the longest

    @property
    def iteration_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.tokens / self.iteration_s / self.gpus

    @property
    def bubble(self) -> float:
        """Of the phases in which models compute, by their seconds."""
        total = sum(self.seconds[phase] for phase in self.bubbles)
        return sum(share * self.seconds[phase] for phase, share in self.bubbles.items()) / total

    def flops_per_s_gpu(self, phases: tuple[str, ...]) -> float:
        """Model FLOPs a second of one GPU over those of `phases` that there are.

        Counted as in `verl_megatron.planner`: matrix products and the causal half of attention, a backward pass twice; not the input
        embedding, logits of tokens that nobody asks about, recomputation and generation.
        """
        there = [phase for phase in phases if phase in self.flops]
        return (
            sum(self.flops[phase] for phase in there)
            / sum(self.seconds[phase] for phase in there)
            / self.gpus
        )


def bubble_share(layout: Layout, micro_batches: int) -> float:
    """Share of a pass in which a pipeline stage waits: (p-1) / (v·m + p-1).

    Idle time over ideal time is (p-1) / (v·m) for p stages, v chunks each and m micro-batches (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2); this is idle over both together.
    """
    return (layout.pp - 1) / (layout.vpp * micro_batches + layout.pp - 1)


def bubbles_of(case: Case) -> dict[str, float]:
    """Bubble share of each phase in which models compute; without gradients all mini-batches go through in one pass, actor and reference together."""
    roles, shares = {role.name: role for role in case.roles}, {}
    for phase in flops_of(case):
        role = roles[MODEL_OF[phase]]
        passes = (
            1
            if phase in UPDATES
            else case.config.algorithm.mini_batches * (1 + (phase == "log_probs" and "reference" in roles))
        )
        shares[phase] = bubble_share(role.layout, passes * case.micro_batches(role)[0])
    return shares


def flops_of(case: Case) -> dict[str, float]:
    """The planner's model FLOPs by phase; they depend on no machine."""
    return plan_work(case, MACHINES["h200"]).flops


def described(case: Case) -> dict:
    """Fields of a `Row` that its settings decide."""
    layouts = {role.name: str(role.layout) for role in case.roles}
    return {
        "gpus": case.world_size,
        "actor": layouts["actor"],
        "critic": layouts.get("critic", ""),
        "rollout": f"{case.replicas} x tp{case.config.rollout.tp}",
        "rows": case.rows,
        "tokens": case.rows * (case.prompt_tokens + case.response_tokens),
        "flops": flops_of(case),
        "bubbles": bubbles_of(case),
    }


def measured_row(case: Case, output_dir, planned: dict[str, float]) -> Row:
    """Medians over the iterations of a run, the first left out: it compiles and allocates.

    Raises:
        ValueError: fewer than two iterations, or responses that are not all as long as asked.
    """
    rows = [row for row in read_metrics(output_dir) if "time/rollout_s" in row]
    lengths = {row["rollout/response_tokens_mean"] for row in rows}
    if len(rows) < 2:
        raise ValueError(
            f"{output_dir} holds {len(rows)} iterations, of which the first does not count; run at least two"
        )
    if lengths != {case.response_tokens}:
        raise ValueError(
            f"responses in {output_dir} have {sorted(lengths)} tokens on average and not "
            f"{case.response_tokens} each; is rollout.ignore_eos off?"
        )
    rows, timeline = rows[1:], Timeline.read(f"{output_dir}/{TRACE_FILE}")
    taken = {
        key[len("time/") : -len("_s")]: [row[key] for row in rows]
        for key in rows[0]
        if key.startswith("time/")
    }
    return Row(
        source=MEASURED,
        seconds={phase: median(seconds) for phase, seconds in taken.items()},
        ranges={phase: (min(seconds), max(seconds)) for phase, seconds in taken.items()},
        planned=planned,
        reshard_bytes=median(row["reshard/bytes"] for row in rows),
        memory_bytes=max(median(row[key] for row in rows) for key in rows[0] if key.startswith("memory/"))
        * 2**20,
        phases_of_wall=timeline.phases_s / timeline.wall_s,
        waiting=timeline.waiting_share,
        **described(case),
    )


def disturbance(row: Row) -> str:
    """What to say where a size's iterations, which all have the same work, differ in a phase by more than `STEADY` of an iteration; else empty."""
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
    """Tokens a second and GPU, as a share of those of the smallest size: 1 is a linear speed-up."""
    return row.tokens_per_s_gpu / first.tokens_per_s_gpu


def at_best(rows: list[Row]) -> str:
    """The efficiency of measured sizes if each phase took its shortest time, which what disturbs an iteration leaves alone."""
    quickest = [
        replace(row, seconds={phase: shortest for phase, (shortest, _) in row.ranges.items()}) for row in rows
    ]
    shares = ", ".join(f"{efficiency(row, quickest[0]):.1%} on {row.gpus}" for row in quickest)
    return f"with the shortest time of every phase in place of its median efficiency is {shares}."


def ideal_seconds(row: Row, first: Row) -> float:
    """An iteration in which every GPU does its share of the rows at the smallest size's speed, without bubbles, and nothing else.

    Generation, forward passes and updates count; hand-over, scores and advantages take no time there.
    """
    work = first.seconds["rollout"] + sum(
        first.seconds[phase] * (1 - share) for phase, share in first.bubbles.items()
    )
    return work * (row.rows / row.gpus) / (first.rows / first.gpus)
