"""Chunked log-probabilities and entropy against log_softmax of the whole logits, gradients included."""

import pytest
import torch
import torch.distributed as dist

from tests.worlds import run_world
from verl_megatron.models.log_probs import Softmax, token_log_probs

VOCAB_SIZE, TOKENS = 29, 13
FLOAT32 = dict(rtol=0, atol=2e-5)  # sums in another order


def by_hand(hidden, weight, labels, *, vocab_size, temperature):
    log_p = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, -1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def chunked(hidden, weight, labels, **options):
    return token_log_probs(hidden, weight, labels, Softmax(**options))


def run(function, hidden, weight, **options):
    """Both values and the gradients of hidden states and weight, of a random sum of the values."""
    generator = torch.Generator().manual_seed(1)
    labels, factors = (
        torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=generator),
        torch.randn(2, TOKENS, generator=generator),
    )
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    logprobs, entropy = function(hidden, weight, labels, vocab_size=VOCAB_SIZE, **options)
    (factors[0] * logprobs + factors[1] * entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(chunk_tokens, temperature):
    torch.manual_seed(0)
    inputs = torch.randn(TOKENS, 8), torch.randn(32, 8)  # three padding rows that must not count
    ours = run(chunked, *inputs, temperature=temperature, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(ours, run(by_hand, *inputs, temperature=temperature), **FLOAT32)
    assert not ours[3][VOCAB_SIZE:].any()


@pytest.mark.parametrize("chunk_tokens", [1, 5, 0])
def test_bfloat16_is_rounded_at_the_logits_and_their_gradient(chunk_tokens):
    torch.manual_seed(0)
    inputs = torch.randn(TOKENS, 8).bfloat16(), torch.randn(32, 8).bfloat16()
    ours = run(chunked, *inputs, temperature=1.0, chunk_tokens=chunk_tokens)
    assert [each.dtype for each in ours] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    for mine, theirs in zip(ours, run(by_hand, *(each.float() for each in inputs), temperature=1.0)):
        assert (
            mine.float() - theirs
        ).norm() < 2e-2 * theirs.norm()  # logits of size 8 are rounded by up to 2^-6


@pytest.mark.parametrize("chunk_tokens", [1, 5, 0])
def test_each_token_has_the_temperature_of_its_sample(chunk_tokens):
    torch.manual_seed(0)
    inputs = torch.randn(TOKENS, 8), torch.randn(32, 8)
    each_N = torch.tensor([1.0, 0.7, 1.9])[torch.arange(TOKENS) % 3]
    ours = run(chunked, *inputs, temperature=each_N, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(ours, run(by_hand, *inputs, temperature=each_N[:, None]), **FLOAT32)
    for value in (1.0, 0.7, 1.9):
        alone = run(chunked, *inputs, temperature=value, chunk_tokens=chunk_tokens)
        for mine, theirs in zip(ours[:2], alone[:2]):
            assert torch.equal(mine[each_N == value], theirs[each_N == value]), "bit by bit those of one"


def test_no_tokens():
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = token_log_probs(hidden, weight, labels, Softmax(vocab_size=30))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,) and not weight.grad.any()


def test_shards():
    output = run_world("tests/unit/test_log_probs.py", 2, timeout=120, fresh=True)
    assert output.count("equal to the whole") == 2


def shards() -> None:
    """Each rank's rows under torchrun, the last of them padding; then a second rank with padding only."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for rows in (16, 32):
        torch.manual_seed(0)
        hidden, weight = torch.randn(TOKENS, 8), torch.randn(2 * rows, 8)
        own = slice(rank * rows, (rank + 1) * rows)
        ours = run(chunked, hidden, weight[own], temperature=0.7, chunk_tokens=5, group=dist.group.WORLD)
        dist.all_reduce(ours[2])  # LanguageHead's part
        theirs = run(by_hand, hidden, weight, temperature=0.7)
        torch.testing.assert_close(ours, (*theirs[:3], theirs[3][own]), **FLOAT32)
    print("equal to the whole")
    dist.destroy_process_group()


if __name__ == "__main__":
    shards()
