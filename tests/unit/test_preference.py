"""Losses on pairs against float64 written from the papers, and their independence of how tokens are packed.

Letters: P pairs, N tokens, T tokens of a sample.
"""

import math

import pytest
import torch

from verl_megatron.algorithms.preference import DPO_LOSSES, PairTokens, bradley_terry_loss, pair_sums
from verl_megatron.config import DPOConfig, DPOLossConfig, RewardModelConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import pack
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.supervised import dpo, reward_model
from verl_megatron.supervised.task import Step

GAPS = [-30.0, -1.3, 0.0, 0.4, 2.0, 80.0]  # log-ratio of the chosen minus that of the rejected response


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


@pytest.mark.parametrize("beta", [0.05, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_and_its_conservative_form(beta, smoothing):
    """Rafailov et al. 2023, equation 7; Mitchell 2023: labels are flipped with probability `smoothing`."""
    config = DPOLossConfig(beta=beta, label_smoothing=smoothing)
    expected = [-(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h) for h in GAPS]
    found = DPO_LOSSES["sigmoid"](torch.tensor(GAPS), config)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)


def test_ipo():
    """Azar et al. 2024, equation 17: the gap is regressed to 1 / (2 tau)."""
    found = DPO_LOSSES["ipo"](torch.tensor(GAPS), DPOLossConfig(loss="ipo", beta=0.25))
    torch.testing.assert_close(found, torch.tensor([(h - 1 / (2 * 0.25)) ** 2 for h in GAPS]))


def test_bradley_terry():
    chosen, rejected = torch.tensor([1.0, -2.0, 0.3]), torch.tensor([0.5, 1.0, 0.3])
    expected = [-math.log(math.exp(w) / (math.exp(w) + math.exp(r))) for w, r in zip(chosen, rejected)]
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected), torch.tensor(expected))


def test_metrics_count_pairs_once():
    sums = pair_sums(
        "x",
        torch.tensor([1.0, 3.0, 9.0]),
        torch.tensor([2.0, 0.0, 7.0]),
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([True, True, False]),
    )
    totals = sums.state_dict()["totals"]
    assert totals["x/loss"] == (4.0, 2) and totals["x/margin"] == (1.0, 2)
    assert totals["x/accuracy"] == (1.0, 2), "equal rewards are no right answer"


def samples(lengths: list[int]) -> RolloutBatch:
    """Samples with these response lengths, and random log-probs of two models."""
    generator = torch.Generator().manual_seed(3)
    batch = RolloutBatch.from_lists(
        list(range(len(lengths))), [[5, 6]] * len(lengths), [[7] * length for length in lengths]
    )
    for name in ("logprobs", "ref_logprobs"):
        noise_BT = torch.randn(batch.generated_ids.shape, generator=generator)
        setattr(batch, name, noise_BT * batch.response_mask)
    return batch


def dpo_gradient(batch: RolloutBatch, micro_batches: list[list[int]]) -> tuple[torch.Tensor, dict]:
    """Gradient of the sum of all pairs' losses with respect to the log-probs [B, T], and the metrics."""
    logprobs_BT, total, sums = batch.logprobs.clone().requires_grad_(), torch.zeros(()), None
    step = Step(config=DPOConfig(), num_samples=len(batch), cp_group=None)
    for members in micro_batches:
        micro = pack(batch, members, fields=("ref_logprobs",))
        loss_N, metrics = dpo.loss({"logprobs": logprobs_BT[micro.sample, micro.offset]}, micro, step)
        total = total + loss_N.sum()
        if sums is None:
            sums = metrics
        else:
            sums.merge(metrics)
    total.backward()
    return logprobs_BT.grad, sums.state_dict()["totals"]


