"""GPU memory of both copies of the weights and of staging in each mode, for `verl-megatron reshard-plan`."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod

from parallel.reshard.in_place.memory_layout import Addresses
from parallel.reshard.in_place.planner import Sides, least_layouts, plan_in_place
from parallel.reshard.plan import Plan
from parallel.weights.shard import ShardedParameter, Shards

# limit of ranks that exchange slices; with more, the search for overwrite cycles takes too long for an
# interactive tool
EXACT_RANKS = 16


def peak_memory(
    plan: Plan,
    source: Shards,
    destination: Shards,
    *,
    replicas: Sequence[Sequence[int]],
    host_of: Callable[[int], int],
    peer_memory: bool,
) -> dict[str, int | dict]:
    """Return the bytes of weights and staging on the fullest rank in each mode.

    Both copies have the plan's element size; no gradients, optimizer or KV cache.

    keep: both copies are resident. share: tensors that vLLM can use in Megatron's memory are not stored
    twice. swap: vLLM's parameters are placed over Megatron's memory, permuted in place through the window.
    For the latter two, `own_bytes` is the size of vLLM's parameters with separate memory, as
    `parallel.reshard` places them. `planned_ranks` is the number of ranks whose schedule was computed for it,
    0 for none.

    Args:
        replicas: ranks of every replica of either engine.
        peer_memory: all ranks read each other's memory.
    """
    source_bytes, destination_bytes = (_bytes(side, plan.element_bytes) for side in (source, destination))
    staged = plan.staged_bytes
    shared = _own_bytes(source, destination, plan.element_bytes, in_place=False)
    ranks = exchanging(source, destination, replicas, host_of)
    if len(ranks) > EXACT_RANKS:
        swap = _at_least(plan, source, destination)
    else:
        sides = _sides(source, destination, ranks, plan.element_bytes)
        swap = _planned(sides, plan.window_bytes, host_of, peer_memory)
    return {
        "larger_copy_bytes": max(*source_bytes.values(), *destination_bytes.values()),
        "keep": {
            "bytes": max(source_bytes[rank] + destination_bytes[rank] + staged[rank] for rank in source)
        },
        "share": {
            "bytes": max(source_bytes[rank] + shared[rank] + staged[rank] for rank in source),
            "own_bytes": max(shared.values()),
        },
        "swap": swap,
    }


def _at_least(plan: Plan, source: Shards, destination: Shards) -> dict[str, int]:
    """Return the memory of `swap` if no overwrite cycles require more."""
    own = _own_bytes(source, destination, plan.element_bytes, in_place=True)
    source_bytes = _bytes(source, plan.element_bytes)
    return {
        "bytes": max(source_bytes[rank] + own[rank] for rank in source) + plan.window_bytes,
        "own_bytes": max(own.values()),
        "planned_ranks": 0,
    }


def _planned(
    sides: Sides, window_bytes: int, host_of: Callable[[int], int], peer_memory: bool
) -> dict[str, int]:
    """Return the memory of `swap` on the fullest of the ranks of `sides`."""
    plans = plan_in_place(
        sides, in_place=True, window_bytes=window_bytes, host_of=host_of, peer_memory=peer_memory
    )
    source_bytes, ranks = _bytes(sides.source, sides.element_bytes), list(sides.source)
    assert plans.to_train is not None  # an in-place plan
    own, staged = plans.own_bytes(sides.destination), plans.to_rollout.staged_bytes
    staged_back = plans.to_train.staged_bytes
    return {
        "bytes": max(source_bytes[rank] + own[rank] + max(staged[rank], staged_back[rank]) for rank in ranks),
        "own_bytes": max(own.values()),
        "planned_ranks": len(ranks),
    }


def _own_bytes(source: Shards, destination: Shards, element_bytes: int, *, in_place: bool) -> dict[int, int]:
    """Return the bytes of separate memory per rank, if no overwrite cycles require more."""
    kinds = {rank: (id(source[rank]), id(destination[rank])) for rank in source}
    one_of = {kind: rank for rank, kind in kinds.items()}  # ranks of a kind have the same shards
    sides = _sides(source, destination, one_of.values(), element_bytes)
    layouts = least_layouts(sides, in_place=in_place)
    return {rank: layouts[one_of[kind]].own_bytes for rank, kind in kinds.items()}


def _sides(source: Shards, destination: Shards, ranks: Iterable[int], element_bytes: int) -> Sides:
    """Return both sides on some ranks, with the source in memory as Megatron places it."""
    return Sides(
        source={rank: source[rank] for rank in ranks},
        destination={rank: destination[rank] for rank in ranks},
        memory={rank: megatron_addresses(source[rank], element_bytes) for rank in ranks},
        element_bytes=element_bytes,
    )


def exchanging(
    source: Shards, destination: Shards, replicas: Sequence[Sequence[int]], host_of: Callable[[int], int]
) -> list[int]:
    """Return ranks that represent all others.

    Replicas of both engines with common ranks form a group. If all groups have the same shards on as many
    hosts, one group is enough; otherwise all ranks are returned. A group has all slices it needs. With
    several groups a plan also takes slices of equal size from others.
    """
    group_of = {rank: [rank] for rank in source}
    for replica in replicas:
        for rank in replica:
            ours, theirs = group_of[replica[0]], group_of[rank]
            if ours is not theirs:
                ours += theirs
                group_of |= dict.fromkeys(theirs, ours)
    by_id = {id(group): group for group in group_of.values()}
    groups = [sorted(group) for group in by_id.values()]

    def kind(group: list[int]) -> list[tuple[int, int, int]]:
        hosts = list(dict.fromkeys(map(host_of, group)))
        return [(id(source[rank]), id(destination[rank]), hosts.index(host_of(rank))) for rank in group]

    return groups[0] if all(kind(group) == kind(groups[0]) for group in groups[1:]) else sorted(source)


def megatron_addresses(parameters: Sequence[ShardedParameter], element_bytes: int) -> Addresses:
    """Place the parameters: one allocation per model chunk, last parameter first, aligned to 64 elements.

    Source: Megatron-Core's `_ParamAndGradBuffer` with a distributed optimizer; padding at the ends of its
    buckets is left out.
    """
    addresses: Addresses = {}
    ends: Counter[int] = Counter()
    for parameter in reversed(parameters):
        addresses[parameter.chunk, parameter.name] = parameter.chunk, ends[parameter.chunk] * element_bytes
        ends[parameter.chunk] += -(-prod(parameter.shape) // 64) * 64
    return addresses


def _bytes(side: Shards, element_bytes: int) -> dict[int, int]:
    sizes: dict[int, int] = {}  # by list: ranks with the same shards share one
    for parameters in side.values():
        if id(parameters) not in sizes:
            sizes[id(parameters)] = element_bytes * sum(prod(p.shape) for p in parameters)
    return {rank: sizes[id(parameters)] for rank, parameters in side.items()}
