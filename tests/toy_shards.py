"""A small model's shards written by hand, as Megatron and as vLLM keep them: a second opinion beside `parallel.weights.rules`."""

from dataclasses import dataclass
from itertools import product

from parallel.layout import Layout
from parallel.weights.shard import Block, ShardedParameter

Segment = tuple[str, int, int]  # tensor, first row, end row


@dataclass(frozen=True, kw_only=True)
class Toy:
    vocab: int = 37
    hidden: int = 8
    head_dim: int = 3
    heads: int = 8
    groups: int = 2
    ffn: int = 16
    layers: int = 4
    tied: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face names and shapes."""
        q, kv, hidden = self.heads * self.head_dim, self.groups * self.head_dim, self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, hidden), "norm": (hidden,)}
        for i in range(self.layers):
            shapes |= {
                f"{i}.q": (q, hidden),
                f"{i}.k": (kv, hidden),
                f"{i}.v": (kv, hidden),
                f"{i}.o": (hidden, q),
                f"{i}.norm": (hidden,),
            }
            shapes |= {
                f"{i}.gate": (self.ffn, hidden),
                f"{i}.up": (self.ffn, hidden),
                f"{i}.down": (hidden, self.ffn),
            }
        return shapes if self.tied else shapes | {"head": (self.vocab, hidden)}


def layouts_of(size: int, *, layers: int) -> list[Layout]:
    """Every tp × pp × dp of `size` ranks that the layers allow, pipelines also with uneven stages and virtual ones."""
    found = []
    for tp, pp, dp in product((1, 2, 4, 8), repeat=3):
        if tp * pp * dp == size and pp <= layers:
            common = {"tp": tp, "pp": pp, "dp": dp, "ranks": tuple(range(size))}
            found.append(Layout(**common))
            if pp == 2:
                found += [Layout(**common, stage_layers=(1, layers - 1)), Layout(**common, vpp=2)]
    return found


def megatron_like(toy: Toy, layout: Layout, rank: int) -> list[ShardedParameter]:
    here, tp = layout.coordinates(rank), layout.tp
    padded = -(-toy.vocab // (4 * tp)) * 4 * tp
    parameters = []
    for (stage, chunk), layers in layout.layers_of(toy.layers).items():
        if stage != here.pp:
            continue
        for local, i in enumerate(layers):
            qkv = _interleaved_qkv(toy, i)
            parameters += [
                _rows(f"{local}.qkv", qkv, toy.hidden, here.tp, tp, chunk=chunk),
                _columns(
                    f"{local}.proj", f"{i}.o", toy.hidden, toy.heads * toy.head_dim, here.tp, tp, chunk=chunk
                ),
                _vector(f"{local}.norm", f"{i}.norm", toy.hidden, chunk=chunk),
                _gate_up(f"{local}.fc1", i, toy, here.tp, tp, chunk=chunk),
                _columns(f"{local}.fc2", f"{i}.down", toy.hidden, toy.ffn, here.tp, tp, chunk=chunk),
            ]
        last = stage == layout.pp - 1 and chunk == layout.vpp - 1
        if stage == 0 and chunk == 0:
            parameters.append(
                _rows("embedding", [("embed", 0, toy.vocab)], toy.hidden, here.tp, tp, total=padded)
            )
        if last:
            parameters.append(_vector("final_norm", "norm", toy.hidden, chunk=chunk))
        if last and (not toy.tied or layout.pp > 1):
            name = "embed" if toy.tied else "head"
            parameters.append(
                _rows(
                    "output",
                    [(name, 0, toy.vocab)],
                    toy.hidden,
                    here.tp,
                    tp,
                    total=padded,
                    chunk=chunk,
                    owner=not toy.tied,
                )
            )
    return parameters


def vllm_like(toy: Toy, tp: int, tp_rank: int) -> list[ShardedParameter]:
    """One rank of a replica; K and V heads repeat where TP exceeds their number."""
    padded, q, kv = (
        -(-toy.vocab // 8) * 8,
        toy.heads * toy.head_dim // tp,
        max(1, toy.groups // tp) * toy.head_dim,
    )
    first_kv = tp_rank * toy.groups // tp * toy.head_dim
    parameters = [_vector("final_norm", "norm", toy.hidden)]
    for name in ("embed",) if toy.tied else ("embed", "head"):
        parameters.append(_rows(name, [(name, 0, toy.vocab)], toy.hidden, tp_rank, tp, total=padded))
    for i in range(toy.layers):
        segments = [
            (f"{i}.q", tp_rank * q, (tp_rank + 1) * q),
            (f"{i}.k", first_kv, first_kv + kv),
            (f"{i}.v", first_kv, first_kv + kv),
        ]
        parameters += [
            _rows(f"layers.{i}.qkv", segments, toy.hidden, 0, 1),
            _columns(f"layers.{i}.o", f"{i}.o", toy.hidden, toy.heads * toy.head_dim, tp_rank, tp),
            _vector(f"layers.{i}.norm", f"{i}.norm", toy.hidden),
            _gate_up(f"layers.{i}.gate_up", i, toy, tp_rank, tp),
            _columns(f"layers.{i}.down", f"{i}.down", toy.hidden, toy.ffn, tp_rank, tp),
        ]
    return parameters


def _interleaved_qkv(toy: Toy, layer: int) -> list[Segment]:
    per, d = toy.heads // toy.groups * toy.head_dim, toy.head_dim
    return [
        s
        for g in range(toy.groups)
        for s in (
            (f"{layer}.q", g * per, (g + 1) * per),
            (f"{layer}.k", g * d, (g + 1) * d),
            (f"{layer}.v", g * d, (g + 1) * d),
        )
    ]


def _rows(
    name: str,
    segments: list[Segment],
    width: int,
    tp_rank: int,
    tp: int,
    *,
    total: int = 0,
    chunk: int = 0,
    owner: bool = True,
) -> ShardedParameter:
    """The `tp_rank`-th of `tp` equal row ranges of the segments stacked upon each other (and padded to `total` rows)."""
    total = total or sum(end - first for _, first, end in segments)
    start, stop = total * tp_rank // tp, total * (tp_rank + 1) // tp
    blocks, top = [], 0
    for tensor, first, end in segments:
        low, high = max(start, top), min(stop, top + end - first)
        if low < high:
            blocks.append(Block(tensor, (first + low - top, first + high - top), (0, width), row=low - start))
        top += end - first
    return ShardedParameter(name, (stop - start, width), tuple(blocks), owner, chunk)


def _columns(
    name: str, tensor: str, height: int, width: int, tp_rank: int, tp: int, *, chunk: int = 0
) -> ShardedParameter:
    cols = (width * tp_rank // tp, width * (tp_rank + 1) // tp)
    return ShardedParameter(
        name, (height, cols[1] - cols[0]), (Block(tensor, (0, height), cols),), True, chunk
    )


def _vector(name: str, tensor: str, size: int, *, chunk: int = 0) -> ShardedParameter:
    return ShardedParameter(name, (size,), (Block(tensor, (0, size), (0, 1)),), True, chunk)


def _gate_up(name: str, layer: int, toy: Toy, tp_rank: int, tp: int, *, chunk: int = 0) -> ShardedParameter:
    rows = (toy.ffn * tp_rank // tp, toy.ffn * (tp_rank + 1) // tp)
    blocks = (
        Block(f"{layer}.gate", rows, (0, toy.hidden)),
        Block(f"{layer}.up", rows, (0, toy.hidden), row=rows[1] - rows[0]),
    )
    return ShardedParameter(name, (2 * (rows[1] - rows[0]), toy.hidden), blocks, True, chunk)
