"""Rows of `bench/reshard.py` as a table, a CSV and a picture."""

from dataclasses import dataclass
from pathlib import Path

from verl_megatron.benchmarks.case import MIB, ReshardCase
from verl_megatron.benchmarks.output import versions

COLOURS = {"gather": "#d9730d", "megatron": "#7a5195", "ours": "#3465a4"}  # by a row's kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table and of the CSV; times are of the slowest rank."""

    kind: str  # floor, link, gather, megatron or ours
    name: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    received_bytes: int  # by the busiest rank
    gb_per_s: float  # 1e9 bytes received per second
    floor_share: float  # its own floor / median; 0 for a link's row and if nothing has to move
    peak_extra_bytes: int = 0  # staging, and on a GPU also temporary allocations of a run
    second_copy_bytes: int = 0  # destination memory in addition to the source
    bitwise: str = ""  # yes, no, or empty if nothing is compared


def table(rows: list[Row]) -> str:
    """Return the table for a terminal."""
    lines = [
        f"{'':52}{'median ms':>11}{'p10':>10}{'p90':>10}{'MiB':>10}{'GB/s':>9}{'of floor':>9}"
        f"{'extra MiB':>11}{'2nd copy':>10}  bitwise"
    ]
    for row in rows:
        cells = (
            f"{row.median_ms:>11.3f}{row.p10_ms:>10.3f}{row.p90_ms:>10.3f}{row.received_bytes / MIB:>10.1f}"
            f"{row.gb_per_s:>9.2f}"
        )
        cells += f"{row.floor_share:>9.0%}" if row.floor_share else " " * 9
        lines.append(
            (
                f"{row.name:52}{cells}{row.peak_extra_bytes / MIB:>11.1f}"
                f"{row.second_copy_bytes / MIB:>10.1f}  {row.bitwise}"
            ).rstrip()
        )
    return "\n".join(lines)


def columns(case: ReshardCase) -> dict[str, object]:
    """Return the columns of the CSV that describe the case."""
    run: dict[str, object] = {
        "model": case.model,
        "layers": case.arch.num_layers,
        "dtype": str(case.dtype)[6:],
        "train": str(case.train),
        "rollout": str(case.rollout),
    }
    return run | {"window_bytes": case.window_bytes, "ranks": case.hardware} | versions()


def write_png(path: Path, case: ReshardCase, rows: list[Row]) -> None:
    """Plot the median time of each method with p10 and p90, and its floor."""
    from matplotlib.figure import Figure  # needs no display, unlike pyplot

    methods = [row for row in rows if row.kind in COLOURS][::-1]
    longest = max(row.p90_ms for row in methods)
    figure = Figure(figsize=(13, 1.6 + 0.45 * len(methods)), layout="constrained")
    axis = figure.subplots()
    for height, row in enumerate(methods):
        floor = row.floor_share * row.median_ms
        axis.barh(height, row.median_ms, color=COLOURS[row.kind], height=0.6)
        axis.plot(
            [row.p10_ms, row.p90_ms], [height, height], color="black", linewidth=1.5, marker="|", markersize=7
        )
        axis.plot([floor, floor], [height - 0.4, height + 0.4], color="#2e8b57", linewidth=2.5)
        axis.text(row.p90_ms + 0.01 * longest, height, _in_words(row), va="center", fontsize=9)
    axis.set_yticks(range(len(methods)), [row.name for row in methods])
    axis.set_xlim(0, 1.75 * longest)
    axis.set_xlabel(
        "milliseconds of the slowest rank: median, p10 to p90; green: the floor of what the method has to "
        "move"
    )
    axis.set_title(f"{case}, {case.hardware}", fontsize=11)
    figure.savefig(path, dpi=110)


def _in_words(row: Row) -> str:
    share = f"{row.floor_share:.0%} of floor, " if row.floor_share else ""
    return (
        f"{_digits(row.median_ms)} ms, {share}{_digits(row.peak_extra_bytes / MIB)} MiB extra, 2nd copy "
        f"{_digits(row.second_copy_bytes / MIB)} MiB"
    )


def _digits(value: float) -> str:
    """Format with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
