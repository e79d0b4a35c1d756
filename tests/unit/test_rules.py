"""The weight map against whole tensors cut with chunk and cat, over families and layouts.

Letters: H hidden.
"""

from itertools import product

import pytest
import torch

from parallel.layout import Layout
from parallel.weights.architecture import Architecture
from parallel.weights.row_shards import row_shards
from parallel.weights.rules import (
    hf_shapes,
    megatron_parameters,
    megatron_shards,
    padded_vocab,
    vllm_parameters,
)
from tests.tiny import FAMILIES, make_hf

COMMON = dict(hidden_size=16, num_layers=4, intermediate_size=48, norm_eps=1e-6, max_positions=64)
ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama", num_heads=8, num_kv_heads=8, head_dim=2, vocab_size=128, **COMMON
    ),
    "llama tied": Architecture(
        model_type="llama", num_heads=8, num_kv_heads=2, head_dim=4, vocab_size=150, tied=True, **COMMON
    ),
    "mistral": Architecture(
        model_type="mistral", num_heads=16, num_kv_heads=4, head_dim=4, vocab_size=1, **COMMON
    ),
    "qwen2": Architecture(
        model_type="qwen2", num_heads=8, num_kv_heads=1, head_dim=4, vocab_size=65, **COMMON
    ),
    "qwen2 tied": Architecture(
        model_type="qwen2", num_heads=24, num_kv_heads=8, head_dim=2, vocab_size=191, tied=True, **COMMON
    ),
    "qwen3": Architecture(
        model_type="qwen3", num_heads=16, num_kv_heads=4, head_dim=6, vocab_size=997, **COMMON
    ),
}
LAYOUTS = [
    *(dict(tp=tp, pp=pp) for tp, pp in product((1, 2, 4, 8), (1, 2, 4))),
    *(dict(tp=tp, pp=2, vpp=2) for tp in (1, 2, 8)),
    dict(tp=2, pp=2, stage_layers=(1, 3)),
    dict(tp=1, pp=3, stage_layers=(1, 2, 1)),
    dict(tp=2, pp=2, cp=2, dp=2),
]


def make_layout(sizes):
    size = sizes["tp"] * sizes["pp"] * sizes.get("cp", 1) * sizes.get("dp", 1)
    return Layout(**sizes, ranks=tuple(range(3, 3 + size)))  # a layout need not begin at rank 0


def numbered(arch, head="lm"):
    tensors, first = {}, 1
    for name, shape in hf_shapes(arch, head).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count).view(shape)
        first += count
    return tensors


def assembled(parameter, tensors):
    """The local tensor that the blocks describe; fails if two of them overlap."""
    local = torch.zeros(parameter.shape, dtype=torch.int64)
    matrix, written = (
        local.view(local.shape[0], -1),
        torch.zeros(parameter.shape, dtype=torch.int64).view(local.shape[0], -1),
    )
    for block in parameter.blocks:
        part = tensors[block.tensor].view(len(tensors[block.tensor]), -1)[
            slice(*block.rows), slice(*block.cols)
        ]
        assert part.shape == (block.rows[1] - block.rows[0], block.cols[1] - block.cols[0])
        place = (slice(block.row, block.row + part.shape[0]), slice(block.col, block.col + part.shape[1]))
        matrix[place] = part
        written[place] += 1
    assert written.max() <= 1
    return local


