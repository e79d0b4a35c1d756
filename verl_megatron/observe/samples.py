"""Samples as JSON lines, for people to read: of some prompts of an iteration, and of validation.

Letters: B samples on this rank, T positions of prompt and response.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel.rank_set import RankSet
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.tokenizer import Tokenizer

FOLDER = "samples"  # in run.output_dir; training samples
VALIDATION_FOLDER = "validation"
DECIMALS = 5  # of log-probs, nats


def record_samples(
    batch: RolloutBatch, tokenizer: Tokenizer, world: RankSet, *, prompts: int, path: Path
) -> None:
    """Write the samples of the iteration's first `prompts` prompts to `path`, from the first rank.

    Collective over `world`. Rows are those of `sample_rows`, by number of the sample.

    Args:
        batch: the samples owned by this rank, with scores and log-probs.
    """
    gathered = world.gather_object(sample_rows(batch, tokenizer, prompts=prompts))
    if gathered is not None:
        write_rows(path, (row for part in gathered for row in part))


def sample_rows(batch: RolloutBatch, tokenizer: Tokenizer, *, prompts: int) -> list[dict[str, Any]]:
    """Return a row for each sample of the first `prompts` prompts that this rank owns.

    `tokens`, `logprobs` (of the actor before the iteration's updates) and `rollout_logprobs` (of the sampler)
    have an entry for each response token. Log-probs are in nats, None for tokens that were not sampled.
    """
    rows = []
    groups, samples = batch.required("group_id").tolist(), batch.sample_id.tolist()
    for b, (group, sample) in enumerate(zip(groups, samples)):
        if group >= prompts:
            continue
        ids_T, sampled_T = batch.generated_ids[b], batch.response_mask[b]
        end = int(batch.attention_mask[b].sum())
        first = int(sampled_T.long().argmax()) if sampled_T.any() else end
        response, sampled = ids_T[first:end].tolist(), sampled_T[first:end]
        row = {
            "sample": sample,
            "group": group,
            "prompt": tokenizer.decode(ids_T[:first].tolist()),
            "response": tokenizer.decode(response),
            "tokens": tokenizer.token_texts(response),
        }
        if batch.rewards is not None:
            row["score"] = float(batch.rewards[b])
        if batch.is_cut is not None:
            row["is_cut"] = bool(batch.is_cut[b])
        for name in ("logprobs", "rollout_logprobs"):
            row[name] = _nats(batch.required(name)[b, first:end], sampled)
        rows.append(row)
    return rows


def _nats(logprobs: Tensor, sampled: Tensor) -> list[float | None]:
    pairs = zip(logprobs.tolist(), sampled.tolist())
    return [round(value, DECIMALS) if is_sampled else None for value, is_sampled in pairs]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, ordered by "sample"; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda row: row["sample"])]
    # lone surrogates are written as JSON escapes them
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="backslashreplace")


def records(folder: Path) -> list[tuple[int, Path]]:
    """Return iteration and path of each `step_N.jsonl` in `folder`, by iteration."""
    found = [(re.fullmatch(r"step_(\d{1,15})", path.stem), path) for path in folder.glob("step_*.jsonl")]
    return sorted((int(number[1]), path) for number, path in found if number and path.is_file())


def remove_later(folder: Path, first_step: int) -> None:
    """Remove the records of iterations from `first_step` on, which a resumed run repeats."""
    for step, path in records(folder):
        if step >= first_step:
            path.unlink()
