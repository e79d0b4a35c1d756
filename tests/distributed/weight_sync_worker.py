"""Weight sync in every mode on four ranks, element by element, into parameters that stand for vLLM's."""

from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.reshard.source import WeightSource
from parallel.reshard.transport import Parameters
from parallel.weights.rules import hf_shapes, megatron_shards, vllm_parameters
from parallel.weights.shard import ShardedParameter
from tests.distributed.reshard_worker import ARCH, EVERYONE, assert_filled, double, filled
from verl_megatron.config import ReshardConfig
from verl_megatron.rollout.weights import WeightSync


class HeldWeights:
    """What a weight sync knows of a rollout engine: its parameters, some of them in Megatron's memory."""

    def __init__(self, parameters: list[ShardedParameter], shared: dict[str, Tensor]):
        own = {p.name: torch.full(p.shape, torch.nan, device=device.device()) for p in parameters}
        self._weights = own | shared

    def weight_target(self) -> dict[str, Tensor]:
        return self._weights

    def reset_cache(self) -> None:
        pass


def in_one_allocation(weights: Parameters) -> Parameters:
    """The same weights one after the other and aligned, as in Megatron's distributed optimizer."""
    sizes = [-(-tensor.numel() // 64) * 64 for tensor in weights.values()]
    parts = torch.zeros(sum(sizes), device=device.device()).split(sizes)
    for part, tensor in zip(parts, weights.values()):
        part[: tensor.numel()] = tensor.view(-1)
    return {key: part[: t.numel()].view(t.shape) for part, (key, t) in zip(parts, weights.items())}


def weight_sync_in_every_mode() -> None:
    """All that the engine reads after each of two syncs, with a step of training between.

    The trained weights are what they were, in mode `swap` once they are restored.
    """
    aliased = dict.fromkeys(("keep", "share", "swap"), 0)
    for mode, name, tp in product(aliased, ("tp2pp2", "pp2vpp2dp2", "tp2dp2", "tp4"), (1, 2, 4)):
        arch, rank = replace(ARCH, tied=tp == 2), dist.get_rank()
        random = torch.Generator().manual_seed(5)
        tensors = {key: torch.randn(shape, generator=random) for key, shape in hf_shapes(arch).items()}
        shards = megatron_shards(arch, Layout.parse(name, ranks=(0, 2, 1, 3)), spec="te")
        trained = filled(shards[rank], tensors, 0, torch.float32)
        given = in_one_allocation(trained) if tp == 4 else {key: t.clone() for key, t in trained.items()}
        source = WeightSource(
            arch=arch, tensors=given, shards=shards, dtype=torch.float32, gather=lambda: None
        )
        config = ReshardConfig(mode=mode, verify="all")
        sync = WeightSync(source, Layout.parse(f"tp{tp}", EVERYONE), config, world(), dtype=torch.float32)
        served = vllm_parameters(arch, tp, rank % tp)
        engine, expected = HeldWeights(served, sync.shared_weights), filled(served, tensors, 0, torch.float32)
        sync.attach(engine)
        for factor in (1, 2):
            sync.run()
            found = {(0, key): tensor for key, tensor in engine.weight_target().items()}
            assert_filled(found, expected, factor, (mode, name, tp))
            assert sync.restore() == (mode == "swap")
            assert_filled(given, trained, factor, (mode, name, tp))
            double(given)
        aliased[mode] += len(sync.shared_weights)
    assert aliased["keep"] == 0 < aliased["share"] < aliased["swap"], aliased


if __name__ == "__main__":
    device.initialize()
    weight_sync_in_every_mode()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all weights arrived in every mode")
    dist.destroy_process_group()
