"""Weights that another model of the same folder and layout has are copied; the others have to be read."""

import torch

from parallel.layout import Layout
from parallel.weights.loading import copy_same
from parallel.weights.rules import megatron_parameters
from tests.tiny import tiny_architecture

ARCH, LAYOUT = tiny_architecture("qwen2"), Layout(tp=2, pp=2, ranks=(0, 1, 2, 3))


def model(rank, *, layout=LAYOUT, head="lm", dtype=torch.float32, seed=0):
    """Return the parameters of a rank, and random tensors for them."""
    parameters, generator = megatron_parameters(ARCH, layout, rank, spec="te", head=head), torch.Generator()
    generator.manual_seed(seed)
    tensors = {(p.chunk, p.name): torch.randn(p.shape, generator=generator).to(dtype) for p in parameters}
    return parameters, tensors


def test_equal_parameters_are_copied():
    for rank in LAYOUT.ranks:
        (parameters, tensors), actor = model(rank, seed=1), model(rank)
        assert copy_same(parameters, tensors, *actor) == []
        assert all(torch.equal(tensors[key], value) for key, value in actor[1].items())


def test_parts_of_other_tensors_or_dtypes_are_left():
    for rank in LAYOUT.ranks:
        (parameters, tensors), actor = model(rank, head="token", seed=1), model(rank)
        before = {key: value.clone() for key, value in tensors.items()}
        absent = {p.name for p in copy_same(parameters, tensors, *actor)}
        assert absent == {p.name for p in parameters if p.name.startswith("output_layer")}
        for (chunk, name), value in tensors.items():
            source = before if name in absent else actor[1]
            assert torch.equal(value, source[chunk, name]), name
    parameters, tensors = model(0, dtype=torch.bfloat16)
    assert copy_same(parameters, tensors, *model(0)) == parameters
    others = model(1)[0]  # of equal shapes, but other rows of the vocabulary
    left = {p.name for p in copy_same(others, model(1)[1], *model(0))}
    assert (
        "embedding.word_embeddings.weight" in left and "decoder.layers.0.input_layernorm.weight" not in left
    )
