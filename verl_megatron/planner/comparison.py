"""Comparison of a plan with the metrics of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from verl_megatron.planner.memory import MemoryPlan
from verl_megatron.planner.seconds import TimePlan

GIB_OF_MB = 1 / 1024  # a run reports memory/PHASE_mb in MiB


@dataclass(frozen=True, slots=True)
class Compared:
    """Planned and measured memory or time of one phase."""

    what: str
    unit: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the plan, as a share of the measured value."""
        return self.planned / self.measured - 1


def compare(memory: MemoryPlan, time: TimePlan, rows: Iterable[Mapping[str, float]]) -> list[Compared]:
    """Compare plans with the medians over a run's iterations, or means where rollout and training overlap.

    The first iteration is left out: it compiles and allocates. With stale samples an iteration that waits is
    often followed by one that does not, and neither is typical.

    Args:
        rows: of metrics.jsonl (`verl_megatron.observe.tracking.read_metrics`).

    Raises:
        ValueError: fewer than two iterations.
    """
    iterations = [row for row in rows if "time/rollout_s" in row][1:]
    if not iterations:
        raise ValueError(
            "metrics.jsonl holds fewer than two iterations;"
            " the first is not compared, so let the run take at least two"
        )

    def measured(key: str) -> float | None:
        values = [row[key] for row in iterations if row.get(key)]
        if not values:
            return None
        return fmean(values) if time.overlaps else median(values)

    pairs = [
        (phase, "GiB", memory.phase_bytes(phase) / 2**30, measured(f"memory/{phase}_mb"), GIB_OF_MB)
        for phase in memory.phases
    ]
    measured_as = {"rollout": "async/generation_s"} if time.overlaps else {}
    pairs += [
        (phase, "s", seconds, measured(measured_as.get(phase, f"time/{phase}_s")), 1.0)
        for phase, seconds in time.seconds.items()
    ]
    pairs.append(("iteration", "s", time.iteration, measured("train/step_time_ms"), 1e-3))
    return [
        Compared(phase, unit, planned, value * scale)
        for phase, unit, planned, value, scale in pairs
        if value is not None
    ]
