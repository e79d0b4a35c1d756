"""The weight mapping: the rectangles of Hugging Face tensors in each Megatron and each vLLM parameter.

Letters of tensor dimensions: V vocabulary, H hidden, Q query heads x head size, K key-value heads x head
size, D head size, F feed-forward, L labels (one).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import lcm
from typing import Literal

from parallel.layout import Layout
from parallel.weights.architecture import Architecture
from parallel.weights.shard import Block, ShardedParameter, Shards

# Language model; a value per token (critic); a score per sequence (reward model); the first two on one trunk.
Head = Literal["lm", "token", "sequence", "lm_token"]
Piece = tuple[str, int, int]  # Hugging Face tensor, first row, number of rows
VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of it


class Split(Enum):
    """The way in which tensor parallelism splits a parameter."""

    WHOLE = "a copy on each rank"
    ROWS = "an interval of rows"
    COLS = "an interval of columns"
    GATE_UP = "a rank's rows of the first tensor, then its rows of the second"
    HEADS = "Megatron: rows of [its query heads, k, v] by query group; vLLM: [q, k, v] of a rank's heads"


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter: its names, its split, and the Hugging Face tensors in it with their dimensions."""

    megatron: str  # in the local spec
    vllm: str
    split: Split
    tensors: Mapping[str, str]
    te: str = field(default="", kw_only=True)  # Megatron's name in the transformer-engine spec, if different


EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    Split.ROWS,
    {"model.embed_tokens.weight": "VH"},
)
TIED_OUTPUT = Rule("output_layer.weight", "", Split.ROWS, {"model.embed_tokens.weight": "VH"})
FINAL_NORM = Rule(
    "decoder.final_layernorm.weight", "model.norm.weight", Split.WHOLE, {"model.norm.weight": "H"}
)
LM_HEAD = Rule("output_layer.weight", "lm_head.weight", Split.ROWS, {"lm_head.weight": "VH"})
SCORE = Rule("output_layer.weight", "", Split.WHOLE, {"score.weight": "LH"})
SCORE_BIAS = Rule("output_layer.bias", "", Split.WHOLE, {"score.bias": "L"})
OUTPUTS: dict[Head, tuple[Rule, ...]] = {
    "lm": (LM_HEAD,),
    "token": (SCORE, SCORE_BIAS),
    "sequence": (SCORE,),
    "lm_token": (
        LM_HEAD,
        replace(SCORE, megatron="value_head.weight"),
        replace(SCORE_BIAS, megatron="value_head.bias"),
    ),
}
QKV, QKV_BIAS = (
    Rule(
        f"self_attention.linear_qkv.{kind}",
        f"self_attn.qkv_proj.{kind}",
        Split.HEADS,
        {
            f"self_attn.q_proj.{kind}": "Q" + dims,
            f"self_attn.k_proj.{kind}": "K" + dims,
            f"self_attn.v_proj.{kind}": "K" + dims,
        },
    )
    for kind, dims in (("weight", "H"), ("bias", ""))
)
QK_NORMS = tuple(
    Rule(
        f"self_attention.{x}_layernorm.weight",
        f"self_attn.{x}_norm.weight",
        Split.WHOLE,
        {f"self_attn.{x}_norm.weight": "D"},
    )
    for x in "qk"
)
INPUT_NORM = Rule(
    "input_layernorm.weight",
    "input_layernorm.weight",
    Split.WHOLE,
    {"input_layernorm.weight": "H"},
    te="self_attention.linear_qkv.layer_norm_weight",
)
MLP_NORM = Rule(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    Split.WHOLE,
    {"post_attention_layernorm.weight": "H"},
    te="mlp.linear_fc1.layer_norm_weight",
)
O_PROJ = Rule(
    "self_attention.linear_proj.weight",
    "self_attn.o_proj.weight",
    Split.COLS,
    {"self_attn.o_proj.weight": "HQ"},
)
GATE_UP = Rule(
    "mlp.linear_fc1.weight",
    "mlp.gate_up_proj.weight",
    Split.GATE_UP,
    {"mlp.gate_proj.weight": "FH", "mlp.up_proj.weight": "FH"},
)
DOWN = Rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", Split.COLS, {"mlp.down_proj.weight": "HF"})


def layer_rules(arch: Architecture) -> tuple[Rule, ...]:
    """Return the rules of one layer; Qwen2 adds biases, Qwen3 norms on queries and keys to Llama's."""
    bias, norms = (QKV_BIAS,) * arch.qkv_bias, QK_NORMS * arch.qk_norm
    return (INPUT_NORM, QKV, *bias, *norms, O_PROJ, MLP_NORM, GATE_UP, DOWN)


def is_language(head: Head) -> bool:
    """Return whether the head gives log-probs."""
    return LM_HEAD in OUTPUTS[head]


