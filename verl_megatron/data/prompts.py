"""Prompt and demonstration datasets from files, and the streams of prompts that runs draw from."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, SFTDataConfig
from verl_megatron.data.chat import Message, Messages, are_turns, split_answer, text_of
from verl_megatron.data.columns import source_of
from verl_megatron.data.formats.sources import DataFile
from verl_megatron.data.order.curriculum import CurriculumCursor, SourceIndex
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.row_reader import Parsed, RowReader
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

    Options are those of `RowReader`. An empty `answer_key` means rows without ground truth. `sources` counts
    the prompts of each data_source.

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
        self.sources: Counter[str] = Counter()  # prompts by their data_source; "" for those without one
        self.first_of: dict[str, int] = {}  # the first prompt of each
        self.without_answer: dict[str, tuple[int, str]] = {}  # prompts of each, and the place of the first
        self.source_index = SourceIndex(config.curriculum, str(path)) if config.curriculum else None
        super().__init__(path, tokenizer, config, **options)

    def _add(self, parsed: Parsed, file: DataFile, number: int) -> None:
        index = len(self)
        super()._add(parsed, file, number)
        if len(self) > index:
            source = source_of(parsed[0].extra)
            self.sources[source] += 1
            self.first_of.setdefault(source, index)
            if parsed[0].answer is None:
                count, first = self.without_answer.get(source, (0, f"{file.path}, {file.unit} {number}"))
                self.without_answer[source] = count + 1, first
            if self.source_index is not None:
                self.source_index.add(parsed[0].extra, file.part)

    def cursor(self, *, seed: int) -> PromptCursor:
        """Return a cursor over these prompts, at their beginning."""
        if self.source_index is None:
            return super().cursor(seed=seed)
        given = [weight for weight, _ in self.shares]
        return CurriculumCursor(
            self.source_index, given, seed=seed, shuffle=self._config.shuffle, data=self.digest
        )

    def _parse(self, row: dict) -> Parsed:
        return self._begin([row])()[0]

    def _begin(self, rows: list[dict]) -> Callable[[], list[Parsed]]:
        values = [self.columns.value(row, "prompt_key") for row in rows]
        key = self._config.answer_key
        answers = [self.columns.value(row, "answer_key") if key else None for row in rows]
        with self._column("prompt_key"):
            prompts, given = zip(*map(split_answer, values))
            texts = self._tokenizer.prompt_texts(prompts)
        used = (self.columns.keys["prompt_key"], self.columns.keys["answer_key"])
        extras = [_without(row, used) for row in rows]
        return lambda: self._parsed(list(zip(prompts, texts, answers, extras, strict=True)), given)

    def _parsed(self, read: list[tuple], given: Sequence[Messages]) -> list[Parsed]:
        """Return `Prompt`s of (prompt, text, answer, extra); `given` are the answers that were cut off."""
        parsed: list[Parsed] = [(None, self._fewest_tokens(text)) for _, text, _, _ in read]
        for is_chat in (False, True):
            places = [
                at
                for at, (prompt, *_) in enumerate(read)
                if isinstance(prompt, list) == is_chat and parsed[at][1] <= self.limit
            ]
            with self._column("prompt_key"):
                encoded = self._tokenizer.encode_texts([read[at][1] for at in places], is_chat=is_chat)
                for at, ids in zip(places, encoded):
                    self._check_tokens(ids)
                    prompt, text, answer, extra = read[at]
                    messages = prompt if is_chat else None
                    item = Prompt(
                        prompt_token_ids=ids, text=text, answer=answer, extra=extra, messages=messages
                    )
                    parsed[at] = item, len(ids)
        self.cut += sum(item is not None and bool(answers) for (item, _), answers in zip(parsed, given))
        return parsed


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


def _without(row: dict, names: Sequence[str]) -> dict:
    return {name: value for name, value in row.items() if name not in names}


def _has_earlier_answers(prompt: object) -> bool:
    """Whether messages have an assistant turn that follows another turn."""
    turns = prompt[1:] if isinstance(prompt, list) else []
    return any(isinstance(message, dict) and message.get("role") == "assistant" for message in turns)


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
