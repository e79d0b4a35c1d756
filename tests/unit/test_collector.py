import torch
from torch.testing import assert_close

from parallel.redistribute import pad_trailing
from verl_megatron.data.collector import pad_to, trim


def test_pad_to_cuts_and_fills():
    values_BT = torch.arange(6.0).view(2, 3)
    assert_close(pad_to(values_BT, 5), torch.cat([values_BT, torch.zeros(2, 2)], dim=1))
    assert_close(pad_to(values_BT, 2), values_BT[:, :2])
    assert pad_to(values_BT[:0], 4).shape == (0, 4)


def test_pad_trailing_fills_every_dimension_but_the_first():
    cube = torch.ones(2, 1, 2, dtype=torch.int32)
    padded = pad_trailing(cube, (2, 3))
    assert padded.dtype == torch.int32 and padded.sum() == 4 and (padded[:, :1, :2] == 1).all()


def test_trim_cuts_per_token_fields_only():
    fields = {"sample_id": torch.arange(2), "logprobs": torch.arange(8.0).view(2, 4)}
    cut = trim(fields, 3)
    assert torch.equal(cut["sample_id"], fields["sample_id"]) and torch.equal(
        cut["logprobs"], fields["logprobs"][:, :3]
    )
