"""Chunked log-probabilities and entropy against log_softmax of the whole logits, gradients included."""

import pytest
import torch

from verl_megatron.log_probs import token_log_probs


def by_hand(hidden, weight, labels, *, vocab_size, temperature):
    log_p = torch.log_softmax(hidden @ weight[:vocab_size].t() / temperature, -1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(chunk_tokens, temperature):
    torch.manual_seed(0)
    labels, vocab_size = torch.randint(0, 29, (13,)), 29
    inputs = [torch.randn(13, 8, dtype=torch.float32), torch.randn(32, 8)]  # three padding rows that must not count
    factors = torch.randn(2, 13)
    gradients = []
    for function, extra in ((token_log_probs, dict(chunk_tokens=chunk_tokens)), (by_hand, {})):
        hidden, weight = (x.clone().requires_grad_() for x in inputs)
        logprobs, entropy = function(hidden, weight, labels, vocab_size=vocab_size, temperature=temperature, **extra)
        (factors[0] * logprobs + factors[1] * entropy).sum().backward()
        gradients.append((logprobs.detach(), entropy.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # fp32 sums in another order
    assert not gradients[0][3][29:].any()


def test_no_tokens():
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    logprobs, entropy = token_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64), vocab_size=30, temperature=1.0)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,) and not weight.grad.any()
