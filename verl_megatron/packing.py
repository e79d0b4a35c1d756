"""Which rows go together: over ranks by tokens, and into micro-batches of a token budget. Pure Python.

Both functions are deterministic: the same lengths give the same answer on every rank.
"""

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Rows (indices into `lengths`) of each of `bins` bins, whose token sums are nearly equal.

    The largest differencing method (Karmarkar and Karp, 1982): join the two partial assignments that differ most,
    the heavy bin of one with the light bin of the other, until one assignment is left. That also leaves no bin empty
    unless there are fewer rows than bins; empty ones come last. Each bin lists its rows in ascending order.

    Raises:
        ValueError: `bins` is below 1.
    """
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    if not lengths:
        return [[] for _ in range(bins)]
    # An assignment is a list of (sum, rows), heaviest first. Weights are length + 1, so that rows of 0 tokens count too.
    heap = []
    for row, length in enumerate(lengths):
        heap.append((-(length + 1), row, [(length + 1, [row])] + [(0, []) for _ in range(bins - 1)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, rows + others) for (a, rows), (b, others) in zip(first, reversed(second))]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))  # order is unique: lists are never compared
    return sorted((sorted(rows) for _, rows in heap[0][2]), key=lambda rows: (not rows, rows))


def micro_batches(lengths: Sequence[int], *, tokens_per_micro_batch: int, multiple_of: int = 1) -> list[list[int]]:
    """Rows of each micro-batch, of at most `tokens_per_micro_batch` tokens together; a longer row is alone in its own.

    First-fit decreasing: at most 11/9 of the fewest possible micro-batches, plus one. Empty ones are added at the end
    until their number is a multiple of `multiple_of` (interleaved pipelines need a multiple of pp).

    Raises:
        ValueError: the budget or the multiple is below 1.
    """
    if tokens_per_micro_batch < 1 or multiple_of < 1:
        raise ValueError(f"tokens_per_micro_batch={tokens_per_micro_batch} and multiple_of={multiple_of} must be at least 1")
    rows_of: list[list[int]] = []
    room_of: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        place = next((i for i, room in enumerate(room_of) if room >= lengths[row]), len(rows_of))
        if place == len(rows_of):
            rows_of.append([])
            room_of.append(tokens_per_micro_batch)
        rows_of[place].append(row)
        room_of[place] -= lengths[row]
    return [sorted(rows) for rows in rows_of] + [[] for _ in range(-len(rows_of) % multiple_of)]
