"""Prompt and demonstration datasets from files, and the order in which prompts are drawn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, SFTDataConfig
from verl_megatron.data.chat import Message, Messages, are_turns, split_answer, text_of
from verl_megatron.data.mixture import Share, digest_of, order_of
from verl_megatron.data.row_reader import RowReader
from verl_megatron.data.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class Prompt:
    """A prompt with the inputs of its reward."""

    prompt_token_ids: list[int]
    text: str  # what the model reads, chat template applied
    answer: Any = None  # ground truth
    extra: dict[str, Any] = field(default_factory=dict)  # the row's other keys
    messages: Messages | None = None  # of a chat


@dataclass(kw_only=True, slots=True)
class Demonstration:
    """A prompt and its target response, which ends in the end-of-sequence token.

    With several assistant turns the response begins with the first one, and `is_target` is false for the
    tokens between them.
    """

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    is_target: list[bool] | None = None  # of each response token; None: all are

    def samples(self) -> list[tuple[list[int], list[int]]]:
        """Return prompt and response of the samples to train on: one."""
        return [(self.prompt_token_ids, self.response_token_ids)]


class PromptDataset(RowReader):
    """`Prompt`s of a file, in file order.

    Options are those of `RowReader`. An empty `answer_key` means rows without ground truth.

    Raises:
        ValueError: an unreadable row, a missing key, a prompt over the limit (unless overlong is "drop"), or
            none left.
    """

    limit_name = "max_prompt_tokens"
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
        columns = self.columns
        value = columns.value(row, "prompt_key")
        answer = columns.value(row, "answer_key") if config.answer_key else None
        with self._column("prompt_key"):
            prompt, given = split_answer(value)
            text = tokenizer.prompt_text(prompt)
            if (fewest := self._fewest_tokens(text)) > self.limit:
                return None, fewest
            ids = tokenizer.encode_text(text, is_chat=not isinstance(prompt, str))
            self._check_tokens(ids)
        self.cut += bool(given)
        used = (columns.keys["prompt_key"], columns.keys["answer_key"])
        extra = {key: value for key, value in row.items() if key not in used}
        messages = None if isinstance(prompt, str) else prompt
        return Prompt(prompt_token_ids=ids, text=text, answer=answer, extra=extra, messages=messages), len(
            ids
        )


class DemonstrationDataset(RowReader):
    """`Demonstration`s of a file, in file order; an assistant turn at the end of messages is the response.

    Raises:
        ValueError: an unreadable row, a missing key, two responses, a row over the limit (unless overlong is
            "drop"), or none left.
    """

    limit_name = "max_tokens"
    _config: SFTDataConfig

    def _parse(self, row: dict) -> tuple[Demonstration | None, int]:
        prompt, answers = split_answer(self.columns.value(row, "prompt_key"))
        response = self._response(row, answers)
        if self._config.imitated_turns == "all" and _has_earlier_answers(prompt):
            return self._parse_conversation(prompt, response)
        before, behind = self._tokenizer.demonstration_text(prompt, response)
        if (fewest := self._fewest_tokens(before, behind)) > self.limit:
            return None, fewest
        ids, response_ids = self._encoded(before, behind, is_chat=not isinstance(prompt, str))
        return Demonstration(prompt_token_ids=ids, response_token_ids=response_ids), len(ids) + len(
            response_ids
        )

    def _parse_conversation(
        self, prompt: Messages, response: str | Message
    ) -> tuple[Demonstration | None, int]:
        """Return messages with several assistant turns as one demonstration, and its tokens."""
        answer = {"role": "assistant", "content": response} if isinstance(response, str) else response
        turns = self._tokenizer.conversation_text(prompt, answer)
        if (fewest := self._fewest_tokens(*turns[-1])) > self.limit:
            return None, fewest
        ids, response_ids, is_target = self._tokenizer.encode_conversation(turns)
        self._check_tokens(ids + response_ids)
        item = Demonstration(prompt_token_ids=ids, response_token_ids=response_ids, is_target=is_target)
        return item, len(ids) + len(response_ids)

    def _response(self, row: dict, answers: Messages) -> str | Message:
        """Return the target response of a row, as text or assistant turn; every row must have one."""
        prompt_key, key = self.columns.keys["prompt_key"], self.columns.keys["response_key"]
        if len(answers) > 1:
            raise ValueError(
                f"{short_repr(prompt_key)} ends in {len(answers)} assistant turns; join them to one"
            )
        if answers:
            given = self.columns.get(row, "response_key") if key != prompt_key else None
            if given is not None and given != text_of(answers[0].get("content"), "the assistant turn"):
                raise ValueError(
                    f"{short_repr(prompt_key)} ends in an assistant turn, and {short_repr(key)} "
                    "(data.response_key) is another response; remove one of them"
                )
            return answers[0]
        if self._config.response_key == prompt_key:
            raise ValueError(
                f"data.prompt_key and data.response_key are both {short_repr(key)},"
                " which holds no messages that end in an assistant turn"
            )
        response = self.columns.value(row, "response_key")
        if are_turns(response) and len(response) == 1:
            return response[0]
        if not isinstance(response, str):
            raise ValueError(f"{short_repr(key)} must be a string, got {short_repr(response)}")
        return response


def _has_earlier_answers(prompt: object) -> bool:
    """Whether messages have an assistant turn that follows another turn."""
    turns = prompt[1:] if isinstance(prompt, list) else []
    return any(isinstance(message, dict) and message.get("role") == "assistant" for message in turns)


class PromptCursor:
    """Draws prompt indices epoch by epoch.

    Each epoch is a permutation determined by (seed, epoch), so the position is two integers. With `shares`,
    weights of several sources, an epoch has as many prompts of each as its weight says (`mixture`).
    """

    def __init__(self, *, num_prompts: int, seed: int, shuffle: bool = True, shares: Sequence[Share] = ()):
        assert num_prompts > 0
        self.shares = list(shares)
        self.mixture = digest_of(self.shares)
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self._go_to(epoch=0, position=0)

    def _go_to(self, *, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        if self.shares:
            self._order = order_of(self.shares, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            return
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
        } | ({"mixture": self.mixture} if self.shares else {})

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from `state`.

        Raises:
            ValueError: it was saved with a different number of prompts, seed, shuffle or weights.
        """
        for name in ("num_prompts", "seed", "shuffle"):
            if state[name] != int(getattr(self, name)):
                raise ValueError(
                    f"the saved data position has {name}={state[name]}, this run {int(getattr(self, name))};"
                    " resume with the same data, run.seed and data.shuffle"
                )
        if state.get("mixture", 0) != self.mixture:
            raise ValueError(
                "the saved data position is of other weights in data.train, or of none; "
                "resume with the same data.train"
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
