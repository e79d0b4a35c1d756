"""Preference pairs from JSON-lines files: a prompt, a chosen and a rejected response."""

from dataclasses import dataclass
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, PairDataConfig, Section, SFTDataConfig
from verl_megatron.data.chat import Message, split_answer, text_of
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset, RowReader


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


class PairDataset(RowReader):
    """`Pair`s of a file, in file order.

    A response is a string, or messages that end in one assistant turn. Such messages may repeat the whole
    conversation; a row whose responses do needs no prompt.

    Raises:
        ValueError: an unreadable row, a missing key, responses to different prompts, equal responses, a pair
            over the limit (unless overlong is "drop"), or none left.
    """

    _limit_name = "max_tokens"

    def _parse(self, row: dict) -> tuple[Pair | None, int]:
        prompt, chosen = self._conversation(row, "chosen_key")
        other, rejected = self._conversation(row, "rejected_key")
        config = self._config
        if prompt != other:
            raise ValueError(
                f"{short_repr(config.chosen_key)} and {short_repr(config.rejected_key)} answer "
                f"different prompts: {short_repr(prompt)} and {short_repr(other)}; "
                "give both responses to one prompt"
            )
        texts = [self._tokenizer.demonstration_text(prompt, response) for response in (chosen, rejected)]
        if texts[0] == texts[1]:
            raise ValueError(
                f"{short_repr(config.chosen_key)} and {short_repr(config.rejected_key)} are the same "
                "response, which teaches nothing; leave the row out"
            )
        if (fewest := max(self._fewest_tokens(*text) for text in texts)) > self._limit:
            return None, fewest
        (ids, chosen_ids), (_, rejected_ids) = [
            self._encoded(*text, is_chat=not isinstance(prompt, str)) for text in texts
        ]
        pair = Pair(prompt_token_ids=ids, chosen_token_ids=chosen_ids, rejected_token_ids=rejected_ids)
        return pair, len(ids) + max(len(chosen_ids), len(rejected_ids))

    def _conversation(self, row: dict, setting: str) -> tuple[Any, str | Message]:
        """Return the prompt and one of the responses of a row."""
        response, key = self._value(row, setting), getattr(self._config, setting)
        if isinstance(response, str):
            prompt, given = split_answer(self._value(row, "prompt_key"))
            if given:
                raise ValueError(
                    f"{short_repr(self._config.prompt_key)} ends in an assistant turn, and "
                    f"{short_repr(key)} is another response; remove one of them"
                )
            return prompt, response
        messages, answers = ([], response) if _is_turn(response) else split_answer(response)
        if not isinstance(answers, list) or len(answers) != 1:
            raise ValueError(
                f"{short_repr(key)} (data.{setting}) must be a string, or messages that end in one assistant "
                f"turn, got {short_repr(response)}"
            )
        if not messages:
            return self._value(row, "prompt_key"), answers[0]
        self._check_same(row, messages, key)
        return messages, answers[0]

    def _check_same(self, row: dict, messages: list[Message], key: str) -> None:
        """Check that the prompt of the row, if it has one, is that of the conversation `messages`."""
        name = self._config.prompt_key
        prompt = row.get(name)
        is_last = isinstance(prompt, str) and prompt == text_of(messages[-1].get("content"), "the last turn")
        if not (prompt in (None, "") or prompt == messages or is_last):
            raise ValueError(
                f"{short_repr(key)} repeats the conversation, and its turns before the response are not "
                f"{short_repr(name)} (data.prompt_key); remove one of them"
            )


def _is_turn(response: Any) -> bool:
    """Whether `response` is a single assistant turn, without the conversation before it."""
    if not isinstance(response, list) or len(response) != 1 or not isinstance(response[0], dict):
        return False
    return response[0].get("role") == "assistant"


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
