"""Token balancing: samples over ranks, and into micro-batches of a token budget. Pure Python.

Both functions are deterministic: the same lengths give the same result on every rank.
"""

import heapq
from collections.abc import Sequence

# With engine.dynamic_batching, which fits the token budget to the free memory:
USED_SHARE = 0.8  # of the free memory; micro-batches of different sizes leave blocks that nothing fits
MICRO_BATCHES_PER_STAGE = 4  # of a mini-batch at least: fewer, larger ones leave pipeline stages waiting


def balance(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Split samples (indices into `lengths`) into `bins` bins with nearly equal token sums.

    The longest remaining sample goes to the bin with the fewest tokens (Graham, 1969: at most 4/3 of the
    heaviest bin of an optimal split). No bin is empty unless there are fewer samples than bins; empty bins
    come last. Each bin lists its samples in ascending order.

    Raises:
        ValueError: `bins` is below 1.
    """
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    samples_of: list[list[int]] = [[] for _ in range(bins)]
    # Tokens of each bin; every sample counts one more, so that samples of 0 tokens are spread too.
    heap = [(0, place) for place in range(bins)]
    for sample in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        tokens, place = heap[0]
        samples_of[place].append(sample)
        heapq.heapreplace(heap, (tokens + lengths[sample] + 1, place))
    return sorted((sorted(samples) for samples in samples_of), key=lambda samples: (not samples, samples))


def micro_batches(
    lengths: Sequence[int], *, tokens_per_micro_batch: int, multiple_of: int = 1
) -> list[list[int]]:
    """Group samples into micro-batches of at most `tokens_per_micro_batch` tokens.

    A longer sample gets a micro-batch of its own. First-fit decreasing: at most 11/9 of the fewest possible
    micro-batches, plus one. Empty ones are appended until their number is a multiple of `multiple_of`
    (interleaved pipelines need a multiple of pp).

    Raises:
        ValueError: the budget or the multiple is below 1.
    """
    if tokens_per_micro_batch < 1 or multiple_of < 1:
        raise ValueError(
            f"tokens_per_micro_batch={tokens_per_micro_batch} and multiple_of={multiple_of}"
            " must be at least 1"
        )
    samples_of: list[list[int]] = []
    room_of: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        place = next((i for i, room in enumerate(room_of) if room >= lengths[sample]), len(samples_of))
        if place == len(samples_of):
            samples_of.append([])
            room_of.append(tokens_per_micro_batch)
        samples_of[place].append(sample)
        room_of[place] -= lengths[sample]
    return [sorted(samples) for samples in samples_of] + [[] for _ in range(-len(samples_of) % multiple_of)]
