"""A stand-in for a tokenizer that is not known: its tokens are characters."""

import json
from collections.abc import Sequence
from types import SimpleNamespace

from verl_megatron.data.chat import Message, Messages
from verl_megatron.data.tokenizer import Tokenizer

# Of a message, and of a response: no text has them, as Unicode keeps them from being characters.
BEGIN, END = "\U0010fffe", "\U0010ffff"


class CharacterTokenizer(Tokenizer):
    """Gives rows all checks of a run that need no tokenizer of a model.

    The chat template takes every role, and writes what messages say.
    """

    def __init__(self):
        end = ord(END)
        hf = {"eos_token_id": end, "all_special_ids": [end], "name_or_path": "", "decode": chr}
        super().__init__(SimpleNamespace(**hf, get_vocab=lambda: ["a"]))

    def _template(self) -> None:
        return None

    def _rendered(self, chats: list[Messages]) -> list[str]:
        return ["".join(map(_written, messages)) for messages in chats]

    def _continuation(self, messages: Messages, answer: Message) -> tuple[str, str]:
        return self._rendered([messages])[0], _written(answer)

    def _ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token) for token in ids if token < ord(BEGIN))


def _written(message: Message) -> str:
    called = json.dumps(calls) if (calls := message.get("tool_calls")) else ""
    return BEGIN + (message.get("content") or "") + called + END * (message["role"] == "assistant")
