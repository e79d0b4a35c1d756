"""Placement of ranks: the choice against brute force with full plans, and what it must not change."""

import random
import time
from dataclasses import replace
from itertools import permutations, product

import pytest

from parallel.layout import AXES, Layout
from parallel.placement import busiest_elements, described, place
from parallel.reshard.plan import Plan, compile_plan
from parallel.weights.architecture import Architecture
from parallel.weights.rules import megatron_parameters, vllm_parameters
from parallel.weights.shapes import shape

TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}


def tiny(name: str = "llama3-8b", **changed) -> Architecture:
    return Architecture.from_hf(shape(name) | TINY | changed)


def layouts(train: str, rollout: str, world: int) -> tuple[Layout, Layout]:
    return Layout.parse(train, tuple(range(world))), Layout.parse(rollout, tuple(range(world)))


def planned(arch: Architecture, train: Layout, rollout: Layout, ranks_per_host: int) -> Plan:
    source = {rank: megatron_parameters(arch, train, rank, spec="local") for rank in train.ranks}
    destination = {
        rank: vllm_parameters(arch, rollout.tp, rollout.coordinates(rank).tp) for rank in rollout.ranks
    }
    return compile_plan(
        source=source,
        destination=destination,
        element_bytes=1,
        window_bytes=2**24,
        host_of=lambda rank: rank // ranks_per_host,
    )


def busiest(arch: Architecture, train: Layout, rollout: Layout, ranks_per_host: int) -> tuple[int, int]:
    """Elements from other hosts and at all, each of its busiest rank, as the plan has them."""
    plan = planned(arch, train, rollout, ranks_per_host)
    elsewhere = dict.fromkeys(plan.ranks, 0)
    for transfer in plan.transfers():
        if transfer.source_rank // ranks_per_host != transfer.destination_rank // ranks_per_host:
            elsewhere[transfer.destination_rank] += transfer.elements
    return max(elsewhere.values()), max(plan.received_bytes.values())


def orders_of(layout: Layout) -> list[Layout]:
    """Every order of the axes, by enumerating the places from the fastest axis to the slowest."""
    found = []
    for order in permutations(AXES):
        places = product(*(range(getattr(layout, axis)) for axis in reversed(order)))
        rank_at = {}
        for index, rank in zip(places, sorted(layout.ranks)):
            of_axis = dict(zip(reversed(order), index))
            rank_at[tuple(of_axis[axis] for axis in reversed(AXES))] = rank
        ordered = replace(layout, ranks=tuple(rank_at[index] for index in sorted(rank_at)))
        if ordered not in found:
            found.append(ordered)
    return found


def spans(layout: Layout, axis: str, ranks_per_host: int) -> int:
    return max(hosts_of(group, ranks_per_host) for group in layout.group_ranks(axis))


