"""Placement of world ranks in Megatron's and vLLM's layouts such that a weight sync moves the least.

Only the order of the axes changes: which of tp, cp, dp and pp varies fastest over the world ranks, or over
those of a host. Within a group along one axis ranks still increase with the position, as torch sorts them. In
groups along several axes (model parallel, for example) they may not; there the position in the group has no
meaning.

Bytes are counted without compiling a plan. Every layer is split the same way, so one layer represents all, in
addition to the embedding and the output. Two tensor-parallel ranks of Megatron hold either the same part of a
tensor or disjoint parts, so the ranks of a host together hold a sum of overlaps. A plan copies each element
from the nearest rank that holds it, so the counts equal the plan's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from math import prod
from operator import itemgetter
from typing import Literal

from parallel.layout import AXES, Layout
from parallel.reshard.rectangles import Rect, area, intersect
from parallel.weights.architecture import Architecture
from parallel.weights.rules import EMBEDDING, megatron_parameters, vllm_parameters
from parallel.weights.shard import ShardedParameter

# Axes that communicate in every layer or reduce every gradient: their groups span no more hosts than in the
# default order.
NEVER_WIDER = ("tp", "cp", "dp")
Digit = tuple[str, int]  # an axis, and its size or a factor of its size
Shard = tuple[int, int]  # tp and pp coordinates, which identify a part of the model
Shards = dict[int, Shard]  # by world rank
Rects = dict[str, list[Rect]]  # by Hugging Face tensor


def place(
    arch: Architecture,
    train: Layout,
    rollout: Layout,
    *,
    spec: Literal["te", "local"] = "local",
    ranks_per_host: int,
) -> tuple[Layout, Layout]:
    """Return both layouts with their `ranks` reordered so that a `train` to `rollout` reshard moves least.

    Minimizes the bytes that the busiest rank receives from other hosts, then those that the busiest rank
    receives at all. The order changes only for a gain, and that of `train` only if reordering `rollout` alone
    gains less. World rank r is on host r // `ranks_per_host`. Tensor-, context- and data-parallel groups span
    no more hosts than before; pipeline groups, which pass only activations, may.

    Each side keeps its set of ranks; the two sets may differ. A side whose ranks do not increase was ordered
    by the user (or by this function) and is left unchanged.

    Raises:
        ValueError: the architecture does not split over a layout, or `rollout` has more axes than tp and dp.
    """
    if rollout.cp * rollout.pp > 1:
        raise ValueError(
            f"rollout layout {rollout} names more than tp and dp, and vLLM's replicas are split by tp only;"
            f" write tp{rollout.tp}"
        )
    missing = cache(_Counts(arch, train, rollout, spec).missing)
    train_shards = {layout: _shards(layout) for layout in _candidates(train, ranks_per_host)}
    rollout_shards = {layout: _shards(layout) for layout in _candidates(rollout, ranks_per_host)}

    def busiest(pair: tuple[Layout, Layout]) -> tuple[int, int]:
        return _busiest(train_shards[pair[0]], rollout_shards[pair[1]], missing, ranks_per_host)

    # min returns the first of equals, and both lists of candidates begin with the unchanged layout.
    return min(product(train_shards, rollout_shards), key=busiest)


def busiest_elements(
    arch: Architecture,
    train: Layout,
    rollout: Layout,
    *,
    spec: Literal["te", "local"] = "local",
    ranks_per_host: int,
) -> tuple[int, int]:
    """Return what `place` minimizes: the most elements that a rank receives from other hosts and in total."""
    return _busiest(
        _shards(train), _shards(rollout), _Counts(arch, train, rollout, spec).missing, ranks_per_host
    )


def described(train: Layout, rollout: Layout) -> str:
    """Describe both orders for a log.

    Example: "neighbours along pp are 1 apart, along tp are 2 apart in Megatron; as usual in vLLM".
    """
    return f"{_in_words(train)} in Megatron; {_in_words(rollout)} in vLLM"


def _in_words(layout: Layout) -> str:
    if list(layout.ranks) == sorted(layout.ranks):
        return "as usual"
    distances = {
        axis: abs(layout.rank_of(**{axis: 1}) - layout.ranks[0]) for axis in AXES if getattr(layout, axis) > 1
    }
    return "neighbours " + ", ".join(
        f"along {axis} are {ranks} apart" for axis, ranks in sorted(distances.items(), key=itemgetter(1))
    )


def _candidates(layout: Layout, ranks_per_host: int) -> list[Layout]:
    """Return the layout itself, then the layouts with other orders of the axes, simple ones first."""
    if list(layout.ranks) != sorted(layout.ranks):
        return [layout]
    hosts = _hosts(layout, ranks_per_host)
    found = {layout.ranks: layout}
    for digits in _orders(layout, ranks_per_host):
        ordered = _ordered(layout, digits)
        if ordered.ranks not in found and all(
            now <= before for now, before in zip(_hosts(ordered, ranks_per_host), hosts)
        ):
            found[ordered.ranks] = ordered
    return list(found.values())


def _orders(layout: Layout, ranks_per_host: int) -> Iterator[list[Digit]]:
    """Yield orders of whole axes, then orders of each axis's part within a host.

    In the latter the rest of each axis is in the default order over the hosts.
    """
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    for order in permutations(axis for axis in AXES if sizes[axis] > 1):
        yield [(axis, sizes[axis]) for axis in order]
    for parts in product(*map(_divisors, sizes.values())):
        if prod(parts) == ranks_per_host < len(layout.ranks):
            over_hosts = [(axis, size // part) for (axis, size), part in zip(sizes.items(), parts)]
            for inside in permutations((axis, part) for axis, part in zip(AXES, parts) if part > 1):
                yield [*inside, *over_hosts]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _ordered(layout: Layout, digits: list[Digit]) -> Layout:
    """Return `layout` with its increasing ranks assigned along `digits`, the fastest digit first."""
    offsets, stride = {axis: [0] for axis in AXES}, 1
    for axis, size in digits:
        offsets[axis] = [step * stride + offset for step in range(size) for offset in offsets[axis]]
        stride *= size
    places = map(sum, product(*(offsets[axis] for axis in reversed(AXES))))
    return replace(layout, ranks=tuple(layout.ranks[place] for place in places))


def _hosts(layout: Layout, ranks_per_host: int) -> list[int]:
    """Return how many hosts the groups of each axis in `NEVER_WIDER` span, the largest first per axis."""
    hosts, stride = [rank // ranks_per_host for rank in layout.ranks], 1
    counts: list[int] = []
    for axis in AXES:
        size = getattr(layout, axis)
        if axis in NEVER_WIDER and size > 1:
            counts += sorted((len(set(group)) for group in _strided(hosts, stride, size)), reverse=True)
        stride *= size
    return counts


def _strided(values: list[int], stride: int, size: int) -> Iterator[list[int]]:
    """Yield the groups of `size` values that are `stride` apart: those of ranks along one axis."""
    for block in range(0, len(values), stride * size):
        for first in range(block, block + stride):
            yield values[first : first + stride * size : stride]


def _shards(layout: Layout) -> Shards:
    indices = product(*(range(getattr(layout, axis)) for axis in reversed(AXES)))  # pp, dp, cp, tp
    return {rank: (tp, pp) for rank, (pp, _, _, tp) in zip(layout.ranks, indices)}


def _busiest(
    held: Shards, wanted: Shards, missing: Callable[[frozenset[Shard], int], int], ranks_per_host: int
) -> tuple[int, int]:
    """Return the most elements that a rank receives from other hosts and in total.

    Args:
        held: Megatron's shards.
        wanted: vLLM's shards, as tp and pp (0) coordinates.
        missing: elements that vLLM's tensor-parallel rank needs and no shard of the set holds.
    """
    on_host: dict[int, set[Shard]] = defaultdict(set)
    for rank, shard in held.items():
        on_host[rank // ranks_per_host].add(shard)
    hosts = {host: frozenset(shards) for host, shards in on_host.items()}
    elsewhere = received = 0
    nothing: frozenset[Shard] = frozenset()
    for tp_rank, of_host, of_rank in {
        (tp_rank, hosts.get(rank // ranks_per_host, nothing), held.get(rank))
        for rank, (tp_rank, _) in wanted.items()
    }:
        elsewhere = max(elsewhere, missing(of_host, tp_rank))
        received = max(received, missing(frozenset([of_rank]) if of_rank else nothing, tp_rank))
    return elsewhere, received


class _Counts:
    """Overlaps of vLLM's and Megatron's shards, in elements.

    Parts of a model: 0 the embedding, 1 a layer, 2 the output.
    """

    def __init__(self, arch: Architecture, train: Layout, rollout: Layout, spec: Literal["te", "local"]):
        self.repeats = _repeats(arch, train)
        one, flat = replace(arch, num_layers=1), Layout(tp=train.tp, ranks=tuple(range(train.tp)))
        held = [_rects(megatron_parameters(one, flat, tp, spec=spec)) for tp in range(train.tp)]
        wanted = [_rects(vllm_parameters(one, rollout.tp, tp_rank)) for tp_rank in range(rollout.tp)]
        common = _common(held)
        own = [_without(rects, common) for rects in held]
        # By vLLM's tensor-parallel rank: the elements that it needs, those of them that every tensor-parallel
        # rank of Megatron holds, and those that each of these ranks holds alone.
        self.need = [_meeting(rects, rects) for rects in wanted]
        self.common = [_meeting(rects, common) for rects in wanted]
        self.own = [_meetings(rects, own) for rects in wanted]

    def missing(self, shards: frozenset[Shard], tp_rank: int) -> int:
        """Return the elements that vLLM's tensor-parallel rank `tp_rank` needs and none of `shards` holds."""
        stages: dict[int, list[int]] = defaultdict(list)
        for tp, pp in shards:
            stages[pp].append(tp)
        elements = 0
        for pp, repeats in enumerate(self.repeats):
            for part, count in enumerate(repeats):
                found = self.common[tp_rank][part] * (pp in stages)
                found += sum(self.own[tp_rank][tp][part] for tp in stages.get(pp, ()))
                elements += count * (self.need[tp_rank][part] - found)
        return elements


