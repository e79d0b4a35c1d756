"""Declaration of a setting, the base of all sections, and settings that have been renamed.

`within` is an interval: square brackets are closed ends, round ones open. Upper bounds are where a value
stops being meaningful, or limits of hardware, vLLM or float32. Limits that depend on the model, the data or
the machine are in `checks/`.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field
from keyword import iskeyword
from typing import Any, ClassVar, Self, TypeVar

from parallel.runtime.refusal import nearest
from verl_megatron.config.names import name_here

MISSING = "???"  # OmegaConf's marker for a required setting
COUNT, POSITIVE = "[0, 1000000000]", "[1, 1000000000]"  # iterations, steps, tokens: more than any run needs
SHARE = "[0, 1000000]"  # coefficients and norms: far below float32 overflow of a loss
LEAST_TEMPERATURE = 0.01  # vLLM takes lower ones above 0 for this one


def shown(section: str) -> str:
    """Return the users' name of a section: `async` is Python's word, so its attribute is `async_`."""
    return section[:-1] if section.endswith("_") and iskeyword(section[:-1]) else section


def attribute_of(section: str) -> str:
    """Return the attribute that a section with this name for users is."""
    return section + "_" * iskeyword(section)


def sections_of(config: "Section") -> "dict[str, Any]":
    """Return the sections of all settings by their users' names."""
    return {shown(name): getattr(config, name) for name in config.__dataclass_fields__}


def as_dict(config: "Section") -> dict[str, dict[str, Any]]:
    """Return all settings by section and name, as plain values."""
    return {name: asdict(section) for name, section in sections_of(config).items()}


def names_of(schema: "type[Section]") -> set[str]:
    """Return all settings of a kind of run, such as "rollout.tp"."""
    return {f"{section}.{name}" for section, settings in as_dict(schema()).items() for name in settings}


# Settings that name files and folders: two spellings may mean the same one, and hosts may keep it elsewhere.
PATHS = {"actor.path", "critic.path", "reward.path", "teacher.path",
         "data.train", "data.validation", "run.output_dir"}  # fmt: skip

RENAMED = {  # former name -> name; the former one is refused with the new one in the message
    "data.rows_per_step": "data.samples_per_step",
    "data.validation_rows": "data.validation_samples",
    "engine.schedule": "engine.lr_decay_style",
    "engine.spec": "engine.transformer_impl",
    "engine.warmup_steps": "engine.lr_warmup_steps",
    "algorithm.clip_high": "algorithm.clip_ratio_high",
    "algorithm.clip_low": "algorithm.clip_ratio_low",
    "algorithm.importance_cap": "algorithm.correction_high",
    "algorithm.tis_cap": "algorithm.correction_high",
    "algorithm.kl_horizon": "algorithm.kl_ctrl_horizon",
    "algorithm.kl_target": "algorithm.kl_ctrl_target",
    "algorithm.lam": "algorithm.gae_lambda",
    "algorithm.mini_batches": "algorithm.num_mini_batches",
    "algorithm.stop_kl": "algorithm.target_kl",
    "algorithm.value_clip": "algorithm.cliprange_value",
}


def present_name(name: str, known: Iterable[str]) -> str:
    """Return what the setting formerly called `name` is called in a section with settings `known`, or ""."""
    names = (new.partition(".")[2] for old, new in RENAMED.items() if old.partition(".")[2] == name)
    return next((new for new in names if new in known), "")


class UnknownSettingError(AttributeError, ValueError):
    """An unknown setting name: an AttributeError in Python terms, a ValueError as for any user error."""


