"""Settings of several recipes in one, those of a command line as Hydra reads them, and devices among them.

Mappings of recipes get each other's entries, all else is replaced.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml.nodes import MappingNode, Node, ScalarNode

from parallel.runtime.refusal import short_repr
from verl_megatron.config import SCHEMAS, SCORERS, TrainerConfig
from verl_megatron.config.rollout import sampling_table
from verl_megatron.config.section import sections_of
from verl_megatron.launch.recipe import TEXT, check_recipe
from verl_megatron.rewards.plan import named_twice, split_outer

_OTHER_KIND = {dict: ListConfig, list: DictConfig}


def merged(files: Sequence[Path]) -> DictConfig:
    """Return the settings of recipes; those of later files win."""
    settings = OmegaConf.create({})
    for file in files:
        recipe = _read(file)
        recipe.pop("defaults", None)
        for section, values in cast(dict, OmegaConf.to_container(recipe)).items():
            make_room(settings, str(section), values)
            for name, value in values.items() if isinstance(values, dict) else ():
                make_room(settings, f"{section}.{name}", value)
        settings = cast(DictConfig, OmegaConf.merge(settings, recipe))
    return settings


def _read(file: Path) -> DictConfig:
    """Return the settings of a recipe; what is given for texts is not read as numbers or truth values."""
    document = check_recipe(file)
    for section, settings in document.value if document else ():
        for name, value in settings.value if isinstance(settings, MappingNode) else ():
            takes_truth = _text_settings().get(f"{section.value}.{name.value}")
            if takes_truth is not None:
                _mark_texts(value, takes_truth=takes_truth)
    text = yaml.serialize(document, Dumper=yaml.SafeDumper) if document else ""
    return cast(DictConfig, OmegaConf.create(text))


def _mark_texts(node: Node, *, takes_truth: bool = False) -> None:
    """Make a value a text, or the entries of a list or the names of a mapping; null stays what it is."""
    kind = node.tag.rpartition(":")[2]
    if isinstance(node, ScalarNode) and not (kind == "null" or (kind == "bool" and takes_truth)):
        node.tag, node.style = TEXT, '"'
    elif not isinstance(node, ScalarNode):
        for each in node.value:
            _mark_texts(each[0] if isinstance(node, MappingNode) else each)


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
    if "=" not in argument or argument[0] == "~":
        return argument
    name, _, value = argument.lstrip("+").partition("=")
    if twice := named_twice(value):
        raise ValueError(
            f"{short_repr(argument)[1:-1]} has two entries {short_repr(twice)}; keep one of them"
        )
    if name in _text_settings():
        value = _as_text(value, takes_truth=_text_settings()[name])
    return f"++{name}={_in_quotes(value)}"


def _as_text(value: str, *, takes_truth: bool = False) -> str:
    """Return what is given for a text, in quotes if Hydra reads a number or a truth value.

    In a list these are entries. A mapping is put in quotes as a whole if they are names of it.
    """
    if value[:1] + value[-1:] == "[]":
        return f"[{','.join(map(_as_text, split_outer(value[1:-1])))}]"
    try:
        read = OverridesParser.create().parse_override(f"++name={value}").value()
    except (HydraException, ValueError, RecursionError):
        return value
    is_other = isinstance(read, int | float) and not (takes_truth and isinstance(read, bool))
    if isinstance(read, dict):
        is_other = any(str(name) not in value for name in read)
    return _quoted(value.strip()) if is_other else value


@functools.cache
def _text_settings() -> dict[str, bool]:
    """Return the settings that are texts or lists of them, and whether a truth value makes one, too."""
    return {
        f"{section}.{name}": field.metadata["many"] is sampling_table
        for schema in SCHEMAS.values()
        for section, values in sections_of(schema()).items()
        for name, field in values.__dataclass_fields__.items()
        if field.type in (str, list[str])
    }


def devices_in(settings: Mapping[str, Any]) -> TrainerConfig:
    """Return the devices of a run's settings by section, which say its worlds; all else is as by default."""
    config = TrainerConfig()
    for name in ("rollout", "actor", "critic", *SCORERS):
        section = settings.get(name)
        devices = section.get("devices") if isinstance(section, dict) else None
        if devices not in (None, ""):  # 0 is a rank
            config.set(f"{name}.devices", str(devices))
    return config


def _in_quotes(value: str) -> str:
    """Return a text, or a list of texts, in quotes where Hydra needs them: Unicode, `&`, `(` and others."""
    if _is_readable(value):
        return value
    inner = value[1:-1]
    if value[:1] + value[-1:] == "[]" and not set(inner) & set("[]{}()"):
        return f"[{','.join(_in_quotes(part.strip()) for part in split_outer(inner))}]"
    if value[:1] in tuple("[{'\"") or "," in value:
        return value
    quoted = _quoted(value)
    return quoted if _is_readable(quoted) else value


def _quoted(value: str) -> str:
    mark = '"' if "'" in value else "'"
    return mark + value + mark


def _is_readable(value: str) -> bool:
    try:
        OverridesParser.create().parse_override(f"++name={value}")
    except HydraException:
        return False
    except (ValueError, RecursionError):
        pass  # such as numbers with thousands of digits: what composes the settings says so
    return True