def pad_rows(tensor, rows):
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def megatron_by_hand(arch, hf, layout, place, spec):
    """{(chunk, name): tensor} of a rank with the language head."""

    def rows(tensor):
        return tensor.chunk(layout.tp)[place.tp]

    def interleaved(prefix, kind):
        groups = [hf[f"{prefix}.{x}_proj.{kind}"].unflatten(0, (arch.num_kv_heads, -1)) for x in "qkv"]
        return torch.cat(groups, 1).flatten(0, 1)

    vocab = padded_vocab(arch.vocab_size, layout.tp)
    embedding = rows(pad_rows(hf["model.embed_tokens.weight"], vocab))
    out = {(0, "embedding.word_embeddings.weight"): embedding} if place.pp == 0 else {}
    for (stage, chunk), layers in layout.layers_of(arch.num_layers).items():
        for local, number in enumerate(layers if stage == place.pp else ()):
            source, names = f"model.layers.{number}", {}
            names[
                "input_layernorm.weight" if spec == "local" else "self_attention.linear_qkv.layer_norm_weight"
            ] = hf[f"{source}.input_layernorm.weight"]
            names["self_attention.linear_qkv.weight"] = rows(interleaved(f"{source}.self_attn", "weight"))
            if arch.model_type == "qwen2":
                names["self_attention.linear_qkv.bias"] = rows(interleaved(f"{source}.self_attn", "bias"))
            for x in "qk" if arch.model_type == "qwen3" else "":
                names[f"self_attention.{x}_layernorm.weight"] = hf[f"{source}.self_attn.{x}_norm.weight"]
            names["self_attention.linear_proj.weight"] = hf[f"{source}.self_attn.o_proj.weight"].chunk(
                layout.tp, 1
            )[place.tp]
            names["pre_mlp_layernorm.weight" if spec == "local" else "mlp.linear_fc1.layer_norm_weight"] = hf[
                f"{source}.post_attention_layernorm.weight"
            ]
            names["mlp.linear_fc1.weight"] = torch.cat(
                [rows(hf[f"{source}.mlp.{x}_proj.weight"]) for x in ("gate", "up")]
            )
            names["mlp.linear_fc2.weight"] = hf[f"{source}.mlp.down_proj.weight"].chunk(layout.tp, 1)[
                place.tp
            ]
            out |= {(chunk, f"decoder.layers.{local}.{name}"): tensor for name, tensor in names.items()}
    if place.pp == layout.pp - 1:
        out[layout.vpp - 1, "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not arch.tied or layout.pp > 1:
            out[layout.vpp - 1, "output_layer.weight"] = (
                embedding if arch.tied else rows(pad_rows(hf["lm_head.weight"], vocab))
            )
    return out


def vllm_by_hand(arch, hf, tp, rank):
    def rows(tensor):
        return tensor.chunk(tp)[rank]

    def heads(tensor):  # of k and v: repeated, so that each rank has one
        per_head = tensor.unflatten(0, (arch.num_kv_heads, -1))
        return rows(per_head.repeat_interleave(max(1, tp // arch.num_kv_heads), 0)).flatten(0, 1)

    vocab = -(-arch.vocab_size // 64) * 64
    out = {
        "model.embed_tokens.weight": rows(pad_rows(hf["model.embed_tokens.weight"], vocab)),
        "model.norm.weight": hf["model.norm.weight"],
    }
    if not arch.tied:
        out["lm_head.weight"] = rows(pad_rows(hf["lm_head.weight"], vocab))
    for number in range(arch.num_layers):
        prefix = f"model.layers.{number}."
        for kind in ("weight", "bias") if arch.model_type == "qwen2" else ("weight",):
            q, k, v = (hf[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
            out[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat([rows(q), heads(k), heads(v)])
        for name in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] * (arch.model_type == "qwen3"):
            out[prefix + name] = hf[prefix + name]
        out[prefix + "mlp.gate_up_proj.weight"] = torch.cat(
            [rows(hf[prefix + "mlp.gate_proj.weight"]), rows(hf[prefix + "mlp.up_proj.weight"])]
        )
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            out[prefix + name] = hf[prefix + name].chunk(tp, 1)[rank]
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[prefix + name] = hf[prefix + name]
    return out


def same(parameters, expected, hf, key):
    found = {key(p): p for p in parameters}
    assert found.keys() == expected.keys() and len(found) == len(parameters)
    for name, parameter in found.items():
        assert parameter.shape == tuple(expected[name].shape), name
        assert torch.equal(assembled(parameter, hf), expected[name]), name


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_megatron_shards(name, sizes):
    arch, layout = ARCHITECTURES[name], make_layout(sizes)
    hf, seen = numbered(arch), []
    for rank in layout.ranks:
        for spec in ("local", "te"):
            parameters = megatron_parameters(arch, layout, rank, spec=spec)
            same(
                parameters,
                megatron_by_hand(arch, hf, layout, layout.coordinates(rank), spec),
                hf,
                key=lambda p: (p.chunk, p.name),
            )
        copies = [p.name for p in parameters if not p.owner]
        assert copies == ["output_layer.weight"] * (
            arch.tied and layout.pp > 1 and layout.coordinates(rank).pp == layout.pp - 1
        )
        seen += [assembled(p, hf).flatten() for p in parameters if p.owner]
    numbers = torch.cat(seen).unique()
    assert torch.equal(
        numbers[numbers > 0], torch.cat([t.flatten() for t in hf.values()])
    )  # the owners hold every element


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vllm_shards(name, tp):
    arch = ARCHITECTURES[name]
    hf = numbered(arch)
    for rank in range(tp):
        same(vllm_parameters(arch, tp, rank), vllm_by_hand(arch, hf, tp, rank), hf, key=lambda p: p.name)


@pytest.mark.parametrize("head", ["token", "sequence"])
@pytest.mark.parametrize("name", ["llama", "llama tied"])
@pytest.mark.parametrize("sizes", [dict(tp=1, pp=1), dict(tp=2, pp=2), dict(tp=2, pp=2, vpp=2)], ids=str)
def test_value_heads(name, head, sizes):
    arch, layout = ARCHITECTURES[name], make_layout(sizes)
    hf = numbered(arch, head)
    assert (
        "lm_head.weight" not in hf
        and hf["score.weight"].shape == (1, arch.hidden_size)
        and ("score.bias" in hf) == (head == "token")
    )
    for rank in layout.ranks:
        place, parameters = (
            layout.coordinates(rank),
            megatron_parameters(arch, layout, rank, spec="te", head=head),
        )
        expected = megatron_by_hand(
            arch, hf | {"lm_head.weight": hf["model.embed_tokens.weight"]}, layout, place, "te"
        )
        expected.pop((layout.vpp - 1, "output_layer.weight"), None)
        if place.pp == layout.pp - 1:
            expected[layout.vpp - 1, "output_layer.weight"] = hf["score.weight"]
            if head == "token":
                expected[layout.vpp - 1, "output_layer.bias"] = hf["score.bias"]
        same(parameters, expected, hf, key=lambda p: (p.chunk, p.name))
        assert all(p.owner for p in parameters)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("head", "suffix"),
    [("lm", "ForCausalLM"), ("token", "ForTokenClassification"), ("sequence", "ForSequenceClassification")],
)
def test_names_and_shapes_are_those_of_transformers(family, head, suffix):
    model = make_hf(family, suffix)
    arch = Architecture.from_hf(model.config.to_dict() | {"model_type": model.config.model_type})
    assert hf_shapes(arch, head) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_blocks_are_as_large_as_can_be():
    arch = ARCHITECTURES["qwen3"]
    whole = megatron_parameters(arch, Layout(), 0, spec="te")
    count = {
        p.name: len(p.blocks)
        for p in whole
        if not p.name.startswith("decoder.layers") or ".layers.0." in p.name
    }
    qkv, fc1 = (
        count.pop("decoder.layers.0.self_attention.linear_qkv.weight"),
        count.pop("decoder.layers.0.mlp.linear_fc1.weight"),
    )
    assert (qkv, fc1, set(count.values())) == (3 * arch.num_kv_heads, 2, {1})
    cut = {p.name: p.blocks for p in vllm_parameters(arch, 8, 5)}
    assert (
        len(cut["model.layers.1.self_attn.qkv_proj.weight"]) == 3
        and len(cut["model.layers.1.mlp.down_proj.weight"]) == 1
    )
    assert cut["model.layers.1.self_attn.o_proj.weight"][0].cols == (60, 72)


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [
        (128, 1, 128),
        (1, 4, 64),
        (65, 2, 128),
        (997, 8, 1024),
        (128256, 8, 128256),
        (151936, 4, 151936),
        (150, 3, 192),
        (200, 3, 384),
    ],
)
def test_padded_vocab(vocab, tp, padded):
    assert padded_vocab(vocab, tp) == padded


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vocabulary_shards_of_megatron_and_vllm_coincide(name):
    arch = ARCHITECTURES[name]
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            megatron = megatron_parameters(arch, Layout(tp=tp, ranks=tuple(range(tp))), rank, spec="local")[0]
            vllm = vllm_parameters(arch, tp, rank)[0]
            assert (megatron.shape, megatron.blocks) == (vllm.shape, vllm.blocks)


def test_refuses_what_does_not_split():
    llama, qwen2 = ARCHITECTURES["llama"], ARCHITECTURES["qwen2"]

    def build(arch, tp, pp=1):
        return megatron_parameters(arch, Layout(tp=tp, pp=pp, ranks=tuple(range(tp * pp))), 0, spec="te")

    with pytest.raises(ValueError, match="tp=3 must divide the model's 8 attention heads"):
        build(llama, 3)
    with pytest.raises(ValueError, match="tp=16 must divide the model's 8 attention heads"):
        vllm_parameters(qwen2, 16, 0)
    with pytest.raises(ValueError, match="4 layers do not split over pp=3"):
        build(llama, 1, pp=3)
    odd = Architecture(model_type="llama", num_heads=12, num_kv_heads=4, head_dim=4, vocab_size=64, **COMMON)
    with pytest.raises(ValueError, match="tp=6 must divide the model's 4 key-value heads or be a multiple"):
        build(odd, 6)
    thirds = Architecture(
        model_type="llama", num_heads=12, num_kv_heads=3, head_dim=4, vocab_size=64, **COMMON
    )
    with pytest.raises(ValueError, match="tp=3 must divide vLLM's padded vocabulary of 64"):
        vllm_parameters(thirds, 3, 0)
    narrow = Architecture(
        model_type="llama", num_heads=8, num_kv_heads=1, head_dim=2, vocab_size=64, **COMMON
    )
    with pytest.raises(ValueError, match="tp=8 must divide the 20 rows"):
        build(narrow, 8)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_shards_are_the_chunks_of_torch(name, count):
    """Put together again, a parameter's row shards are the parameter; their shapes are torch's."""
    layout = Layout(dp=count, ranks=tuple(range(count)))
    arch = ARCHITECTURES[name]
    shards = row_shards(megatron_shards(arch, layout, spec="te"), layout)
    for place, whole in enumerate(megatron_parameters(arch, layout, 0, spec="te")):
        parts = [shards[rank][place] for rank in layout.ranks]
        chunks = torch.chunk(torch.zeros(whole.shape), count)
        sizes = [chunk.shape[0] for chunk in chunks] + [0] * (count - len(chunks))
        assert [part.shape for part in parts] == [(size, *whole.shape[1:]) for size in sizes]
        found = torch.zeros(whole.shape[0], dtype=torch.int64)
        want, top = cells(whole), 0
        for part in parts:
            found[top : top + part.shape[0]] = cells(part)
            top += part.shape[0]
        assert torch.equal(found, want)


def cells(parameter) -> torch.Tensor:
    """What each row of a parameter is: a number of its tensor and its row there; 0 is padding."""
    found = torch.zeros(parameter.shape[0], dtype=torch.int64)
    for block in parameter.blocks:
        first, last = block.rows
        key = 1 + sum(block.tensor.encode()) * 10**6
        found[block.row : block.row + last - first] = key + torch.arange(first, last)
    return found