def test_a_micro_batch_of_some_pairs_gives_the_papers_loss_and_gradient():
    """Equation 7 on sums over the tokens, differentiated by autograd in float64, however pairs are packed."""
    batch = samples([3, 1, 2, 6, 4, 4])
    logprobs_BT = batch.logprobs.double().requires_grad_()
    ratio_BT = (logprobs_BT - batch.ref_logprobs.double()) * batch.response_mask
    ratio_P2 = ratio_BT.sum(1).view(3, 2)
    loss_P = -torch.log(torch.sigmoid(0.1 * (ratio_P2[:, 0] - ratio_P2[:, 1])))
    loss_P.sum().backward()
    for micro_batches in ([[0, 1, 2, 3, 4, 5]], [[2, 3], [0, 1, 4, 5]], [[4, 5], [0, 1], [], [2, 3]]):
        gradient_BT, totals = dpo_gradient(batch, micro_batches)
        torch.testing.assert_close(gradient_BT.double(), logprobs_BT.grad, rtol=1e-6, atol=1e-8)
        assert totals["dpo/loss"] == (pytest.approx(loss_P.sum().item(), rel=1e-6), 3)
        assert totals["dpo/chosen_logprob"][0] == pytest.approx(batch.logprobs[::2].sum().item(), rel=1e-5)


def test_evaluation_is_the_loss_of_a_step():
    batch = samples([3, 1, 2, 6, 4, 4])
    _, step = dpo_gradient(batch, [[0, 1, 2, 3, 4, 5]])
    evaluated = dpo.evaluate(DPOConfig(), batch).state_dict()["totals"]
    assert {name.removeprefix("validation/") for name in evaluated} == {
        name.removeprefix("dpo/") for name in step
    }
    for name, (total, count) in evaluated.items():
        assert step[name.replace("validation", "dpo")] == (pytest.approx(total, rel=1e-5, abs=1e-6), count)


def test_a_reward_model_scores_the_last_token():
    batch = samples([3, 1, 2, 6])
    score_B = torch.tensor([1.0, 0.5, -1.0, 2.0], requires_grad=True)
    micro = pack(batch, [0, 1, 2, 3], last_token=True)
    step = Step(config=RewardModelConfig(), num_samples=4, cp_group=None)
    loss_N, _ = reward_model.loss({"values": score_B[micro.sample]}, micro, step)
    expected = -torch.log(torch.sigmoid(score_B[0] - score_B[1])) - torch.log(
        torch.sigmoid(score_B[2] - score_B[3])
    )
    torch.testing.assert_close(loss_N.sum(), expected)
    assert len(loss_N) == 4
    batch.values = torch.zeros(batch.generated_ids.shape)
    batch.values[torch.arange(4), batch.lengths - 1] = score_B.detach()
    totals = reward_model.evaluate(RewardModelConfig(), batch).state_dict()["totals"]
    assert totals["validation/loss"][0] == pytest.approx(expected.item(), rel=1e-6)
    assert totals["validation/accuracy"] == (1.0, 2)


def test_pairs_stay_together():
    lengths = [30, 10, 5, 5, 20, 28, 1, 2, 9, 9, 40, 3]
    batch = RolloutBatch.from_lists(list(range(12)), [[1]] * 12, [[2] * (length - 1) for length in lengths])
    lengths_B, zero_B = batch.lengths, torch.zeros(12, dtype=torch.int64)
    table = SampleTable(lengths_B, lengths_B - 1, zero_B, zero_B, [range(0, 6), range(6, 12)], unit=2)
    place_B = table.assign(2)
    assert torch.equal(place_B[::2], place_B[1::2]) and set(place_B.tolist()) == {0, 1}
    for place in (0, 1):
        ids = (place_B == place).nonzero().squeeze(1)
        found = table.micro_batches(ids, tokens_per_micro_batch=45, multiple_of=1)
        assert len(found) == 2
        whole = [ids[micro].tolist() for part in found for micro in part]
        assert sorted(sum(whole, [])) == ids.tolist()
        for members in whole:
            assert members[1::2] == [number + 1 for number in members[::2]]
            assert len(members) == 2 or lengths_B[members].sum() <= 45


def test_totals_of_pairs_elsewhere_are_zero():
    pairs = PairTokens(torch.tensor([2, 2, 3]), num_samples=6)
    (total_P2,) = pairs.totals(torch.tensor([1.0, 2.0, 4.0]))
    assert total_P2.tolist() == [[0, 0], [3, 4], [0, 0]]
