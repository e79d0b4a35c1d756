"""Random reshards for property tests: models under two layouts, and shards of no particular kind."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd, lcm

from hypothesis import strategies as st

from parallel.layout import Layout
from parallel.reshard.plan import Plan, compile_plan, matrix_shape
from parallel.weights.architecture import FAMILIES, Architecture
from parallel.weights.rules import VOCAB_MULTIPLE, hf_shapes, megatron_parameters, vllm_parameters
from parallel.weights.shard import Block, ShardedParameter, Shards

MAX_RANKS = 16  # of either side
TENSOR_PARALLEL = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two sides to plan between; a failing example shows `note` in the place of the long ones."""

    note: str
    source: Shards = field(repr=False)
    destination: Shards = field(repr=False)
    shapes: dict[str, tuple[int, ...]] = field(repr=False)  # Hugging Face names and shapes
    hosts: tuple[int, ...]  # by world rank
    element_bytes: int
    window_bytes: int
    peer_memory: bool

    def compile(self, *, order: Callable = lambda entries: entries) -> Plan:
        """The plan; `order` rearranges the entries of both mappings before it."""
        return compile_plan(
            source=dict(order(list(self.source.items()))),
            destination=dict(order(list(self.destination.items()))),
            element_bytes=self.element_bytes,
            window_bytes=self.window_bytes,
            host_of=self.hosts.__getitem__,
            peer_memory=self.peer_memory,
        )


