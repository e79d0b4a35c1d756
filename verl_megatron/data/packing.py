"""Token balancing: samples over ranks, and into micro-batches of a token budget. Pure Python.

All of it is deterministic: the same lengths give the same result on every rank.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

# With engine.dynamic_batching, which fits the token budget to the free memory:
USED_SHARE = 0.8  # of the free memory; micro-batches of different sizes leave blocks that nothing fits
MICRO_BATCHES_PER_STAGE = 4  # of a mini-batch at least: fewer, larger ones leave pipeline stages waiting
# A head computes the logits of a micro-batch in chunks of this size, in the dtype of the hidden states.
LOGIT_CHUNK_BYTES = 512 << 20


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


# ---- samples that stay together ------------------------------------------------------------------------


def members_of(group_id: Sequence[int]) -> list[list[int]]:
    """Return the places of each group's samples, groups in the order of their first samples."""
    found: dict[int, list[int]] = {}
    for place, group in enumerate(group_id):
        found.setdefault(group, []).append(place)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Units:
    """Samples that stay together on a data-parallel rank and in a micro-batch.

    Single samples, pairs, or those of a prompt, which may share its tokens (engine.shared_prompts): these
    count once in a unit, and a unit may be cut, with the prompt in every piece.
    """

    members: list[list[int]]  # of each unit, places in `lengths`
    lengths: list[int]  # tokens of each sample
    prompts: list[int] | None = None  # tokens of each sample's prompt, which a unit shares; None: it does not

    def tokens(self) -> list[int]:
        """Return the packed tokens of each unit."""
        return [self._tokens_of(members) for members in self.members]

    def spread(self, bins: int) -> list[list[int]]:
        """Return the places of the samples in each of `bins` bins with nearly equal tokens.

        Units that share their prompt stay whole, unless fewer bins are empty, or the heaviest one has fewer
        tokens, with all of them in halves, in quarters and so on.
        """
        best: list[list[int]] = []
        least = None
        for units in self._halvings():
            tokens = units.tokens()
            dealt = balance(tokens, bins)
            heaviest = max(sum(map(tokens.__getitem__, content)) for content in dealt)
            cost = (dealt.count([]), heaviest)
            if least is None or cost < least:
                best, least = [units.places(content) for content in dealt], cost
        return best

    def micro_batches(self, *, tokens_per_micro_batch: int, multiple_of: int) -> list[list[int]]:
        """Return the places of the samples in each micro-batch, as `packing.micro_batches` groups units.

        Units that share their prompt are cut into pieces within the token budget.
        """
        pieces = self
        if self.prompts is not None:
            cut = [piece for unit in self.members for piece in self._within(unit, tokens_per_micro_batch)]
            pieces = replace(self, members=cut)
        groups = micro_batches(
            pieces.tokens(), tokens_per_micro_batch=tokens_per_micro_batch, multiple_of=multiple_of
        )
        return [pieces.places(group) for group in groups]

    def places(self, units: Sequence[int]) -> list[int]:
        """Return the places of the samples of some units."""
        return [place for unit in units for place in self.members[unit]]

    def _tokens_of(self, members: Sequence[int]) -> int:
        total = sum(self.lengths[m] for m in members)
        if self.prompts is None:
            return total
        return total - (len(members) - 1) * min(self.prompts[m] for m in members)

    def _halvings(self) -> Iterator["Units"]:
        """Yield these units, and if they share their prompt, all of them in 2, 4, ... equal pieces."""
        yield self
        pieces, largest = 2, max(map(len, self.members), default=1)
        while self.prompts is not None and pieces < 2 * largest:
            yield replace(self, members=[part for unit in self.members for part in _cut(unit, pieces)])
            pieces *= 2

    def _within(self, members: list[int], tokens: int) -> list[list[int]]:
        """Cut a unit, in order, into pieces of at most `tokens`; a longer sample is a piece of its own."""
        pieces = [members[:1]]
        for m in members[1:]:
            if self._tokens_of([*pieces[-1], m]) <= tokens:
                pieces[-1].append(m)
            else:
                pieces.append([m])
        return pieces


def _cut(members: list[int], pieces: int) -> list[list[int]]:
    """Cut into at most `pieces` parts, whose sizes differ by one at most."""
    count = min(pieces, len(members))
    bounds = [len(members) * i // count for i in range(count + 1)]
    return [members[first:end] for first, end in pairwise(bounds)]
