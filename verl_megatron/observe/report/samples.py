"""Samples of a report: rows of `samples/` and `validation/`, grouped by prompt, within a budget."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_megatron.observe import samples
from verl_megatron.observe.tracking import complete_lines

MAX_TOKENS = 60_000  # of all samples of a run's report
MAX_RECORDS = 12  # iterations whose samples are shown
MAX_VALIDATED = 40  # validation prompts that are shown
HEAD_TOKENS, TAIL_TOKENS = 1_500, 500  # of a long response
MAX_CHARACTERS = 20_000  # of a prompt, and of a response without tokens
SIGNIFICANT = 3  # digits of log-probs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A response to a prompt; its tokens have log-probs only where the record has them."""

    step: int
    response: str  # empty if there are tokens
    score: float | None
    is_cut: bool = False
    tokens: list[str] | None = None
    logprobs: list[float | None] | None = None  # of the actor, nats; None for tokens that were not sampled
    gaps: list[float | None] | None = None  # logprobs minus those of the sampler
    left_out: int = 0  # tokens between the HEAD_TOKENS first and the TAIL_TOKENS last


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt: those of one training iteration, or of all validations."""

    source: str  # "training" or "validation"
    prompt: str
    answer: str = ""
    samples: list[Sample]


def read_groups(folder: Path, *, last_step: int, notes: list[str]) -> list[Group]:
    """Read the samples of a run, newest iterations first; records after `last_step` are of another run.

    What is damaged is left out and noted in `notes`.
    """
    groups, budget = [], MAX_TOKENS
    written = [entry for entry in samples.records(folder / samples.FOLDER) if entry[0] <= last_step]
    for step, path in spread_out(written[::-1], MAX_RECORDS):
        found = _training_groups(step, _rows(path, notes))
        budget -= sum(len(sample.tokens or ()) for group in found for sample in group.samples)
        if budget < 0 and groups:
            break
        groups += found
    validated = [
        entry for entry in samples.records(folder / samples.VALIDATION_FOLDER) if entry[0] <= last_step
    ]
    by_step = [(step, _rows(path, notes)) for step, path in spread_out(validated, 3)]
    return groups + _validation_groups(by_step)


def spread_out(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of `items` (2 or more), evenly apart, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines of a record that are samples."""
    try:
        lines = complete_lines(path)
    except OSError as error:
        notes.append(f"{path.parent.name}/{path.name} cannot be read ({error.strerror}) and is left out")
        return []
    rows = [row for line in lines if (row := _parsed(line)) is not None]
    if len(rows) < len(lines):
        notes.append(f"{len(lines) - len(rows)} lines of {path.parent.name}/{path.name} are no samples")
    return rows


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_sample = (
        isinstance(row, dict)
        and isinstance(row.get("prompt"), str)
        and isinstance(row.get("response"), str)
        and ("score" not in row or _is_number(row["score"]))
        and type(row.get("sample")) is int
        and ("group" not in row or type(row["group"]) is int)
        and ("tokens" not in row or _has_tokens(row))
    )
    return row if is_sample else None


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= 2**53)  # larger ones may overflow


def _has_tokens(row: dict[str, Any]) -> bool:
    """Whether a row has texts and log-probs of its tokens, in lists of one length."""
    tokens, ours, theirs = (row.get(name) for name in ("tokens", "logprobs", "rollout_logprobs"))
    if not (isinstance(tokens, list) and isinstance(ours, list) and isinstance(theirs, list)):
        return False
    return (
        len(tokens) == len(ours) == len(theirs)
        and all(isinstance(text, str) for text in tokens)
        and all(value is None or _is_number(value) for value in [*ours, *theirs])
    )


def _training_groups(step: int, rows: Iterable[dict[str, Any]]) -> list[Group]:
    by_group: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row.get("group", 0), []).append(row)
    return [_training_group(step, by_group[number]) for number in sorted(by_group)]


def _training_group(step: int, rows: Sequence[dict[str, Any]]) -> Group:
    return Group(
        source="training",
        prompt=shortened(rows[0]["prompt"]),
        samples=[_sample(step, row) for row in rows],
    )


def _validation_groups(by_step: Sequence[tuple[int, list[dict[str, Any]]]]) -> list[Group]:
    """Group by prompt: how the answer to it changed from validation to validation."""
    groups: dict[tuple[int, str], Group] = {}
    for step, rows in by_step:
        for row in rows:
            key = row["sample"], row["prompt"]
            if key not in groups:
                answer = row.get("answer")
                text = answer if isinstance(answer, str) else json.dumps(answer)
                groups[key] = Group(
                    source="validation",
                    prompt=shortened(row["prompt"]),
                    answer="" if answer is None else shortened(text),
                    samples=[],
                )
            groups[key].samples.append(_sample(step, row))
    return list(groups.values())[:MAX_VALIDATED]


def _sample(step: int, row: dict[str, Any]) -> Sample:
    score = float(row["score"]) if math.isfinite(row.get("score", math.nan)) else None
    if "tokens" not in row:
        return Sample(step=step, response=shortened(row["response"]), score=score)
    pairs = zip(row["logprobs"], row["rollout_logprobs"])
    gaps = [None if ours is None or theirs is None else ours - theirs for ours, theirs in pairs]
    return Sample(
        step=step,
        response="",
        score=score,
        is_cut=row.get("is_cut") is True,
        tokens=_ends(row["tokens"]),
        logprobs=[significant(value, SIGNIFICANT) for value in _ends(row["logprobs"])],
        gaps=[significant(value, SIGNIFICANT) for value in _ends(gaps)],
        left_out=max(len(row["tokens"]) - HEAD_TOKENS - TAIL_TOKENS, 0),
    )


def _ends(values: list[Any]) -> list[Any]:
    """Return the first and the last entries of a list that is too long."""
    if len(values) <= HEAD_TOKENS + TAIL_TOKENS:
        return values
    return values[:HEAD_TOKENS] + values[-TAIL_TOKENS:]


def significant(value: float | None, digits: int) -> float | None:
    """Round to significant digits; None stays None, and so becomes what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def shortened(text: str) -> str:
    """Cut a text that is too long for the page."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} characters left out)"
