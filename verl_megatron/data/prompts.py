"""Prompt and demonstration datasets from JSON-lines files, and the order in which prompts are drawn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, PairDataConfig, SFTDataConfig
from verl_megatron.data.chat import Message, Messages, split_answer, text_of
from verl_megatron.data.json_lines import numbered_rows
from verl_megatron.data.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class Prompt:
    """A prompt with the inputs of its reward."""

    prompt_token_ids: list[int]
    text: str  # what the model reads, chat template applied
    answer: Any = None  # ground truth
    extra: dict[str, Any] = field(default_factory=dict)  # the row's other keys


@dataclass(kw_only=True, slots=True)
class Demonstration:
    """A prompt and its target response, which ends in the end-of-sequence token."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]

    def samples(self) -> list[tuple[list[int], list[int]]]:
        """Return prompt and response of the samples to train on: one."""
        return [(self.prompt_token_ids, self.response_token_ids)]


class RowReader(Sequence):
    """Rows of a file that are within the token limit.

    Args:
        vocab_size: of the model; token ids must be below it. None: unknown.
        max_rows: number of rows to read at most. None: all.
    """

    _limit_name: str  # the setting that limits the tokens of a row

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer,
        config: DataConfig | SFTDataConfig | PairDataConfig,
        *,
        vocab_size: int | None = None,
        max_rows: int | None = None,
    ):
        if config.overlong not in ("error", "drop"):
            raise ValueError(f"data.overlong={short_repr(config.overlong)} is unknown; choose error or drop")
        if not config.prompt_key:
            raise ValueError("data.prompt_key is empty; name the key of a row's prompt")
        self.path, self._tokenizer, self._vocab_size = path, tokenizer, vocab_size
        self._config: Any = config
        self.dropped = 0  # rows that are too long
        self.cut = 0  # prompts whose trailing assistant turns were removed
        self._limit: int = getattr(config, self._limit_name)
        self._items: list = []
        for line, row in islice(numbered_rows(path), max_rows):
            try:
                self._add(row)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
        if not self._items and self.dropped != max_rows:  # otherwise later rows may be short enough
            why = (
                f"all {self.dropped} rows are longer than data.{self._limit_name}={self._limit}"
                if self.dropped
                else "it has no rows"
            )
            raise ValueError(f"data file {path} gives nothing to train on: {why}")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]

    @property
    def notes(self) -> list[str]:
        """User messages about the parts of the file that were left out."""
        limit = f"data.{self._limit_name}={self._limit}"
        dropped = f"{self.path}: {self.dropped} rows longer than {limit} left out (data.overlong=drop)"
        cut = (
            f"{self.path}: {self.cut} prompts ended in an assistant turn, which is an answer and was cut off"
        )
        return [dropped] * bool(self.dropped) + [cut] * bool(self.cut)

    def _add(self, row: dict) -> None:
        item, length = self._parse(row)
        if item is not None and length <= self._limit:
            self._items.append(item)
        elif self._config.overlong == "drop":
            self.dropped += 1
        else:
            length_said = f"{length} tokens" if item is not None else f"at least {length} tokens"
            raise ValueError(
                f"{length_said}, more than data.{self._limit_name}={self._limit};"
                " raise the limit or set data.overlong=drop"
            )

    def _parse(self, row: dict) -> tuple[Any, int]:
        """Return a row's item and token count; no item if its character count alone exceeds the limit."""
        raise NotImplementedError

    def _value(self, row: dict, setting: str) -> Any:
        key = getattr(self._config, setting)
        if key not in row:
            names = ", ".join(map(short_repr, islice(row, 20))) or "no keys"
            raise ValueError(
                f"no key {short_repr(key)} (data.{setting}); the row has {names}{', ...' * (len(row) > 20)}"
            )
        return row[key]

    def _fewest_tokens(self, *texts: str) -> int:
        """Lower bound of the texts' tokens: tokenizing 10 MB only to find it too long takes seconds."""
        return sum(map(len, texts)) // self._tokenizer.longest_token

    def _encoded(self, before: str, behind: str, *, is_chat: bool) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and of the response to it."""
        tokenizer = self._tokenizer
        if is_chat:
            ids, response_ids = tokenizer.encode_chat(before, behind)
        else:
            ids = tokenizer.encode_text(before, is_chat=False)
            response_ids = tokenizer.encode_response(behind)
        self._check_tokens(ids + response_ids)
        return ids, response_ids

    def _check_tokens(self, ids: list[int]) -> None:
        if self._vocab_size is not None and max(ids) >= self._vocab_size:
            raise ValueError(
                f"the tokenizer in {self._tokenizer.hf.name_or_path} gives token {max(ids)},"
                f" and the model has vocab_size={self._vocab_size}; use the model's own tokenizer"
            )


class PromptDataset(RowReader):
    """`Prompt`s of a file, in file order.

    Options are those of `RowReader`. An empty `answer_key` means rows without ground truth.

    Raises:
        ValueError: an unreadable row, a missing key, a prompt over the limit (unless overlong is "drop"), or
            none left.
    """

    _limit_name = "max_prompt_tokens"
    _config: DataConfig

    def __init__(self, path: str | Path, tokenizer: Tokenizer, config: DataConfig, **options: int | None):
        if config.answer_key and config.answer_key == config.prompt_key:
            raise ValueError(
                f"data.prompt_key and data.answer_key are both {short_repr(config.answer_key)};"
                " name two keys, or leave answer_key empty"
            )
        super().__init__(path, tokenizer, config, **options)

    def _parse(self, row: dict) -> tuple[Prompt | None, int]:
        config, tokenizer = self._config, self._tokenizer
        prompt, given = split_answer(self._value(row, "prompt_key"))
        answer = self._value(row, "answer_key") if config.answer_key else None
        text = tokenizer.prompt_text(prompt)
        if (fewest := self._fewest_tokens(text)) > self._limit:
            return None, fewest
        ids = tokenizer.encode_text(text, is_chat=not isinstance(prompt, str))
        self._check_tokens(ids)
        self.cut += bool(given)
        extra = {
            key: value for key, value in row.items() if key not in (config.prompt_key, config.answer_key)
        }
        return Prompt(prompt_token_ids=ids, text=text, answer=answer, extra=extra), len(ids)


class DemonstrationDataset(RowReader):
    """`Demonstration`s of a file, in file order; an assistant turn at the end of messages is the response.

    Raises:
        ValueError: an unreadable row, a missing key, two responses, a row over the limit (unless overlong is
            "drop"), or none left.
    """

    _limit_name = "max_tokens"
    _config: SFTDataConfig

    def _parse(self, row: dict) -> tuple[Demonstration | None, int]:
        prompt, answers = split_answer(self._value(row, "prompt_key"))
        before, behind = self._tokenizer.demonstration_text(prompt, self._response(row, answers))
        if (fewest := self._fewest_tokens(before, behind)) > self._limit:
            return None, fewest
        ids, response_ids = self._encoded(before, behind, is_chat=not isinstance(prompt, str))
        return Demonstration(prompt_token_ids=ids, response_token_ids=response_ids), len(ids) + len(
            response_ids
        )

    def _response(self, row: dict, answers: Messages) -> str | Message:
        """Return the target response of a row, as text or assistant turn; every row must have one."""
        prompt_key, key = self._config.prompt_key, self._config.response_key
        if len(answers) > 1:
            raise ValueError(
                f"{short_repr(prompt_key)} ends in {len(answers)} assistant turns; join them to one"
            )
        if answers:
            given = row.get(key) if key != prompt_key else None
            if given is not None and given != text_of(answers[0].get("content"), "the assistant turn"):
                raise ValueError(
                    f"{short_repr(prompt_key)} ends in an assistant turn, and {short_repr(key)} "
                    "(data.response_key) is another response; remove one of them"
                )
            return answers[0]
        if key == prompt_key:
            raise ValueError(
                f"data.prompt_key and data.response_key are both {short_repr(key)},"
                " which holds no messages that end in an assistant turn"
            )
        response = self._value(row, "response_key")
        if not isinstance(response, str):
            raise ValueError(f"{short_repr(key)} must be a string, got {short_repr(response)}")
        return response


class PromptCursor:
    """Draws prompt indices epoch by epoch.

    Each epoch is a permutation determined by (seed, epoch), so the position is two integers.
    """

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
        """Return the next `count` prompt indices; a new epoch starts where one ends."""
        drawn: list[int] = []
        while len(drawn) < count:
            if self.position == self.num_prompts:
                self._go_to(epoch=self.epoch + 1, position=0)
            part = self._order[self.position : self.position + count - len(drawn)]
            self.position += len(part)
            drawn += part
        return drawn

    def state_dict(self) -> dict[str, int]:
        """Plain integers from which `load_state_dict` resumes exactly."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from `state`.

        Raises:
            ValueError: it was saved with a different number of prompts, seed or shuffle.
        """
        for name in ("num_prompts", "seed", "shuffle"):
            if state[name] != int(getattr(self, name)):
                raise ValueError(
                    f"the saved data position has {name}={state[name]}, this run {int(getattr(self, name))};"
                    " resume with the same data, run.seed and data.shuffle"
                )
        self._go_to(epoch=state["epoch"], position=state["position"])


@dataclass(frozen=True, slots=True)
class TrainingPrompts:
    """Endless stream of a dataset's prompts in the cursor's order."""

    prompts: Sequence[Prompt]
    cursor: PromptCursor

    def draw(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        return [self.prompts[i] for i in self.cursor.draw(count)]


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """A fixed list of prompts, used once."""

    prompts: Sequence[Prompt]

    def draw(self, count: int) -> list[Prompt]:
        """Return the first `count` prompts."""
        return list(self.prompts[:count])
