"""A small model's shards written by hand, Megatron's and vLLM's: a second opinion on `weights.rules`."""

from dataclasses import dataclass, replace
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
    """Every tp × pp × dp of `size` ranks that the layers allow, also with uneven and virtual stages."""
    layouts = []
    for tp, pp, dp in product((1, 2, 4, 8), repeat=3):
        if tp * pp * dp == size and pp <= layers:
            common = {"tp": tp, "pp": pp, "dp": dp, "ranks": tuple(range(size))}
            layouts.append(Layout(**common))
            if pp == 2:
                layouts += [Layout(**common, stage_layers=(1, layers - 1)), Layout(**common, vpp=2)]
    return layouts


def megatron_like(toy: Toy, layout: Layout, rank: int) -> list[ShardedParameter]:
    here, tp = layout.coordinates(rank), layout.tp
    part = Part(here.tp, tp)
    padded = -(-toy.vocab // (4 * tp)) * 4 * tp
    parameters = []
    for (stage, chunk), layers in layout.layers_of(toy.layers).items():
        if stage != here.pp:
            continue
        of_chunk = []
        for local, i in enumerate(layers):
            of_chunk += [
                _rows(f"{local}.qkv", _interleaved_qkv(toy, i), toy.hidden, part),
                _columns(f"{local}.proj", f"{i}.o", (toy.hidden, toy.heads * toy.head_dim), part),
                _vector(f"{local}.norm", f"{i}.norm", toy.hidden),
                _gate_up(f"{local}.fc1", i, toy, part),
                _columns(f"{local}.fc2", f"{i}.down", (toy.hidden, toy.ffn), part),
            ]
        last = stage == layout.pp - 1 and chunk == layout.vpp - 1
        if stage == 0 and chunk == 0:
            of_chunk.append(_rows("embedding", [("embed", 0, toy.vocab)], toy.hidden, part, total=padded))
        if last:
            of_chunk.append(_vector("final_norm", "norm", toy.hidden))
        if last and (not toy.tied or layout.pp > 1):
            name = "embed" if toy.tied else "head"
            output = _rows("output", [(name, 0, toy.vocab)], toy.hidden, part, total=padded)
            of_chunk.append(replace(output, owner=not toy.tied))
        parameters += [replace(parameter, chunk=chunk) for parameter in of_chunk]
    return parameters


def vllm_like(toy: Toy, tp: int, tp_rank: int) -> list[ShardedParameter]:
    """One rank of a replica; K and V heads repeat where TP exceeds their number."""
    part, padded, q = Part(tp_rank, tp), -(-toy.vocab // 8) * 8, toy.heads * toy.head_dim // tp
    kv, first_kv = max(1, toy.groups // tp) * toy.head_dim, tp_rank * toy.groups // tp * toy.head_dim
    parameters = [_vector("final_norm", "norm", toy.hidden)]
    for name in ("embed",) if toy.tied else ("embed", "head"):
        parameters.append(_rows(name, [(name, 0, toy.vocab)], toy.hidden, part, total=padded))
    for i in range(toy.layers):
        segments = [
            (f"{i}.q", tp_rank * q, (tp_rank + 1) * q),
            (f"{i}.k", first_kv, first_kv + kv),
            (f"{i}.v", first_kv, first_kv + kv),
        ]
        parameters += [
            _rows(f"layers.{i}.qkv", segments, toy.hidden, Part(0, 1)),
            _columns(f"layers.{i}.o", f"{i}.o", (toy.hidden, toy.heads * toy.head_dim), part),
            _vector(f"layers.{i}.norm", f"{i}.norm", toy.hidden),
            _gate_up(f"layers.{i}.gate_up", i, toy, part),
            _columns(f"layers.{i}.down", f"{i}.down", (toy.hidden, toy.ffn), part),
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


@dataclass(frozen=True)
class Part:
    """The `rank`-th of `tp` equal parts."""

    rank: int
    tp: int


def _rows(name: str, segments: list[Segment], width: int, part: Part, *, total: int = 0) -> ShardedParameter:
    """Return a part of the rows of the segments below each other, padded to `total` rows."""
    total = total or sum(end - first for _, first, end in segments)
    start, stop = total * part.rank // part.tp, total * (part.rank + 1) // part.tp
    blocks, top = [], 0
    for tensor, first, end in segments:
        low, high = max(start, top), min(stop, top + end - first)
        if low < high:
            blocks.append(Block(tensor, (first + low - top, first + high - top), (0, width), row=low - start))
        top += end - first
    return ShardedParameter(name, (stop - start, width), tuple(blocks))


def _columns(name: str, tensor: str, shape: tuple[int, int], part: Part) -> ShardedParameter:
    height, width = shape
    cols = (width * part.rank // part.tp, width * (part.rank + 1) // part.tp)
    return ShardedParameter(name, (height, cols[1] - cols[0]), (Block(tensor, (0, height), cols),))


def _vector(name: str, tensor: str, size: int) -> ShardedParameter:
    return ShardedParameter(name, (size,), (Block(tensor, (0, size), (0, 1)),))


def _gate_up(name: str, layer: int, toy: Toy, part: Part) -> ShardedParameter:
    rows = (toy.ffn * part.rank // part.tp, toy.ffn * (part.rank + 1) // part.tp)
    blocks = (
        Block(f"{layer}.gate", rows, (0, toy.hidden)),
        Block(f"{layer}.up", rows, (0, toy.hidden), row=rows[1] - rows[0]),
    )
    return ShardedParameter(name, (2 * (rows[1] - rows[0]), toy.hidden), blocks)
