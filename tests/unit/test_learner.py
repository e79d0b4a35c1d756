"""The learner with a simple function as its actor: reused old log-probs give what a separate pass gives.

Letters: B samples, N response tokens of a micro-batch, T positions of prompt and response.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.layout import Layout
from parallel.rank_set import world
from verl_megatron.algorithms.kl import FixedKL
from verl_megatron.algorithms.normalizers import NORMALIZERS, leave_out
from verl_megatron.config import AlgorithmConfig, EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.collector import DataCollector
from verl_megatron.data.micro_batch import pack
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.data.shared_prompts import pack_shared
from verl_megatron.learner import Learner
from verl_megatron.observe.metrics import PhaseTimer, Sums
from verl_megatron.roles import role
from verl_megatron.roles.role import Role

RESPONSES = [3, 1, 6, 2, 0, 5, 4, 2, 6]  # tokens of each of three samples of three prompts


class SimpleEngine:
    """An engine whose log-prob of a token is a parameter of its position plus a constant of its sample."""

    head, value_head = "lm", None

    def __init__(self, seed: int):
        layout = Layout.parse("tp1", (0,))
        self.layout, self.config = layout, EngineConfig(tokens_per_micro_batch=8)
        self.groups = SimpleNamespace(layout=layout, world=world(), is_member=True, is_last_stage=True)
        generator = torch.Generator().manual_seed(seed)
        self.constant_BT = torch.randn(len(RESPONSES), 8, generator=generator) - 1.5
        self.weight_T = torch.zeros(8, requires_grad=True)
        self.num_inferred = 0  # samples of all separate passes

    def pack(self, batch: RolloutBatch, samples: list[int], **options):
        return (pack_shared if self.config.shared_prompts else pack)(batch, samples, **options)

    def outputs(self, batch: RolloutBatch, micro) -> dict[str, Tensor]:
        constant_N = self.constant_BT[batch.sample_id[micro.sample], micro.offset]
        logprobs_N = constant_N + self.weight_T[micro.offset]
        return {"logprobs": logprobs_N, "entropy": torch.zeros_like(logprobs_N)}

    def infer(self, batch: RolloutBatch, micro_batches) -> dict[str, Tensor]:
        self.num_inferred += sum(map(len, micro_batches))
        micros = [self.pack(batch, samples) for samples in micro_batches]
        with torch.no_grad():
            return role.filled(
                self, batch, [(micro, self.outputs(batch, micro)) for micro in micros], ["logprobs"]
            )

    def train_step(self, batch: RolloutBatch, micro_batches, loss, *, fields, scale) -> Sums:
        sums, total = Sums(), 0.0
        for samples in micro_batches:
            micro = self.pack(batch, samples, fields=fields)
            loss_N, metrics = loss(self.outputs(batch, micro), micro)
            if scale.weight_B is not None:
                loss_N = scale.weight_B[batch.sample_id[micro.sample]] * loss_N
            total = total + loss_N.sum() / scale.divisor
            sums.merge(metrics)
        (gradient_T,) = torch.autograd.grad(total, self.weight_T)
        with torch.no_grad():
            self.weight_T -= 2.0 * gradient_T  # far enough that ratios are clipped
        return sums


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    """A world of one, for the exchange of samples."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def passes_of_simple_engines(monkeypatch):
    def infer_models(engines, batch, micro_batches, names, *, last_token=False):
        return [engine.infer(batch, micro_batches) for engine in engines]

    monkeypatch.setattr(role, "infer_models", infer_models)


def scored_batch() -> RolloutBatch:
    batch = RolloutBatch.from_lists(
        list(range(9)), [[1, 2]] * 9, [[3] * n for n in RESPONSES], [[-1.5] * n for n in RESPONSES]
    )
    batch.group_id = batch.sample_id // 3
    batch.rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 2.0, 1.0, 1.0])
    return batch


def learn(
    *,
    step: int,
    reference: bool = False,
    batch: RolloutBatch | None = None,
    shared_prompts: bool = False,
    **settings,
):
    """One iteration; the actor's engine and the metrics."""
    config = AlgorithmConfig(name="grpo", **settings)
    engines = {"actor": SimpleEngine(0)} | ({"reference": SimpleEngine(1)} if reference else {})
    for engine in engines.values():
        engine.config.shared_prompts = shared_prompts
    roles = {
        name: Role(engine, DataCollector(engine.layout, engine.groups.world))
        for name, engine in engines.items()
    }
    learner = Learner(
        roles,
        config=config,
        max_tokens=6,
        kl=FixedKL(0.1),
        residency=SimpleNamespace(enter_training=lambda engine: None),
        clock=PhaseTimer(),
    )
    batch = scored_batch() if batch is None else batch
    table = SampleTable.gather(
        batch, world(), num_mini_batches=config.num_mini_batches, shared_prompts=shared_prompts
    )
    metrics = learner.learn(batch, table, Sums(), step=step)
    return engines["actor"], metrics


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
