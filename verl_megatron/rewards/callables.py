"""A reward function given as a Python object: lambdas, functions of notebooks, partial calls."""

import hashlib
import io
import os
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from keyword import iskeyword
from pathlib import Path
from types import NoneType
from typing import Any

from parallel.runtime.refusal import short_repr

_FILE = '''"""The reward function that RLTrainer was given."""

import pickle

{name} = pickle.loads(
{content}
)
'''


def spec_of(function: Any, folder: str | os.PathLike[str]) -> Any:
    """Return what reward.function says: texts as they are, a callable as `file.py:score` in `folder`.

    Lists of names, callables and pairs with a weight, and mappings of them by data_source, are returned with
    names in place of callables. Functions of modules that can be imported are stored by name, others with
    their code and what they use. The file's name depends on the content, so that a resumed run knows whether
    its function has changed.

    Raises:
        ValueError: a function uses what cannot be stored, or the folder cannot be written to.
    """
    if isinstance(function, Mapping):
        return {
            source: _item(entry, folder) if callable(entry) else spec_of(entry, folder)
            for source, entry in function.items()
        }
    if _is_pair(function):
        return [_item(function, folder)]
    if isinstance(function, list | tuple):
        return [_item(item, folder) for item in function]
    return _stored(function, folder, "score") if callable(function) else function


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], int | float)


def _item(item: Any, folder: str | os.PathLike[str]) -> Any:
    """Return an item of a list. A callable keeps its name, which its metrics get."""
    if _is_pair(item):
        return _item(item[0], folder), item[1]
    if not callable(item):
        return item
    name = getattr(item, "__name__", "")
    return _stored(item, folder, name if name.isidentifier() and not iskeyword(name) else "score")


def _digest(function: Callable[..., Any], content: bytes) -> str:
    """Return a digest of a callable and what it uses, the same in every process.

    Args:
        content: what cloudpickle makes of it, where nothing better can be made.
    """
    try:
        stable = _stable(function)
    except Exception:  # any type: objects say themselves what cannot be stored of them alone
        stable = content
    return hashlib.sha256(stable).hexdigest()


def _stable(value: Any, within: tuple[int, ...] = ()) -> bytes:
    """Return what cloudpickle makes of a value, without the order of sets and the ids of classes.

    Args:
        within: ids of the sets that have the value.
    """
    content = io.BytesIO()
    pickler: Any = _pickler()(content)
    pickler.within = within
    pickler.dump(value)
    return content.getvalue()


@cache
def _pickler() -> type[Any]:
    from cloudpickle import cloudpickle

    class_ids = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})

    class Pickler(cloudpickle.Pickler):
        within: tuple[int, ...]

        def persistent_id(self, obj: Any) -> Any:
            if type(obj) in (set, frozenset):
                within = (*self.within, id(obj))
                found = ["again"] if id(obj) in self.within else [_element(each, within) for each in obj]
                return type(obj).__name__, *sorted(found)
            return "class" if type(obj) is str and obj in class_ids else None

    return Pickler


def _element(value: Any, within: tuple[int, ...]) -> str:
    """Return a text of an element of a set, by which it can be sorted."""
    if type(value) in (str, bytes, int, float, bool, complex, NoneType):
        return f"{type(value).__name__} {value!r}"
    return hashlib.sha256(_stable(value, within)).hexdigest()


def _stored(function: Callable[..., Any], folder: str | os.PathLike[str], name: str) -> str:
    """Write a callable into a file; return `file.py:name`."""
    import cloudpickle

    shown = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # any type: objects say themselves why they cannot be stored
        raise ValueError(
            f"reward_function={short_repr(shown)} cannot be passed to worker processes "
            f"({type(error).__name__}: {short_repr(str(error))}); write it into a file of its own "
            "and give reward_function='path.py:name'"
        ) from None
    digest = _digest(function, content)[:12]
    prefix = "" if name == "score" else f"{name}_"
    path = Path(folder) / f"reward_function_{prefix}{digest}.py"
    lines = [content[start : start + 80] for start in range(0, len(content), 80)]
    text = _FILE.format(name=name, content=textwrap.indent("\n".join(map(repr, lines)), "    "))
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
    return f"{path}:{name}"
