"""Tokenizer: a thin wrapper of Hugging Face tokenizers. It reads local files only and runs no remote code."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from parallel.runtime.refusal import short_repr
from parallel.weights.json_files import read_object, reason_of
from verl_megatron.data.chat import Message, Messages, checked, continuation, render_all
from verl_megatron.data.token_ids import token_ids

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# transformers may silently ignore a broken one of these.
READ_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # that transformers may open; a pipe would block it
SMALL_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class Tokenizer:
    """A Hugging Face tokenizer (`hf`) with the operations that training needs."""

    def __init__(self, hf):
        self.hf = hf

    def __len__(self) -> int:
        """Number of token ids, added tokens included."""
        return len(self.hf)

    @property
    def eos_token_id(self) -> int:
        """Id of the token that ends a response.

        Raises:
            ValueError: the tokenizer has none.
        """
        if self.hf.eos_token_id is None:
            raise ValueError(
                f"the tokenizer in {self.hf.name_or_path} has no end-of-sequence token;"
                " name one as eos_token in its tokenizer_config.json"
            )
        return self.hf.eos_token_id

    @functools.cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens at which vLLM ends a response: the end-of-sequence token and those of the model folder.

        Raises:
            ValueError: the tokenizer has no end-of-sequence token, or a file of the folder is not valid JSON.
        """
        return frozenset({self.eos_token_id}) | self.end_token_ids

    @functools.cached_property
    def end_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the tokenizer and of the model folder; empty if none is named.

        Raises:
            ValueError: a file of the folder is not valid JSON.
        """
        ids = set() if self.hf.eos_token_id is None else {self.hf.eos_token_id}
        for name in ("generation_config.json", "config.json"):  # vLLM reads the first one that exists
            path = Path(self.hf.name_or_path, name)
            if self.hf.name_or_path and path.is_file():
                ids |= _eos_of(path)
                break
        return frozenset(ids)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.hf.get_vocab()))

    def prompt_text(self, prompt: str | Messages) -> str:
        """Return the model's input text.

        Strings are returned unchanged; chat messages are rendered with the generation prompt.

        Raises:
            ValueError: neither a string nor messages, an assistant turn at their end, or messages that the
                chat template rejects.
        """
        return self.prompt_texts([prompt])[0]

    def prompt_texts(self, prompts: Sequence[str | Messages]) -> list[str]:
        """Return `prompt_text` of several prompts; an error does not say which of them it is about."""
        chats = [self._asked(prompt) for prompt in prompts if not isinstance(prompt, str)]
        rendered = iter(self._rendered(chats) if chats else ())
        return [prompt if isinstance(prompt, str) else next(rendered) for prompt in prompts]

    def _rendered(self, chats: list[Messages]) -> list[str]:
        """Return the texts that the chat template writes for prompts."""
        return render_all(self.hf, chats, add_generation_prompt=True)

    def _continuation(self, messages: Messages, answer: Message) -> tuple[str, str]:
        """Return the texts of a prompt, and of the answer to it."""
        return continuation(self.hf, messages, answer)

    def _asked(self, prompt: Messages) -> Messages:
        messages = self._checked(prompt)
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                "the messages of a prompt end in an assistant turn, which is an answer; leave it out"
            )
        return messages

    def demonstration_text(self, prompt: str | Messages, answer: str | Message) -> tuple[str, str]:
        """Return the model's input text and its target text.

        For messages, the target is the text that the chat template adds for the answer.

        Raises:
            ValueError: as in `prompt_text`, an empty answer, or one that the template does not append to the
                prompt.
        """
        if isinstance(answer, str):
            if not answer.strip():
                raise ValueError("the response is empty; give one, or leave the row out")
            if isinstance(prompt, str):
                return prompt, answer
            answer = {"role": "assistant", "content": answer}
        turns = [*prompt, answer] if isinstance(prompt, list) else prompt
        *messages, answer = self._checked(cast(Messages, turns))
        if not ((answer.get("content") or "").strip() or answer.get("tool_calls")):
            raise ValueError("the assistant turn is empty; give it content, or leave the row out")
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("with a response, the prompt must be messages that end in a user turn")
        return self._continuation(messages, answer)

    def conversation_text(self, messages: Messages, answer: Message) -> list[tuple[str, str]]:
        """Return the text before each assistant turn that follows another turn, and the text of that turn.

        Args:
            messages: the turns before `answer`, the last assistant turn.

        Raises:
            ValueError: as in `demonstration_text`, or the template writes earlier turns differently once
                others follow.
        """
        turns: list[tuple[str, str]] = []
        for at, message in enumerate([*messages, answer]):
            if at and isinstance(message, dict) and message.get("role") == "assistant":
                before, behind = self.demonstration_text(messages[:at], message)
                if turns and not before.startswith("".join(turns[-1])):
                    raise ValueError(
                        f"the chat template writes assistant turn {len(turns)} differently once other turns "
                        "follow, so it cannot be imitated where it stands; set data.imitated_turns=last"
                    )
                turns.append((before, behind))
        return turns

    def _checked(self, messages: Messages) -> Messages:
        template = self._template()
        if isinstance(messages, list) and messages and template == "":
            raise ValueError(
                f"the tokenizer in {self.hf.name_or_path} has no chat template for a list of messages;"
                " add chat_template.jinja or give prompts as strings"
            )
        return checked(messages, template)

    def _template(self) -> str | None:
        """Text of the chat template, or of all of them; empty without one, None if it is not known."""
        template = self.hf.chat_template
        return template if isinstance(template, str) else " ".join((template or {}).values())

    def encode_prompt(self, prompt: str | Messages) -> list[int]:
        """Return the token ids of a prompt; errors as in `prompt_text` and `encode_text`."""
        return self.encode_text(self.prompt_text(prompt), is_chat=not isinstance(prompt, str))

    def encode_text(self, text: str, *, is_chat: bool) -> list[int]:
        """Return the token ids of a prompt's text, with special tokens unless a chat template wrote them.

        Raises:
            ValueError: the text is empty or cannot be encoded.
        """
        return self.encode_texts([text], is_chat=is_chat)[0]

    def encode_texts(self, texts: Sequence[str], *, is_chat: bool) -> list[list[int]]:
        """Return `encode_text` of several texts; errors as there."""
        if not all(text.strip() for text in texts):
            raise ValueError("the prompt is empty; give it text, or leave the row out")
        encoded = self._ids(texts, add_special_tokens=not is_chat) if texts else []
        for text, ids in zip(texts, encoded, strict=True):
            # Some tokenizers append the end-of-sequence token to every text; a prompt must not end in it.
            while not is_chat and len(ids) > 1 and ids[-1] == self.hf.eos_token_id:
                ids.pop()
            if self._special.issuperset(ids):
                raise ValueError(
                    f"the prompt {short_repr(text)} has special or unknown tokens only; give it text"
                )
        return encoded

    def encode_response(self, response: str) -> list[int]:
        """Return the token ids of the response to a string prompt, ended by one stop token.

        Raises:
            ValueError: the response is empty or contains a stop token before its end.
        """
        return self._ended(self._encode(response, add_special_tokens=False))

    def encode_chat(self, before: str, behind: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a chat prompt and of its response.

        The stop token and errors are as in `encode_response`.
        """
        ids, whole = (
            self.encode_text(before, is_chat=True),
            self._encode(before + behind, add_special_tokens=False),
        )
        if whole[: len(ids)] != ids:  # a token spans the boundary; the prompt's tokens are fixed
            return ids, self.encode_response(behind)
        return ids, self._ended(whole[len(ids) :])

    def encode_conversation(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[int], list[bool]]:
        """Return the token ids before the first assistant turn, those from there on, and which are targets.

        Args:
            turns: of `conversation_text`.

        Raises:
            ValueError: a turn that is not the last does not end in a stop token, or a token spans the
                boundary of a turn.
        """
        ids = self.encode_text(turns[0][0], is_chat=True)
        told, is_target = list(ids), []  # all tokens so far, and which of those after `ids` are targets
        for number, (before, behind) in enumerate(turns, start=1):
            told = self._continued(told, before)
            is_target += [False] * (len(told) - len(ids) - len(is_target))
            answer = self._continued(told, before + behind)[len(told) :]
            spoken = self._ended_within(answer, number) if number < len(turns) else self._ended(answer)
            told += spoken
            is_target += [True] * len(spoken)
        return ids, told[len(ids) :], is_target

    def _continued(self, ids: list[int], text: str) -> list[int]:
        """Return the token ids of `text`, which begin with `ids`."""
        whole = self._encode(text, add_special_tokens=False)
        if whole[: len(ids)] != ids:
            raise ValueError(
                "a token spans the boundary of an assistant turn, so the turns cannot be imitated where they "
                "stand; set data.imitated_turns=last"
            )
        return whole

    def _ended_within(self, ids: list[int], number: int) -> list[int]:
        """Return an earlier assistant turn up to its stop token."""
        end = next((at for at, token in enumerate(ids) if token in self.stop_token_ids), None)
        if end is None:
            raise ValueError(
                f"the chat template ends assistant turn {number} without a stop token, so its end cannot be "
                "imitated; set data.imitated_turns=last"
            )
        return ids[: end + 1]

    def _ended(self, ids: list[int]) -> list[int]:
        stops = self.stop_token_ids
        end = next((at for at, token in enumerate(ids) if token in stops), len(ids))
        rest = [token for token in ids[end:] if token not in stops]
        if rest and (text := self.decode(rest)).strip():
            stop = short_repr(self.hf.decode(ids[end]))
            raise ValueError(
                f"the response has {stop}, which ends generation, before {short_repr(text)}; remove it"
            )
        if self._special.issuperset(ids[:end]) or not self.decode(ids[:end]).strip():
            raise ValueError("the response is empty; give one, or leave the row out")
        return ids[: end + 1] if end < len(ids) else [*ids, self.eos_token_id]

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.hf.all_special_ids)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._ids([text], add_special_tokens=add_special_tokens)[0]

    def _ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return token_ids(self.hf, texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids without special tokens."""
        return self.hf.decode(ids, skip_special_tokens=True)

    def token_texts(self, ids: list[int]) -> list[str]:
        """Return the text of each token, special tokens by name.

        A character that is spread over several tokens belongs to the first of them; the others are empty.
        """
        texts = [self._token_text(token) for token in ids]
        at = 0
        while at < len(texts):
            end = at
            while end < len(texts) and "\ufffd" in texts[end]:
                end += 1
            if end - at > 1 and "\ufffd" not in (whole := self.hf.decode(ids[at:end])):
                texts[at:end] = [whole, *[""] * (end - at - 1)]
            at = end + 1
        return texts

    def _token_text(self, token: int) -> str:
        if token not in self._texts:
            # Behind another token, because some tokenizers drop the space before a first word.
            before, both = self.hf.decode([self._anchor]), self.hf.decode([self._anchor, token])
            is_appended = both.startswith(before)
            self._texts[token] = both[len(before) :] if is_appended else self.hf.decode([token])
        return self._texts[token]

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        return {}

    @functools.cached_property
    def _anchor(self) -> int:
        """A token with a text of its own."""
        return self.hf.encode("a", add_special_tokens=False)[-1]


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder contains tokenizer files."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def _eos_of(path: Path) -> set[int]:
    """End-of-sequence token ids of a model's JSON file: none, one or several."""
    try:
        named = json.loads(path.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ValueError(
            f"{path} is no JSON object that can be read; copy it again from where the model is from"
        ) from None
    return {token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)}


def import_transformers() -> None:
    """Import what `load_tokenizer` imports."""
    from transformers import AutoTokenizer  # noqa: F401


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder, the fast one if there is one.

    Raises:
        ValueError: no such folder, no tokenizer in it, or a broken one; the message names the file if it is
            known.
    """
    from transformers import AutoTokenizer  # imported here because it takes seconds

    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"tokenizer folder {folder} does not exist; give a local Hugging Face folder")
    # Without this check transformers may build an empty tokenizer from config.json alone.
    if not has_tokenizer(folder):
        raise ValueError(
            f"folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)});"
            " copy the model's tokenizer files into it"
        )
    for path in sorted(folder.iterdir()):
        if path.suffix in READ_SUFFIXES and path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file; copy the tokenizer's files again from their source")
    for name in SMALL_FILES:
        if (folder / name).exists():
            read_object(folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.decode(tokenizer.encode("a"))  # some defects show only on first use
        tokenizer.get_vocab()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a Rust panic of the tokenizers library is not an Exception
        raise ValueError(
            f"{_broken_file(folder, error)}; copy the tokenizer's files again from their source"
        ) from None
    return Tokenizer(tokenizer)


def _broken_file(folder: Path, error: BaseException) -> str:
    """Describe which file of a tokenizer that fails with `error` is broken, and how."""
    from tokenizers import Tokenizer as Reader

    present = [folder / name for name in ("tokenizer.json", "vocab.json") if (folder / name).exists()]
    try:
        for path in present:
            read_object(path)
        for template in folder.glob("chat_template*"):
            template.read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        return f"{template} is no UTF-8 text ({reason_of(reason)})"
    except ValueError as reason:
        return str(reason).rpartition(";")[0]
    if present and present[0].name == "tokenizer.json":
        try:
            Reader.from_file(str(present[0]))
        except Exception as reason:
            return f"{present[0]} is no tokenizer ({reason_of(reason)})"
        return f"{folder / SMALL_FILES[0]} does not go with {present[0].name} ({reason_of(error)})"
    return f"the tokenizer in {folder} cannot be loaded ({reason_of(error)})"
