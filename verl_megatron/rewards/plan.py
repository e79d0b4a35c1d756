"""What `reward.function` says: one function, several with weights, or those of each data_source.

    math                                                       one function, also path.py:name or a URL
    [math:0.8,format:0.2]                                      several, whose weighted sum is the score
    {openai/gsm8k:math,codecontests:[code,format:0.1],default:exact}    by the row's column data_source

Lists and mappings are stored as JSON; texts as above are read, too.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr

DEFAULT = "default"  # entry of a mapping for all other sources
MOST_WEIGHT = 1e6
FORM = "write NAME, [NAME:WEIGHT,...] or {DATA_SOURCE:NAME,default:NAME}"

QUOTES = ("'", '"')

_URL = re.compile(r"https?://", re.IGNORECASE)
# A URL's port is no weight: that stands behind the path, or behind the port.
_WEIGHTED_URL = re.compile(r"(https?://(?:[^/]+/.*|(?:\[[^]]*\]|[^/:]+):\d+)):([^/:]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """A function with its weight in the score, and the name of its metrics."""

    spec: str
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class RewardPlan:
    """The functions that score a sample, by its data_source."""

    routes: Mapping[str, tuple[Part, ...]]  # by data_source; DEFAULT for those without an entry
    is_routed: bool = False
    is_plain: bool = False  # one function, whose score is that of the sample

    @property
    def specs(self) -> list[str]:
        """All functions, each once."""
        return list(dict.fromkeys(part.spec for parts in self.routes.values() for part in parts))

    def parts(self, source: str) -> tuple[Part, ...]:
        """Return the functions for rows of a data_source; empty if there are none."""
        return self.routes.get(source) or self.routes.get(DEFAULT, ())


def is_routed(text: str) -> bool:
    """Whether reward.function=`text` chooses functions by data_source."""
    return bool(text) and read_plan(text).is_routed


def functions_of(text: str) -> list[str]:
    """Return the functions of reward.function=`text`; empty if it cannot be read."""
    try:
        return read_plan(text).specs if text else []
    except ValueError:
        return []


def described(text: str) -> str:
    """Return what reward.function=`text` adds up, in words; empty for one function or none."""
    plan = read_plan(text) if text else RewardPlan(routes={}, is_plain=True)
    if plan.is_plain:
        return ""
    shown = []
    for source, parts in plan.routes.items():
        of = "all others" if source == DEFAULT else short_repr(source)
        total = " + ".join(f"{part.weight:g} x {part.name}" for part in parts)
        shown.append(f"{total} for {of}" if plan.is_routed else total)
    return f"score: {'; '.join(shown)}"


def is_url(spec: str) -> bool:
    """Whether a function is a server's."""
    return _URL.match(spec) is not None


def read_plan(text: str) -> RewardPlan:
    """Return what reward.function=`text` says; whether the functions exist is not looked at.

    Raises:
        ValueError: it cannot be read, or has no function, one twice, or a wrong weight.
    """
    try:
        value = _value(text.strip())
        if isinstance(value, dict):
            plan = RewardPlan(routes=_routes(value), is_routed=True)
        else:
            parts = _parts(value)
            is_plain = isinstance(value, str) and parts == (Part(value),)
            plan = RewardPlan(routes={DEFAULT: parts}, is_plain=is_plain)
    except ValueError as error:
        raise ValueError(f"reward.function={short_repr(text)} {error}") from None
    return replace(plan, routes=_named(plan))


# ---- reading -----------------------------------------------------------------------------------------------


def _value(text: str) -> Any:
    """Return a text as a value of JSON; text that is no list and no mapping as it is."""
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return text
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except _TwiceError:
        raise
    except RecursionError:
        raise ValueError(f"is nested too deeply; {FORM}") from None
    except ValueError:
        return _without_quotes(text)


def named_twice(text: str) -> str:
    """Return the first name that has two entries in the text of a mapping; empty if there is none."""
    try:
        _value(text)
    except _TwiceError as error:
        return error.key
    except ValueError:
        pass  # whoever reads it says so
    return ""


class _TwiceError(ValueError):
    """A mapping has two entries of one name."""

    def __init__(self, key: str):
        self.key = key
        super().__init__(f"has two entries for data_source {short_repr(key)}; join them to one")


