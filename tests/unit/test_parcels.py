"""Objects on their way between worlds."""

import pickle

import pytest
import torch

from parallel.parcels import dumps

TENSORS = {
    "token ids": torch.randint(0, 128_256, (3, 5)),
    "beyond int32": torch.tensor([2**31, -(2**40)]),
    "at the ends of int32": torch.tensor([2**31 - 1, -(2**31)]),
    "mask": torch.tensor([[True, False], [False, True]]),
    "not contiguous": torch.arange(12.0).view(3, 4).t(),
    "a number": torch.tensor(7),
    "empty": torch.zeros(0, 3, dtype=torch.int64),
    "bfloat16": torch.rand(4).bfloat16(),
    "with a gradient": torch.rand(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were(name):
    given = TENSORS[name]
    (found,) = pickle.loads(dumps([given]))
    assert found.dtype == given.dtype and torch.equal(found, given)
    with torch.no_grad():
        found[...] = 0  # it may be changed


def test_samples_take_less_room_than_as_torch_writes_them():
    batch = {"generated_ids": torch.randint(0, 128_256, (8, 1600)), "versions": torch.ones(8, 1600).long()}
    assert len(dumps(batch)) < 0.52 * len(pickle.dumps(batch))
