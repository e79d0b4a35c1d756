"""fp8 weights in a real vLLM: a weight sync makes those that vLLM makes of the folder, again and again.

python -m torch.distributed.run --nproc-per-node 1 tests/distributed/fp8_weights_worker.py FOLDER

On a GPU also with CUDA graphs, vLLM's own kernel and sleep.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.reshard.source import WeightSource
from parallel.weights.architecture import read_architecture
from parallel.weights.rules import megatron_shards, vllm_parameters
from tests.distributed.reshard_worker import filled
from tests.tiny import write_hf
from verl_megatron.config import ReshardConfig, RolloutConfig
from verl_megatron.rollout.sampling import Generation, Request, Sampling
from verl_megatron.rollout.vllm import Colocation, VLLMActor
from verl_megatron.rollout.vllm_weights.fp8 import FP8, quantize
from verl_megatron.rollout.weights import WeightSync

CONFIG = RolloutConfig(
    dtype="bfloat16", weight_dtype="fp8", max_num_seqs=8, kv_cache_mib=32, gpu_memory_utilization=0.2
)
REQUESTS = [Request(i, [1, *range(3 + 5 * i, 10 + 6 * i)], i) for i in range(6)]
GREEDY = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
SIZES = dict(
    hidden_size=256, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2
)
folder = Path(sys.argv[-1])


def actor_of(name: str, *, config: RolloutConfig = CONFIG, **options) -> VLLMActor:
    return VLLMActor(folder / name, config=config, max_model_len=128, **options)


def weights_of(actor: VLLMActor) -> dict[str, Tensor]:
    """The weights by name, on the CPU, those in fp8 with their scales; fp8 as bytes."""
    weights = {name: tensor.cpu() for name, tensor in actor.weight_target().items()}
    for name, weight in actor.fp8_target().items():
        weights[name] = weight.weight_NK.cpu().view(torch.uint8)
        weights[f"{name}_scale"] = weight.scale_N1.cpu()
    return {name: tensor.clone() for name, tensor in weights.items()}


def quantized(name: str) -> dict[str, Tensor]:
    """The same of a folder, by plain torch on the CPU."""
    tensors, weights = load_file(folder / name / "model.safetensors"), {}
    for parameter in vllm_parameters(read_architecture(str(folder / name)), 1, 0):
        value = filled([parameter], tensors, 0, torch.bfloat16)[0, parameter.name].cpu()
        weights[parameter.name] = value
        if parameter.name.endswith("_proj.weight"):
            weight, scale = torch.empty(value.shape, dtype=FP8), torch.empty(len(value), 1)
            quantize(value, weight, scale)
            weights[parameter.name], weights[f"{parameter.name}_scale"] = weight.view(torch.uint8), scale
    return weights


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_close(found: list[Generation], expected: list[Generation]) -> None:
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-3)


def addresses(actor: VLLMActor) -> list[int]:
    fp8 = actor.fp8_target().values()
    return [tensor.data_ptr() for weight in fp8 for tensor in (weight.weight_NK, weight.scale_N1)]


def sync_from(name: str) -> tuple[WeightSync, dict[tuple[int, str], Tensor]]:
    """A weight sync out of a trained model, and the model's tensors."""
    arch = read_architecture(str(folder / name))
    shards = megatron_shards(arch, Layout.parse("tp1", ranks=(0,)), spec="te")
    trained = trained_weights(name)
    source = WeightSource(
        arch=arch, tensors=trained, shards=shards, dtype=torch.bfloat16, gather=lambda: None
    )
    config = ReshardConfig(window_mib=1, verify="all")
    return WeightSync(source, Layout.parse("tp1", ranks=(0,)), config, world(), dtype=torch.bfloat16), trained


def trained_weights(name: str) -> dict[tuple[int, str], Tensor]:
    arch, tensors = read_architecture(str(folder / name)), load_file(folder / name / "model.safetensors")
    (parameters,) = megatron_shards(arch, Layout.parse("tp1", ranks=(0,)), spec="te").values()
    return filled(list(parameters), tensors, 0, torch.bfloat16)


def main() -> None:
    for seed, name in enumerate("ab"):
        write_hf(folder / name, "qwen2", seed=seed, **SIZES)
    loaded = actor_of("a", config=replace(CONFIG, sleep=False))  # vLLM lets one engine of a process sleep
    vllms, expected = weights_of(loaded), loaded.generate(REQUESTS, GREEDY)
    loaded.close()
    assert sum(tensor.dtype == torch.uint8 for tensor in vllms.values()) == 8  # four of each layer
    assert_same(quantized("a"), vllms)
    actor = actor_of("a", colocation=Colocation(shared_weights={}))
    sync, trained = sync_from("a")
    sync.attach(actor)
    before = addresses(actor)
    assert sync.run().checked_slices
    assert_same(weights_of(actor), vllms)
    assert_close(actor.generate(REQUESTS, GREEDY), expected)
    for key, tensor in trained_weights("b").items():
        trained[key].copy_(tensor)
    sync.run()
    assert_same(weights_of(actor), quantized("b"))
    other = actor.generate(REQUESTS, GREEDY)
    assert [sample.token_ids for sample in other] != [sample.token_ids for sample in expected]
    actor.sleep()
    for key, tensor in trained_weights("a").items():
        trained[key].copy_(tensor)
    actor.wake("weights")
    sync.run(meanwhile=lambda: actor.wake("kv_cache"))
    assert addresses(actor) == before
    assert_same(weights_of(actor), vllms)
    assert_close(actor.generate(REQUESTS, GREEDY), expected)
    actor.close()


if __name__ == "__main__":
    device.initialize()
    main()
    print("all checks of fp8 weights passed", flush=True)
    dist.destroy_process_group()
