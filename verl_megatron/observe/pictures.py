"""Plots of a run: reward, KL, entropy and phase times from `metrics.jsonl`, and one iteration's timeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from verl_megatron.observe.metrics import PhaseEvent
from verl_megatron.observe.tracking import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]  # of `read_metrics`: numbers, None for those that are not finite
MOST_LABELS = 40  # of ranks, beside a timeline
BLUE, ORANGE, GREEN = "#3465a4", "#d9730d", "#2e8b57"


def draw_report(output_dir: str | Path) -> Path:
    """Write `report.png` next to the metrics and return its path; ValueError without metrics to draw."""
    rows = read_metrics(output_dir)
    if not rows:
        raise ValueError(
            f"{Path(output_dir) / METRICS_FILE} holds no metrics; a report needs jsonl in run.track_metrics"
        )
    import matplotlib

    matplotlib.use("Agg")  # a file, no display
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained", sharex=True)
    draw_reward(axes[0, 0], rows)
    draw_kl(axes[0, 1], rows)
    draw_entropy(axes[1, 0], rows)
    draw_phases(axes[1, 1], rows)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelbottom=True)
        axis.set_xlabel("iteration")
    path = Path(output_dir) / "report.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def draw_timeline(path: Path, ranks: Sequence[Sequence[PhaseEvent]], labels: Sequence[str]) -> None:
    """Plot each rank's phases as a colored line: solid while it works, hatched while it waits for others.

    Args:
        labels: of the ranks.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(event.name for events in ranks for event in events))
    colours = {name: colormaps["tab20"](2 * number % 19) for number, name in enumerate(names)}
    colours["waiting"] = colormaps["gray"](0.5)  # of ranks of other worlds
    axis = Figure(figsize=(13, min(2.0 + 0.4 * len(ranks), 24)), layout="constrained").subplots()
    for rank, events in enumerate(ranks):
        for event in events:
            place, colour = (rank - 0.4, 0.8), colours[event.name]
            axis.broken_barh([(event.start_s, event.busy_end_s - event.start_s)], place, color=colour)
            axis.broken_barh(
                [(event.busy_end_s, event.end_s - event.busy_end_s)],
                place,
                facecolor="none",
                edgecolor=colour,
                hatch="////",
                linewidth=0,
            )
    apart = -(-len(ranks) // MOST_LABELS)
    axis.set_yticks(range(0, len(ranks), apart), labels[::apart])
    axis.set(xlabel="seconds", ylim=(len(ranks) - 0.5, -0.5))
    legend = [Patch(color=colours[name], label=name.replace("_", " ")) for name in names if name != "waiting"]
    legend.append(
        Patch(facecolor="none", edgecolor="gray", hatch="////", linewidth=0, label="waits for other ranks")
    )
    axis.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize=9)
    cast("Figure", axis.figure).savefig(path, dpi=110)


def series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """Return steps and values of the rows with a finite number under `key`."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw_reward(axis: "Axes", rows: Rows) -> None:
    """Plot the mean reward, and the validation accuracy if it was measured."""
    axis.set(title="Reward", ylabel="mean reward of a sample")
    plot(axis, series(rows, "reward/mean"), color=BLUE, label="training reward")
    steps, accuracy = series(rows, "validation/accuracy")
    if steps:
        axis.plot(steps, accuracy, "D", color=ORANGE, markersize=8, label="validation accuracy", zorder=3)
        axis.legend()


def draw_kl(axis: "Axes", rows: Rows) -> None:
    """Plot the KL of a sample from the reference and, on a second axis, the per-token KL of the update."""
    axis.set(title="KL divergence", ylabel="nats")
    to_reference, to_old = series(rows, "kl/ref"), series(rows, "policy/approx_kl")
    if to_reference[0] and to_old[0]:
        lines = plot(axis, to_reference, color=BLUE, label="from the reference, per sample (left)")
        right = axis.twinx()
        lines += plot(right, to_old, color=GREEN, label="of the update, per token (right)")
        right.set_ylabel("nats per token", color=GREEN)
        right.tick_params(axis="y", labelcolor=GREEN)
        axis.set_ylabel("nats per sample", color=BLUE)
        axis.tick_params(axis="y", labelcolor=BLUE)
        headroom(axis, right)
        right.legend(lines, [line.get_label() for line in lines], loc="upper left")
    elif to_reference[0]:
        axis.set(title="KL divergence from the reference", ylabel="nats per sample")
        plot(axis, to_reference, color=BLUE)
    else:
        axis.set(title="KL divergence of the update", ylabel="nats per token")
        plot(axis, to_old, color=GREEN)


def draw_entropy(axis: "Axes", rows: Rows) -> None:
    """Plot the policy's mean entropy per response token."""
    axis.set(title="Policy entropy", ylabel="nats per token")
    plot(axis, series(rows, "policy/entropy"), color=BLUE)


def draw_phases(axis: "Axes", rows: Rows) -> None:
    """Plot the seconds of each phase, stacked to the iteration time; a missing phase counts as 0 s."""
    axis.set(title="Time per iteration", ylabel="seconds")
    keys = list(dict.fromkeys(key for row in rows for key in row if key.startswith("time/")))
    if not keys:
        return nothing(axis)
    from matplotlib import colormaps

    steps = sorted({row["step"] for row in rows if not row.keys().isdisjoint(keys)})
    edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]
    bottom = [0.0] * len(steps)
    for number, key in enumerate(keys):
        seconds = dict(zip(*series(rows, key), strict=True))
        top = [below + seconds.get(step, 0.0) for below, step in zip(bottom, steps, strict=True)]
        label = key.removeprefix("time/").removesuffix("_s").replace("_", " ")
        axis.stairs(
            top, edges, baseline=bottom, fill=True, color=colormaps["tab20"](number % 20), label=label
        )
        bottom = top
    axis.set_ylim(0, 1.05 * max(bottom) or 1.0)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        fontsize=9,
    )


def plot(
    axis: "Axes", points: tuple[list[float], list[float]], *, color: str, label: str | None = None
) -> list:
    """Plot a line and return its artists; few points get markers, because a single one would be invisible."""
    if not points[0]:
        nothing(axis)
        return []
    marker = "o" if len(points[0]) <= 60 else ""
    return axis.plot(*points, color=color, marker=marker, markersize=3, linewidth=1.2, label=label)


def headroom(*axes: "Axes") -> None:
    """Leave room for a legend above the curves."""
    for axis in axes:
        low, high = axis.get_ylim()
        axis.set_ylim(low, high + 0.25 * (high - low))


def nothing(axis: "Axes") -> None:
    """Write "not measured" into an axis without data."""
    axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center", color="gray")
