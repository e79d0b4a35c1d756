"""Plans against a reference executor of a few lines, over all pairs of layouts; elements are numbered."""

from itertools import product
from operator import attrgetter

import numpy as np
import pytest

from parallel.layout import Layout
from parallel.reshard.plan import compile_plan, matrix_shape
from parallel.weights.architecture import Architecture
from parallel.weights.rules import hf_shapes, megatron_parameters, vllm_parameters
from parallel.weights.shard import Block, ShardedParameter
from tests.toy_shards import Toy, layouts_of, megatron_like, vllm_like

TOYS = [Toy(), Toy(tied=True, vocab=32), Toy(groups=8, vocab=41), Toy(groups=1, tied=True)]
UNTOUCHED, SOURCE_PADDING = -7, -1


def numbered(shapes):
    """Hugging Face tensors whose elements are all different and positive."""
    tensors, first = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(first, first + size).reshape(matrix_shape(shape))
        first += size
    return tensors


def filled(parameters, tensors, padding):
    """Local arrays of a rank by (chunk, name), straight from the whole tensors."""
    local = {}
    for parameter in parameters:
        array = np.full(matrix_shape(parameter.shape), padding)
        for b in parameter.blocks:
            part = tensors[b.tensor][slice(*b.rows), slice(*b.cols)]
            array[b.row : b.row + part.shape[0], b.col : b.col + part.shape[1]] = part
        local[parameter.chunk, parameter.name] = array
    return local


def follow(plan, source, destination, tensors):
    """Execute `plan`; return each destination rank's arrays and how often each element was written."""
    held = {rank: filled(parameters, tensors, SOURCE_PADDING) for rank, parameters in source.items()}
    result, writes = {}, {}
    for rank, parameters in destination.items():
        shapes = {(p.chunk, p.name): matrix_shape(p.shape) for p in parameters}
        result[rank] = {key: np.full(shape, UNTOUCHED) for key, shape in shapes.items()}
        writes[rank] = {key: np.zeros(shape, dtype=int) for key, shape in shapes.items()}
    for padding in plan.padding:
        rectangle = (slice(*padding.rows), slice(*padding.cols))
        result[padding.rank][padding.chunk, padding.name][rectangle] = 0
        writes[padding.rank][padding.chunk, padding.name][rectangle] += 1
    for t in plan.transfers():
        (chunk, name, row, col), (to_chunk, to_name, to_row, to_col), (height, width) = (
            t.source,
            t.destination,
            t.shape,
        )
        to = (slice(to_row, to_row + height), slice(to_col, to_col + width))
        result[t.destination_rank][to_chunk, to_name][to] = held[t.source_rank][chunk, name][
            row : row + height, col : col + width
        ]
        writes[t.destination_rank][to_chunk, to_name][to] += 1
    return result, writes


def numbers(parameters, tensors):
    """The distinct elements that these parameters hold."""
    arrays = [array.ravel() for array in filled(parameters, tensors, 0).values()]
    return np.setdiff1d(np.concatenate(arrays), [0]) if arrays else np.array([], dtype=int)


def check(source, destination, shapes, *, window_bytes):
    tensors = numbered(shapes)
    plan = compile_plan(source=source, destination=destination, element_bytes=2, window_bytes=window_bytes)
    result, writes = follow(plan, source, destination, tensors)
    for rank, parameters in destination.items():
        for key, expected in filled(parameters, tensors, 0).items():
            assert (writes[rank][key] == 1).all(), (rank, key)
            np.testing.assert_array_equal(result[rank][key], expected)
    # Received bytes and the lower bound against a count of the elements.
    owned = {rank: list(filter(attrgetter("owner"), source.get(rank, []))) for rank in plan.ranks}
    needs = {
        rank: np.setdiff1d(numbers(destination[rank], tensors), numbers(owned[rank], tensors)).size * 2
        for rank in destination
    }
    assert plan.lower_bound_bytes == max(needs.values())
    assert all(plan.received_bytes[rank] >= need for rank, need in needs.items())
    total = sum(tensor.size for tensor in tensors.values())
    assert plan.gather_all_bytes == 2 * (
        total - min(numbers(owned[rank], tensors).size for rank in destination)
    )
    assert plan.peak_extra_bytes <= window_bytes
    assert sum(plan.sent_bytes.values()) == sum(plan.received_bytes.values())
    moved = sum(plan.received_bytes.values()) + sum(plan.local_bytes.values())
    assert moved == 2 * sum(
        array.size for rank in destination for array in filled(destination[rank], tensors, 0).values()
    ) - 2 * sum((hole.rows[1] - hole.rows[0]) * (hole.cols[1] - hole.cols[0]) for hole in plan.padding)
    return plan


