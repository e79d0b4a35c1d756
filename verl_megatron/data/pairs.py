"""Preference pairs from files: a prompt, a chosen and a rejected response."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, PairDataConfig, Section, SFTDataConfig
from verl_megatron.data.chat import Message, Messages, are_turns, split_answer, text_of
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset
from verl_megatron.data.row_reader import RowReader
from verl_megatron.data.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class Pair:
    """A prompt and two responses, each of which ends in the end-of-sequence token."""

    prompt_token_ids: list[int]
    chosen_token_ids: list[int]
    rejected_token_ids: list[int]

    def samples(self) -> list[tuple[list[int], list[int]]]:
        """Return prompt and response of the samples to train on: the chosen one first."""
        return [
            (self.prompt_token_ids, self.chosen_token_ids),
            (self.prompt_token_ids, self.rejected_token_ids),
        ]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One response of a row and its prompt, with the keys under which both are."""

    key: str
    response: str | Message
    prompt_key: str
    prompt: Any


class PairDataset(RowReader):
    """`Pair`s of a file, in file order.

    A response is a string, or messages that end in one assistant turn. Such messages may repeat the whole
    conversation; a row whose responses do needs no prompt.

    Raises:
        ValueError: two settings name one key, an unreadable row, a missing key, responses to different
            prompts or of equal tokens, a pair over the limit (unless overlong is "drop"), or none left.
    """

    limit_name = "max_tokens"
    _config: PairDataConfig

    def __init__(self, path: str | Path, tokenizer: Tokenizer, config: PairDataConfig, **options: int | None):
        keys = {"prompt": config.prompt_key, "chosen": config.chosen_key, "rejected": config.rejected_key}
        for one, other in combinations(keys, 2):
            if keys[one] == keys[other]:
                raise ValueError(
                    f"data.{one}_key and data.{other}_key are both {short_repr(keys[one])}; name two keys"
                )
        super().__init__(path, tokenizer, config, **options)

    def _parse(self, row: dict) -> tuple[Pair | None, int]:
        chosen, rejected = answers = [
            self._answer(row, setting) for setting in ("chosen_key", "rejected_key")
        ]
        if chosen.prompt != rejected.prompt:
            raise ValueError(
                f"{short_repr(chosen.key)} and {short_repr(rejected.key)} answer different prompts: "
                f"{short_repr(chosen.prompt)} and {short_repr(rejected.prompt)}; "
                "give both responses to one prompt"
            )
        demonstration_text, is_chat = self._tokenizer.demonstration_text, not isinstance(chosen.prompt, str)
        texts = [self._named(one, demonstration_text, one.prompt, one.response) for one in answers]
        if (fewest := max(self._fewest_tokens(*text) for text in texts)) > self.limit:
            return None, fewest
        encoded = partial(self._encoded, is_chat=is_chat)
        (ids, chosen_ids), (_, rejected_ids) = [
            self._named(one, encoded, *text) for one, text in zip(answers, texts)
        ]
        if chosen_ids == rejected_ids:
            raise ValueError(
                f"{short_repr(chosen.key)} and {short_repr(rejected.key)} are the same response, which "
                "teaches nothing; leave the row out"
            )
        pair = Pair(prompt_token_ids=ids, chosen_token_ids=chosen_ids, rejected_token_ids=rejected_ids)
        return pair, len(ids) + max(len(chosen_ids), len(rejected_ids))

    def _named(self, answer: _Answer, work: Callable[..., Any], *args: Any) -> Any:
        """Return `work(*args)`; its ValueError names the key at fault, of the prompt or else the response."""
        try:
            return work(*args)
        except ValueError as error:
            key, said = answer.key, error
        try:
            self._tokenizer.encode_prompt(answer.prompt)
        except ValueError as error:
            key, said = answer.prompt_key, error
        raise ValueError(f"{short_repr(key)}: {said}")

    def _answer(self, row: dict, setting: str) -> _Answer:
        """Return one of the responses of a row, with its prompt."""
        response, key = self.columns.value(row, setting), self.columns.keys[setting]
        name = self.columns.keys["prompt_key"]
        if isinstance(response, str):
            prompt, given = split_answer(self.columns.value(row, "prompt_key"))
            if given:
                raise ValueError(
                    f"{short_repr(name)} ends in an assistant turn, and {short_repr(key)} is another "
                    "response; remove one of them"
                )
            return _Answer(key, response, name, prompt)
        messages, answers = ([], response) if are_turns(response) else split_answer(response)
        is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        if not is_list or len(answers) != 1:
            raise ValueError(
                f"{short_repr(key)} (data.{setting}) must be a string, or messages that end in one assistant "
                f"turn, got {short_repr(response)}"
            )
        if messages:
            self._check_same(row, messages, key)
            return _Answer(key, answers[0], key, messages)
        if isinstance(prompt := self.columns.value(row, "prompt_key"), str):
            raise ValueError(
                f"{short_repr(key)} is a message, and {short_repr(name)} is a string; "
                "give both as strings, or both as messages"
            )
        return _Answer(key, answers[0], name, prompt)

    def _check_same(self, row: dict, messages: Messages, key: str) -> None:
        """Check that the prompt of the row, if it has one, is that of the conversation `messages`."""
        name = self.columns.keys["prompt_key"]
        prompt, last = self.columns.get(row, "prompt_key"), messages[-1].get("content")
        is_last = isinstance(prompt, str) and prompt == text_of(
            last, f"the last turn before {short_repr(key)}"
        )
        if not (prompt in (None, "") or prompt == messages or is_last):
            raise ValueError(
                f"{short_repr(key)} repeats the conversation, and its turns before the response are not "
                f"{short_repr(name)} (data.prompt_key); remove one of them"
            )


READERS: dict[type, type[RowReader]] = {
    DataConfig: PromptDataset,
    SFTDataConfig: DemonstrationDataset,
    PairDataConfig: PairDataset,
}  # by the class of a run's data section


def is_paired(data: Section) -> bool:
    """Whether a run with this data section trains on pairs of responses."""
    return isinstance(data, PairDataConfig)


def items_per_step(data: SFTDataConfig | PairDataConfig) -> int:
    """Return the demonstrations or pairs of an optimizer step."""
    return data.pairs_per_step if isinstance(data, PairDataConfig) else data.samples_per_step
