"""Output heads from the engine's side: results of the target tokens, and the names of metrics and settings.

Letters: N target tokens, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_megatron.models.build import Head
from verl_megatron.models.heads import head_weight
from verl_megatron.models.log_probs import Softmax, token_log_probs

Outputs = dict[str, Tensor]  # "logprobs" and "entropy", or "values": [N] float32 for the target tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """Results of a head."""

    names: tuple[str, ...]
    # Target tokens' output of the last chunk [N, H or 1], the chunk, labels [N] and distribution → results.
    compute: Callable[[Tensor, torch.nn.Module, Tensor, Softmax], Outputs]
    metrics: str  # prefix of the training metrics
    section: str  # settings of the model that is trained with this head
    last_token: bool = (
        False  # trained on one target token per sample, its last, instead of the response tokens
    )


def _log_probs(hidden_NH: Tensor, chunk: torch.nn.Module, labels_N: Tensor, softmax: Softmax) -> Outputs:
    logprobs, entropy = token_log_probs(hidden_NH, head_weight(chunk), labels_N, softmax)
    return {"logprobs": logprobs, "entropy": entropy}


def _values(values_N1: Tensor, chunk: torch.nn.Module, labels_N: Tensor, softmax: Softmax) -> Outputs:
    return {"values": values_N1.squeeze(-1)}


_LANGUAGE = HeadOutputs(names=("logprobs", "entropy"), compute=_log_probs, metrics="policy", section="actor")
_VALUE = HeadOutputs(names=("values",), compute=_values, metrics="critic", section="critic")
_SCORE = replace(_VALUE, metrics="reward_model", section="reward", last_token=True)

HEADS: dict[Head, HeadOutputs] = {"lm": _LANGUAGE, "token": _VALUE, "sequence": _SCORE}
