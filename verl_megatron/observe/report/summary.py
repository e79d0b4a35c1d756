"""The table at the top of a report: what became of each run, in a few numbers."""

from collections.abc import Callable, Mapping, Sequence

from verl_megatron.observe.report.record import RunRecord
from verl_megatron.observe.report.rules import ROLLOUT_WAITS, TRAINING_WAITS, number, percent

ENDS = 10  # iterations at either end whose median is shown
TRANSFER = "async/weights_transfer_s"
LOSSES = ("sft/loss", "dpo/loss", "reward_model/loss")


def summary(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table, each with a cell for every run; rows without any content are left out."""
    rows = [(title, list(map(cell, runs))) for title, cell in ROWS]
    return [(title, cells) for title, cells in rows if any(cells)]


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2


def iterations(run: RunRecord) -> str:
    """Return how far the run has come."""
    of = f" of {run.total_steps:,}" if run.total_steps else ""
    return f"{run.last_step:,}{of}"


def state(run: RunRecord) -> str:
    """Return what is known of the run's process."""
    if run.state.at_work:
        return "at work"
    said = run.starts[-1].reason if run.starts else ""
    return said or ("killed" if run.state.was_killed else "ended")


def change(
    run: RunRecord, metric: str, *, ends: int, best: Callable[[Sequence[float]], float] | None = max
) -> str:
    """Return the level of a metric at the start and at the end, and its best value if it has one."""
    _, values = run.finite(metric)
    if not values:
        return ""
    count = min(ends, max(len(values) // 10, 1))
    first, last = median(values[:count]), median(values[-count:])
    if len(values) == 1:
        return number(last)
    return f"{number(first)} → {number(last)}" + (f" (best {number(best(values))})" if best else "")


def loss(run: RunRecord) -> str:
    return next(
        (text for name in LOSSES if (text := change(run, name, ends=ENDS, best=min))),
        "",
    )


def typical(run: RunRecord, metric: str, *, factor: float, unit: str) -> str:
    """Return the median of a metric."""
    _, values = run.finite(metric)
    return f"{number(factor * median(values))} {unit}" if values else ""


def memory(run: RunRecord) -> str:
    """Return the most memory that was in use after any phase."""
    keys = [key for key in run.series if key.startswith("memory/")]
    most = max((max(values) for key in keys if (values := run.finite(key)[1])), default=0.0)
    return f"{number(most / 1024)} GiB" if most else ""


def weight_sync(run: RunRecord) -> str:
    """Return bytes and time of the usual weight sync; with rollout worlds the time until they have all."""
    if beside := typical(run, TRANSFER, factor=1e3, unit="ms"):
        return f"{beside} beside training"
    size = typical(run, "reshard/bytes", factor=2**-20, unit="MiB")
    return f"{size} in {typical(run, 'reshard/ms', factor=1.0, unit='ms')}" if size else ""


def waiting(run: RunRecord) -> str:
    """Return the share of its time for which each side usually waits, with rollout worlds."""
    shares = [
        (side, run.finite(key)[1]) for side, key in (("training", TRAINING_WAITS), ("rollout", ROLLOUT_WAITS))
    ]
    return ", ".join(f"{side} {percent(median(values))}" for side, values in shares if values)


def iteration_time(run: RunRecord) -> str:
    """Return the usual time of an iteration."""
    if "train/step_time_ms" in run.series:
        return typical(run, "train/step_time_ms", factor=1e-3, unit="s")
    curves = [run.finite(key) for key in run.series if key.startswith("time/")]
    totals: dict[int, float] = {}
    for steps, values in curves:
        for step, value in zip(steps, values):
            totals[step] = totals.get(step, 0.0) + value
    return f"{number(median(list(totals.values())))} s" if totals else ""


ROWS: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
    ("kind", lambda run: run.kind),
    ("iterations", iterations),
    ("state", state),
    ("reward", lambda run: change(run, "reward/mean", ends=ENDS)),
    ("loss", loss),
    ("validation", lambda run: change(run, "validation/accuracy", ends=1)),
    ("validation loss", lambda run: change(run, "validation/loss", ends=1, best=min)),
    (
        "response length, tokens",
        lambda run: change(run, "rollout/response_tokens_mean", ends=ENDS, best=None),
    ),
    ("time of an iteration", iteration_time),
    (
        "generation",
        lambda run: typical(run, "rollout/throughput_tokens_per_sec", factor=1.0, unit="tokens/s"),
    ),
    ("waiting", waiting),
    ("peak memory", memory),
    ("weight sync", weight_sync),
)


def facts(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table about the last start of each run: command, versions, layouts."""
    of_runs = [run.starts[-1].facts if run.starts else {} for run in runs]
    titles = dict.fromkeys(title for known in of_runs for title in known)
    return [(title, _column(title, of_runs)) for title in titles]


def _column(title: str, of_runs: Sequence[Mapping[str, str]]) -> list[str]:
    return [known.get(title, "") for known in of_runs]