def _mapping(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of JSON."""
    found: dict[str, Any] = {}
    for key, value in entries:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found


def _without_quotes(text: str) -> Any:
    """Read a list or a mapping whose texts have no quotes."""
    items = split_outer(text[1:-1])
    if text[0] == "[":
        return [_bare(item) for item in items]
    found: dict[str, Any] = {}
    for item in items:
        key, *values = split_outer(item, at=":")
        key = _without_marks(key.strip())
        if key in found:
            raise _TwiceError(key)
        found[key] = _bare(":".join(values))
    return found


def _bare(text: str) -> Any:
    text = text.strip()
    return _value(text) if text[:1] not in QUOTES else _without_marks(text)


def _without_marks(text: str) -> str:
    return text[1:].removesuffix(text[0]) if text[:1] in QUOTES else text


def split_outer(text: str, *, at: str = ",") -> list[str]:
    """Split at the signs `at` that stand outside brackets and quotes."""
    parts, depth, mark = [""], 0, ""
    for letter in text:
        if mark or (letter in QUOTES and not parts[-1].strip()):
            mark = "" if letter == mark else mark or letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == at and not depth and not mark:
            parts.append("")
        else:
            parts[-1] += letter
    return parts if text.strip() else []


def _routes(value: dict[str, Any]) -> dict[str, tuple[Part, ...]]:
    if not value:
        raise ValueError(f"has no entries; {FORM}")
    routes = {}
    for source, functions in value.items():
        if isinstance(functions, int | float):
            raise ValueError(
                f"gives data_source {short_repr(source)} the number {functions}, and entries name functions;"
                f" weights stand in a list, as [{source}:{functions},...]"
            )
        try:
            routes[source] = _parts(functions)
        except ValueError as error:
            raise ValueError(f"has a wrong entry {short_repr(source)}: it {error}") from None
    return routes


def _parts(value: Any) -> tuple[Part, ...]:
    """Return the functions of a text or a list; ValueError with a clause."""
    if not isinstance(value, str | list):
        raise ValueError(f"is {short_repr(value)}; {FORM}")
    items = _pairs(value) if isinstance(value, list) else [value]
    parts = list(map(_part, items))
    if not parts:
        raise ValueError(f"names no function; {FORM}")
    spec, count = Counter(part.spec for part in parts).most_common(1)[0]
    if count > 1:
        raise ValueError(f"names {short_repr(spec)} twice; give it once, with the sum of its weights")
    if not any(part.weight for part in parts):
        raise ValueError("has weights of 0 only, so every score would be 0; give one a weight")
    return tuple(parts)


def _pairs(items: list[Any]) -> list[Any]:
    """Return the items of a list, YAML's `- NAME: WEIGHT` written as texts."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, dict) and item and all(map(_is_number, item.values())):
            found += [f"{name}:{weight!r}" for name, weight in item.items()]
        else:
            found.append(item)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _part(item: Any) -> Part:
    if not isinstance(item, str):
        raise ValueError(f"has {short_repr(item)} in place of a function; {FORM}")
    spec, written = item.strip(), ""
    if is_url(spec):
        if found := _WEIGHTED_URL.fullmatch(spec):
            spec, written = found[1], found[2]
    elif _as_number(spec.rpartition(":")[2]) is not None:
        spec, _, written = spec.rpartition(":")
    if not spec.strip():
        raise ValueError(f"has {short_repr(item)} in place of a function; {FORM}")
    if not written:
        return Part(spec)
    weight = _as_number(written)
    if weight is None or not abs(weight) <= MOST_WEIGHT:
        raise ValueError(
            f"gives {short_repr(spec)} the weight {short_repr(written)[1:-1]}; give a number, of at most "
            f"{MOST_WEIGHT:.0f}"
        )
    return Part(spec.strip(), weight)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# ---- names of metrics --------------------------------------------------------------------------------------


def _named(plan: RewardPlan) -> dict[str, tuple[Part, ...]]:
    """Return the routes with a name for each function, which no other function has."""
    names = {spec: _short_name(spec) for spec in plan.specs}
    shared = [name for name, count in Counter(names.values()).items() if count > 1]
    names = {spec: _longer_name(spec) if name in shared else name for spec, name in names.items()}
    taken: Counter[str] = Counter()
    for spec, name in names.items():
        taken[name] += 1
        names[spec] = f"{name}_{taken[name]}" if taken[name] > 1 else name
    named = {}
    for source, parts in plan.routes.items():
        named[source] = tuple(replace(part, name=names[part.spec]) for part in parts)
    return named


def _short_name(spec: str) -> str:
    if not is_url(spec):
        return spec.rpartition(":")[2]
    host, _, path = spec.partition("://")[2].partition("?")[0].partition("/")
    return path.rstrip("/").rpartition("/")[2] or host.replace(":", "_")


def _longer_name(spec: str) -> str:
    if is_url(spec):
        return re.sub(r"[^\w.-]+", "_", spec.partition("://")[2].partition("?")[0]).strip("_")
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).stem}.{name}" if colon else name
