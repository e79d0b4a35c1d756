"""In-place plans, executed on numpy arrays in which every element has its own number."""

from dataclasses import replace
from itertools import chain, product
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel.layout import Layout
from parallel.reshard.in_place.memory_layout import ALIGNMENT
from parallel.reshard.in_place.planner import WORTH_ANOTHER, Sides, plan_in_place
from parallel.reshard.plan import matrix_shape
from parallel.weights.rules import hf_shapes, megatron_parameters, vllm_parameters
from tests.strategies import model_cases
from tests.tiny import tiny_architecture
from tests.toy_shards import Toy, layouts_of, megatron_like, vllm_like
from tests.unit.test_reshard_plan import filled, numbered

ELEMENT_BYTES = 8
TOYS = [
    Toy(hidden=32, ffn=64, head_dim=8, vocab=64),
    Toy(hidden=16, groups=8, vocab=41),
    Toy(tied=True, groups=1),
]
LOST = -9


def flat(parameters, element_bytes=ELEMENT_BYTES):
    """One allocation, as in Megatron's distributed optimizer: aligned parameters one after the other."""
    addresses, end = {}, 0
    for p in reversed(parameters):
        addresses[p.chunk, p.name] = (0, end)
        end += -(-prod(p.shape) * element_bytes // 128) * 128
    return addresses


def scattered(parameters, element_bytes=ELEMENT_BYTES):
    return {(p.chunk, p.name): (number, 0) for number, p in enumerate(parameters)}


class Machine:
    """The ranks' memory, and an executor that stages as `Resharder` does.

    A window is packed on all ranks before any of it is written.
    """

    def __init__(self, source, destination, memory, plans):
        self.memory = {}
        for rank in {*source, *destination}:
            sizes = {}
            for p in source.get(rank, []):
                space, first = memory[rank][p.chunk, p.name]
                sizes[space] = max(sizes.get(space, 0), first // ELEMENT_BYTES + prod(p.shape))
            self.memory[rank] = {space: np.full(size, LOST) for space, size in sizes.items()}
        self.source = {rank: self.views(rank, memory[rank], shards) for rank, shards in source.items()}
        self.destination = {}
        for rank, shards in destination.items():
            own = {(p.chunk, p.name): np.full(matrix_shape(p.shape), LOST) for p in shards}
            self.destination[rank] = own | self.views(rank, plans.addresses[rank], shards)

    def views(self, rank, addresses, shards):
        keys = {(p.chunk, p.name): p for p in shards}
        return {key: self.view(rank, addresses[key], p) for key, p in keys.items() if key in addresses}

    def view(self, rank, address, parameter):
        space, first = address
        assert first % ELEMENT_BYTES == 0
        first //= ELEMENT_BYTES
        size = prod(parameter.shape)
        assert first + size <= len(self.memory[rank][space])
        return self.memory[rank][space][first : first + size].reshape(matrix_shape(parameter.shape))

    def follow(self, plan, source, destination):
        def at(side, rank, position, shape):
            chunk, name, row, col = position
            return side[rank][chunk, name][row : row + shape[0], col : col + shape[1]]

        windows = [list(chain(*window.values())) for window in plan.windows]
        for transfers in (plan.direct, *windows):
            packed = [at(source, t.source_rank, t.source, t.shape).copy() for t in transfers]
            for t, values in zip(transfers, packed):
                at(destination, t.destination_rank, t.destination, t.shape)[:] = values
        for padding in plan.padding:
            rectangle = slice(*padding.rows), slice(*padding.cols)
            destination[padding.rank][padding.chunk, padding.name][rectangle] = 0


def check(model, memory_of, *, in_place, peer_memory, window_bytes=2**14):
    """To rollout and back twice, bit by bit; returns the plans. `model`: source, destination, shapes."""
    source, destination, shapes = model
    tensors = numbered(shapes)
    memory = {rank: memory_of(shards) for rank, shards in source.items()}
    sides = Sides(source=source, destination=destination, memory=memory, element_bytes=ELEMENT_BYTES)
    plans = plan_in_place(sides, in_place=in_place, window_bytes=window_bytes, peer_memory=peer_memory)
    machine = Machine(source, destination, memory, plans)
    for rank, shards in source.items():
        for key, values in filled(shards, tensors, 0).items():
            machine.source[rank][key][:] = values
    for _ in range(2):
        machine.follow(plans.to_rollout, machine.source, machine.destination)
        for rank, shards in destination.items():
            for key, values in filled(shards, tensors, 0).items():
                assert np.array_equal(machine.destination[rank][key], values), (rank, key)
        if plans.to_train is not None:
            machine.follow(plans.to_train, machine.destination, machine.source)
        for rank, shards in source.items():
            for key, values in filled(shards, tensors, 0).items():
                assert np.array_equal(machine.source[rank][key], values), (rank, key)
    for plan in filter(None, (plans.to_rollout, plans.to_train)):
        assert plan.peak_extra_bytes <= window_bytes
        assert not peer_memory or all(
            t.source_rank == t.destination_rank or t in plan.direct or plan.one_sided
            for t in plan.transfers()
        )
    for rank, addresses in plans.addresses.items():
        sizes = {(p.chunk, p.name): prod(p.shape) * ELEMENT_BYTES for p in destination[rank]}
        spans = sorted((space, start, start + sizes[key]) for key, (space, start) in addresses.items())
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:])), (
            "two parameters share memory"
        )
    return plans


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("memory_of", [flat, scattered])
def test_every_layout_out_and_back(memory_of, in_place):
    for number, toy in enumerate(TOYS):
        for layout, tp in product(layouts_of(4, layers=toy.layers), (1, 2, 4)):
            number, peer_memory = number + 1, number % 2 == 0
            if number % 4 == 2 * in_place + (memory_of is flat):  # other cases in each of the four tests
                layout = replace(layout, ranks=(0, 2, 1, 3) if tp == 2 else (0, 1, 2, 3))
                source = {rank: megatron_like(toy, layout, rank) for rank in layout.ranks}
                destination = {rank: vllm_like(toy, tp, rank % tp) for rank in range(4)}
                check(
                    (source, destination, toy.shapes()), memory_of, in_place=in_place, peer_memory=peer_memory
                )


@settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    model_cases(), st.booleans(), st.sampled_from([flat, scattered]), st.sampled_from([2**12, 2**14, 2**18])
)
def test_random_models_out_and_back(case, in_place, memory_of, window_bytes):
    check(
        (case.source, case.destination, case.shapes),
        memory_of,
        in_place=in_place,
        peer_memory=case.peer_memory,
        window_bytes=window_bytes,
    )


def test_a_window_below_two_rows_is_refused():
    source, destination, shapes = real("tp2pp2", 4)
    with pytest.raises(ValueError, match="window_bytes=1000 cannot hold two rows of .*; set it to"):
        check((source, destination, shapes), flat, in_place=True, peer_memory=False, window_bytes=1000)


HIDDEN_SIZE = 256


def real(train, tp, *, ranks=(0, 1, 2, 3), **changes):
    sizes = dict(hidden_size=HIDDEN_SIZE, num_heads=8, head_dim=32, intermediate_size=512)
    arch = tiny_architecture("qwen2", **sizes | dict(num_layers=4, vocab_size=1024) | changes)
    layout = Layout.parse(train, ranks=ranks)
    source = {rank: megatron_parameters(arch, layout, rank, spec="te") for rank in layout.ranks}
    return source, {rank: vllm_parameters(arch, tp, rank % tp) for rank in range(4)}, hf_shapes(arch)


def copy_bytes(shards, element_bytes=ELEMENT_BYTES):
    sizes = {}
    for rank, parameters in shards.items():
        sizes[rank] = sum(prod(p.shape) for p in parameters) * element_bytes
    return sizes


def own(plans, destination):
    return max(plans.own_bytes(destination).values())


def test_equal_layouts_share_all_but_attention():
    source, destination, shapes = real("tp2", 2, num_kv_heads=4)
    plans = check((source, destination, shapes), flat, in_place=False, peer_memory=True)
    qkv = sum(prod(p.shape) for p in destination[0] if "qkv_proj" in p.name) * ELEMENT_BYTES
    assert own(plans, destination) == qkv == max(plans.to_rollout.local_bytes.values())
    assert (
        max(plans.to_rollout.received_bytes.values()) == 0
        and plans.to_train is None
        and not plans.to_rollout.windows
    )


def test_with_one_head_group_a_rank_everything_is_shared():
    source, destination, shapes = real("tp2", 2)
    plans = check((source, destination, shapes), flat, in_place=False, peer_memory=True)
    assert own(plans, destination) == 0 and not list(plans.to_rollout.transfers())


def test_swapping_equal_layouts_needs_no_second_copy():
    source, destination, shapes = real("tp2", 2)
    plans = check((source, destination, shapes), flat, in_place=True, peer_memory=False, window_bytes=2**21)
    assert own(plans, destination) == 0 and max(plans.to_train.received_bytes.values()) == 0


