"""Advantages of every algorithm against plain float64 formulas, written down from the papers."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from tests.simulated_ranks import Ranks
from verl_megatron.algorithms import ALGORITHMS, get_algorithm
from verl_megatron.algorithms.advantages.distillation import add_teacher
from verl_megatron.algorithms.advantages.estimators import own_samples
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch

WIDTH, KL_COEF, GAMMA, LAMBDA = 9, 0.1, 0.9, 0.8
OWN = [  # positions of the model's own tokens; others between them are a tool's output
    [2, 3, 4, 5],
    [1, 2],
    [4, 5, 7, 8],
    [3],
    [],
    [1, 2, 3, 6, 7],
    [2, 4, 6, 8],
    [5, 6, 7],
    [2, 3],
    [1, 5],
]
SAMPLE = [4, 0, 9, 5, 3, 2, 7, 1, 8, 6]  # samples are out of order
GROUP = [1, 0, 3, 1, 0, 0, 2, 0, 2, 1]  # of 4, 3, 2 and 1 samples
SPLITS = [[10], [3, 4, 3], [0, 10], [5, 0, 1, 4]]


@pytest.fixture
def batch() -> RolloutBatch:
    """Scored samples with log-probs and values; 100 where no algorithm may look."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(len(OWN), WIDTH, dtype=torch.bool)
    for b, own in enumerate(OWN):
        mask[b, own] = True

    def per_token() -> torch.Tensor:  # exact in float32, so that both computations start from the same
        values = torch.randint(-64, 64, mask.shape, generator=generator) / 64
        return values.masked_fill(~mask, 100.0)

    return RolloutBatch(
        sample_id=torch.tensor(SAMPLE),
        group_id=torch.tensor(GROUP),
        input_ids=torch.zeros(len(OWN), 4, dtype=torch.int64),
        generated_ids=torch.zeros(mask.shape, dtype=torch.int64),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        rewards=torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0, 0.25, -1.0, 0.25, 0.0]),
        baselines=torch.tensor([0.5, 1.0, -1.0, 0.5, 1.0, 1.0, 0.75, 1.0, 0.75, 0.5]),
        logprobs=per_token(),
        ref_logprobs=per_token(),
        teacher_logprobs=per_token(),
        values=per_token(),
    )


@dataclass
class Case:
    """A batch sample by sample, in float64."""

    batch: RolloutBatch
    config: AlgorithmConfig

    def own(self, name: str, b: int) -> np.ndarray:
        """A per-token field at the sample's own tokens."""
        return getattr(self.batch, name)[b].numpy().astype(np.float64)[OWN[b]]

    def kl(self, b: int) -> np.ndarray:
        x = self.own("logprobs", b) - self.own("ref_logprobs", b)
        terms = {"k1": x, "k2": x * x / 2, "k3": np.exp(-x) - 1 + x}
        return terms[self.config.kl_estimator] * (self.config.kl_in == "reward")

    def rewards(self, b: int) -> np.ndarray:
        """r_t = score [t = n] - beta KL_t."""
        rewards = -KL_COEF * self.kl(b)
        rewards[-1:] += self.batch.rewards[b].item()
        return rewards

    def score(self, b: int) -> float:
        return self.batch.rewards[b].item() - KL_COEF * self.kl(b).sum()

    def scores_of_group(self, b: int, *, without: int = -1) -> np.ndarray:
        members = [i for i in range(len(OWN)) if GROUP[i] == GROUP[b] and i != without]
        return np.array([self.score(i) for i in members])


Advantages = list[np.ndarray]  # of the own tokens of each sample


def discounted(x: np.ndarray, rate: float) -> np.ndarray:
    """sum_k rate^k x_{t+k} for each t."""
    powers = rate ** np.arange(len(x))
    return np.array([np.dot(x[t:], powers[: len(x) - t]) for t in range(len(x))])


def whitened(parts: Advantages) -> Advantages:
    tokens = np.concatenate(parts)
    return [(part - tokens.mean()) / np.sqrt(tokens.var() + 1e-8) for part in parts]


def constant(case: Case, advantage: Callable[[Case, int], float]) -> Advantages:
    """The sample's advantage at each of its tokens."""
    return [np.full(len(own), advantage(case, b)) for b, own in enumerate(OWN)]


def gae_of_sample(case: Case, b: int) -> np.ndarray:
    """sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t (Schulman 2016, eq. 16)."""
    values = case.own("values", b)
    delta = case.rewards(b) + GAMMA * np.append(values[1:], 0.0)[: len(values)] - values
    return discounted(delta, GAMMA * LAMBDA)


def gae(case: Case) -> Advantages:
    return [gae_of_sample(case, b) for b in range(len(OWN))]


def ppo(case: Case) -> Advantages:
    return whitened(gae(case)) if case.config.whiten else gae(case)


def centered_score(case: Case, b: int) -> float:
    """Score minus the group's mean (Dr. GRPO, Liu et al. 2025)."""
    return case.score(b) - case.scores_of_group(b).mean()


def group_score(case: Case, b: int) -> float:
    """(r - mean) / std (Shao et al. 2024, section 4.1.2)."""
    scores = case.scores_of_group(b)
    std = scores.std(ddof=1) if len(scores) > 1 else 0.0
    return (case.score(b) - scores.mean()) / (std + 1e-6)


def leave_one_out(case: Case, b: int) -> float:
    """r_i - mean of r_j, j != i (Ahmadian et al. 2024); a sample alone has no baseline, so 0."""
    others = case.scores_of_group(b, without=b)
    return case.score(b) - others.mean() if len(others) else 0.0


