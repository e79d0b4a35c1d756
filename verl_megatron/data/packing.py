"""Which rows go together: over ranks by tokens, and into micro-batches of a token budget. Pure Python.

Both functions are deterministic: the same lengths give the same answer on every rank.
"""

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Rows (indices into `lengths`) of each of `bins` bins, whose token sums are nearly equal.

    The longest row that is left goes to the bin with the fewest tokens (Graham, 1969: at most 4/3 of the best split's heaviest bin). No bin
    is empty unless there are fewer rows than bins; empty ones come last. Each bin lists its rows in ascending order.

    Raises:
        ValueError: `bins` is below 1.
    """
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    rows_of: list[list[int]] = [[] for _ in range(bins)]
    heap = [
        (0, place) for place in range(bins)
    ]  # tokens of a bin; each row counts one more, so that rows of 0 tokens are dealt out, too
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        tokens, place = heap[0]
        rows_of[place].append(row)
        heapq.heapreplace(heap, (tokens + lengths[row] + 1, place))
    return sorted((sorted(rows) for rows in rows_of), key=lambda rows: (not rows, rows))


def micro_batches(
    lengths: Sequence[int], *, tokens_per_micro_batch: int, multiple_of: int = 1
) -> list[list[int]]:
    """Rows of each micro-batch, of at most `tokens_per_micro_batch` tokens together; a longer row is alone in its own.

    First-fit decreasing: at most 11/9 of the fewest possible micro-batches, plus one. Empty ones are added at the end
    until their number is a multiple of `multiple_of` (interleaved pipelines need a multiple of pp).

    Raises:
        ValueError: the budget or the multiple is below 1.
    """
    if tokens_per_micro_batch < 1 or multiple_of < 1:
        raise ValueError(
            f"tokens_per_micro_batch={tokens_per_micro_batch} and multiple_of={multiple_of} must be at least 1"
        )
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
