"""Output heads from the engine's side: results of the target tokens, and the names of metrics and settings.

Letters: T packed tokens, N target tokens, H hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.weights.rules import Head
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.models.heads import head_weight, trunk
from verl_megatron.models.log_probs import Softmax, token_log_probs

Outputs = dict[str, Tensor]  # "logprobs" and "entropy", "values": [N] float32 for the target tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """Results of a head."""

    names: tuple[str, ...]
    # Output of the last chunk [T, H or 1], the chunk, the micro-batch and the distribution → results.
    compute: Callable[[Tensor, torch.nn.Module, MicroBatch, Softmax], Outputs]
    metrics: str  # prefix of the training metrics
    section: str  # settings of the model that is trained with this head
    last_token: bool = (
        False  # trained on one target token per sample, its last, instead of the response tokens
    )


def _log_probs(hidden_TH: Tensor, chunk: torch.nn.Module, micro: MicroBatch, softmax: Softmax) -> Outputs:
    hidden_NH = hidden_TH.index_select(0, micro.index)
    softmax = replace(softmax, temperature=micro.fields.get("temperature", softmax.temperature))
    logprobs, entropy = token_log_probs(hidden_NH, head_weight(chunk), micro.labels, softmax)
    return {"logprobs": logprobs, "entropy": entropy}


def _values(values_T1: Tensor, chunk: torch.nn.Module, micro: MicroBatch, softmax: Softmax) -> Outputs:
    return {"values": values_T1.index_select(0, micro.index).squeeze(-1)}


def _log_probs_and_values(
    hidden_TH: Tensor, chunk: torch.nn.Module, micro: MicroBatch, softmax: Softmax
) -> Outputs:
    values_T1 = trunk(chunk).value_head.take_values().squeeze(1)
    return _log_probs(hidden_TH, chunk, micro, softmax) | _values(values_T1, chunk, micro, softmax)


_LANGUAGE = HeadOutputs(names=("logprobs", "entropy"), compute=_log_probs, metrics="policy", section="actor")
_VALUE = HeadOutputs(names=("values",), compute=_values, metrics="critic", section="critic")
_BOTH = replace(_LANGUAGE, names=(*_LANGUAGE.names, *_VALUE.names), compute=_log_probs_and_values)
_SCORE = replace(_VALUE, metrics="reward_model", section="reward", last_token=True)

HEADS: dict[Head, HeadOutputs] = {
    "lm": _LANGUAGE,
    "token": _VALUE,
    "sequence": _SCORE,
    "lm_token": _BOTH,
}


def finite(grad_norm: float, head: HeadOutputs) -> float:
    """Return the gradient norm, which is the same on all members; ValueError if it is not finite."""
    if not math.isfinite(grad_norm):
        raise ValueError(
            f"{head.metrics}/grad_norm is {grad_norm}: this step would leave weights that are no numbers, "
            "so the run ends, and checkpoints stay as they are;"
            f" lower {head.section}.lr or engine.clip_grad, or look at the rewards and ratios before it"
        )
    return grad_norm
