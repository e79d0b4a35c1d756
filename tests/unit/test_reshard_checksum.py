"""The checksum sees every change of bits or order, and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.layout import Layout
from parallel.reshard import checksum as definition
from parallel.reshard.checksum import checksum
from parallel.reshard.checksum_verifier import Fingerprint
from parallel.reshard.plan import compile_plan
from parallel.reshard.resolve import resolve_slices
from tests.distributed.reshard_worker import UNTIED, filled, rollout_shards, train_shards, whole_tensors

# Letters: R rows, C columns.


def by_hand(slice_RC):
    """The definition in Python's integers."""
    bits = slice_RC.contiguous().view(definition.BITS[slice_RC.element_size()]).tolist()
    total = 0
    for r, row in enumerate(bits, 1):
        for c, value in enumerate(row, 1):
            total += value * (r * definition.ROW_FACTOR | 1) * (c * definition.COLUMN_FACTOR | 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_checksum_is_its_definition_for_any_strides_and_pieces(dtype, monkeypatch):
    slice_RC = (torch.randn(13, 9, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    wide = torch.zeros(20, 30, dtype=dtype)
    wide[4:17, 7:16] = slice_RC
    assert (
        checksum(slice_RC).item()
        == by_hand(slice_RC)
        == checksum(wide[4:17, 7:16]).item()
        == checksum(slice_RC.T.contiguous().T).item()
    )
    monkeypatch.setattr(definition, "PIECE", 30)  # three rows at a time
    assert checksum(slice_RC).item() == by_hand(slice_RC)


def test_each_single_bit_and_each_exchange_is_seen():
    slice_RC = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    good = checksum(slice_RC).item()
    for row in range(6):
        for col in range(5):
            for bit in (0, 15, 31):
                other = slice_RC.clone()
                other.view(torch.int32)[row, col] ^= -(2**31) if bit == 31 else 1 << bit
                assert checksum(other).item() != good
            swapped = slice_RC.clone()
            swapped[row, col], swapped[(row + 1) % 6, (col + 2) % 5] = (
                slice_RC[(row + 1) % 6, (col + 2) % 5],
                slice_RC[row, col],
            )
            assert checksum(swapped).item() != good
    assert checksum(slice_RC.roll(1, 0)).item() != good and checksum(slice_RC.roll(1, 1)).item() != good


def test_negative_zero_differs_from_zero():
    assert checksum(torch.zeros(2, 2)).item() != checksum(-torch.zeros(2, 2)).item()


def test_a_fingerprint_is_the_same_on_both_sides_and_sees_every_slice():
    ranks, dtype = (2, 3), torch.bfloat16
    source = train_shards(UNTIED, Layout.parse("tp2", ranks=(0, 1)))
    destination = rollout_shards(UNTIED, 2, ranks=ranks)
    plan = compile_plan(
        source=source, destination=destination, element_bytes=dtype.itemsize, window_bytes=200
    )
    tensors = whole_tensors(UNTIED)

    def slices_of(rank, given, held):
        transport: Any = SimpleNamespace(rank=rank, dtype=dtype)
        return resolve_slices(plan, given, held, transport)

    sent = torch.zeros(2, dtype=torch.int64)
    for rank in (0, 1):
        slices = slices_of(rank, filled(source[rank], tensors, torch.nan, dtype), {})
        sent += Fingerprint(slices.transfers, slices.reads, ranks).run()
    for place, rank in enumerate(ranks):
        held = filled(destination[rank], tensors, 0, dtype)
        slices = slices_of(rank, {}, held)
        fingerprint = Fingerprint(slices.transfers, slices.writes, ranks)
        assert fingerprint.run()[place] == sent[place] and fingerprint.run()[1 - place] == 0
        for number, tensor in slices.writes.items():
            before = tensor.clone()
            tensor[-1, -1] += 1
            assert fingerprint.run()[place] != sent[place], f"transfer {number} is not seen"
            tensor.copy_(before)
        assert fingerprint.run()[place] == sent[place]
    assert Fingerprint([], {}, ranks).run().tolist() == [0, 0]
