"""Lengths of responses that differ: a distribution, and the samples that stand for it in a plan."""

import re
from dataclasses import dataclass
from math import ceil, sqrt

from parallel.runtime.refusal import short_repr

GOLDEN = (sqrt(5) - 1) / 2  # its multiples modulo 1 spread evenly, so neighbours in an order differ
_TOKENS, _NUMBER = r"[1-9]\d{0,8}", r"(?:\d{1,9}\.?\d{0,9}|\.\d{1,9})(?:e[+-]?\d\d?)?"
_RANGE = re.compile(rf"({_TOKENS})(?:-({_TOKENS}))?(?::({_NUMBER}))?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRange:
    """Responses of `least` to `most` tokens, all equally frequent."""

    least: int
    most: int
    share: float  # of all responses

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    @property
    def mean_square(self) -> float:
        """Mean of the squares, for lengths as real numbers: (a² + ab + b²) / 3."""
        return (self.least**2 + self.least * self.most + self.most**2) / 3


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of response lengths in tokens: ranges with shares that sum to 1, shortest first."""

    ranges: tuple[LengthRange, ...]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read ranges with weights, such as "64-2048", or "512:0.7,1024-8192:0.3".

        Weights are positive numbers; only their ratios count.

        Raises:
            ValueError: another text, a weight of 0, or ranges that overlap.
        """
        found = []
        for part in text.split(","):
            read = _RANGE.fullmatch(part)
            if read is None or not float(read[3] or 1):
                raise ValueError(
                    f"--lengths {short_repr(text)}: {short_repr(part)} is no range of tokens with a positive "
                    "weight; write 64-2048, or 512:70,1024-8192:30"
                )
            least, most, weight = read.groups()
            found.append((int(least), int(most or least), float(weight or 1)))
        total = sum(weight for _, _, weight in found)
        ranges = [
            LengthRange(least=least, most=most, share=weight / total) for least, most, weight in sorted(found)
        ]
        ends = [0, *(each.most for each in ranges)]
        if any(each.most < each.least or each.least < end for each, end in zip(ranges, ends)):
            raise ValueError(f"--lengths {short_repr(text)}: ranges must not overlap; write A-B with A ≤ B")
        return cls(tuple(ranges))

    @property
    def mean(self) -> float:
        return sum(each.share * each.mean for each in self.ranges)

    @property
    def mean_square(self) -> float:
        return sum(each.share * each.mean_square for each in self.ranges)

    @property
    def longest(self) -> int:
        return self.ranges[-1].most

    def quantile(self, share: float) -> int:
        """Return the length that this share of the responses does not exceed."""
        for each in self.ranges:
            if share <= each.share:
                return ceil(each.least + (each.most - each.least) * max(share, 0.0) / each.share)
            share -= each.share
        return self.longest

    def samples(self, count: int, *, of: int) -> list[int]:
        """Return the lengths of a replica's samples, in the order in which they start.

        They are the middles of `count` equal shares; the longest is that of all `of` samples, because the
        slowest replica is waited for. Long and short ones are spread evenly over the order.
        """
        lengths = [self.quantile((place + 0.5) / count) for place in range(count)]
        if lengths:
            lengths[-1] = self.quantile((of - 0.5) / of)
        order = sorted(range(count), key=lambda place: place * GOLDEN % 1)
        return [lengths[place] for place in order]
