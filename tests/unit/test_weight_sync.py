"""What vLLM may hold, and what is said of a model whose layers it has transformed."""

import pytest
import torch

from parallel.reshard.in_place.addresses import addresses_of, views_at
from parallel.weights.rules import vllm_parameters
from parallel.weights.shard import ShardedParameter
from tests.tiny import tiny_architecture
from verl_megatron.rollout.weights import check_parameters

PARAMETERS = vllm_parameters(tiny_architecture(intermediate_size=32, vocab_size=64), 2, 0)


def held():
    return {(0, p.name): torch.zeros(p.shape) for p in PARAMETERS}


def test_known_parameters_are_accepted():
    check_parameters(PARAMETERS, held(), torch.float32)


@pytest.mark.parametrize("shape", [(16, 16), (8, 32)])
def test_a_transformed_layer_is_named_with_the_covered_share(shape):
    found = held()
    name = (0, "model.layers.1.mlp.down_proj.weight")
    found[name] = found[name].view(shape).to(torch.float8_e4m3fn)  # as a quantising engine may keep it
    other = sum(tensor.nbytes for key, tensor in found.items() if key != name) / sum(
        tensor.nbytes for tensor in found.values()
    )
    with pytest.raises(
        ValueError,
        match=rf"model.layers.1.mlp.down_proj.weight as \({shape[0]}, {shape[1]}\) "
        rf"torch.float8.*{other:.1%}.*rollout.dtype",
    ):
        check_parameters(PARAMETERS, found, torch.float32)


@pytest.mark.parametrize("lost", [True, False])
def test_missing_and_unknown_parameters_are_named(lost):
    found = held()
    if lost:
        del found[0, "model.norm.weight"]
        expected = "model.norm.weight as nothing where the weight map has"
    else:
        found[0, "model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(1)
        expected = "weight_scale as .* where the weight map has nothing"
    with pytest.raises(ValueError, match=expected):
        check_parameters(PARAMETERS, found, torch.float32)


def test_views_lie_in_the_memory_they_are_given():
    flat, alone = torch.arange(100, dtype=torch.float32), torch.zeros(8)
    memory = {(0, "a"): flat[:40].view(4, 10), (0, "b"): flat[40:], (1, "c"): alone}
    addresses = addresses_of(memory)
    space = addresses[0, "b"][0]
    assert (
        addresses[0, "a"] == (space, 0)
        and addresses[0, "b"] == (space, 160)
        and addresses[1, "c"] == (1 - space, 0)
    )
    views = views_at(
        {(0, "w"): (space, 24)},
        [ShardedParameter("w", (3, 5), ()), ShardedParameter("own", (2,), ())],
        memory,
        torch.float32,
    )
    assert views.keys() == {(0, "w")} and torch.equal(views[0, "w"], flat[6:21].view(3, 5))
    flat[6] = -1
    assert views[0, "w"][0, 0] == -1
