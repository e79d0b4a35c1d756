"""Chat messages and what a chat template makes of them: checked before, bounded meanwhile, checked behind."""

import functools
import itertools
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

from verl_megatron.data.json_lines import shown

RENDER_S = 5.0  # CPU seconds that a template may take for one prompt; usual ones take less than a thousandth
RENDER_BYTES = 1 << 30  # memory that it may take
_RENDERS_A_MEASURE = 64  # the system takes as long to tell the memory in use as a template takes for a prompt
_renders = itertools.count()

Message = dict[str, Any]  # {"role": ..., "content": ...}, and what else the template reads
Messages = list[Message]

_NO_PROMPT = "a prompt must be a string or a non-empty list of messages with role and content"
_USUAL_ROLES = ("system", "user", "assistant")  # templates write these without naming each of them
# What else a message may say; a template that does not read it would leave it out without a word.
_SAID_BESIDE = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "images",
    "image",
    "audio",
    "video",
    "videos",
)


class _OutOfTime(BaseException):
    """A template took more than RENDER_S; no Exception, which templates' compilers catch."""


def split_answer(messages: Any) -> tuple[Any, Messages]:
    """`messages` without the assistant's turns at their end, and those turns; what is no list stays as it is.

    Raises:
        ValueError: nothing is left before them.
    """
    if not isinstance(messages, list):
        return messages, []
    end = len(messages)
    while end and isinstance(messages[end - 1], dict) and messages[end - 1].get("role") == "assistant":
        end -= 1
    if messages and not end:
        raise ValueError(
            "the messages have assistant turns only; a prompt needs a turn of the user before them"
        )
    return messages[:end], messages[end:]


def checked(messages: Any, template: str) -> Messages:
    """`messages` as the template takes them: text parts joined to one text, empty keys left out.

    Raises:
        ValueError: no list of messages, or a role or content that the template would drop or stumble over.
    """
    if not (
        isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    ):
        raise ValueError(f"{_NO_PROMPT}, got {shown(messages)}")
    return [
        _checked(message, f"message {number}", template) for number, message in enumerate(messages, start=1)
    ]


def _checked(message: Message, which: str, template: str) -> Message:
    role = message.get("role")
    if "role" not in message or not ("content" in message or message.get("tool_calls")):
        raise ValueError(f"{_NO_PROMPT}, and {which} is {shown(message)}")
    if not isinstance(role, str) or not (
        role in _USUAL_ROLES or f"'{role}'" in template or f'"{role}"' in template
    ):
        raise ValueError(
            f"{which} has role {shown(role)}, which the chat template does not know;"
            f" use {', '.join(_USUAL_ROLES)}"
        )
    kept = {key: value for key, value in message.items() if key == "content" or value not in (None, [], {})}
    for key in _SAID_BESIDE:
        if key in kept and key not in template:
            raise ValueError(
                f"{which} has {key}, which the chat template does not read;"
                " write it into content or remove it"
            )
    if not (kept.get("content") is None and kept.get("tool_calls")):
        kept["content"] = text_of(kept.get("content"), which)
    return kept


def text_of(content: Any, which: str) -> str:
    """The content of the message `which` as one text; ValueError if it has another kind of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{which} has content {shown(content)}; it must be a string or a list of text parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise ValueError(
                f"{which} has the part {shown(part)};"
                " only parts such as {'type': 'text', 'text': ...} are read"
            )
        texts.append(text)
    return "".join(texts)


def render(hf: Any, messages: Messages, *, add_generation_prompt: bool) -> str:
    """What the chat template of tokenizer `hf` writes for (checked) messages.

    Raises:
        ValueError: it fails, refuses, takes too much time or memory, writes nothing, or leaves a message out.
    """
    template = (
        f"the chat template of {hf.name_or_path}" if getattr(hf, "name_or_path", "") else "the chat template"
    )
    write = functools.partial(
        hf.apply_chat_template, messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    try:
        try:
            text = _limited(write)
        except MemoryError:
            _address_space.cache_clear()  # the process may have grown since it was measured
            text = _limited(write)
    except _OutOfTime:
        raise ValueError(f"{template} took more than {RENDER_S:g} s for these messages; mend it") from None
    except (MemoryError, OverflowError):
        raise ValueError(
            f"{template} takes more than {RENDER_BYTES >> 30} GiB for these messages; mend it"
        ) from None
    except Exception as error:  # templates are programs of others
        said = f"{type(error).__name__}: {str(error)[:300]}"
        raise ValueError(
            f"{template} does not take these messages ({said}); change them or mend the template"
        ) from None
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the chat template writes nothing for these messages; mend it")
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("system", "user") and not contains(text, message.get("content") or ""):
            raise ValueError(
                f"the chat template leaves out message {number} (role {message['role']!r});"
                " leave it out of the data, or use a template that writes it"
            )
    return text


def contains(text: str, content: str) -> bool:
    """Whether `text` has `content`, white space apart."""
    return content.strip() in text or "".join(content.split()) in "".join(text.split())


def continuation(hf: Any, messages: Messages, answer: Message) -> tuple[str, str]:
    """The text of a prompt, and what the chat template writes behind it for the assistant's turn `answer`.

    Raises:
        ValueError: as in `render`, or the turn does not go on where the prompt ends.
    """
    before = render(hf, messages, add_generation_prompt=True)
    whole = render(hf, [*messages, answer], add_generation_prompt=False)
    if not whole.startswith(before):
        same = next((at for at, (a, b) in enumerate(zip(before, whole)) if a != b), len(whole))
        raise ValueError(
            f"the chat template writes {shown(before[same:])} before an answer is generated and"
            f" {shown(whole[same:])} once it is there, so that the answer does not continue the prompt;"
            " write prompt and response as strings, or mend the template"
        )
    behind = whole[len(before) :]
    if not contains(behind, answer.get("content") or ""):
        raise ValueError(
            f"the chat template changes the answer: of {shown(answer['content'])} it writes {shown(behind)};"
            " write prompt and response as strings, or mend the template"
        )
    return before, behind


def _limited(write: Callable[[], str]) -> str:
    """`write()` within RENDER_S of CPU time (in the main thread) and RENDER_BYTES of memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space(next(_renders) // _RENDERS_A_MEASURE) + RENDER_BYTES
    timed = threading.current_thread() is threading.main_thread()
    if timed:
        _hear_timer()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(soft, most), hard))
        if timed:  # again and again, as it may come while code runs whose exceptions go nowhere
            signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S, 0.5)
        return write()
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _stop(*_) -> None:
    raise _OutOfTime


@functools.cache
def _hear_timer() -> None:
    signal.signal(signal.SIGVTALRM, _stop)  # of a timer that only `_limited` sets


@functools.lru_cache(maxsize=1)
def _address_space(measure: int) -> int:
    """Bytes of address space that this process has, anew for each `measure`."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()
