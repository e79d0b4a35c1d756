"""The record that flows through an iteration: rows of tokens with what was learnt about each.

Letters: B rows on this rank, S prompt positions, T positions of prompt and response. Rows are padded on the right.
A per-token field at position t speaks of token t: `logprobs[b, t]` is log p(token t | tokens before t) and
`values[b, t]` the critic's value of the state in which token t is chosen. Outside the response every such field is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(slots=True)
class RolloutBatch:
    """Rows with their prompts, responses and scores. Fields that an algorithm does not need stay None."""

    row_id: Tensor  # [B] int64, number of the row in the iteration: 0, 1, ... over all ranks, without gaps
    input_ids: Tensor  # [B, S] int64, prompts
    generated_ids: Tensor  # [B, T] int64, prompt and response
    attention_mask: Tensor  # [B, T] bool, prompt and response
    response_mask: Tensor  # [B, T] bool, the model's own tokens of the response: between turns there are others, such as a tool's answer
    group_id: Tensor | None = (
        None  # [B] int64, number of the prompt in the iteration, without gaps; the rows of a prompt share it
    )
    policy_version: Tensor | None = None  # [B] int64, updates of the policy that generated the row
    rollout_logprobs: Tensor | None = None  # [B, T] float32, the sampler's (vLLM's)
    rewards: Tensor | None = None  # [B] float32, score of the row
    logprobs: Tensor | None = None  # [B, T] float32, the actor's before the iteration's updates
    ref_logprobs: Tensor | None = None  # [B, T] float32
    values: Tensor | None = None  # [B, T] float32
    token_rewards: Tensor | None = None  # [B, T] float32, score on the last token, less the KL penalty
    advantages: Tensor | None = None  # [B, T] float32
    returns: Tensor | None = None  # [B, T] float32

    def __len__(self) -> int:
        return len(self.row_id)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are set, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def select(self, index: Tensor) -> "RolloutBatch":
        """Rows `index` [B'] int64, in that order."""
        return RolloutBatch(**{name: value[index] for name, value in self.tensors().items()})

    @property
    def lengths(self) -> Tensor:
        """[B] int64, tokens of prompt and response."""
        return self.attention_mask.sum(-1)

    @classmethod
    def concatenate(cls, parts: Sequence["RolloutBatch"]) -> "RolloutBatch":
        """All rows of `parts` (at least one, with the same fields set), ordered by number and padded to the widest."""

        def joined(tensors: list[Tensor]) -> Tensor:
            width = max((tensor.size(1) for tensor in tensors if tensor.dim() > 1), default=0)
            return torch.cat(
                [
                    torch.nn.functional.pad(tensor, (0, width - tensor.size(1)))
                    if tensor.dim() > 1
                    else tensor
                    for tensor in tensors
                ]
            )

        batch = cls(**{name: joined([part.tensors()[name] for part in parts]) for name in parts[0].tensors()})
        return batch.select(batch.row_id.argsort())

    @classmethod
    def from_rows(
        cls,
        row_ids: list[int],
        prompts: list[list[int]],
        responses: list[list[int]],
        rollout_logprobs: list[list[float]] | None = None,
    ) -> "RolloutBatch":
        """Pad ragged rows; every prompt has at least one token. Without rows the batch is empty, one position wide."""
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses)]
        width, prompt_width = max(lengths, default=1), max(map(len, prompts), default=1)
        ids = torch.zeros(len(row_ids), width, dtype=torch.int64)
        prompt_ids = torch.zeros(len(row_ids), prompt_width, dtype=torch.int64)
        logprobs = torch.zeros(len(row_ids), width)
        for b, (prompt, response) in enumerate(zip(prompts, responses)):
            prompt_ids[b, : len(prompt)] = torch.tensor(prompt)
            ids[b, : lengths[b]] = torch.tensor(prompt + response)
            if rollout_logprobs is not None:
                logprobs[b, len(prompt) : lengths[b]] = torch.tensor(rollout_logprobs[b])
        place_T = torch.arange(width)
        attention_mask = place_T < torch.tensor(lengths, dtype=torch.int64)[:, None]
        response_mask = attention_mask & (
            place_T >= torch.tensor(list(map(len, prompts)), dtype=torch.int64)[:, None]
        )
        return cls(
            row_id=torch.tensor(row_ids, dtype=torch.int64),
            input_ids=prompt_ids,
            generated_ids=ids,
            attention_mask=attention_mask,
            response_mask=response_mask,
            rollout_logprobs=logprobs if rollout_logprobs is not None else None,
        )
