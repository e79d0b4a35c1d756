"""Optimizer steps against plain PyTorch, written out here.

Letters: N tokens asked about in a sample.
"""

import torch
from torch import Tensor

from parallel.layout import Layout
from tests.parity.training import CLASSES, FIELDS, KL_COEF, LR, experience, train
from tests.parity.world import (
    check,
    largest,
    make_batch,
    sample_logits,
    say,
    shared_folder,
    weights_apart,
    write_once,
)
from verl_megatron.config import EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.roles.engine import EngineOptions

# ---- the same in plain PyTorch ---------------------------------------------------------------------------


def plain_policy_loss(
    logits_NV: Tensor,
    labels_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    ref_N: Tensor,
    temperature: float,
) -> Tensor:
    """Sum over the tokens of PPO's clipped loss, the entropy bonus and the k3 penalty."""
    distribution = torch.distributions.Categorical(logits=logits_NV / temperature)
    logprob_N = distribution.log_prob(labels_N)
    ratio_N = torch.exp(logprob_N - old_N)
    clipped_N = torch.clamp(ratio_N, 0.8, 1.3)
    surrogate_N = (
        torch.where(ratio_N * advantages_N < clipped_N * advantages_N, ratio_N, clipped_N) * advantages_N
    )
    kl_N = torch.exp(ref_N - logprob_N) - 1 - (ref_N - logprob_N)
    return (-surrogate_N - 0.01 * distribution.entropy() + KL_COEF * kl_N).sum()


def plain_value_loss(value_N: Tensor, old_N: Tensor, return_N: Tensor) -> Tensor:
    """Sum over the tokens of half the squared error, the larger of the free and the limited one."""
    limited_N = torch.minimum(torch.maximum(value_N, old_N - 0.2), old_N + 0.2)
    return torch.stack([(value_N - return_N) ** 2, (limited_N - return_N) ** 2]).amax(0).sum() / 2


def plain_loss(model, batch: RolloutBatch, head: str, temperature: float) -> Tensor:
    """Mean over all response tokens."""
    total = torch.zeros(())
    for b, logits in enumerate(sample_logits(model, batch)):
        asked = batch.response_mask[b].nonzero().squeeze(1)
        known = [getattr(batch, name)[b, asked] for name in FIELDS[head]]
        if head == "lm":
            total = total + plain_policy_loss(
                logits[asked - 1], batch.generated_ids[b, asked], *known, temperature
            )
        else:
            total = total + plain_value_loss(logits[asked - 1, 0], *known)
    return total / batch.response_mask.sum()


def plain_steps(
    model, batch: RolloutBatch, head: str, config: EngineConfig, temperature: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms of two AdamW steps, and the weights afterwards."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=tuple(config.adam_betas), eps=config.adam_eps)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        plain_loss(model, batch, head, temperature).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, config.clip_grad).item())
        optimizer.step()
    return norms, {name: p.detach().view(len(p), -1) for name, p in model.named_parameters()}


def initial_logprobs(model, batch: RolloutBatch, temperature: float) -> Tensor:
    """[B, T]: what the model says of each token but the first."""
    logprobs_BT = torch.zeros(batch.generated_ids.shape)
    with torch.no_grad():
        for b, logits in enumerate(sample_logits(model, batch)):
            ids = batch.generated_ids[b, 1 : len(logits)]
            logprobs_BT[b, 1 : len(logits)] = (
                torch.log_softmax(logits[:-1] / temperature, -1).gather(1, ids[:, None]).squeeze(1)
            )
    return logprobs_BT


def check_plain() -> None:
    """Two steps of the engine are two steps of autograd and torch.optim.AdamW on the Hugging Face model."""
    folder, temperature = shared_folder(), 0.7
    config = EngineConfig(tokens_per_micro_batch=64, clip_grad=0.5, adam_eps=1e-4, weight_decay=0.1)
    for head, family in (("lm", "qwen2_tied_yarn"), ("lm", "qwen3"), ("token", "llama_tied_llama3")):
        path = folder / f"{head}_{family}"
        model = write_once(path, family, CLASSES[head])
        batch = make_batch(model.config.vocab_size)
        batch = experience(
            model.config.vocab_size,
            logprobs_BT=initial_logprobs(model, batch, temperature) if head == "lm" else 0.0,
        )
        norms, want = plain_steps(model, batch, head, config, temperature)
        assert min(norms) > config.clip_grad, "the gradients have to be clipped, or clipping is not compared"
        for text, count in (("tp1", 1), ("tp2pp2", 4)):
            options = EngineOptions(config=config, seed=1, temperature=temperature)
            history, weights = train(
                path, head, Layout.parse(text, tuple(range(count))), batch, options, steps=2
            )
            kind = "policy" if head == "lm" else "critic"
            clipped = history[0][f"{kind}/clip_fraction"]
            assert 0.05 < clipped < 0.95, f"both branches of the clip have to be taken: {clipped}"
            norm = largest(abs(step[f"{kind}/grad_norm"] - x) / x for step, x in zip(history, norms))
            moved = weights_apart(weights, want)
            say(f"gradient norms {norms}, clipped {clipped:.2f}")
            check(f"plain {head} {family} {text} on {count}", limit=1e-5, weights=moved, relative_norm=norm)
