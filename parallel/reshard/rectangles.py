"""Arithmetic of half-open rectangles: intersections and differences of shards."""

from functools import cache

Rect = tuple[int, int, int, int]  # first row, end row, first column, end column


def area(rect: Rect) -> int:
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


def intersect(a: Rect, b: Rect) -> Rect | None:
    first, end, left, right = max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])
    return (first, end, left, right) if first < end and left < right else None


def subtract(rect: Rect, other: Rect) -> list[Rect]:
    """Return the parts of `rect` outside `other`: above, below, left and right of it."""
    cut = intersect(rect, other)
    if cut is None:
        return [rect]
    if cut == rect:
        return []
    first, end, left, right = cut
    parts = [
        (rect[0], first, rect[2], rect[3]),
        (end, rect[1], rect[2], rect[3]),
        (first, end, rect[2], left),
        (first, end, right, rect[3]),
    ]
    return [part for part in parts if part[0] < part[1] and part[2] < part[3]]


@cache  # layers repeat the same few shapes
def uncovered(whole: Rect, written: tuple[Rect, ...]) -> list[Rect] | None:
    """Return the parts of `whole` that `written` does not cover; None if those overlap or exceed `whole`."""
    rest = [whole]
    for rect in written:
        rest = [part for piece in rest for part in subtract(piece, rect)]
    return rest if sum(map(area, rest)) + sum(map(area, written)) == area(whole) else None
