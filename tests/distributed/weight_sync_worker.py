"""Weight sync in every mode on four ranks, element by element, into parameters that stand for vLLM's."""

from dataclasses import replace
from itertools import chain, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.reshard.checksum_verifier import ReshardError
from parallel.reshard.plan import compile_plan
from parallel.reshard.source import WeightSource
from parallel.reshard.staged import StagedResharder
from parallel.reshard.transport import Parameters, Transport
from parallel.reshard.versions import VersionedReshard, background_group
from parallel.weights.rules import hf_shapes, megatron_shards, vllm_parameters, vllm_shards
from parallel.weights.shard import ShardedParameter
from tests.distributed.reshard_worker import ARCH, EVERYONE, assert_filled, double, filled
from verl_megatron.config import ReshardConfig
from verl_megatron.rollout.vllm_weights.fp8 import FP8, Fp8Weight, is_quantized
from verl_megatron.rollout.weights import WeightSync, target_of
from verl_megatron.separate.identity import PublishedWeights, ServedWeights

TRAINING, ROLLOUT = (0, 1), (2, 3)


class HeldWeights:
    """What a weight sync knows of a rollout engine: its parameters, some of them in Megatron's memory."""

    def __init__(self, parameters: list[ShardedParameter], shared: dict[str, Tensor], dtype=torch.float32):
        own = {
            p.name: torch.full(p.shape, torch.nan, dtype=dtype, device=device.device()) for p in parameters
        }
        self._weights, self._fp8 = own | shared, {}

    def in_fp8(self) -> "HeldWeights":
        """Hold linear layers in fp8, as vLLM does with rollout.weight_dtype=fp8."""
        for name in [name for name in self._weights if is_quantized(name)]:
            weight_NK = torch.zeros_like(self._weights.pop(name)).to(FP8)
            self._fp8[name] = Fp8Weight(weight_NK, torch.zeros(len(weight_NK), 1, device=weight_NK.device))
        return self

    def weight_target(self) -> dict[str, Tensor]:
        return self._weights

    def fp8_target(self) -> dict[str, Fp8Weight]:
        return self._fp8

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


def fp8_weights_arrive_in_groups() -> None:
    """The fp8 form of what arrives in bfloat16, in many groups, after each of two syncs."""
    for name, tp in product(("tp2pp2", "tp2dp2"), (1, 4)):
        rank, random = dist.get_rank(), torch.Generator().manual_seed(6)
        tensors = {key: torch.randn(shape, generator=random) for key, shape in hf_shapes(ARCH).items()}
        shards = megatron_shards(ARCH, Layout.parse(name, ranks=(0, 2, 1, 3)), spec="te")
        given = filled(shards[rank], tensors, 0, torch.float32)
        plan = compile_plan(
            source=shards,
            destination=vllm_shards(ARCH, Layout.parse(f"tp{tp}", EVERYONE)),
            element_bytes=2,
            window_bytes=2**12,
        )
        served = vllm_parameters(ARCH, tp, rank % tp)
        engine = HeldWeights(served, {}, torch.bfloat16).in_fp8()
        target, fp8 = target_of(engine, served, torch.bfloat16)
        transport = Transport(
            dtype=torch.bfloat16, group=world().device_group, device=device.device(), verify="all"
        )
        resharder = StagedResharder(plan, given, target, transport, staged=fp8, limit_bytes=2**12)
        assert resharder.staging_bytes <= 2**13 + 2**11  # limit, window, and room between parameters
        for factor in (1, 2):
            assert resharder.run().checked_slices == len(list(plan.transfers()))
            values = filled(served, tensors, 0, torch.bfloat16)
            for key, weight in engine.fp8_target().items():
                value = values.pop((0, key)) * factor
                expected = Fp8Weight(torch.empty_like(weight.weight_NK), torch.empty_like(weight.scale_N1))
                expected.write(value)
                assert torch.equal(weight.weight_NK.view(torch.uint8), expected.weight_NK.view(torch.uint8))
                assert torch.equal(weight.scale_N1, expected.scale_N1)
            assert_filled(target, values, factor, (name, tp))
            double(given)


class Told:
    """What both sides tell each other over a bridge, here over the world's own store."""

    def __init__(self):
        self.rank, self.serving_ranks, self.num_training = dist.get_rank(), ROLLOUT, len(TRAINING)
        self.store = dist.distributed_c10d._get_default_store()

    def put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def value(self, key: str) -> bytes:
        return self.store.get(key)


def changed_fp8_weights_are_found() -> None:
    """What a rollout world serves is what was published, and one changed bit of it is noticed."""
    rank, random = dist.get_rank(), torch.Generator().manual_seed(7)
    tensors = {key: torch.randn(shape, generator=random) for key, shape in hf_shapes(ARCH).items()}
    shards = megatron_shards(ARCH, Layout.parse("pp2", ranks=TRAINING), spec="te")
    destination = vllm_shards(ARCH, Layout.parse("tp2", ROLLOUT))
    plan = compile_plan(source=shards, destination=destination, element_bytes=2, window_bytes=2**12)
    transport = Transport(
        dtype=torch.bfloat16, group=background_group(EVERYONE), device=device.device(), verify="all"
    )
    bridge = Told()
    if rank in TRAINING:
        given = filled(shards[rank], tensors, 0, torch.bfloat16)
        versions = VersionedReshard(plan, given, {}, transport)
        published = PublishedWeights(bridge, versions)
        for sync in (1, 2):
            versions.publish(sync)
            published.tell(sync, version=sync)
            double(given)
        versions.close()
        return
    engine = HeldWeights(destination[rank], {}, torch.bfloat16).in_fp8()
    target, fp8 = target_of(engine, destination[rank], torch.bfloat16)
    versions = VersionedReshard(plan, {}, target, transport, staged=fp8)
    pieces = [(weight.weight_NK, weight.scale_N1) for weight in engine.fp8_target().values()]
    served = ServedWeights(bridge, versions, target, list(chain(*pieces)))
    for sync in (1, 2):
        assert versions.adopt(served.record) == sync
        served.expect(sync)
        served.check(sync, "samples")
    for tensor in (pieces[0][0].view(torch.uint8), pieces[-1][1], next(iter(target.values()))):
        first = tensor.view(-1)[:1]
        before = first.clone()
        first += 1
        with pytest.raises(ReshardError, match="generated samples with wrong weights.* of no version"):
            served.check(2, "samples")
        first.copy_(before)
        served.check(2, "samples")
    versions.close()


if __name__ == "__main__":
    device.initialize()
    weight_sync_in_every_mode()
    fp8_weights_arrive_in_groups()
    changed_fp8_weights_are_found()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all weights arrived in every mode")
    dist.destroy_process_group()
