"""A reward function given as a Python object: lambdas, functions of notebooks, partial calls."""

import hashlib
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr

_FILE = '''"""The reward function that RLTrainer was given."""

import pickle

score = pickle.loads(
{content}
)
'''


def spec_of(function: str | Callable[..., Any], folder: str | os.PathLike[str]) -> str:
    """Return what reward.function names: texts as they are, a callable as `file.py:score` in `folder`.

    Functions of modules that can be imported are stored by name, others with their code and what they use.
    The file's name depends on the content, so that a resumed run knows whether its function has changed.

    Raises:
        ValueError: the function uses what cannot be stored, or the folder cannot be written to.
    """
    if not callable(function):
        return function
    import cloudpickle

    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # any type: objects say themselves why they cannot be stored
        raise ValueError(
            f"reward_function={short_repr(name)} cannot be passed to worker processes "
            f"({type(error).__name__}: {short_repr(str(error))}); write it into a file of its own "
            "and give reward_function='path.py:name'"
        ) from None
    digest = hashlib.sha256(content).hexdigest()[:12]
    path = Path(folder) / f"reward_function_{digest}.py"
    lines = [content[start : start + 80] for start in range(0, len(content), 80)]
    text = _FILE.format(content=textwrap.indent("\n".join(map(repr, lines)), "    "))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # ranks of a host write the same file
    except OSError as error:
        raise ValueError(
            f"run.output_dir={short_repr(str(folder))} cannot take the file of the reward function "
            f"({error.strerror}); name a folder that can be written to"
        ) from None
    return f"{path}:score"