@st.composite
def model_cases(draw: st.DrawFn) -> Case:
    """A model between Megatron's and vLLM's shards, either way, on equal, overlapping or disjoint ranks."""
    tp, num_trained = draw(st.sampled_from(TENSOR_PARALLEL)), 1
    sizes = {"tp": tp}
    for axis, largest in (("pp", 4), ("dp", 3), ("cp", 2)):
        num_trained *= sizes.setdefault(
            axis, draw(st.integers(1, min(largest, MAX_RANKS // (tp * num_trained))))
        )
    num_trained *= tp
    served_tp = draw(st.sampled_from(TENSOR_PARALLEL))
    num_served = served_tp * draw(st.integers(1, MAX_RANKS // served_tp))
    world = range(draw(st.integers(max(num_trained, num_served), num_trained + num_served)))
    placed = draw(st.permutations(world))
    # Disjoint where the world has room for both.
    serving = (
        placed[num_trained:]
        if len(world) == num_trained + num_served
        else draw(st.permutations(world))[:num_served]
    )
    vpp = draw(st.integers(1, 2)) if sizes["pp"] > 1 else 1
    stages = draw(
        st.lists(st.integers(1, 2).map(lambda count: count * vpp), min_size=sizes["pp"], max_size=sizes["pp"])
    )
    layout = Layout(
        **sizes,
        vpp=vpp,
        stage_layers=tuple(stages),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        ranks=tuple(placed[:num_trained]),
    )
    arch = draw(_architectures(tp, served_tp, num_layers=sum(stages)))
    spec = draw(st.sampled_from(("te", "local")))
    trained = {rank: megatron_parameters(arch, layout, rank, spec=spec) for rank in layout.ranks}
    served = {rank: vllm_parameters(arch, served_tp, place % served_tp) for place, rank in enumerate(serving)}
    to_vllm = draw(st.booleans())
    source, destination = (trained, served) if to_vllm else (served, trained)
    return Case(
        note=f"{arch}, {layout}, {spec}, vLLM tp{served_tp} on {serving}, {to_vllm=}",
        source=source,
        destination=destination,
        shapes=hf_shapes(arch),
        **draw(
            _circumstances(
                len(world), max(arch.hidden_size, arch.num_heads * arch.head_dim, arch.intermediate_size)
            )
        ),
    )


def _divides(one: int, other: int) -> bool:
    """Whether one of the two numbers divides the other."""
    return one % other == 0 or other % one == 0


@st.composite
def _architectures(draw: st.DrawFn, tp: int, served_tp: int, *, num_layers: int) -> Architecture:
    """A small model that both tensor-parallel sizes split."""
    both = lcm(tp, served_tp)
    num_heads = both * draw(st.integers(1, 2 if both < 12 else 1))
    groups = [
        g
        for g in range(1, num_heads + 1)
        if num_heads % g == 0 and _divides(g, tp) and _divides(g, served_tp)
    ]
    num_kv_heads = draw(st.sampled_from(groups))
    head_dim = (
        tp // gcd(tp, num_heads + 2 * num_kv_heads) * draw(st.integers(1, 3))
    )  # Megatron cuts the rows of all heads into equal parts
    vocab_step = lcm(VOCAB_MULTIPLE, served_tp)
    return Architecture(
        model_type=draw(st.sampled_from(sorted(FAMILIES))),
        hidden_size=draw(st.integers(1, 12)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=both * draw(st.integers(1, 2)),
        vocab_size=vocab_step * draw(st.integers(1, 2 if vocab_step == VOCAB_MULTIPLE else 1))
        - draw(st.integers(0, VOCAB_MULTIPLE - 1)),
        tied=draw(st.booleans()),
        norm_eps=1e-5,
        max_positions=64,
    )


@st.composite
def _circumstances(draw: st.DrawFn, num_ranks: int, widest: int) -> dict:
    """Hosts, and two windows that hold at least a row of `widest` elements each."""
    ranks_per_host = draw(st.sampled_from((1, 2, 4, 8, MAX_RANKS * 2)))
    scattered = st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks)
    hosts = [rank // ranks_per_host for rank in range(num_ranks)] if draw(st.booleans()) else draw(scattered)
    element_bytes = draw(st.sampled_from((2, 4)))
    window_bytes = 2 * widest * element_bytes * draw(st.sampled_from((1, 2, 7, 50, 10**6))) + draw(
        st.integers(0, 5)
    )
    return {
        "hosts": tuple(hosts),
        "element_bytes": element_bytes,
        "window_bytes": window_bytes,
        "peer_memory": draw(st.booleans()),
    }


@st.composite
def any_cases(draw: st.DrawFn) -> Case:
    """Arbitrary shards: overlapping sources, unowned copies, elements needed twice, gaps anywhere."""
    shapes = {f"tensor {i}": shape for i, shape in enumerate(draw(st.lists(_SHAPES, min_size=1, max_size=3)))}
    num_ranks, source, parts = draw(st.integers(1, 6)), {}, []
    for tensor, (num_rows, num_cols) in shapes.items():  # parts that cover it, on any ranks
        edges = sorted({0, num_rows, *draw(st.lists(st.integers(0, num_rows), max_size=3))})
        for rows in zip(edges, edges[1:]):
            parts.append(Block(tensor, rows, (0, num_cols)))
            source.setdefault(draw(st.integers(0, num_ranks - 1)), []).append(
                _stacked(f"part {len(parts)}", parts[-1:])
            )
    blocks = st.sampled_from(parts) | _blocks(
        shapes
    )  # the same ones again, elsewhere in a parameter: replicas
    for rank, parameters in draw(_shards(blocks, num_ranks, "extra", owner=st.booleans())).items():
        source.setdefault(rank, []).extend(parameters)
    destination = draw(_shards(blocks, num_ranks, "wanted", owner=st.just(True)).filter(bool))
    return Case(
        note=f"{source=}, {destination=}",
        source=source,
        destination=destination,
        shapes=shapes,
        **draw(_circumstances(num_ranks, max(width for _, width in shapes.values()))),
    )


_SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 7))


@st.composite
def _shards(
    draw: st.DrawFn,
    blocks: st.SearchStrategy[Block],
    num_ranks: int,
    name: str,
    *,
    owner: st.SearchStrategy[bool],
) -> Shards:
    """Some parameters of some blocks, each on some ranks."""
    shards: Shards = {}
    for number in range(draw(st.integers(0, 8))):
        held = draw(st.lists(blocks, max_size=3))
        gaps = draw(st.lists(st.integers(0, 2), min_size=len(held) + 1, max_size=len(held) + 1))
        parameter = _stacked(
            f"{name} {number}", held, gaps=gaps, owner=draw(owner), chunk=draw(st.integers(0, 1))
        )
        for rank in draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=3, unique=True)):
            shards.setdefault(rank, []).append(parameter)
    return shards


@st.composite
def _blocks(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> Block:
    tensor = draw(st.sampled_from(sorted(shapes)))
    rows, cols = (
        draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(sorted))
        for size in matrix_shape(shapes[tensor])
    )
    return Block(tensor, tuple(rows), tuple(cols))


def _stacked(
    name: str, blocks: list[Block], *, gaps: list[int] = (0, 0), owner: bool = True, chunk: int = 0
) -> ShardedParameter:
    """A parameter that stacks `blocks`, each after its gap, with a last gap at the end."""
    placed, row, width = [], 0, 1
    for gap, block in zip(gaps, blocks):
        placed.append(Block(block.tensor, block.rows, block.cols, row=row + gap, col=gap))
        row += gap + block.rows[1] - block.rows[0]
        width = max(width, gap + block.cols[1] - block.cols[0])
    return ShardedParameter(name, (row + gaps[len(blocks)] or 1, width), tuple(placed), owner, chunk)
