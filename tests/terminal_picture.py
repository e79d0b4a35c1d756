"""A picture of what a program prints on a terminal, colours included, for the documents."""

import re
from pathlib import Path

CODE = re.compile(r"\x1b\[([0-9;]*)m")
COLOURS = {
    "0": "#d8dee9",
    "1": "#ffffff",
    "2": "#7f8896",
    "32": "#8fce7e",
    "33": "#e8c268",
    "1;31": "#ff7b72",
}
CHARACTER, LINE, MARGIN = 0.08182, 0.185, 0.15  # inches


def draw_terminal(lines: list[str], path: Path) -> None:
    """Write a .png of these lines, whose colours are terminal codes."""
    from matplotlib.figure import Figure

    columns = max(len(CODE.sub("", line)) for line in lines)
    width, height = columns * CHARACTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    figure = Figure(figsize=(width, height), facecolor="#1b2028")
    for row, line in enumerate(lines):
        y, column, colour = 1 - (MARGIN + (row + 0.5) * LINE) / height, 0, COLOURS["0"]
        for number, part in enumerate(CODE.split(line)):
            if number % 2:
                colour = COLOURS.get(part, COLOURS["0"])
                continue
            figure.text(
                (MARGIN + column * CHARACTER) / width,
                y,
                part,
                family="DejaVu Sans Mono",
                size=10,
                color=colour,
                va="center_baseline",
                parse_math=False,
            )
            column += len(part)
    figure.savefig(path, dpi=110, facecolor=figure.get_facecolor())
