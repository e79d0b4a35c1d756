"""Rows of `benchmark_scaling.py` as Markdown, CSV and a picture; each line says measured or modelled."""

import csv
from dataclasses import dataclass
from pathlib import Path

from verl_megatron.benchmarks.scaling.rows import FORWARD, MEASURED, UPDATES, Row, efficiency, ideal_seconds

COLOURS = {MEASURED: "#3465a4", "ideal": "#2e8b57", "modelled": "#d9730d"}
CUT = 4.0  # times the longest measured iteration: higher bars are cut off in the picture
DEFINITIONS = """\
- measured: medians over the iterations of a run, the first left out, with a barrier at the end of every \
phase; modelled: nothing of the line was run.
- tokens/s/GPU: prompt and response tokens of all rows, over the seconds of all phases, over GPUs. \
Efficiency: of that of the smallest size.
- of ideal: an iteration in which every GPU does its share of generation, forward passes and updates at the \
smallest size's speed, without
  bubbles and without anything else, over this one.
- {flops}: matrix products and the causal half of attention, a backward pass twice; not the input embedding, \
logits of tokens that nobody
  asks about, recomputation and generation. Log-probs are those of actor and reference.
- bubble: (p-1) / (v m + p-1) for p pipeline stages of v chunks and m micro-batches (Narayanan et al. 2021), \
calculated from the layout.
- reshard: bytes that arrive on all ranks together. Memory: {memory}.
- phases/wall: share of the last iteration that lies inside phases. Waiting: share of its phases in which \
ranks wait at their ends.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Content of the report: a title, the measuring device, and the rows."""

    title: str
    device: str
    rows: list[Row]  # measured ones first, smallest first
    peak_flops: float | None  # of a GPU; None: unknown, and no MFU is reported
    notes: list[str]

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(phase for row in self.rows for phase in row.seconds))

    def utilization(self, row: Row, phases: tuple[str, ...]) -> float:
        """Return the MFU if the device's rate is known, otherwise FLOP/s per rank."""
        return row.flops_per_s_gpu(phases) / (self.peak_flops or 1.0)

    def cells(self, row: Row) -> dict[str, object]:
        """Return all values of a size, by column, in plain units; None: unknown."""
        first, unit = self.rows[0], "mfu" if self.peak_flops else "flops_per_s"
        cells: dict[str, object] = {
            "gpus": row.gpus,
            "source": row.source,
            "actor": row.actor,
            "critic": row.critic,
            "rollout": row.rollout,
        }
        cells |= {"rows": row.rows, "tokens": row.tokens} | {
            f"{phase}_s": row.seconds.get(phase) for phase in self.phases
        }
        cells |= {
            "iteration_s": row.iteration_s,
            "tokens_per_s_gpu": row.tokens_per_s_gpu,
            "efficiency": efficiency(row, first),
        }
        cells |= {"of_ideal": ideal_seconds(row, first) / row.iteration_s}
        cells |= {
            f"{unit}_log_probs": self.utilization(row, FORWARD[1:2]),
            f"{unit}_updates": self.utilization(row, UPDATES),
        }
        cells |= {"bubble": row.bubble, "reshard_bytes": row.reshard_bytes, "memory_bytes": row.memory_bytes}
        cells |= {"phases_of_wall": row.phases_of_wall, "waiting": row.waiting}
        if any(row.planned for row in self.rows):
            cells |= {f"planned_{phase}_s": row.planned.get(phase) for phase in self.phases}
        return cells


def markdown(report: Report) -> str:
    """Return title, tables and the meaning of the columns."""
    unit = "MFU" if report.peak_flops else "TFLOP/s a rank"
    memory = (
        "taken on the fullest GPU after the fullest phase"
        if report.peak_flops
        else "on a CPU the peak of the largest process"
    )
    parts = [f"# {report.title}", report.device, _table(_scaling_columns(report, unit), report.rows)]
    if any(row.planned for row in report.rows):
        columns = {"GPUs": lambda row: f"{row.gpus}", "": lambda row: row.source}
        columns |= {phase: lambda row, phase=phase: _planned(row, phase) for phase in report.phases}
        columns |= {
            "iteration": lambda row: (
                f"{sum(row.planned.values()):.2f} / "
                f"{sum(row.seconds[phase] for phase in row.planned if phase in row.seconds):.2f}"
            )
        }
        parts += ["The planner's seconds / those of the table above:", _table(columns, report.rows)]
    return "\n\n".join(
        [
            *parts,
            DEFINITIONS.format(flops=unit, memory=memory) + "".join(f"- {note}\n" for note in report.notes),
        ]
    )


def _planned(row: Row, phase: str) -> str:
    return f"{row.planned[phase]:.2f} / {row.seconds[phase]:.2f}" if phase in row.planned else "-"