def _common(shards: list[Rects]) -> Rects:
    """Return the tensors of which all shards hold the same rectangles."""
    common = shards[0]
    for shard in shards[1:]:
        common = {tensor: rects for tensor, rects in common.items() if shard.get(tensor) == rects}
    return common


def _without(shard: Rects, common: Rects) -> Rects:
    return {tensor: rects for tensor, rects in shard.items() if tensor not in common}


def _meetings(wanted: Rects, shards: list[Rects]) -> list[tuple[int, int, int]]:
    return [_meeting(wanted, held) for held in shards]


def _meeting(wanted: Rects, held: Rects) -> tuple[int, int, int]:
    """Return the number of elements in both, by part."""
    elements = [0, 0, 0]
    for tensor, rects in wanted.items():
        part = 0 if tensor in EMBEDDING.tensors else 1 if tensor.startswith("model.layers.") else 2
        for pair in product(rects, held.get(tensor, ())):
            if overlap := intersect(*pair):
                elements[part] += area(overlap)
    return elements[0], elements[1], elements[2]


def _repeats(arch: Architecture, train: Layout) -> list[tuple[int, int, int]]:
    """Return how many embeddings, layers and outputs each pipeline stage holds.

    A tied output is a copy of the embedding and no source of it.
    """
    layers = [0] * train.pp
    for (stage, _), chunk in train.layers_of(arch.num_layers).items():
        layers[stage] += len(chunk)
    return [(int(stage == 0), count, int(stage == train.pp - 1)) for stage, count in enumerate(layers)]


def _rects(parameters: list[ShardedParameter]) -> Rects:
    rects: Rects = defaultdict(list)
    for parameter in parameters:
        for block in parameter.blocks:
            rects[block.tensor].append((*block.rows, *block.cols))
    return dict(rects)
