"""The actor's weights, from Megatron's shards into vLLM's shards."""

import torch
import torch.distributed as dist

from parallel import device
from parallel.reshard.execute import Resharder, ReshardReport
from parallel.reshard.plan import compile_plan
from parallel.weights.rules import megatron_parameters, vllm_parameters
from verl_megatron.config import ReshardConfig
from verl_megatron.roles.engine import Engine
from verl_megatron.rollout.vllm import VLLMActor


class WeightSync:
    """Compiled once; `run()` writes the actor's present weights into vLLM in place. Collective over the world."""

    def __init__(self, actor: Engine, vllm: VLLMActor, config: ReshardConfig):
        layout, rank = actor.layout, dist.get_rank()
        source = {r: megatron_parameters(actor.arch, layout, r, spec=actor.compute.spec) for r in layout.ranks}
        destination = {r: vllm_parameters(actor.arch, vllm.tp, r % vllm.tp) for r in range(dist.get_world_size())}
        held = {(0, name): tensor for name, tensor in vllm.parameters().items()}
        _compare(destination[rank], held)
        dtype = next(iter(held.values())).dtype
        plan = compile_plan(source=source, destination=destination, element_bytes=dtype.itemsize, window_bytes=config.window_mib << 20, host_of=device.host_of)
        self.resharder = Resharder(
            plan,
            rank=rank,
            source=actor.tensors if actor.groups.is_member else {},
            destination=held,
            dtype=dtype,
            group=None,
            device=device.device(),
            verify=config.verify,
        )
        self.plan = plan
        self.vllm = vllm

    def run(self) -> ReshardReport:
        """Move, prove, and forget what vLLM cached with the old weights."""
        report = self.resharder.run()
        self.vllm.reset_prefix_cache()
        return report


def _compare(described: list, held: dict[tuple[int, str], torch.Tensor]) -> None:
    """Refuse a model whose vLLM parameters are not those that the map describes (quantised or repacked ones, say)."""
    expected = {(0, p.name): tuple(p.shape) for p in described}
    found = {key: tuple(tensor.shape) for key, tensor in held.items()}
    if expected != found:
        names = sorted(name for (_, name), _ in set(expected.items()) ^ set(found.items()))
        raise ValueError(f"vLLM holds {names[0]} (and {len(set(names)) - 1} others) in a layout that the weight map does not know; use an unquantised dtype")
