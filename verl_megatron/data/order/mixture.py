"""Epochs that draw from several sources by weight.

An epoch is as long as all sources together. Source i has round(weight_i x length) places in it. It fills
them with its items, over and over, each time in another order, and goes on where its last epoch ended. So an
epoch depends on the shares, the seed and the epoch's number only.
"""

import random
import zlib
from collections.abc import Sequence
from itertools import accumulate

Share = tuple[float, int]  # weight of a source, and its items


def places_of(shares: Sequence[Share]) -> list[int]:
    """Return the places of each source in an epoch, at least one each.

    Raises:
        ValueError: a weight is so small that its source gets none.
    """
    length, weights = sum(count for _, count in shares), sum(weight for weight, _ in shares)
    exact = [length * weight / weights for weight, _ in shares]
    places = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: places[at] - exact[at])
    for at in by_remainder[: length - sum(places)]:
        places[at] += 1
    for (weight, _), count in zip(shares, places):
        if not count:
            raise ValueError(
                f"weight {weight:g} of data.train is less than one prompt in an epoch of {length:,}; raise it"
            )
    return places


def order_of(shares: Sequence[Share], *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the items of an epoch in order; items of a source follow those of the one before it.

    Without `shuffle` a source keeps its order, and the sources alternate evenly.
    """
    drawn: list[tuple[float, int]] = []
    firsts = accumulate((count for _, count in shares), initial=0)
    for source, (places, (_, count), first) in enumerate(zip(places_of(shares), shares, firsts)):
        begin = epoch * places
        for place in range(places):
            cycle, at = divmod(begin + place, count)
            if place == 0 or at == 0:
                items = list(range(first, first + count))
                if shuffle:
                    random.Random(f"{seed}/{source}/{cycle}").shuffle(items)
            drawn.append(((place + 0.5) / places, items[at]))
    drawn.sort(key=lambda pair: pair[0])
    order = [item for _, item in drawn]
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def digest_of(shares: Sequence[Share]) -> int:
    """Return a number that other shares hardly have; 0 without any."""
    return zlib.crc32(repr([(float(weight), count) for weight, count in shares]).encode()) if shares else 0