class Section:
    """A group of settings. Unknown names are refused; a pathlib.Path is stored as a string.

    A list, or a mapping, for a setting that takes several values is stored as one string.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    # Further names: each takes a value and returns the settings that it stands for, as `set` takes them.
    _older_names: ClassVar[Mapping[str, Callable[[Any], dict[str, Any]]]] = {}

    def __new__(cls, **settings: Any) -> Self:
        for name in settings:
            cls._refuse_unknown(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._older_names:
            for setting, stands_for in self._older_names[name](value).items():
                self.set(setting, stands_for)
            return
        self._refuse_unknown(name)
        if many := self.__dataclass_fields__[name].metadata.get("many"):
            value = many(value)
        super().__setattr__(name, os.fspath(value) if isinstance(value, os.PathLike) else value)

    def set(self, setting: str, value: Any) -> None:
        """Set "section.setting" of one of these sections, or a "setting" of this one."""
        section, _, name = setting.rpartition(".")
        setattr(getattr(self, attribute_of(section)) if section else self, name, value)

    @classmethod
    def _refuse_unknown(cls, name: str) -> None:
        known = [*cls.__dataclass_fields__, *cls._older_names]
        if new := present_name(name, known):
            raise UnknownSettingError(f"{name} of {cls.__name__} is now called {new}; rename it")
        if name not in known:
            if said := name_here(f"{cls._section()}.{name}", anywhere=True):
                raise UnknownSettingError(said)
            raise UnknownSettingError(
                f"{name} is no setting of {cls.__name__}{nearest(name, known)}; it has {', '.join(known)}"
            )

    @classmethod
    def _section(cls) -> str:
        """The section's usual name in other projects."""
        return {"ModelConfig": "actor"}.get(cls.__name__, cls.__name__.removesuffix("Config").lower())


SectionType = TypeVar("SectionType", bound=type[Section])


def accept(names: Mapping[str, Callable[[Any], dict[str, Any]]]) -> Callable[[SectionType], SectionType]:
    """Return a class decorator: the class takes these names too, as arguments and as attributes."""

    def decorate(kind: SectionType) -> SectionType:
        decorated: Any = kind
        initialize = decorated.__init__

        @functools.wraps(initialize)
        def initialize_with_older(self: Section, **settings: Any) -> None:
            older = {name: settings.pop(name) for name in names if name in settings}
            initialize(self, **settings)
            for name, value in older.items():
                setattr(self, name, value)

        decorated._older_names, decorated.__init__ = names, initialize_with_older
        return kind

    return decorate


def joined(value: Any) -> Any:
    """Return paths as one string; all other values as they are.

    Args:
        value: a list of paths, pairs (path, weight) and mappings from paths to weights, or one such mapping.
    """
    if isinstance(value, Mapping):
        value = [value] if value else []
    if not isinstance(value, list | tuple):
        return value
    parts = [part for item in value for part in (item.items() if isinstance(item, Mapping) else [item])]
    texts: list[Any] = [f"{part[0]}:{part[1]!r}" if _is_weighted(part) else part for part in parts]
    is_list = all(isinstance(text, str | os.PathLike) for text in texts)
    return ",".join(str(os.fspath(text)) for text in texts) if is_list else value


def _is_weighted(part: Any) -> bool:
    """Whether a value is a pair of a name and its weight."""
    return (
        isinstance(part, tuple)
        and len(part) == 2
        and isinstance(part[0], str | os.PathLike)
        and isinstance(part[1], int | float)
        and not isinstance(part[1], bool)
    )


def as_json(value: Any) -> Any:
    """Return a list or a mapping as JSON, its pairs (name, weight) as "name:weight"; others as they are.

    What JSON cannot hold stays as it is.
    """
    if not isinstance(value, list | tuple | Mapping):
        return value
    try:
        return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if _is_weighted(value):
        return f"{os.fspath(value[0])}:{value[1]!r}"
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def setting(
    default: Any,
    meaning: str,
    *,
    within: str = "",
    choices: tuple[str, ...] = (),
    many: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare a dataclass field whose metadata says what the setting means and which values it takes.

    Args:
        default: copied for each section if it is a list.
        meaning: with the unit, for users.
        within: interval of a number, or of each element of a list, such as "(0, 1]"; empty: any.
        choices: valid values; empty: any.
        many: makes the string that is stored of a list or a mapping; None: these are refused.
    """
    metadata = {"meaning": meaning, "within": within, "choices": choices, "many": many}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
