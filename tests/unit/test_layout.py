"""Rank arithmetic against enumeration in Megatron's order."""

import math
from dataclasses import asdict
from itertools import product

import pytest

from parallel.layout import Layout, parse_devices


def layouts_of(world: int) -> list[Layout]:
    sizes = [s for s in product(range(1, world + 1), repeat=4) if math.prod(s) == world]
    return [Layout(tp=tp, cp=cp, dp=dp, pp=pp, ranks=tuple(range(world))) for tp, cp, dp, pp in sizes]


@pytest.mark.parametrize("world", [1, 2, 4, 8, 12])
def test_coordinates_follow_megatrons_order(world):
    for layout in layouts_of(world):
        places = [
            (pp, dp, cp, tp)
            for pp in range(layout.pp)
            for dp in range(layout.dp)
            for cp in range(layout.cp)
            for tp in range(layout.tp)
        ]
        for rank, (pp, dp, cp, tp) in enumerate(places):
            place = layout.coordinates(rank)
            assert (place.pp, place.dp, place.cp, place.tp) == (pp, dp, cp, tp)
            assert layout.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) == rank


@pytest.mark.parametrize("world", [1, 4, 8])
@pytest.mark.parametrize(
    "axes", [("tp",), ("dp",), ("pp",), ("cp",), ("dp", "cp"), ("tp", "pp"), ("tp", "cp", "dp", "pp")]
)
def test_groups_partition_the_ranks_and_differ_on_their_axes_only(world, axes):
    for layout in layouts_of(world):
        groups = layout.group_ranks(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            assert len(group) == math.prod(getattr(layout, axis) for axis in axes)
            places = [asdict(layout.coordinates(rank)) for rank in group]
            for axis in {"tp", "cp", "dp", "pp"} - set(axes):
                assert len({place[axis] for place in places}) == 1


def test_ranks_need_not_start_at_zero():
    layout = Layout.parse("tp2pp2", (7, 5, 3, 1))
    assert layout.rank_of(tp=1, pp=1) == 1
    assert layout.coordinates(3).pp == 1 and layout.coordinates(3).tp == 0
    assert layout.group_ranks("tp") == [[7, 5], [3, 1]]
    with pytest.raises(ValueError):
        layout.coordinates(0)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_compact_form_is_read_back(world):
    for layout in layouts_of(world):
        assert Layout.parse(str(layout), layout.ranks) == layout


def test_parts_in_any_order():
    eight = tuple(range(8))
    assert Layout.parse("pp2 TP2 vpp3 sp", eight) == Layout(
        tp=2, pp=2, vpp=3, dp=2, sequence_parallel=True, ranks=eight
    )
    assert not Layout.parse("sp", (0,)).sequence_parallel  # nothing to split over one rank


@pytest.mark.parametrize(
    ("text", "ranks", "names"),
    [
        ("tp3", 4, "needs 3 ranks or a multiple"),
        ("tp2dp4", 4, "needs 8 ranks"),
        ("tp2tp2", 4, "not understood"),
        ("tensor2", 4, "not understood"),
        ("tp", 4, "not understood"),
        ("", 4, "not understood"),
        (" ", 4, "not understood"),
        ("tp1 6", 16, "not understood"),
        ("tpsp2", 4, "not understood"),
        ("spsp", 4, "not understood"),
        ("tp0", 4, "size of 0"),
        ("tp2vpp2", 2, "one pipeline stage"),
    ],
)
def test_refused_layouts(text, ranks, names):
    with pytest.raises(ValueError, match=names):
        Layout.parse(text, tuple(range(ranks)))


@pytest.mark.parametrize(("pp", "vpp", "layers"), [(1, 1, 5), (2, 1, 6), (2, 3, 12), (4, 2, 8)])
def test_layers_are_dealt_chunk_by_chunk(pp, vpp, layers):
    dealt = Layout(pp=pp, vpp=vpp, ranks=tuple(range(pp))).layers_of(layers)
    assert [layer for chunk in range(vpp) for stage in range(pp) for layer in dealt[stage, chunk]] == list(
        range(layers)
    )
    assert {len(part) for part in dealt.values()} == {layers // (pp * vpp)}


def test_uneven_stages():
    dealt = Layout(pp=3, stage_layers=(1, 3, 2), ranks=(0, 1, 2)).layers_of(6)
    assert dealt == {(0, 0): range(0, 1), (1, 0): range(1, 4), (2, 0): range(4, 6)}
    for layout, names in (
        (Layout(pp=4, ranks=(0, 1, 2, 3)), "do not split over pp=4"),
        (Layout(pp=2, stage_layers=(2, 3), ranks=(0, 1)), "do not split over pp=2"),
        (Layout(pp=2, vpp=2, ranks=(0, 1)), "vpp=2"),
        (Layout(pp=2, stage_layers=(6, 0), ranks=(0, 1)), "leave a pipeline stage without any"),
    ):
        with pytest.raises(ValueError, match=names):
            layout.layers_of(6)
    with pytest.raises(ValueError, match="stage_layers"):
        Layout(pp=2, stage_layers=(6,), ranks=(0, 1))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", (0, 1, 2, 3)),
        ("1", (1,)),
        ("0-2", (0, 1, 2)),
        ("cuda:0-1, 3", (0, 1, 3)),
        ("1,3", (1, 3)),
        (" 0 - 2 ,3", (0, 1, 2, 3)),
    ],
)
def test_devices(text, ranks):
    assert parse_devices(text, 4) == ranks


@pytest.mark.parametrize("text", ["4", "0-4", "3,1", "1,1", "0-2,2", "a", "2-1", "-1", "0,", "0 1", "0-1 2"])
def test_refused_devices(text):
    with pytest.raises(ValueError, match="devices"):
        parse_devices(text, 4)
