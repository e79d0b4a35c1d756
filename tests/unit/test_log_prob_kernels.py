"""The PyTorch path against float64 autograd; the kernels against PyTorch in Triton's interpreter."""

from itertools import product

import pytest
import torch

from tests.gpu.log_probs_check import Case, truth
from tests.interpreter import needs_triton, run_interpreted
from verl_megatron.models import log_prob_kernels as kernels
from verl_megatron.models.log_prob_kernels import Tuning

# Letters: N tokens, V vocabulary rows.

# Logits over temperature reach 20, where float32 numbers are 2e-6 apart; so exponentials are that far off,
# of their own size. bfloat16 is rounded to once, to within 2^-8; Triton's interpreter cuts off instead,
# 2^-7 at most.
LOGIT = 2e-6
GRADIENT, INTERPRETED = (
    {torch.float32: 3e-6, torch.bfloat16: 2**-8 + 3e-6},
    {torch.float32: 3e-6, torch.bfloat16: 2**-7 + 3e-6},
)
# Narrower than a block of 64, whole blocks, both and a rest; rows that begin at odd places; no token and
# one; with tokens of other shards.
SHAPES = [(5, 1), (3, 40), (4, 128), (7, 129), (6, 1001), (1, 333), (0, 70)]


def cases():
    for number, ((tokens, columns), dtype, temperature) in enumerate(
        product(SHAPES, GRADIENT, (1.0, 0.6, None))
    ):
        yield Case(
            tokens=tokens,
            columns=columns,
            padding=number % 3,
            dtype=dtype,
            temperature=temperature,
            seed=number,
            device=torch.device("cpu"),
        )


def close(ours, theirs, *, atol):
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=atol)


@pytest.mark.parametrize(
    "case",
    list(cases()),
    ids=lambda case: f"{case.tokens}x{case.columns}+{case.padding}-{case.dtype}-{case.temperature}",
)
def test_pytorch_is_what_autograd_makes_of_log_softmax(case):
    stats_4N = kernels.stats(case.logits_NV, case.labels_N, case.given)
    logprob_N, entropy_N, factors_4N, grad_NV = truth(case)
    log_z_N = stats_4N[0].double() + stats_4N[1].double().log()
    inside_N = (case.labels_N >= 0) & (case.labels_N < case.logits_NV.size(1))
    close((stats_4N[3] - log_z_N)[inside_N], logprob_N[inside_N], atol=LOGIT)
    close(log_z_N - stats_4N[2] / stats_4N[1], entropy_N, atol=2 * LOGIT)
    assert not stats_4N[3, ~inside_N].any()
    around = case.padding_is_untouched()
    grad = kernels.grad_logits_(case.logits_NV, case.labels_N, case.given, factors_4N.float())
    assert grad.data_ptr() == case.logits_NV.data_ptr() and around()
    torch.testing.assert_close(
        grad.double(), grad_NV, rtol=GRADIENT[case.dtype], atol=LOGIT
    )  # p − 1 for a sure label leaves p's error


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_shards_together_are_the_whole(temperature):
    torch.manual_seed(0)
    logits_NV, labels_N = 3 * torch.randn(9, 100), torch.randint(0, 100, (9,))
    shards = [
        kernels.stats(logits_NV[:, at : at + 25], labels_N - at, temperature) for at in range(0, 100, 25)
    ]
    whole_4N, top_N = (
        kernels.stats(logits_NV, labels_N, temperature),
        torch.stack([shard[0] for shard in shards]).amax(0),
    )
    close(top_N, whole_4N[0], atol=0)
    for number in (1, 2):
        close(
            sum(shard[number] * (shard[0] - top_N).exp() for shard in shards), whole_4N[number], atol=2e-5
        )  # sums of up to 100
    close(sum(shard[3] for shard in shards), whole_4N[3], atol=0)


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    run_interpreted(__file__)


def interpret():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    tuning = Tuning(block=64, num_warps=1)
    for case in cases():
        where = (case.logits_NV, case.labels_N, case.given)
        by_torch_4N, by_triton_4N = kernels.stats_by_torch(*where), kernels.stats_by_triton(*where, tuning)
        torch.testing.assert_close(by_triton_4N, by_torch_4N, rtol=LOGIT, atol=LOGIT)
        factors_4N = truth(case)[2].float()
        expected_NV = kernels.grad_logits_by_torch_(case.logits_NV.clone(), *where[1:], factors_4N)
        around = case.padding_is_untouched()
        grad_NV = kernels.grad_logits_by_triton_(*where, factors_4N, tuning)
        assert grad_NV is case.logits_NV and around()
        torch.testing.assert_close(grad_NV, expected_NV, rtol=INTERPRETED[case.dtype], atol=LOGIT)


if __name__ == "__main__":
    interpret()
    print("interpreted")