def hosts_of(group: list[int], ranks_per_host: int) -> int:
    return len({rank // ranks_per_host for rank in group})


def allowed_orders(layout: Layout, ranks_per_host: int) -> list[Layout]:
    """The orders of the axes whose groups span no more hosts than those of `layout`."""
    found = []
    for ordered in orders_of(layout):
        wider = [
            axis
            for axis in ("tp", "cp", "dp")
            if spans(ordered, axis, ranks_per_host) > spans(layout, axis, ranks_per_host)
        ]
        if not wider:
            found.append(ordered)
    return found


def random_cases(count: int) -> list[tuple]:
    draw, cases = random.Random(0), []
    while len(cases) < count:
        world = draw.choice([4, 8, 8])
        tp, cp, pp, rollout = (draw.choice([1, 2, 4]) for _ in range(4))
        if world % (tp * cp * pp) == world % rollout == 0:
            vpp = "vpp2" * (pp == 2 and draw.random() < 0.5)
            cases.append(
                (
                    f"tp{tp}cp{cp}pp{pp}{vpp}",
                    f"tp{rollout}",
                    world,
                    draw.choice([world, world // 2]),
                    draw.choice(["llama3-8b", "llama3-1b", "qwen2.5-7b"]),
                )
            )
    return cases


@pytest.mark.parametrize("train, rollout, world, ranks_per_host, family", random_cases(24))
def test_no_order_of_the_axes_moves_less(train, rollout, world, ranks_per_host, family):
    arch, before = tiny(family), layouts(train, rollout, world)
    chosen = place(arch, *before, ranks_per_host=ranks_per_host)
    allowed = [allowed_orders(side, ranks_per_host) for side in before]
    least = min(busiest(arch, *pair, ranks_per_host) for pair in product(*allowed))
    for pair in (before, chosen):
        assert busiest_elements(arch, *pair, ranks_per_host=ranks_per_host) == busiest(
            arch, *pair, ranks_per_host
        )
    if ranks_per_host == world:
        assert busiest(arch, *chosen, ranks_per_host) == least
    assert busiest(arch, *chosen, ranks_per_host) <= least  # over hosts an axis may also be cut
    if busiest(arch, *before, ranks_per_host) == busiest(arch, *chosen, ranks_per_host):
        assert chosen == before


# Train, rollout, the ranks of both, what the busiest rank receives of a vLLM shard before and after.
NAMED = [
    ("tp2pp2", "tp4", (0, 2, 1, 3), (0, 1, 2, 3), 1, 1 / 2),
    ("tp4", "tp2", (0, 1, 2, 3), (0, 2, 1, 3), 1, 1 / 2),
    ("tp2", "tp4", (0, 2, 1, 3), (0, 1, 2, 3), 1, 0),
    ("tp2pp2", "tp2", (0, 1, 2, 3), (0, 1, 2, 3), 1 / 2, 1 / 2),
]


@pytest.mark.parametrize("train, rollout, train_ranks, rollout_ranks, before, after", NAMED)
def test_named_examples(train, rollout, train_ranks, rollout_ranks, before, after):
    arch = tiny(num_key_value_heads=8, vocab_size=512, hidden_size=64)
    sides = layouts(train, rollout, 4)
    chosen = place(arch, *sides, ranks_per_host=8)
    assert [side.ranks for side in chosen] == [train_ranks, rollout_ranks]
    shard = sum(
        block[0] * block[1] for p in vllm_parameters(arch, sides[1].tp, 0) if len(block := p.shape) == 2
    )
    norms = 64 * (2 * 4 + 1)  # held by some ranks and not by others
    for pair, share in ((sides, before), (chosen, after)):
        assert busiest(arch, *pair, 8)[1] == pytest.approx(share * shard, abs=norms)


def test_tensor_parallel_groups_stay_in_their_host():
    """Two hosts of 8: pipeline ranks of one host would hold more, but would tear tp8 apart."""
    arch = tiny(num_key_value_heads=8)
    before = layouts("tp8pp2", "tp8", 16)
    assert place(arch, *before, ranks_per_host=8) == before
    train, rollout = place(arch, *layouts("tp8pp2", "tp4", 16), ranks_per_host=8)
    assert spans(train, "tp", 8) == spans(rollout, "tp", 8) == 1
    train, _ = place(arch, *layouts("tp2cp4pp2", "tp8", 16), ranks_per_host=8)
    assert spans(train, "tp", 8) == spans(train, "cp", 8) == 1


def test_data_parallel_groups_stay_in_their_host():
    """A stage per host: any host could hold every stage, but then gradients would cross between hosts.

    Within its host a rank still finds all that it needs.
    """
    arch, before = tiny(num_key_value_heads=8), layouts("tp2pp2", "tp8", 16)
    whole_model = replace(
        before[0], ranks=tuple(4 * dp + 2 * pp + tp for pp, dp, tp in product(range(2), range(4), range(2)))
    )
    assert busiest(arch, whole_model, before[1], 8)[0] == 0 and spans(whole_model, "dp", 8) == 2
    chosen = place(arch, *before, ranks_per_host=8)
    assert spans(chosen[0], "dp", 8) == 1
    elsewhere, received = busiest(arch, *before, 8)
    assert busiest(arch, *chosen, 8) == (elsewhere, elsewhere) and 0 < elsewhere < 0.52 * received


def test_every_host_is_laid_out_as_one_host_alone_would_be():
    """tp2 with data parallelism: only half an axis keeps a pair in its host and serves each rank.

    No order of whole axes does.
    """
    arch = tiny(num_key_value_heads=8)
    train, rollout = place(arch, *layouts("tp2", "tp4", 16), ranks_per_host=4)
    assert busiest(arch, train, rollout, 4) == (0, 0) and spans(train, "tp", 4) == 1
    assert train.group_ranks("tp") == [
        [first, first + 2] for host in range(4) for first in (4 * host, 4 * host + 1)
    ]


SIXTEEN = [
    ("tp2pp2", "tp4", 8),
    ("tp2cp2pp2", "tp4", 4),
    ("tp4", "tp2", 16),
    ("tp2cp2", "tp8", 8),
    ("tp2", "tp2", 8),
]


@pytest.mark.parametrize("train, rollout, ranks_per_host", SIXTEEN)
def test_groups_increase_and_the_choice_repeats(train, rollout, ranks_per_host):
    before = layouts(train, rollout, 16)
    arch = tiny(num_key_value_heads=8)
    chosen = place(arch, *before, ranks_per_host=ranks_per_host)
    assert chosen == place(arch, *before, ranks_per_host=ranks_per_host)
    assert chosen == place(arch, *chosen, ranks_per_host=ranks_per_host)
    for side, ordered in zip(before, chosen):
        assert replace(ordered, ranks=side.ranks) == side and sorted(ordered.ranks) == list(side.ranks)
        for axis in AXES:
            assert all(group == sorted(group) for group in ordered.group_ranks(axis))


def test_partial_and_given_ranks():
    """Sets stay; ranks in an order of the user's stay too; apart from each other nothing can be gained."""
    arch = tiny()
    train, rollout = place(
        arch, Layout.parse("tp2pp2", (2, 3, 4, 5)), Layout.parse("tp4", tuple(range(8))), ranks_per_host=8
    )
    assert sorted(train.ranks) == [2, 3, 4, 5] and sorted(rollout.ranks) == list(range(8))
    given = Layout.parse("tp2pp2", (1, 0, 3, 2))
    assert place(arch, given, Layout.parse("tp4", (0, 1, 2, 3)), ranks_per_host=8)[0] == given
    apart = Layout.parse("tp2pp2", (0, 1, 2, 3)), Layout.parse("tp4", (4, 5, 6, 7))
    assert place(arch, *apart, ranks_per_host=8) == apart


def test_uneven_stages_count_as_they_are():
    arch = tiny()
    train = Layout.parse("tp2pp2", (0, 1, 2, 3), stage_layers=(1, 3))
    chosen = place(arch, train, Layout.parse("tp4", (0, 1, 2, 3)), ranks_per_host=4)
    pairs = product(orders_of(train), orders_of(chosen[1]))
    assert busiest(arch, *chosen, 4) == min(busiest(arch, *pair, 4) for pair in pairs)


def test_words_and_refusals():
    arch = tiny()
    before = layouts("tp2pp2", "tp4", 4)
    assert described(*before) == "as usual in Megatron; as usual in vLLM"
    assert (
        described(*place(arch, *before, ranks_per_host=4))
        == "neighbours along pp are 1 apart, along tp are 2 apart in Megatron; as usual in vLLM"
    )
    with pytest.raises(ValueError, match="tp=3 must divide"):
        place(arch, *layouts("tp3", "tp1", 3), ranks_per_host=4)
    with pytest.raises(ValueError, match="rollout layout tp2pp2 names more.*write tp2"):
        place(arch, *layouts("tp2", "tp2pp2", 4), ranks_per_host=4)


def test_quick_for_many_ranks():
    arch = Architecture.from_hf(shape("llama3-70b"))
    started = time.process_time()
    for train in ("tp8pp8", "tp2cp2pp8"):
        place(arch, *layouts(train, "tp8", 1024), ranks_per_host=8)
    assert time.process_time() - started < 2  # CPU seconds, of which a tenth is used
