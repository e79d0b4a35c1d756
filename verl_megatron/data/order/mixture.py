"""Epochs that draw from several sources by weight.

An epoch is as long as all sources together. Source i has round(weight_i x length) places in it, evenly spread
over the epoch. It fills them with its items, over and over, each time in another order, and goes on where its
last epoch ended. So an epoch depends on the shares, the seed and the epoch's number only.
"""

import math
import random
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

Share = tuple[float, int]  # weight of a source, and its items

BLOCK = 64  # places that are shuffled together: a source has its share of any part of an epoch


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return weights divided by their sum; the largest first, as the sum of large ones may be infinite."""
    largest = max(weights)
    relative = [weight / largest for weight in weights]
    total = math.fsum(relative)
    return [weight / total for weight in relative]


def places_of(shares: Sequence[Share]) -> list[int]:
    """Return the places of each source in an epoch, at least one each.

    Raises:
        ValueError: a weight is so small that its source gets none.
    """
    length = sum(count for _, count in shares)
    weights = [weight for weight, _ in shares]
    exact = [length * share for share in shares_of(weights)]
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


def order_of(shares: Sequence[Share], *, seed: int, epoch: int, shuffle: bool) -> "array[int]":
    """Return the items of an epoch in order; items of a source follow those of the one before it.

    The sources alternate evenly. With `shuffle` they do so to within BLOCK places, and the items of a source
    are permuted.
    """
    positions, items = [], []
    firsts = accumulate((count for _, count in shares), initial=0)
    for source, (places, (_, count), first) in enumerate(zip(places_of(shares), shares, firsts)):
        begin = epoch * places
        drawn = array("I")
        for cycle in range(begin // count, -(-(begin + places) // count)):
            within = permutation(count, f"{seed}/{source}/{cycle}" if shuffle else None)
            drawn += within[max(begin - cycle * count, 0) : begin + places - cycle * count]
        items.append(np.asarray(drawn) + first)
        positions.append((np.arange(places) + 0.5) / places)
    order = np.concatenate(items)[np.argsort(np.concatenate(positions), kind="stable")]
    mixed = array("I", order.astype(np.uint32).tobytes())
    if shuffle:
        rng = random.Random(f"{seed}/{epoch}")
        for start in range(0, len(mixed), BLOCK):
            block = mixed[start : start + BLOCK]
            rng.shuffle(block)
            mixed[start : start + BLOCK] = block
    return mixed


def permutation(count: int, seed: str | None) -> "array[int]":
    """Return the numbers below `count` in an order that the seed determines; None: in their own."""
    numbers = array("I", range(count))
    if seed is not None:
        random.Random(seed).shuffle(numbers)
    return numbers


def digest_of(shares: Sequence[Share]) -> int:
    """Return a number that other shares hardly have; 0 without any."""
    return (
        zlib.crc32(repr([BLOCK, *((float(weight), count) for weight, count in shares)]).encode())
        if shares
        else 0
    )