def weighted_by_length(case: Case, b: int) -> float:
    """r_i - sum_j l_j r_j / sum_j l_j (Hao et al. 2025)."""
    members = [i for i in range(len(OWN)) if GROUP[i] == GROUP[b]]
    lengths = [len(OWN[i]) for i in members]
    return case.score(b) - np.average(case.scores_of_group(b), weights=lengths)


def grpo(case: Case) -> Advantages:
    return constant(case, group_score if case.config.scale_by_std else centered_score)


def returns(case: Case) -> Advantages:
    return [discounted(case.rewards(b), GAMMA) for b in range(len(OWN))]


def remax(case: Case) -> Advantages:
    """sum of later rewards - r(greedy) (Li et al. 2024)."""
    return [part - case.batch.baselines[b].item() for b, part in enumerate(returns(case))]


PAPER: dict[str, Callable[[Case], Advantages]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": lambda case: constant(case, centered_score),
    "gspo": grpo,
    "cispo": grpo,
    "rloo": lambda case: constant(case, leave_one_out),
    "opo": lambda case: constant(case, weighted_by_length),
    "reinforce_plus_plus": lambda case: whitened(returns(case)),
    "reinforce_plus_plus_baseline": lambda case: whitened(constant(case, centered_score)),
    "remax": remax,
    "distillation": lambda case: constant(case, lambda *_: 0.0),
}


def run(batch: RolloutBatch, config: AlgorithmConfig, split: list[int] | None = None) -> RolloutBatch:
    """The algorithm's result with the samples on simulated ranks."""
    starts = np.cumsum([0, *(split or [len(batch)])])
    parts = [batch.select(torch.arange(start, end)) for start, end in zip(starts, starts[1:])]

    def one_rank(part: RolloutBatch, all_sum) -> RolloutBatch:
        return get_algorithm(config).advantages(part, config, kl_coef=KL_COEF, num_groups=4, all_sum=all_sum)

    results = Ranks(parts).run(one_rank)
    joined = {}
    for name in results[0].tensors():
        joined[name] = torch.cat([getattr(part, name) for part in results])
    return RolloutBatch(**joined)


def config_of(name: str, **settings) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, gamma=GAMMA, gae_lambda=LAMBDA, **settings)


def assert_matches(found_BT: torch.Tensor, expected: Advantages) -> None:
    """Equal to 1e-6 at the own tokens, and 0 elsewhere."""
    for b, own in enumerate(OWN):
        others = [t for t in range(WIDTH) if t not in own]
        assert not found_BT[b, others].any()
        np.testing.assert_allclose(found_BT[b, own].double().numpy(), expected[b], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("kl_in", "estimator"), [("reward", "k1"), ("reward", "k3"), ("loss", "k2")])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_are_those_of_the_paper_wherever_samples_lie(batch, name, kl_in, estimator, split):
    config = config_of(name, kl_in=kl_in, kl_estimator=estimator)
    result, case = run(batch, config, split), Case(batch, config)
    assert_matches(result.advantages, PAPER[name](case))
    if name == "ppo":
        whole = [part + case.own("values", b) for b, part in enumerate(gae(case))]
        assert_matches(result.returns, whole)
    else:
        assert result.returns is None
    if name != "distillation":
        assert_matches(result.token_rewards, [case.rewards(b) for b in range(len(OWN))])


@pytest.mark.parametrize(
    "settings", [{"name": "ppo", "whiten": False}, {"name": "grpo", "scale_by_std": False}]
)
def test_advantages_without_their_scaling(batch, settings):
    config = config_of(**settings)
    assert_matches(run(batch, config).advantages, PAPER[config.name](Case(batch, config)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_names_the_settings_that_it_reads(batch, name):
    """Others are refused, as they would change nothing."""
    usual = run(batch, config_of(name)).advantages
    others = {"gamma": 0.5, "gae_lambda": 0.3, "whiten": False, "scale_by_std": False}
    read = {
        setting
        for setting, value in others.items()
        if not torch.equal(run(batch, replace(config_of(name), **{setting: value})).advantages, usual)
    }
    assert read == set(ALGORITHMS[name].settings)


@pytest.mark.parametrize("name", ["distillation", "grpo", "ppo"])
def test_a_teacher_adds_its_log_prob_gap(batch, name):
    """A token's reward is log q(t) - log p(t), with mean -KL(p, q) of the next-token distributions."""
    config = config_of(name)
    case, result = Case(batch, config), add_teacher(run(batch, config), coef=0.5)
    gaps = [case.own("teacher_logprobs", b) - case.own("logprobs", b) for b in range(len(OWN))]
    expected = [part + 0.5 * gap for part, gap in zip(PAPER[name](case), gaps)]
    assert_matches(result.advantages, expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_new_batch_comes_back_and_the_old_one_stays(batch, name):
    before = {field.name: getattr(batch, field.name) for field in fields(batch)}
    result = get_algorithm(config_of(name)).advantages(
        batch, config_of(name), kl_coef=KL_COEF, num_groups=4, all_sum=own_samples
    )
    assert all(getattr(batch, name) is value for name, value in before.items())
    assert result.advantages.dtype == result.token_rewards.dtype == torch.float32
    assert result.sample_id is batch.sample_id and batch.advantages is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_a_reference_there_is_no_penalty(batch, name):
    batch.ref_logprobs = None
    rewards_BT = run(batch, config_of(name)).token_rewards
    torch.testing.assert_close(rewards_BT.sum(-1), batch.rewards * batch.response_mask.any(-1))


def test_an_unknown_algorithm_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"algorithm\.name='reinforce' is not known; choose one of ppo, grpo"
    ):
        get_algorithm(AlgorithmConfig(name="reinforce"))