PAIRS = [
    (layout, tp, size)
    for size in (1, 2, 4, 8)
    for layout, tp in product(layouts_of(size, layers=4), (1, 2, 4, 8))
    if tp <= size
]


@pytest.mark.parametrize("layout, tp, size", PAIRS, ids=lambda value: str(value).replace("layout", ""))
def test_each_element_arrives_once_both_ways(layout, tp, size):
    toy = TOYS[PAIRS.index((layout, tp, size)) % len(TOYS)]
    trained = {rank: megatron_like(toy, layout, rank) for rank in range(size)}
    served = {rank: vllm_like(toy, tp, rank % tp) for rank in range(size)}
    plan = check(trained, served, toy.shapes(), window_bytes=300)
    assert max(plan.received_bytes.values()) == plan.lower_bound_bytes
    check(served, trained, toy.shapes(), window_bytes=2**20)


@pytest.mark.parametrize(
    "model_type, tied, size",
    [
        ("llama", False, 1),
        ("qwen2", True, 2),
        ("llama", True, 4),
        ("qwen2", False, 4),
        ("qwen3", True, 4),
        ("qwen2", False, 8),
    ],
)
def test_real_models_both_ways(model_type, tied, size):
    sizes = {
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 6,
        "intermediate_size": 24,
        "vocab_size": 101,
    }
    arch = Architecture(model_type=model_type, **sizes, tied=tied, norm_eps=1e-5, max_positions=64)
    for layout, tp in product(layouts_of(size, layers=4), (1, 2, 4, 8)):
        if tp <= size:
            trained = {rank: megatron_parameters(arch, layout, rank, spec="local") for rank in range(size)}
            served = {rank: vllm_parameters(arch, tp, rank % tp) for rank in range(size)}
            check(trained, served, hf_shapes(arch), window_bytes=2**12)
            check(served, trained, hf_shapes(arch), window_bytes=2**12)


@pytest.mark.parametrize("toy", TOYS)
def test_disjoint_ranks(toy):
    trained = {
        rank: megatron_like(toy, Layout.parse("tp2pp2", ranks=(4, 5, 6, 7)), rank) for rank in range(4, 8)
    }
    served = {rank: vllm_like(toy, 2, rank % 2) for rank in range(4)}
    plan = check(trained, served, toy.shapes(), window_bytes=1000)
    assert not plan.direct and max(plan.received_bytes[rank] for rank in range(4, 8)) == 0
    check(served, trained, toy.shapes(), window_bytes=1000)


def whole(name="w", rows=16, cols=4, owner=True):
    return ShardedParameter(name, (rows, cols), (Block("w", (0, rows), (0, cols)),), owner)


def test_source_is_own_rank_then_own_host_then_spread():
    source = {rank: [whole()] for rank in (0, 1, 4, 5)}
    destination = {rank: [whole()] for rank in range(12)}
    plan = compile_plan(
        source=source,
        destination=destination,
        element_bytes=4,
        window_bytes=2**20,
        host_of=lambda rank: rank // 4,
    )
    giver = {t.destination_rank: t.source_rank for t in plan.transfers()}
    assert all(giver[rank] == rank for rank in source)
    assert {giver[2], giver[3]} == {0, 1} and {giver[6], giver[7]} == {4, 5}
    assert {giver[rank] for rank in range(8, 12)} == {0, 1, 4, 5}
    assert {plan.sent_bytes[rank] for rank in source} == {2 * 16 * 4 * 4}


