"""Columns of a data file: dotted keys, and those of verl's and TRL's data sets in place of default names."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import Section

# By setting: columns that stand in for its default name where a file does not have it, best first.
STAND_INS = {
    "prompt_key": ("messages",),  # TRL
    "answer_key": ("reward_model.ground_truth", "ground_truth", "solution"),  # verl; TRL
    "response_key": ("completion",),  # TRL
}
_ABSENT = object()


class Columns:
    """The keys under which a file has what the settings of a data section name.

    Args:
        config: a section with settings such as `prompt_key`.
        first: the first row of the file, which shows what columns there are.
        hint: what to say of a file without a column, such as where its columns are named.
        unread: types of columns that the rows lack because these are not read.
    """

    def __init__(
        self,
        config: Section,
        first: Mapping[str, Any],
        *,
        hint: str = "",
        unread: Mapping[str, str] | None = None,
    ):
        self._hint, self._unread = hint, unread or {}
        self.keys: dict[str, str] = {
            name: getattr(config, name) for name in config.__dataclass_fields__ if name.endswith("_key")
        }
        self.stand_ins: dict[str, str] = {}  # by setting
        for name, key in self.keys.items():
            is_default = key == config.__dataclass_fields__[name].default
            if is_default and _at(first, key) is _ABSENT:
                free = [one for one in STAND_INS.get(name, ()) if one not in self.keys.values()]
                other = next((one for one in free if _at(first, one) is not _ABSENT), "")
                if other:
                    self.stand_ins[name] = other
        self.keys |= self.stand_ins

    @property
    def note(self) -> str:
        """What was recognized, for users; empty if the settings' names are the file's."""
        return ", ".join(f"{short_repr(key)} is read as data.{name}" for name, key in self.stand_ins.items())

    def get(self, row: Mapping[str, Any], setting: str) -> Any:
        """Return the row's value for a setting, None if it has none."""
        return value_at(row, self.keys[setting])

    def value(self, row: Mapping[str, Any], setting: str) -> Any:
        """Return the row's value for a setting; ValueError if it has none."""
        value = _at(row, self.keys[setting])
        column = self.keys[setting].partition(".")[0]
        if value is _ABSENT and (kind := self._unread.get(self.keys[setting]) or self._unread.get(column)):
            raise ValueError(
                f"column {short_repr(self.keys[setting])} (data.{setting}) is of the type {kind}, which is "
                "not read; write it as text"
            )
        if value is _ABSENT:
            names = ", ".join(map(short_repr, islice(row, 20))) or "no keys"
            name_one = f"; set data.{setting} to one of them" * bool(row)
            raise ValueError(
                f"no key {short_repr(self.keys[setting])} (data.{setting}); "
                f"the row has {names}{', ...' * (len(row) > 20)}{self._hint or name_one}"
            )
        return value


def _at(row: Mapping[str, Any], key: str) -> Any:
    """Return what is under `key`, or under its parts between dots, one inside the other; or _ABSENT."""
    if key in row or "." not in key:
        return row.get(key, _ABSENT)
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return what a row has under `key`, which may have dots; None if it has nothing there."""
    value = _at(row, key)
    return None if value is _ABSENT else value


def source_of(row: Mapping[str, Any]) -> str:
    """Return the `data_source` of a row as a text; empty if it has none."""
    value = row.get("data_source")
    return "" if value is None else str(value)