def _output_rules(arch: Architecture, head: Head, tied: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of the output heads, with `tied` in the place of a tied LM head."""
    if not arch.tied:
        return OUTPUTS[head]
    return tuple(other for rule in OUTPUTS[head] for other in (tied if rule is LM_HEAD else (rule,)))


def hf_shapes(arch: Architecture, head: Head = "lm") -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the Hugging Face folder, in the model's order.

    A tied model has no lm_head.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, rules in (
        ("", (EMBEDDING,)),
        *((_layer_prefix(i), layer_rules(arch)) for i in range(arch.num_layers)),
        ("", (FINAL_NORM, *_output_rules(arch, head, tied=()))),
    ):
        shapes |= {prefix + name: _shape(dims, arch) for rule in rules for name, dims in rule.tensors.items()}
    return shapes


def megatron_parameters(
    arch: Architecture, layout: Layout, rank: int, *, spec: Literal["te", "local"], head: Head = "lm"
) -> list[ShardedParameter]:
    """Return all parameters of all model chunks of world rank `rank`, named as in `named_parameters()`.

    Data- and context-parallel ranks hold the same parameters. With tied embeddings and several stages, the
    output layer of the last stage is a copy of the embedding and no owner; with one stage it does not exist.

    Raises:
        ValueError: the architecture does not split over the layout, or `rank` is not in it.
    """
    if problems := tp_problems(arch, layout.tp):
        raise ValueError(problems[0])
    place = layout.coordinates(rank)
    parameters: list[ShardedParameter] = []
    part = _Part(layout.tp, place.tp, padded_vocab(arch.vocab_size, layout.tp))
    for (stage, chunk), layers in layout.layers_of(arch.num_layers).items():
        if stage != place.pp:
            continue
        rules = [(EMBEDDING, "", "")] if stage == chunk == 0 else []
        rules += [
            (rule, f"decoder.layers.{local}.", _layer_prefix(i))
            for local, i in enumerate(layers)
            for rule in layer_rules(arch)
        ]
        if stage == layout.pp - 1 and chunk == layout.vpp - 1:
            output = _output_rules(arch, head, tied=(TIED_OUTPUT,) * (layout.pp > 1))
            rules += [(rule, "", "") for rule in (FINAL_NORM, *output)]
        for rule, where, prefix in rules:
            name = where + (rule.te if spec == "te" and rule.te else rule.megatron)
            pieces = _megatron_pieces(rule, arch, layout.tp)
            shape, blocks = _shard(rule, arch, pieces, prefix, part)
            parameters.append(
                ShardedParameter(
                    name=name, shape=shape, blocks=blocks, owner=rule is not TIED_OUTPUT, chunk=chunk
                )
            )
    return parameters


def vllm_parameters(arch: Architecture, tp: int, tp_rank: int) -> list[ShardedParameter]:
    """Return all parameters of vLLM's model (0.26 to 0.32, unquantised) on rank `tp_rank` of `tp`.

    Key and value heads are replicated if `tp` exceeds their number. A tied output layer is the embedding's
    own parameter.

    Raises:
        ValueError: the architecture does not split over `tp` ranks, or the padded vocabulary does not.
    """
    if problems := vllm_tp_problems(arch, tp):
        raise ValueError(problems[0])
    vocab = padded_vocab(arch.vocab_size, 1)
    rules = [(EMBEDDING, "")] + [
        (rule, _layer_prefix(i)) for i in range(arch.num_layers) for rule in layer_rules(arch)
    ]
    rules += [(rule, "") for rule in (FINAL_NORM, *_output_rules(arch, "lm", tied=()))]
    part = _Part(tp, tp_rank, vocab)
    parameters: list[ShardedParameter] = []
    for rule, prefix in rules:
        shape, blocks = _shard(rule, arch, _vllm_pieces(rule, arch, tp), prefix, part)
        parameters.append(ShardedParameter(name=prefix + rule.vllm, shape=shape, blocks=blocks))
    return parameters


def megatron_shards(
    arch: Architecture, layout: Layout, *, spec: Literal["te", "local"], head: Head = "lm"
) -> Shards:
    """Return `megatron_parameters` of every rank; ranks with the same parameters share one list."""
    by_part: dict[tuple[int, int], list[ShardedParameter]] = {}
    shards: dict[int, list[ShardedParameter]] = {}
    for rank in layout.ranks:
        place = layout.coordinates(rank)
        if (place.tp, place.pp) not in by_part:
            by_part[place.tp, place.pp] = megatron_parameters(arch, layout, rank, spec=spec, head=head)
        shards[rank] = by_part[place.tp, place.pp]
    return shards


def vllm_shards(arch: Architecture, rollout: Layout) -> Shards:
    """Return `vllm_parameters` of every rank; ranks with the same parameters share one list."""
    by_tp_rank = [vllm_parameters(arch, rollout.tp, tp_rank) for tp_rank in range(rollout.tp)]
    return {rank: by_tp_rank[rollout.coordinates(rank).tp] for rank in rollout.ranks}


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the rows of Megatron's embedding: the next multiple of 64 that `tp` divides.

    The shards are then equal to vLLM's with the same `tp`.
    """
    multiple = lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def tp_problems(arch: Architecture, tp: int) -> list[str]:
    """Return why `tp` ranks cannot split the model, one message for each size; empty if they can."""
    sizes = ((arch.num_heads, "attention heads"), (arch.intermediate_size, "feed-forward channels"))
    problems = [
        f"tp={tp} must divide the model's {size} {what}; choose a divisor"
        for size, what in sizes
        if size % tp
    ]
    if arch.num_kv_heads % tp and tp % arch.num_kv_heads:
        problems.append(
            f"tp={tp} must divide the model's {arch.num_kv_heads} key-value heads or be a multiple of them; "
            "choose such a size"
        )
    return problems


def vllm_tp_problems(arch: Architecture, tp: int) -> list[str]:
    """Return why `tp` ranks of vLLM cannot split the model: `tp_problems`, and its padded vocabulary."""
    problems, vocab = tp_problems(arch, tp), padded_vocab(arch.vocab_size, 1)
    if vocab % tp:
        problems.append(
            f"tp={tp} must divide vLLM's padded vocabulary of {vocab} (vocab_size={arch.vocab_size}); "
            "choose a divisor"
        )
    return problems


def _layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _shape(dims: str, arch: Architecture) -> tuple[int, ...]:
    sizes = {
        "V": arch.vocab_size,
        "H": arch.hidden_size,
        "D": arch.head_dim,
        "F": arch.intermediate_size,
        "L": 1,
    }
    sizes |= {"Q": arch.num_heads * arch.head_dim, "K": arch.num_kv_heads * arch.head_dim}
    return tuple(sizes[letter] for letter in dims)


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of every split parameter that one rank holds."""

    tp: int
    tp_rank: int
    vocab: int  # rows of the padded embedding


def _shard(
    rule: Rule, arch: Architecture, pieces: Iterable[Piece], prefix: str, part: _Part
) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """Return shape and blocks of a rank's shard, from the pieces of all ranks' rows in rank order."""
    pieces, tp, tp_rank = list(pieces), part.tp, part.tp_rank
    first_dims = next(iter(rule.tensors.values()))
    num_rows = part.vocab if first_dims[0] == "V" else sum(count for _, _, count in pieces)
    num_cols = _shape(first_dims, arch)[1] if len(first_dims) == 2 else 1
    rows, cols = (0, num_rows), (0, num_cols)
    if rule.split is Split.COLS:
        cols = (tp_rank * num_cols // tp, (tp_rank + 1) * num_cols // tp)
    elif rule.split is not Split.WHOLE:
        if num_rows % tp:
            raise ValueError(f"tp={tp} must divide the {num_rows} rows of {rule.megatron}; choose a divisor")
        rows = (tp_rank * num_rows // tp, (tp_rank + 1) * num_rows // tp)
    blocks: list[Block] = []
    at = 0
    for tensor, first, count in pieces:
        start, stop = max(rows[0], at), min(rows[1], at + count)
        if start < stop:
            blocks.append(
                Block(prefix + tensor, (first + start - at, first + stop - at), cols, row=start - rows[0])
            )
        at += count
    return (rows[1] - rows[0], cols[1] - cols[0])[: len(first_dims)], tuple(blocks)


def _megatron_pieces(rule: Rule, arch: Architecture, tp: int) -> Iterator[Piece]:
    """Yield the pieces of Megatron's whole parameter from the first row on.

    Its QKV rows are interleaved by query group for any `tp`: a rank holds an interval of these rows, which
    may begin or end inside a group.
    """
    if rule.split is not Split.HEADS:
        yield from _plain_pieces(rule, arch, tp)
        return
    q, k, v = rule.tensors
    per_group = arch.num_heads // arch.num_kv_heads * arch.head_dim
    for group in range(arch.num_kv_heads):
        yield q, group * per_group, per_group
        yield k, group * arch.head_dim, arch.head_dim
        yield v, group * arch.head_dim, arch.head_dim


def _vllm_pieces(rule: Rule, arch: Architecture, tp: int) -> Iterator[Piece]:
    """Yield the pieces of vLLM's shards in rank order."""
    if rule.split is not Split.HEADS:
        yield from _plain_pieces(rule, arch, tp)
        return
    q, k, v = rule.tensors
    num_q, num_kv = arch.num_heads // tp * arch.head_dim, max(1, arch.num_kv_heads // tp) * arch.head_dim
    for rank in range(tp):
        # If tp exceeds the number of key-value heads, neighbouring ranks share a head.
        first_kv = rank * arch.num_kv_heads // tp * arch.head_dim
        yield q, rank * num_q, num_q
        yield k, first_kv, num_kv
        yield v, first_kv, num_kv


def _plain_pieces(rule: Rule, arch: Architecture, tp: int) -> Iterator[Piece]:
    """Yield the pieces of a parameter that Megatron and vLLM order in the same way."""
    ranks = range(tp) if rule.split is Split.GATE_UP else range(1)
    for rank in ranks:
        for tensor, dims in rule.tensors.items():
            count = _shape(dims, arch)[0] // len(ranks)
            yield tensor, rank * count, count
