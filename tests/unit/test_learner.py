"""The learner with a simple function as its actor: reused old log-probs give what a separate pass gives."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.simple_learner import RESPONSES, SimpleEngine, infer_models, learn, scored_batch
from verl_megatron.algorithms.normalizers import NORMALIZERS, leave_out
from verl_megatron.algorithms.proximal import loglinear
from verl_megatron.roles import role


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    """A world of one, for the exchange of samples."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def passes_of_simple_engines(monkeypatch):
    monkeypatch.setattr(role, "infer_models", infer_models)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reference": True, "kl_in": "loss", "kl_estimator": "k3"},
        {"correction": "truncate", "correction_level": "sequence", "objective": "gspo"},
    ],
    ids=["plain", "kl_in_loss", "correction"],
)
@pytest.mark.parametrize("num_mini_batches", [1, 3])
@pytest.mark.parametrize("epochs", [1, 3])
def test_reused_log_probs_change_no_bit(epochs, num_mini_batches, settings):
    settings = settings | {"epochs": epochs, "num_mini_batches": num_mini_batches}
    expected, expected_metrics = learn(step=2, reuse_logprobs=False, **settings)
    engine, metrics = learn(step=2, **settings)
    assert torch.equal(engine.weight_T, expected.weight_T)
    assert metrics == expected_metrics
    assert (expected.num_inferred, engine.num_inferred) == (9, 9 - 9 // num_mini_batches)
    if epochs * num_mini_batches > 1:
        assert metrics["policy/ratio_max"] > 1.1, "the case must reach other ratios than 1"
    checked, checked_metrics = learn(step=50, **settings)
    assert torch.equal(checked.weight_T, expected.weight_T) and checked.num_inferred == 9
    assert checked_metrics.pop("policy/reuse_error") == 0.0 and checked_metrics == expected_metrics


def test_the_samples_get_the_log_probs_that_the_update_computed():
    given, plain = scored_batch(), scored_batch()
    learn(step=2, batch=given)
    learn(step=2, batch=plain, reuse_logprobs=False)
    assert torch.equal(given.logprobs, plain.logprobs) and given.logprobs.any()


def test_prompts_whose_samples_have_one_score_are_counted():
    batch = scored_batch()
    assert learn(step=2, batch=batch)[1]["rollout/zero_variance_fraction"] == 0
    batch = scored_batch()
    batch.rewards[3:6] = -0.5
    assert learn(step=2, batch=batch)[1]["rollout/zero_variance_fraction"] == 1 / 3


def test_the_first_iteration_shows_how_far_the_reference_is_off():
    """Before the first update its weights are the actor's; other iterations do not have the metric."""
    gap_BT = SimpleEngine(0).constant_BT - SimpleEngine(1).constant_BT
    gap_N = gap_BT[scored_batch().response_mask].abs()
    metrics = learn(step=1, reference=True, kl_in="loss")[1]
    assert metrics["reference/logprob_gap_mean"] == pytest.approx(gap_N.mean().item(), rel=1e-5)
    assert metrics["reference/logprob_gap_max"] == pytest.approx(gap_N.max().item(), rel=1e-5)
    both, sampled = {"reference": True, "kl_in": "loss"}, {"old_logprobs": "sampler"}
    for step, settings in ((2, both), (1, {}), (1, both | sampled)):
        batch = scored_batch()
        batch.policy_version = torch.zeros(9, dtype=torch.int64)
        assert "reference/logprob_gap_mean" not in learn(step=step, batch=batch, **settings)[1]


CUT = [2, 3, 4, 5, 8]  # a whole group among them


def advantages_of(scores: list[float]) -> list[float]:
    """GRPO's, of groups of three."""
    found = []
    for first in range(0, len(scores), 3):
        group = scores[first : first + 3]
        mean = sum(group) / 3
        std = (sum((score - mean) ** 2 for score in group) / 2) ** 0.5
        found += [(score - mean) / (std + 1e-6) for score in group]
    return found


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean", "sequence_sum"])
def test_cut_responses_get_no_loss_and_count_in_their_group(normalizer):
    batch = scored_batch()
    batch.is_cut = torch.tensor([b in CUT for b in range(9)])
    engine, metrics = learn(step=2, batch=batch, normalizer=normalizer, mask_cut=True)
    kept = [b for b in range(9) if b not in CUT]
    tokens, expected_T = sum(RESPONSES[b] for b in kept), torch.zeros(8)
    for b in kept:  # with ratio 1 the gradient of a token's loss is minus its advantage; the rate is 2
        scale = {
            "token_mean": tokens,
            "sequence_mean": RESPONSES[b] * len(kept),
            "sequence_sum": len(kept) * 6,
        }[normalizer]
        for t in range(2, 2 + RESPONSES[b]):
            expected_T[t] += 2.0 * advantages_of(batch.rewards.tolist())[b] / scale
    torch.testing.assert_close(engine.weight_T.detach(), expected_T)  # float32 sums
    assert metrics["rollout/cut_fraction"] == pytest.approx(5 / 9)
    assert not torch.equal(learn(step=2, normalizer=normalizer)[0].weight_T, engine.weight_T)


def test_an_iteration_whose_responses_are_all_cut_changes_nothing():
    batch = scored_batch()
    batch.is_cut = torch.ones(9, dtype=torch.bool)
    engine, _ = learn(step=2, batch=batch, mask_cut=True, epochs=2, num_mini_batches=3)
    assert not engine.weight_T.any()


@pytest.mark.parametrize("normalizer", NORMALIZERS.values(), ids=NORMALIZERS)
def test_samples_left_out_count_neither_as_tokens_nor_as_samples(normalizer):
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        response_B = torch.randint(0, 6, (12,), generator=generator)
        is_out_B = torch.rand(12, generator=generator) < 0.4
        found = leave_out(partial(normalizer, max_tokens=7), is_out_B)
        for samples in (range(0, 5), range(5, 12), range(4, 4)):
            kept = [b for b in samples if not is_out_B[b]]
            alone = normalizer(response_B[kept], range(len(kept)), max_tokens=7)
            scale = found(response_B, samples)
            assert scale.divisor == alone.divisor and not scale.weight_B[is_out_B].any()
            expected_B = torch.ones(len(kept)) if alone.weight_B is None else alone.weight_B
            torch.testing.assert_close(scale.weight_B[kept], expected_B, rtol=0, atol=0)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_shared_prompts_change_no_metric(mini_batches):
    """Groups of three samples; two mini-batches have the second one's in two."""
    settings = {"step": 1, "reference": True, "num_mini_batches": mini_batches, "reuse_logprobs": False}
    (rows, want), (shared, found) = (learn(shared_prompts=share, **settings) for share in (False, True))
    assert found == pytest.approx(want, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(shared.weight_T, rows.weight_T)


# ---- old log-probs without a pass --------------------------------------------------------------------------

STALE_B = [0, 0, 0, 1, 1, 1, 3, 3, 3]  # updates by which the weights of a sample lag behind


def stale_batch(step: int):
    batch = scored_batch()
    batch.policy_version = step - 1 - torch.tensor(STALE_B)
    return batch


def trained_by_loop(old_logprobs: str, *, epochs: int, num_mini_batches: int) -> torch.Tensor:
    """The positions' weights after an iteration of GRPO, in plain PyTorch, sample by sample."""
    batch, constant_BT, weight_T = scored_batch(), SimpleEngine(0).constant_BT, torch.zeros(8)
    advantages, num_steps = advantages_of(batch.rewards.tolist()), epochs * num_mini_batches
    for step in range(num_steps):
        weight_T.requires_grad_()
        width, place, loss, count = 9 // num_mini_batches, step % num_mini_batches, torch.tensor(0.0), 0
        for b in range(place * width, (place + 1) * width):
            for t in range(2, 2 + RESPONSES[b]):
                logprob, sampler = constant_BT[b, t] + weight_T[t], torch.tensor(-1.5)
                if old_logprobs == "sampler":
                    old = sampler
                elif step == 0:
                    old = logprob.detach()
                else:
                    alpha = STALE_B[b] / (STALE_B[b] + step / num_steps)
                    old = (1 - alpha) * sampler + alpha * logprob.detach()
                ratio, advantage = (logprob - old).exp(), advantages[b]
                loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                count += 1
        (gradient_T,) = torch.autograd.grad(loss / count, weight_T)
        weight_T = weight_T.detach() - 2.0 * gradient_T
    return weight_T


@pytest.mark.parametrize("old_logprobs", ["sampler", "loglinear"])
@pytest.mark.parametrize(("epochs", "num_mini_batches"), [(1, 1), (1, 3), (2, 3)])
def test_old_log_probs_without_a_pass(old_logprobs, epochs, num_mini_batches):
    settings = {"epochs": epochs, "num_mini_batches": num_mini_batches, "old_logprobs": old_logprobs}
    engine, metrics = learn(step=7, batch=stale_batch(7), **settings)
    expected_T = trained_by_loop(old_logprobs, epochs=epochs, num_mini_batches=num_mini_batches)
    torch.testing.assert_close(engine.weight_T.detach(), expected_T)  # float32 sums
    assert engine.num_inferred == 0 and "policy/proximal_error" not in metrics
    assert ("policy/effective_sample_size" in metrics) == (old_logprobs == "sampler")
    checked, found = learn(step=50, batch=stale_batch(50), **settings)
    assert torch.equal(checked.weight_T, engine.weight_T) and checked.num_inferred == 9
    error = found.pop("policy/proximal_error")
    assert found == metrics and (error == 0) == (
        old_logprobs == "loglinear" and epochs * num_mini_batches == 1
    )


def test_with_one_step_loglinear_is_recompute_to_the_last_bit():
    batch = stale_batch(7)
    settings = {"correction": "truncate", "kl_in": "loss", "kl_estimator": "k3", "reference": True}
    expected, expected_metrics = learn(step=7, reuse_logprobs=False, **settings)
    engine, metrics = learn(step=7, batch=batch, old_logprobs="loglinear", **settings)
    assert torch.equal(engine.weight_T, expected.weight_T) and metrics == expected_metrics
    assert (expected.num_inferred, engine.num_inferred) == (9, 0)


def test_each_token_is_interpolated_by_its_own_version():
    batch = stale_batch(7)
    batch.token_versions = torch.where(torch.arange(8) < 4, 2, 6).expand(9, 8).clone()
    batch.set_behind(6)
    assert batch.behind[2].tolist() == [0, 0, 4, 4, 0, 0, 0, 0] and not batch.behind[4].any()
    behind_N = batch.behind[2, 2:6]
    found_N = loglinear(torch.full((4,), -2.0), torch.full((4,), -1.0), behind_N, done=0.5)
    torch.testing.assert_close(found_N, torch.tensor([-1 - 4 / 4.5, -1 - 4 / 4.5, -1.0, -1.0]))


def test_samples_that_no_step_has_reached_keep_the_samplers_log_probs():
    batch = stale_batch(7)
    _, metrics = learn(
        step=7, batch=batch, old_logprobs="loglinear", num_mini_batches=3, epochs=2, target_kl=1e-9
    )
    assert metrics["policy/steps"] == 2  # the first has no KL
    engine = SimpleEngine(0)
    assert torch.equal(batch.logprobs[0, 2:5], engine.constant_BT[0, 2:5])
    assert (batch.logprobs[6:] == batch.rollout_logprobs[6:]).all()
