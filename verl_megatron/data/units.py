"""Units: samples of a mini-batch that stay together, on a data-parallel rank and in a micro-batch. Pure Python.

Single samples, pairs, or the samples of a prompt. The latter can share its tokens (engine.shared_prompts):
these count once in a unit, and a unit may be cut, with the prompt in every piece.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from verl_megatron.data.packing import balance, micro_batches


def members_of(group_id: Sequence[int]) -> list[list[int]]:
    """Return the places of each group's samples, groups in the order of their first samples."""
    found: dict[int, list[int]] = {}
    for place, group in enumerate(group_id):
        found.setdefault(group, []).append(place)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Units:
    """Samples that stay together."""

    members: list[list[int]]  # of each unit, places in `lengths`
    lengths: list[int]  # tokens of each sample
    prompts: list[int] | None = None  # tokens of each sample's prompt, which a unit shares; None: it does not

    def tokens(self) -> list[int]:
        """Return the packed tokens of each unit."""
        return [self._tokens_of(members) for members in self.members]

    def spread(self, bins: int) -> list[list[int]]:
        """Return the places of the samples in each of `bins` bins with nearly equal tokens.

        Units that share their prompt stay whole, unless the heaviest bin has fewer tokens with all of them in
        halves, in quarters and so on.
        """
        best: list[list[int]] = []
        fewest = None
        for units in self._halvings():
            tokens, dealt = units.tokens(), balance(units.tokens(), bins)
            heaviest = max(sum(tokens[unit] for unit in content) for content in dealt)
            if fewest is None or heaviest < fewest:
                best, fewest = [units.places(content) for content in dealt], heaviest
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
    return [members[first:end] for first, end in pairwise(len(members) * i // count for i in range(count + 1))]