def _scaling_columns(report: Report, unit: str) -> dict:
    first = report.rows[0]

    def utilization(phases: tuple[str, ...]):
        return lambda row: (
            f"{report.utilization(row, phases):.1%}"
            if report.peak_flops
            else f"{report.utilization(row, phases) / 1e12:.4f}"
        )

    columns = {"GPUs": lambda row: f"{row.gpus}", "": lambda row: row.source, "actor": lambda row: row.actor}
    if any(row.critic != row.actor for row in report.rows if row.critic):
        columns["critic"] = lambda row: row.critic
    columns |= {"vLLM": lambda row: row.rollout, "rows": lambda row: f"{row.rows}"}
    columns |= {
        f"{phase} s": lambda row, phase=phase: _known(row.seconds.get(phase), _seconds)
        for phase in report.phases
    }
    columns |= {
        "iteration s": lambda row: _seconds(row.iteration_s),
        "tokens/s/GPU": lambda row: f"{row.tokens_per_s_gpu:,.0f}",
        "efficiency": lambda row: f"{efficiency(row, first):.1%}",
        "of ideal": lambda row: f"{ideal_seconds(row, first) / row.iteration_s:.1%}",
        f"{unit}, log-probs": utilization(FORWARD[1:2]),
        f"{unit}, updates": utilization(UPDATES),
        "bubble": lambda row: f"{row.bubble:.1%}",
        "reshard MiB": lambda row: _known(row.reshard_bytes, lambda size: f"{size / 2**20:,.1f}"),
        "memory GiB": lambda row: _known(row.memory_bytes, lambda size: f"{size / 2**30:.1f}"),
        "phases/wall": lambda row: _known(row.phases_of_wall, lambda share: f"{share:.1%}"),
        "waiting": lambda row: _known(row.waiting, lambda share: f"{share:.1%}"),
    }
    return columns


def _known(value: float | None, written) -> str:
    return "-" if value is None else written(value)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def _table(columns: dict, rows: list[Row]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [cell(row) for cell in columns.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_csv(path: Path, report: Report) -> None:
    """Write one line per size; seconds, bytes and shares."""
    lines = [report.cells(row) for row in report.rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_png(path: Path, report: Report) -> None:
    """Plot tokens per second and GPU over the number of GPUs, and the phases of an iteration.

    Modelled values are dashed and hatched.
    """
    from matplotlib.figure import Figure  # needs no display, unlike pyplot

    left, right = Figure(figsize=(15, 6), layout="constrained").subplots(1, 2)
    _draw_speed(left, report)
    _draw_phases(right, report)
    left.figure.suptitle(f"{report.title}\n{report.device}", fontsize=11)
    left.figure.savefig(path, dpi=110)


def _draw_speed(axis, report: Report) -> None:
    measured = [row for row in report.rows if row.source == MEASURED]
    modelled = [measured[-1], *report.rows[len(measured) :]]
    axis.plot(
        [row.gpus for row in report.rows],
        [report.rows[0].tokens_per_s_gpu] * len(report.rows),
        color=COLOURS["ideal"],
        linewidth=1,
        label="as on the smallest size",
    )
    if len(modelled) > 1:
        axis.plot(
            [row.gpus for row in modelled],
            [row.tokens_per_s_gpu for row in modelled],
            "o--",
            color=COLOURS["modelled"],
            markerfacecolor="white",
            label="modelled",
        )
    axis.plot(
        [row.gpus for row in measured],
        [row.tokens_per_s_gpu for row in measured],
        "o-",
        color=COLOURS[MEASURED],
        label="measured",
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks([row.gpus for row in report.rows], [f"{row.gpus:,}" for row in report.rows], rotation=45)
    axis.set(
        xlabel="GPUs" if report.peak_flops else "ranks",
        ylabel="tokens/s of one",
        title="Tokens per second and GPU" if report.peak_flops else "Tokens per second and rank",
    )
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend()


def _draw_phases(axis, report: Report) -> None:
    from matplotlib import colormaps

    bottom = [0.0] * len(report.rows)
    for number, phase in enumerate(report.phases):
        heights = [row.seconds.get(phase, 0.0) for row in report.rows]
        bars = axis.bar(
            range(len(heights)),
            heights,
            bottom=bottom,
            color=colormaps["tab20"](2 * number % 19),
            label=phase.replace("_", " "),
        )
        for bar, row in zip(bars, report.rows):
            if row.source != MEASURED:
                bar.set(hatch="///", edgecolor="white", linewidth=0)
        bottom = [below + height for below, height in zip(bottom, heights)]
    axis.set_xticks(range(len(report.rows)), [f"{row.gpus:,}" for row in report.rows], rotation=45)
    shown = CUT * max(row.iteration_s for row in report.rows if row.source == MEASURED)
    axis.set_ylim(0, min(1.05 * max(bottom), shown))
    cut = f", cut at {shown:.3g} s" if max(bottom) > shown else ""
    axis.set(
        xlabel="GPUs" if report.peak_flops else "ranks",
        ylabel="seconds",
        title=f"Time per iteration (hatched: modelled{cut})",
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize=9)
