"""Which world rank takes which place in Megatron's layout and in vLLM's, so that a rank already holds much of what it needs.

Only the order of the axes changes: which of tp, cp, dp and pp varies fastest over the world ranks, or over those of a host.
Within a group of one axis ranks still increase with the position, as torch sorts them. In groups of several axes (model parallel,
say) they may not: there a rank's number in the group is only a name.

Bytes are counted, not planned. Every layer is split alike, so one layer stands for all, beside the embedding and the output.
Of a tensor two of Megatron's tensor-parallel ranks hold either the same or nothing in common; what the ranks of a host hold
together is therefore a sum of overlaps. A plan takes each element from the nearest rank that holds it, so the counts are the plan's.
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

NEVER_WIDER = (
    "tp",
    "cp",
    "dp",
)  # axes that speak in every layer or reduce every gradient: their groups span no more hosts than in the usual order
Digit = tuple[str, int]  # an axis or a factor of it, and its size
Shard = tuple[int, int]  # tp and pp: which part of the model
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
    """The same two layouts with their `ranks` reordered so that a reshard from `train` into `rollout` moves least.

    First the bytes that the busiest rank receives from other hosts are made smallest, then those that it receives at all. Nothing
    changes without a gain, and `train` not where the same is gained by `rollout` alone. World rank r stands on host
    r // `ranks_per_host`. Tensor-, context- and data-parallel groups span no more hosts than before; pipeline groups may, which pass
    only activations.

    Each side keeps its set of ranks, which may differ from the other's. A side whose ranks do not increase was ordered by its
    user (or by this function) and stays as it is.

    Raises:
        ValueError: the architecture does not split over a layout, or `rollout` has more axes than tp and dp.
    """
    if rollout.cp * rollout.pp > 1:
        raise ValueError(
            f"rollout layout {rollout} names more than tp and dp, and vLLM's replicas are split by tp only;"
            f" write tp{rollout.tp}"
        )
    missing = cache(_Counts(arch, train, rollout, spec).missing)
    trained, served = (
        [(layout, _shards(layout)) for layout in _candidates(side, ranks_per_host)]
        for side in (train, rollout)
    )
    # The first of the smallest: both candidates' lists begin with the layout as it is.
    (best_train, _), (best_rollout, _) = min(
        product(trained, served), key=lambda pair: _busiest(pair[0][1], pair[1][1], missing, ranks_per_host)
    )
    return best_train, best_rollout


def busiest_elements(
    arch: Architecture,
    train: Layout,
    rollout: Layout,
    *,
    spec: Literal["te", "local"] = "local",
    ranks_per_host: int,
) -> tuple[int, int]:
    """What `place` makes smallest: elements that the busiest rank receives from other hosts, and that the busiest rank receives."""
    return _busiest(
        _shards(train), _shards(rollout), _Counts(arch, train, rollout, spec).missing, ranks_per_host
    )


def described(train: Layout, rollout: Layout) -> str:
    """Both orders in words, for a log: "neighbours along pp are 1 apart, along tp are 2 apart in Megatron; as usual in vLLM"."""
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
    """The layout itself, then its ranks by other orders of the axes, plain ones first."""
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
    """Orders of whole axes; then of a host's part of each axis, with the rest of the axes as usual over the hosts."""
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    for order in permutations(axis for axis in AXES if sizes[axis] > 1):
        yield [(axis, sizes[axis]) for axis in order]
    for parts in product(
        *([part for part in range(1, size + 1) if size % part == 0] for size in sizes.values())
    ):
        if prod(parts) == ranks_per_host < len(layout.ranks):
            over_hosts = [(axis, size // part) for (axis, size), part in zip(sizes.items(), parts)]
            for inside in permutations((axis, part) for axis, part in zip(AXES, parts) if part > 1):
                yield [*inside, *over_hosts]


def _ordered(layout: Layout, digits: list[Digit]) -> Layout:
    """The increasing ranks of `layout`, dealt out along `digits`, the fastest first."""
    offsets, stride = {axis: [0] for axis in AXES}, 1
    for axis, size in digits:
        offsets[axis] = [step * stride + offset for step in range(size) for offset in offsets[axis]]
        stride *= size
    return replace(
        layout,
        ranks=tuple(
            layout.ranks[sum(index)] for index in product(*(offsets[axis] for axis in reversed(AXES)))
        ),
    )


def _hosts(layout: Layout, ranks_per_host: int) -> list[int]:
    """Numbers of hosts that the groups of each axis in `NEVER_WIDER` span, the largest first."""
    hosts, counts, step = [rank // ranks_per_host for rank in layout.ranks], [], 1
    for axis in AXES:
        size, step = getattr(layout, axis), step * getattr(layout, axis)
        if axis in NEVER_WIDER and size > 1:
            starts = [start + first for start in range(0, len(hosts), step) for first in range(step // size)]
            counts += sorted(
                (len(set(hosts[start : start + step : step // size])) for start in starts), reverse=True
            )
    return counts


def _shards(layout: Layout) -> Shards:
    indices = product(*(range(getattr(layout, axis)) for axis in reversed(AXES)))  # pp, dp, cp, tp
    return {rank: (tp, pp) for rank, (pp, _, _, tp) in zip(layout.ranks, indices)}


def _busiest(
    held: Shards, slots: Shards, missing: Callable[[frozenset[Shard], int], int], ranks_per_host: int
) -> tuple[int, int]:
    on_host: dict[int, set[Shard]] = defaultdict(set)
    for rank, shard in held.items():
        on_host[rank // ranks_per_host].add(shard)
    hosts = {host: frozenset(shards) for host, shards in on_host.items()}
    elsewhere = received = 0
    nothing: frozenset[Shard] = frozenset()
    for slot, of_host, of_rank in {
        (slot, hosts.get(rank // ranks_per_host, nothing), held.get(rank))
        for rank, (slot, _) in slots.items()
    }:
        elsewhere = max(elsewhere, missing(of_host, slot))
        received = max(received, missing(frozenset([of_rank]) if of_rank else nothing, slot))
    return elsewhere, received


class _Counts:
    """How much of what vLLM needs is in Megatron's shards, in elements. Parts of a model: 0 the embedding, 1 a layer, 2 the output."""

    def __init__(self, arch: Architecture, train: Layout, rollout: Layout, spec: Literal["te", "local"]):
        self.repeats = _repeats(arch, train)
        one, flat = replace(arch, num_layers=1), Layout(tp=train.tp, ranks=tuple(range(train.tp)))
        held = [_rects(megatron_parameters(one, flat, tp, spec=spec)) for tp in range(train.tp)]
        wanted = [_rects(vllm_parameters(one, rollout.tp, slot)) for slot in range(rollout.tp)]
        common = {
            tensor: rects
            for tensor, rects in held[0].items()
            if all(other.get(tensor) == rects for other in held)
        }
        own = [
            {tensor: rects for tensor, rects in rects_of.items() if tensor not in common} for rects_of in held
        ]
        # By vLLM's tensor-parallel rank: what it needs, what all of Megatron's tensor-parallel ranks hold of it, what each alone does.
        self.need = [_meeting(rects, rects) for rects in wanted]
        self.common = [_meeting(rects, common) for rects in wanted]
        self.own = [[_meeting(rects, mine) for mine in own] for rects in wanted]

    def missing(self, shards: frozenset[Shard], slot: int) -> int:
        """Elements that vLLM's tensor-parallel rank `slot` needs and none of `shards` holds."""
        stages: dict[int, list[int]] = defaultdict(list)
        for tp, pp in shards:
            stages[pp].append(tp)
        elements = 0
        for pp, repeats in enumerate(self.repeats):
            for part, count in enumerate(repeats):
                found = self.common[slot][part] * (pp in stages) + sum(
                    self.own[slot][tp][part] for tp in stages.get(pp, ())
                )
                elements += count * (self.need[slot][part] - found)
        return elements


def _meeting(wanted: Rects, held: Rects) -> tuple[int, int, int]:
    """Elements in both, by part."""
    elements = [0, 0, 0]
    for tensor, rects in wanted.items():
        part = 0 if tensor in EMBEDDING.tensors else 1 if tensor.startswith("model.layers.") else 2
        elements[part] += sum(
            area(meet) for meet in (intersect(a, b) for a, b in product(rects, held.get(tensor, ()))) if meet
        )
    return elements[0], elements[1], elements[2]


def _repeats(arch: Architecture, train: Layout) -> list[tuple[int, int, int]]:
    """By pipeline stage: how many embeddings, layers and outputs it holds. A tied output is the embedding's copy, no source of it."""
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
