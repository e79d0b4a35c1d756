"""Prompts and demonstrations from JSON-lines files, and the order in which prompts are drawn."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from verl_megatron.config import DataConfig, SFTDataConfig
from verl_megatron.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class Prompt:
    """A prompt with what its reward needs."""

    prompt_token_ids: list[int]
    text: str  # what the model reads, chat template applied
    answer: Any = None  # ground truth
    extra: dict[str, Any] = field(default_factory=dict)  # the row's other keys


@dataclass(kw_only=True, slots=True)
class Demonstration:
    """A prompt and the response to imitate, which ends in the end-of-sequence token."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]


def numbered_rows(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Line numbers (from 1) and objects of a JSON-lines file; empty lines are passed over.

    Raises:
        ValueError: no such file, or a line that is not a JSON object, with file and line.
    """
    if not Path(path).is_file():
        raise ValueError(f"data file {path} does not exist; give a .jsonl file with one JSON object a line")
    with open(path, "rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw)
            except ValueError as error:  # bad JSON or bad UTF-8
                raise ValueError(f"{path}, line {line}: not valid JSON ({error}); each line must be one JSON object") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {line}: expected a JSON object, got {type(row).__name__}")
            yield line, row


def read_rows(path: str | Path) -> list[dict]:
    """All objects of a JSON-lines file; errors as in `numbered_rows`."""
    return [row for _, row in numbered_rows(path)]


class _Rows(Sequence):
    """Rows of a file that are short enough; `dropped` counts the others."""

    def __init__(self, path: str | Path, *, limit: int, limit_name: str, overlong: str, rows: int | None):
        if overlong not in ("error", "drop"):
            raise ValueError(f"data.overlong={overlong!r} is unknown; choose error or drop")
        self.path = path
        self.dropped = 0
        self._items = []
        for line, row in islice(numbered_rows(path), rows):
            item, length = self._parse(row, f"{path}, line {line}")
            if length <= limit:
                self._items.append(item)
            elif overlong == "drop":
                self.dropped += 1
            else:
                raise ValueError(f"{path}, line {line}: {length} tokens, more than data.{limit_name}={limit}; raise the limit or set data.overlong=drop")
        if not self._items:
            why = f"all {self.dropped} rows are longer than data.{limit_name}={limit}" if self.dropped else "it has no rows"
            raise ValueError(f"data file {path} gives nothing to train on: {why}")

    def _parse(self, row: dict, where: str) -> tuple[Any, int]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


def _value(row: dict, key: str, *, setting: str, where: str) -> Any:
    if key not in row:
        raise ValueError(f"{where}: no key {key!r} (data.{setting}); the row has {', '.join(map(repr, row)) or 'no keys'}")
    return row[key]


def _prompt_ids(tokenizer: Tokenizer, prompt: Any, where: str) -> list[int]:
    try:
        ids = tokenizer.encode_prompt(prompt)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not ids:
        raise ValueError(f"{where}: the prompt is empty")
    return ids


class PromptDataset(_Rows):
    """`Prompt`s of a file, in its order, of its first `rows` if given. An empty `answer_key` means rows without ground truth.

    Raises:
        ValueError: an unreadable row, a missing key, a prompt over the limit (if overlong is "error"), or no prompt left.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer, config: DataConfig, *, rows: int | None = None):
        self._tokenizer = tokenizer
        self._config = config
        super().__init__(path, limit=config.max_prompt_tokens, limit_name="max_prompt_tokens", overlong=config.overlong, rows=rows)

    def _parse(self, row: dict, where: str) -> tuple[Prompt, int]:
        config = self._config
        prompt = _value(row, config.prompt_key, setting="prompt_key", where=where)
        answer = _value(row, config.answer_key, setting="answer_key", where=where) if config.answer_key else None
        ids = _prompt_ids(self._tokenizer, prompt, where)
        extra = {key: value for key, value in row.items() if key not in (config.prompt_key, config.answer_key)}
        return Prompt(prompt_token_ids=ids, text=self._tokenizer.prompt_text(prompt), answer=answer, extra=extra), len(ids)


class DemonstrationDataset(_Rows):
    """`Demonstration`s of a file, in its order, of its first `rows` if given.

    Raises:
        ValueError: an unreadable row, a missing key, a row over the limit (if overlong is "error"), or no row left.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer, config: SFTDataConfig, *, rows: int | None = None):
        self._tokenizer = tokenizer
        self._config = config
        super().__init__(path, limit=config.max_tokens, limit_name="max_tokens", overlong=config.overlong, rows=rows)

    def _parse(self, row: dict, where: str) -> tuple[Demonstration, int]:
        ids = _prompt_ids(self._tokenizer, _value(row, self._config.prompt_key, setting="prompt_key", where=where), where)
        response = _value(row, self._config.response_key, setting="response_key", where=where)
        if not isinstance(response, str):
            raise ValueError(f"{where}: {self._config.response_key!r} must be a string, got {response!r}")
        response_ids = self._tokenizer.encode_response(response)
        return Demonstration(prompt_token_ids=ids, response_token_ids=response_ids), len(ids) + len(response_ids)


class PromptCursor:
    """Draws row numbers epoch by epoch: each epoch is a permutation fixed by (seed, epoch), so a position is two integers."""

    def __init__(self, *, num_prompts: int, seed: int, shuffle: bool = True):
        assert num_prompts > 0
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self._go_to(epoch=0, position=0)

    def _go_to(self, *, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self._order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)

    def draw(self, count: int) -> list[int]:
        """The next `count` row numbers; a new epoch starts where one ends."""
        drawn: list[int] = []
        while len(drawn) < count:
            if self.position == self.num_prompts:
                self._go_to(epoch=self.epoch + 1, position=0)
            taken = self._order[self.position : self.position + count - len(drawn)]
            self.position += len(taken)
            drawn += taken
        return drawn

    def state_dict(self) -> dict[str, int]:
        """Plain integers from which `load_state_dict` goes on exactly."""
        return {"epoch": self.epoch, "position": self.position, "num_prompts": self.num_prompts, "seed": self.seed, "shuffle": int(self.shuffle)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`.

        Raises:
            ValueError: it was saved with another number of prompts, seed or shuffle.
        """
        for name in ("num_prompts", "seed", "shuffle"):
            if state[name] != int(getattr(self, name)):
                raise ValueError(f"the saved data position has {name}={state[name]}, this run {int(getattr(self, name))}; resume with the same data, run.seed and data.shuffle")
        self._go_to(epoch=state["epoch"], position=state["position"])
