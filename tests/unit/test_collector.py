import torch
from torch.testing import assert_close

from parallel.redistribute import pad_trailing
from verl_megatron.batch import RolloutBatch
from verl_megatron.collector import pad_to, trim


def test_pad_to_cuts_and_fills():
    values_BT = torch.arange(6.0).view(2, 3)
    assert_close(pad_to(values_BT, 5), torch.cat([values_BT, torch.zeros(2, 2)], dim=1))
    assert_close(pad_to(values_BT, 2), values_BT[:, :2])
    assert pad_to(values_BT[:0], 4).shape == (0, 4)


def test_pad_trailing_fills_every_dimension_but_the_first():
    cube = torch.ones(2, 1, 2, dtype=torch.int32)
    padded = pad_trailing(cube, (2, 3))
    assert padded.dtype == torch.int32 and padded.sum() == 4 and (padded[:, :1, :2] == 1).all()


def test_trim_leaves_the_longest_row_whole():
    rows = dict(row_ids=[0, 1, 2], prompts=[[1], [1, 2, 3], [4, 5, 6, 7]], responses=[[2, 3], [4], [8, 9]], rollout_logprobs=[[-1.0, -2.0], [-3.0], [-4.0, -5.0]])
    batch = RolloutBatch.from_rows(**rows)
    short = trim(batch.select(torch.tensor([1, 0])))
    alone = RolloutBatch.from_rows(*([value[b] for b in (1, 0)] for value in rows.values()))
    for name, value in alone.tensors().items():
        assert_close(getattr(short, name), value, rtol=0, atol=0)
    assert trim(batch.select(torch.zeros(0, dtype=torch.int64))).generated_ids.shape == (0, 1)
