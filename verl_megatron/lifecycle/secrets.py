"""Secrets in settings and command lines, masked before they are written to files."""

import re
from typing import Any

MASK = "***"
# Columns of data are keys too (`data.prompt_key`), so a key is a secret alone or with a word that says so.
_NAME = re.compile(
    r"(?:.*[_.-])?(?:token|secret|passw(?:or)?d|passphrase|credentials?"
    r"|(?:api|access|private|secret|auth|account|encryption)[_-]?key)|(?:.*\.|-*)key",
    re.IGNORECASE,
)
_COUNT = re.compile(r"[-+0-9.eE_]+|true|false|null", re.IGNORECASE)  # of tokens, not a token
_IN_TEXT = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE), rf"\1{MASK}@"),  # user:password@host
    (
        re.compile(r"([?&][^=&\s]*(?:token|secret|key|sig|signature|password|credential)=)[^&\s]+", re.I),
        rf"\1{MASK}",
    ),
    # As Hugging Face, OpenAI, GitHub, GitLab, Slack and AWS write theirs.
    (
        re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}"),
        MASK,
    ),
)


def is_secret(name: str) -> bool:
    """Whether a setting or an option of this name holds a token, key or password."""
    return _NAME.fullmatch(name) is not None


def masked_text(text: str) -> str:
    """Return `text` with tokens and the passwords of URLs masked."""
    for pattern, mask in _IN_TEXT:
        text = pattern.sub(mask, text)
    return text


def masked_value(name: str, value: Any) -> Any:
    """Return a setting's value with secrets masked; numbers and switches are none."""
    if isinstance(value, str):
        return MASK if value and is_secret(name) else masked_text(value)
    if isinstance(value, list | tuple):
        return [masked_value(name, part) for part in value]
    if isinstance(value, dict):
        return {key: masked_value(str(key), part) for key, part in value.items()}
    return value


def masked_arguments(arguments: list[str]) -> list[str]:
    """Return a command line with secrets masked, in `NAME=VALUE`, `--name=VALUE` and `--name VALUE`."""
    masked, follows = [], False
    for argument in arguments:
        name, sign, value = argument.partition("=")
        if follows and not argument.startswith("-"):
            masked.append(MASK)
        elif sign and value and is_secret(name) and not _COUNT.fullmatch(value):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(masked_text(argument))
        follows = not sign and argument.startswith("--") and is_secret(name)
    return masked
