"""Curves made small enough for a page: few points, few digits."""

from collections.abc import Sequence

from verl_megatron.observe.report.record import Series
from verl_megatron.observe.report.samples import significant

MAX_POINTS = 5_000  # of a curve
DIGITS = 6


def thinned(series: Series, most: int = MAX_POINTS) -> Series:
    """Return a curve of at most `most` points: of each stretch its least and its largest value.

    A value that is not finite stays, as the curve has a hole there.
    """
    if len(series.steps) > most:
        size = -(-len(series.steps) // (most // 2))  # of a stretch, which keeps two points
        places = [
            place
            for start in range(0, len(series.steps), size)
            for place in _extremes(series.values, start, min(start + size, len(series.steps)))
        ]
        series = Series([series.steps[i] for i in places], [series.values[i] for i in places])
    return Series(series.steps, [significant(value, DIGITS) for value in series.values])


def _extremes(values: Sequence[float | None], start: int, end: int) -> list[int]:
    """Return the places of the least and the largest value of a stretch, in order; of holes first."""

    def least(place: int) -> tuple[bool, float]:
        value = values[place]
        return value is not None, value or 0.0

    def largest(place: int) -> tuple[bool, float]:
        value = values[place]
        return value is not None, -(value or 0.0)

    stretch = range(start, end)
    return sorted({min(stretch, key=least), min(stretch, key=largest)})
