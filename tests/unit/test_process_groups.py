"""Making process groups where a GPU is bound to the default one, in a world of fake ranks."""

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.rank_set import new_group

GPU = torch.device("cuda", 0)


class Split:
    """A communicator; to split it, every rank has to."""

    def perform_nocolor_split(self, gpu: torch.device) -> None:
        raise TimeoutError(f"the others do not split {gpu}")


def default() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.group.WORLD)


@pytest.fixture
def outsider(monkeypatch):
    """Rank 1 of 2, bound to a GPU."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    default().bound_device_id = GPU
    monkeypatch.setattr(
        distributed_c10d, "_get_split_source", lambda group: Split() if group.bound_device_id else None
    )
    yield
    dist.destroy_process_group()


def test_ranks_outside_a_gloo_group_do_not_wait_for_its_members(outsider):
    assert new_group([0], "gloo") == dist.GroupMember.NON_GROUP_MEMBER
    assert default().bound_device_id == GPU


def test_ranks_outside_other_groups_take_part_in_splitting(outsider):
    with pytest.raises(TimeoutError, match="cuda:0"):
        new_group([0], "fake")
    assert default().bound_device_id == GPU
