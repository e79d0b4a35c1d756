"""Settings of several recipes in one, and those of a command line as Hydra reads them.

Mappings of recipes get each other's entries, all else is replaced.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from parallel.runtime.refusal import short_repr
from verl_megatron.config import SCHEMAS
from verl_megatron.config.section import sections_of
from verl_megatron.rewards.plan import named_twice

_OTHER_KIND = {dict: ListConfig, list: DictConfig}


def merged(files: Sequence[Path]) -> DictConfig:
    """Return the settings of recipes; those of later files win."""
    settings = OmegaConf.create({})
    for file in files:
        recipe = cast(DictConfig, OmegaConf.load(file))
        recipe.pop("defaults", None)
        for section, values in cast(dict, OmegaConf.to_container(recipe)).items():
            make_room(settings, str(section), values)
            for name, value in values.items() if isinstance(values, dict) else ():
                make_room(settings, f"{section}.{name}", value)
        settings = cast(DictConfig, OmegaConf.merge(settings, recipe))
    return settings


def make_room(settings: DictConfig, name: str, value: Any) -> None:
    """Empty a setting that is a list if `value` is a mapping, or the reverse: OmegaConf cannot merge the two.

    Args:
        name: SECTION or SECTION.SETTING.
    """
    other = _OTHER_KIND.get(type(value))
    if other is not None and isinstance(OmegaConf.select(settings, name), other):
        OmegaConf.update(settings, name, None)


# ---- the command line --------------------------------------------------------------------------------------


def override_of(argument: str) -> str:
    """Return a setting as Hydra reads it, with `++`, as recipes omit defaults.

    Raises:
        ValueError: a mapping with two entries of one name, of which Hydra would keep the last.
    """
    is_setting = "=" in argument and argument[0] not in "+~" and not argument.startswith("hydra")
    if not is_setting:
        return argument
    name, _, value = argument.partition("=")
    if twice := named_twice(value):
        raise ValueError(
            f"{short_repr(argument)[1:-1]} has two entries {short_repr(twice)}; keep one of them"
        )
    return f"++{name}={_as_text(name, value) or _in_quotes(value)}"


def _as_text(name: str, value: str) -> str:
    """Return a number or a truth value in quotes where the setting is a text; empty if it is none."""
    texts = _text_settings()
    if name not in texts or not _is_readable(value):
        return ""
    try:
        read = OverridesParser.create().parse_override(f"++{name}={value}").value()
    except (HydraException, ValueError, RecursionError):
        return ""
    takes_truth = texts[name] and isinstance(read, bool)
    return f"'{value}'" if isinstance(read, int | float) and not takes_truth else ""


@functools.cache
def _text_settings() -> dict[str, bool]:
    """Return the settings that are texts, and whether they are made of other values, too."""
    return {
        f"{section}.{name}": field.metadata["many"] is not None
        for schema in SCHEMAS.values()
        for section, values in sections_of(schema()).items()
        for name, field in values.__dataclass_fields__.items()
        if field.type is str
    }


def _in_quotes(value: str) -> str:
    """Return a text, or a list of texts, in quotes where Hydra needs them: Unicode, `&`, `(` and others."""
    if _is_readable(value):
        return value
    inner = value[1:-1]
    if value[:1] + value[-1:] == "[]" and not set(inner) & set("[]{}()'\""):
        return f"[{','.join(_in_quotes(part.strip()) for part in inner.split(','))}]"
    if value[:1] in tuple("[{'\"") or "," in value:
        return value
    quoted = (mark + value + mark for mark in "'\"" if mark not in value)
    return next(filter(_is_readable, quoted), value)


def _is_readable(value: str) -> bool:
    try:
        OverridesParser.create().parse_override(f"++name={value}")
    except HydraException:
        return False
    except (ValueError, RecursionError):
        pass  # such as numbers with thousands of digits: what composes the settings says so
    return True