@pytest.mark.parametrize(
    "train,ranks,tp",
    [
        ("tp2pp2", (0, 2, 1, 3), 4),
        ("tp2pp2vpp2", (0, 2, 1, 3), 4),
        ("pp4", (0, 1, 2, 3), 4),
        ("tp2dp2", (0, 2, 1, 3), 4),
    ],
)
def test_swapping_holds_one_copy(train, ranks, tp):
    """The larger copy, and what no gap is large enough for: less than a tenth of it."""
    source, destination, shapes = real(train, tp, ranks=ranks)
    plans = check((source, destination, shapes), flat, in_place=True, peer_memory=True, window_bytes=2**22)
    held, needed, extra = copy_bytes(source), copy_bytes(destination), plans.own_bytes(destination)
    assert max(held[rank] + extra[rank] for rank in source) <= 1.1 * max(*held.values(), *needed.values())
    assert max(plans.to_rollout.received_bytes.values()) < max(needed.values())


def test_a_window_too_small_for_a_permutation_gives_a_parameter_its_own_memory():
    source, destination, shapes = real("tp2pp2", 4, ranks=(0, 2, 1, 3))
    roomy = check((source, destination, shapes), flat, in_place=True, peer_memory=True, window_bytes=2**22)
    tight = check((source, destination, shapes), flat, in_place=True, peer_memory=True, window_bytes=2**17)
    assert own(roomy, destination) < own(tight, destination) and tight.to_rollout.peak_extra_bytes <= 2**17


def excess(plans, source, destination):
    """Bytes by which source and own memory exceed the larger copy, on the rank that has most."""
    held, needed, extra = copy_bytes(source), copy_bytes(destination), plans.own_bytes(destination)
    return max(held.get(rank, 0) + extra[rank] - max(held.get(rank, 0), needed[rank]) for rank in needed)


@pytest.mark.parametrize("train,tp", [("tp4", 2), ("tp4", 1), ("tp2pp2", 1)])
def test_where_the_destination_is_larger_only_the_difference_is_added(train, tp):
    """No parameter fits into its own source: they are packed, with no gap above the smallest one."""
    source, destination, shapes = real(train, tp, num_kv_heads=4)
    for peer_memory in (False, True):
        plans = check(
            (source, destination, shapes), flat, in_place=True, peer_memory=peer_memory, window_bytes=2**17
        )
        norm = HIDDEN_SIZE * ELEMENT_BYTES
        assert excess(plans, source, destination) <= norm + ALIGNMENT < copy_bytes(source)[0] // WORTH_ANOTHER


def test_cycles_of_all_layers_cost_one_of_them():
    """A window of half a feed-forward matrix holds none of its cycles."""
    source, destination, shapes = real(
        "tp2pp2", 4, ranks=(0, 2, 1, 3), num_layers=24, num_kv_heads=4, vocab_size=64
    )
    largest = max(prod(p.shape) for p in source[0]) * ELEMENT_BYTES
    plans = check(
        (source, destination, shapes), flat, in_place=True, peer_memory=False, window_bytes=largest // 2
    )
    assert 0 < excess(plans, source, destination) <= largest


@settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(model_cases(), st.sampled_from([flat, scattered]))
def test_own_memory_is_bounded(case, memory_of):
    """Without cycles: a 64th of the larger copy, or two gaps per allocation that fit no own parameter."""
    element_bytes = 2**12  # so that what alignment costs is nothing beside the parameters
    memory = {rank: memory_of(shards, element_bytes) for rank, shards in case.source.items()}
    sides = Sides(
        source=case.source, destination=case.destination, memory=memory, element_bytes=element_bytes
    )
    plans = plan_in_place(sides, in_place=True, window_bytes=2**40, peer_memory=case.peer_memory)
    held, needed = copy_bytes(case.source, element_bytes), copy_bytes(case.destination, element_bytes)
    larger = max(*held.values(), *needed.values())
    for rank, shards in case.destination.items():
        own = [
            prod(p.shape) * element_bytes for p in shards if (p.chunk, p.name) not in plans.addresses[rank]
        ]
        gaps = 2 * len({space for space, _ in memory.get(rank, {}).values()}) * min(own, default=0)
        assert sum(own) <= max(0, needed[rank] - held.get(rank, 0)) + max(larger // WORTH_ANOTHER, gaps)


def test_aliased_parameters_are_aligned():
    source, destination, shapes = real("tp2pp2", 4)
    plans = check((source, destination, shapes), flat, in_place=True, peer_memory=True, window_bytes=2**22)
    starts = [first for addresses in plans.addresses.values() for _, first in addresses.values()]
    assert starts and all(first % 16 == 0 for first in starts) and ALIGNMENT % 16 == 0
