"""A model whose text goes round a circle of tokens, each with a given probability; others lead back to it.

Its layers add nothing, so the last hidden state is the token's embedding, of entries 1 and -1. The head's row
of the following token is that embedding, scaled so that its softmax has the probability.

Letters: R rows of the vocabulary on this rank, C columns (hidden size).
"""

from math import log

import torch
from torch import Tensor

from verl_megatron.rollout.vllm import VLLMActor

PERIOD = 64  # tokens of the circle, the first ones of the vocabulary
_ROWS = 1024  # written at a time


def following(token: int, vocab_size: int, *, step: int = 1) -> int:
    """Return the token that follows; with `step` -1 the one of the circle before."""
    return (token + step) % min(PERIOD, vocab_size)


def write_repeating(actor: VLLMActor, *, chance: float, step: int = 1) -> None:
    """Write such weights into an engine. Collective.

    Args:
        chance: probability of the following token, apart from rounding; above that of the others.
        step: 1 or -1, the direction.

    Raises:
        ValueError: the embedding is also the head.
    """
    weights, vocab_size = actor.weight_target(), actor.vocab_size
    if "lm_head.weight" not in weights:
        raise ValueError(
            f"{actor.model_name}: --repeat needs a head of its own, and the embedding is the head"
        )
    for tensor in weights.values():
        tensor.zero_()
    weights["model.norm.weight"].fill_(1)
    embedding_RC, head_RC = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    columns = embedding_RC.shape[1]
    scale = log(chance * (vocab_size - 1) / (1 - chance)) / columns
    own = range(actor.tp_rank * len(head_RC), (actor.tp_rank + 1) * len(head_RC))
    for start in range(0, len(own), _ROWS):
        rows = own[start : start + _ROWS]
        places = [following(row, vocab_size, step=0) for row in rows]
        embedding_RC[start : start + _ROWS] = _signs(places, columns, embedding_RC)
        before = [following(row, vocab_size, step=-step) for row in rows if row < min(PERIOD, vocab_size)]
        head_RC[start : start + len(before)] = scale * _signs(before, columns, head_RC)
    actor.reset_cache()


def _signs(rows: list[int], columns: int, like: Tensor) -> Tensor:
    """Return 1 and -1 by a hash of row and column: [R, C] of the dtype of `like`."""
    row_R1 = torch.tensor(rows, dtype=torch.long, device=like.device)[:, None]
    mixed_RC = row_R1 * 0x9E3779B1 + torch.arange(columns, device=like.device) * 0x85EBCA77
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed_RC = (mixed_RC ^ (mixed_RC >> 15)) * factor
    return (((mixed_RC >> 20) & 1) * 2 - 1).to(like.dtype)
