"""Settings of a transfer: how slices travel between ranks, and how many of them are verified."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.reshard.ipc_tensors import IpcTensors

Parameters = dict[tuple[int, str], Tensor]  # by (model chunk, name)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transport:
    """Settings that a plan's transfers share on this rank."""

    dtype: torch.dtype  # of a transferred element; the source rank casts before it sends
    group: dist.ProcessGroup  # spans every rank of the plan
    device: torch.device  # of the parameters and the staging memory
    verify: str = "sample"  # slices that each run checks: "sample" (a rotating share), "all" or "none"
    # All other ranks' sources, from `map_tensors`; required by a plan compiled with `peer_memory`.
    ipc_tensors: IpcTensors | None = None
    # [N] of `dtype` on `device`; other plans may use it at other times. None: allocated by each `Resharder`.
    staging: Tensor | None = None

    @property
    def rank(self) -> int:
        """World rank of this process."""
        return dist.get_global_rank(self.group, dist.get_rank(self.group))