def test_a_copy_is_never_a_source():
    with pytest.raises(
        ValueError, match=r"w rows 0-16 columns 0-4 are needed for w of rank 1 and no source rank holds them"
    ):
        compile_plan(
            source={0: [whole(owner=False)]}, destination={1: [whole()]}, element_bytes=4, window_bytes=2**20
        )


def test_missing_rows_are_named():
    half = ShardedParameter("w", (8, 4), (Block("w", (0, 8), (0, 4)),))
    with pytest.raises(ValueError, match=r"w rows 8-16 columns 0-4 are needed"):
        compile_plan(source={0: [half]}, destination={1: [whole()]}, element_bytes=4, window_bytes=2**20)


def test_overlapping_destination_blocks_are_refused():
    twice = ShardedParameter("w", (16, 4), (Block("w", (0, 16), (0, 4)), Block("w", (0, 4), (0, 4))))
    with pytest.raises(ValueError, match="overlap or leave it"):
        compile_plan(source={0: [whole()]}, destination={1: [twice]}, element_bytes=4, window_bytes=2**20)


def test_overlapping_sources_write_once_and_prefer_own_rank():
    top = ShardedParameter("top", (8, 4), (Block("w", (0, 8), (0, 4)),))
    plan = compile_plan(
        source={0: [whole()], 1: [top]}, destination={1: [whole()]}, element_bytes=4, window_bytes=2**20
    )
    assert [(t.source_rank, t.rows) for t in plan.transfers()] == [(1, (0, 8)), (0, (8, 16))]


def test_windows_cut_a_large_transfer_by_rows():
    plan = compile_plan(
        source={0: [whole()]}, destination={1: [whole()]}, element_bytes=4, window_bytes=200
    )  # a row is 16 bytes: 6 of 16 rows fit a half
    assert [t.rows for t in plan.transfers()] == [(0, 6), (6, 12), (12, 16)]
    assert [t.destination for t in plan.transfers()] == [(0, "w", 0, 0), (0, "w", 6, 0), (0, "w", 12, 0)]
    assert plan.peak_extra_bytes == 192 and plan.messages == 3
    with pytest.raises(ValueError, match="window_bytes=24 cannot hold two rows of w, 32 bytes"):
        compile_plan(source={0: [whole()]}, destination={1: [whole()]}, element_bytes=4, window_bytes=24)


def test_replicas_share_the_sending():
    toy = Toy(groups=8)
    source = {rank: megatron_like(toy, Layout.parse("tp2", ranks=tuple(range(8))), rank) for rank in range(8)}
    destination = {rank: vllm_like(toy, 4, rank % 4) for rank in range(8, 16)}
    sent = compile_plan(
        source=source, destination=destination, element_bytes=2, window_bytes=2**20
    ).sent_bytes
    assert max(sent[rank] for rank in range(8)) < 1.1 * min(sent[rank] for rank in range(8))


def test_windows_keep_all_ranks_busy():
    toy = Toy()
    source = {rank: megatron_like(toy, Layout.parse("pp4", ranks=(0, 1, 2, 3)), rank) for rank in range(4)}
    plan = compile_plan(
        source=source,
        destination={rank: vllm_like(toy, 4, rank) for rank in range(4)},
        element_bytes=4,
        window_bytes=1024,
    )
    busiest = max(plan.sent_bytes[rank] + plan.received_bytes[rank] for rank in range(4))
    assert len(plan.windows) <= 1.5 * busiest / 512


def test_a_70b_plan_on_64_ranks():
    toy = Toy(vocab=128256, hidden=8192, head_dim=128, heads=64, groups=8, ffn=28672, layers=80)
    layout = Layout.parse("tp4pp4", ranks=tuple(range(64)))
    source = {rank: megatron_like(toy, layout, rank) for rank in range(64)}
    destination = {rank: vllm_like(toy, 8, rank % 8) for rank in range(64)}
    plan = compile_plan(
        source=source,
        destination=destination,
        element_bytes=2,
        window_bytes=2**28,
        host_of=lambda rank: rank // 8,
    )
    assert max(plan.received_bytes.values()) == plan.lower_bound_bytes < plan.gather_all_bytes / 4
