"""Chat messages and chat templates: validation before rendering, limits during it, checks of its output."""

import functools
import itertools
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

from parallel.runtime.refusal import short_repr

RENDER_S = 5.0  # CPU-time limit of one prompt; typical templates take under a thousandth of it
RENDER_BYTES = 1 << 30  # memory limit of one prompt
_RENDERS_A_MEASURE = 64  # reading the memory in use takes as long as rendering one prompt
_renders = itertools.count()

Message = dict[str, Any]  # {"role": ..., "content": ...}, plus any other keys that the template reads
Messages = list[Message]

_NO_PROMPT = "a prompt must be a string or a non-empty list of messages with role and content"
_USUAL_ROLES = ("system", "user", "assistant")  # templates accept these without naming each of them
# Other message keys that carry content; a template that does not read them would drop them silently.
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
    """A template exceeded RENDER_S. Not an Exception, because compiled templates catch those."""


def split_answer(messages: Any) -> tuple[Any, Messages]:
    """Split `messages` into the prompt and the assistant turns at its end.

    A value that is not a list is returned unchanged.

    Raises:
        ValueError: nothing is left before the assistant turns.
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


def are_turns(response: Any) -> bool:
    """Whether `response` has assistant turns only, without the conversation before them."""
    if not isinstance(response, list) or not response:
        return False
    return all(isinstance(message, dict) and message.get("role") == "assistant" for message in response)


def check_form(messages: Any) -> None:
    """Raise a ValueError if `messages` are no list of messages with role and content."""
    if not (
        isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    ):
        raise ValueError(f"{_NO_PROMPT}, got {short_repr(messages)}")
    for number, message in enumerate(messages, start=1):
        if "role" not in message or not ("content" in message or message.get("tool_calls")):
            raise ValueError(f"{_NO_PROMPT}, and message {number} is {short_repr(message)}")


def checked(messages: Any, template: str | None) -> Messages:
    """Normalize `messages` for the template: join text parts into one string, drop empty keys.

    Args:
        template: None: it is not known, and takes all roles and keys.

    Raises:
        ValueError: not a list of messages, or a role or content that the template would drop or fail on.
    """
    check_form(messages)
    return [
        _checked(message, f"message {number}", template) for number, message in enumerate(messages, start=1)
    ]


def _checked(message: Message, which: str, template: str | None) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not (
        role in _USUAL_ROLES or template is None or f"'{role}'" in template or f'"{role}"' in template
    ):
        raise ValueError(
            f"{which} has role {short_repr(role)}, which the chat template does not know;"
            f" use {', '.join(_USUAL_ROLES)}"
        )
    kept = {key: value for key, value in message.items() if key == "content" or value not in (None, [], {})}
    for key in _SAID_BESIDE:
        if key in kept and template is not None and key not in template:
            raise ValueError(
                f"{which} has {key}, which the chat template does not read;"
                " write it into content or remove it"
            )
    if not (kept.get("content") is None and kept.get("tool_calls")):
        kept["content"] = text_of(kept.get("content"), which)
    return kept


def text_of(content: Any, which: str) -> str:
    """Return the content of message `which` as one string; ValueError for parts that are not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"{which} has content {short_repr(content)}; it must be a string or a list of text parts"
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise ValueError(
                f"{which} has the part {short_repr(part)};"
                " only parts such as {'type': 'text', 'text': ...} are read"
            )
        texts.append(text)
    return "".join(texts)


def render(hf: Any, messages: Messages, *, add_generation_prompt: bool) -> str:
    """Apply the chat template of tokenizer `hf` to messages that `checked` has validated.

    Raises:
        ValueError: as in `render_all`.
    """
    return render_all(hf, [messages], add_generation_prompt=add_generation_prompt)[0]


def render_all(hf: Any, conversations: list[Messages], *, add_generation_prompt: bool) -> list[str]:
    """Apply the chat template to several conversations, within the limits of one; as `render` for each.

    Raises:
        ValueError: the template fails, rejects messages, exceeds the time or memory limit, writes nothing,
            or omits a message; which conversation it was is not said.
    """
    template = (
        f"the chat template of {hf.name_or_path}" if getattr(hf, "name_or_path", "") else "the chat template"
    )
    write = functools.partial(
        hf.apply_chat_template, conversations, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    try:
        try:
            texts = _limited(write)
        except MemoryError:
            _address_space.cache_clear()  # the process may have grown since the last measurement
            texts = _limited(write)
    except _OutOfTime:
        raise ValueError(f"{template} took more than {RENDER_S:g} s for these messages; mend it") from None
    except (MemoryError, OverflowError):
        raise ValueError(
            f"{template} takes more than {RENDER_BYTES >> 30} GiB for these messages; mend it"
        ) from None
    except Exception as error:  # templates are third-party code
        said = f"{type(error).__name__}: {str(error)[:300]}"
        raise ValueError(
            f"{template} does not take these messages ({said}); change them or mend the template"
        ) from None
    for messages, text in zip(conversations, texts, strict=True):
        _check_written(messages, text)
    return texts


def _check_written(messages: Messages, text: Any) -> None:
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the chat template writes nothing for these messages; mend it")
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("system", "user") and not contains(text, message.get("content") or ""):
            raise ValueError(
                f"the chat template leaves out message {number} (role {message['role']!r});"
                " leave it out of the data, or use a template that writes it"
            )


def contains(text: str, content: str) -> bool:
    """Whether `text` contains `content`, ignoring white space."""
    return content.strip() in text or "".join(content.split()) in "".join(text.split())


def continuation(hf: Any, messages: Messages, answer: Message) -> tuple[str, str]:
    """Return the rendered prompt and the text that the template appends for assistant turn `answer`.

    Raises:
        ValueError: as in `render`, or the rendered turn does not start with the rendered prompt.
    """
    before = render(hf, messages, add_generation_prompt=True)
    whole = render(hf, [*messages, answer], add_generation_prompt=False)
    if not whole.startswith(before):
        same = next((at for at, (a, b) in enumerate(zip(before, whole)) if a != b), len(whole))
        raise ValueError(
            f"the chat template writes {short_repr(before[same:])} before an answer is generated and"
            f" {short_repr(whole[same:])} once it is there, so that the answer does not continue the prompt;"
            " write prompt and response as strings, or mend the template"
        )
    behind = whole[len(before) :]
    if not contains(behind, answer.get("content") or ""):
        raise ValueError(
            f"the chat template changes the answer: of {short_repr(answer['content'])} it writes "
            f"{short_repr(behind)};"
            " write prompt and response as strings, or mend the template"
        )
    return before, behind


def _limited(write: Callable[[], list[str]]) -> list[str]:
    """Call `write()` within RENDER_S of CPU time (in the main thread) and RENDER_BYTES of memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space(next(_renders) // _RENDERS_A_MEASURE) + RENDER_BYTES
    timed = threading.current_thread() is threading.main_thread()
    if timed:
        _hear_timer()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(soft, most), hard))
        if timed:  # repeating: one signal may arrive in code that swallows exceptions
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
    signal.signal(signal.SIGVTALRM, _stop)  # only `_limited` sets this timer


@functools.lru_cache(maxsize=1)
def _address_space(measure: int) -> int:
    """Bytes of address space in use by this process, measured once for each value of `measure`."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()
