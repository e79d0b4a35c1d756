"""Settings from a recipe and a command line: names and types, all wrong ones reported together."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.checks.problems import refuse
from verl_megatron.config import MISSING, SCHEMAS, Section, name_here, present_name
from verl_megatron.config.rollout import sampling_table
from verl_megatron.config.section import names_of, shown

Schema = TypeVar("Schema")
LEAST_GROUPED = 10_000  # integers from here on are written with _ at times
PATHS = ("output_dir", "path", "train", "validation", "function")  # settings that name files or folders


def structured(overrides: Mapping[str, Any] | DictConfig, schema: type[Schema]) -> Schema:
    """Return the settings of `schema` (such as TrainerConfig) with `overrides` applied.

    Texts such as ${run.seed} are replaced in a DictConfig; in any other mapping they stay as they are.

    Raises:
        ValueError: lists all unknown sections and settings, values of a wrong type and missing settings.
    """
    given = _resolved(overrides)
    structure = OmegaConf.structured(schema)
    merged = {shown(name): structure[name] for name in structure}
    problems = []
    known = [f"{section}.{name}" for section in merged for name in merged[section]]
    for name, values in given.items():
        section = shown(name) if isinstance(name, str) else name
        if section not in merged:
            said = _no_section(str(section), merged, known)
            problems += _each_name(str(section), values, known, otherwise=said)
        elif not isinstance(values, dict):
            problems.append(
                f"{section}={short_repr(values)} is no section with settings; give its settings one by one, "
                f"such as {section}.{next(iter(merged[section]))}"
            )
        else:
            problems += _put_all(merged[section], str(section), values, known)
    missing = sorted(OmegaConf.missing_keys(structure) - set(_flat(given)))  # a wrong value is said above
    problems += [f"{name} has to be given; add {name}=..." for name in missing]
    refuse(problems)
    return cast(Schema, OmegaConf.to_object(structure))


def command_of(settings: Mapping[Any, Any], schema: type[Section]) -> str:
    """Return the command whose settings these are, if `schema` does not have all of them; "" otherwise."""
    names = set(_flat(settings))
    if names <= names_of(schema):
        return ""
    commands = (command.replace("_", "-") for command in SCHEMAS if names <= names_of(SCHEMAS[command]))
    return next(commands, "")


def _flat(given: Mapping[Any, Any]) -> Iterator[str]:
    """Yield section.setting of all settings that have a value."""
    for section, values in given.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if value != MISSING:
                yield f"{section}.{name}"


def _resolved(overrides: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    if not isinstance(overrides, DictConfig):
        return dict(overrides)
    try:
        return cast(dict[str, Any], OmegaConf.to_container(overrides, resolve=True))
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{error.full_key or 'a setting'} cannot be read ({str(error).splitlines()[0]}); "
            f"give the value itself, or a ${{section.setting}} that exists"
        ) from None


def _each_name(
    name: str, value: Any, known: Collection[str], *, otherwise: str, anywhere: bool = False
) -> list[str]:
    """Return what all settings in and below `name` are called here, or `otherwise`; each sentence once."""
    said = [name_here(below, known, anywhere=anywhere) or otherwise for below in _below(name, value)]
    return list(dict.fromkeys(said))


def _below(name: str, value: Any) -> Iterator[str]:
    """Yield the full names of all settings in and below `name`."""
    if not isinstance(value, dict) or not value:
        yield name
        return
    for key, each in value.items():
        yield from _below(f"{name}.{key}", each)


def _put_all(
    section: DictConfig, section_name: str, values: dict[Any, Any], settings: Collection[str]
) -> list[str]:
    """Set settings of a section, which are some of all `settings`; return the problems."""
    known, problems = [str(key) for key in section], []
    for name, value in ((str(name), value) for name, value in values.items()):
        if name in known:
            problems += filter(None, [_put(section, section_name, name, value)])
        elif new := present_name(name, known):
            problems.append(f"{section_name}.{name} is now called {section_name}.{new}; rename it")
        else:
            said = _no_setting(section_name, name, known, settings)
            problems += _each_name(f"{section_name}.{name}", value, settings, otherwise=said, anywhere=True)
    return problems


def _put(section: DictConfig, section_name: str, name: str, value: Any) -> str:
    """Set one setting; return its problem, or an empty string."""
    fields = cast(Any, OmegaConf.get_type(section)).__dataclass_fields__
    if name in PATHS:
        value = _with_home(value)
    many = fields[name].metadata.get("many")
    is_text = fields[name].type in (str, list[str])
    misread = _misread(value, takes_truth=many is sampling_table) if is_text else None
    if misread is not None:
        where = "" if misread is value else f": {misread!r}"
        return (
            f"{section_name}.{name}={short_repr(value)}{where} was read as a {type(misread).__name__}, and "
            "the setting is a text; put it in quotes"
        )
    try:
        section[name] = _literal(many(value) if many else value)
        is_number = re.fullmatch(r"[-+]?\d{1,9}", str(value)) is not None
        if isinstance(section[name], bool) and is_number and int(value) not in (0, 1):
            raise ValidationError(f"Value {str(value)!r} is not a valid bool")  # OmegaConf takes every number
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        if "ListConfig" in reason and isinstance(value, str | int | float):
            return (
                f"{section_name}.{name}={short_repr(value)} has a wrong type (it is no list); write [{value}]"
            )
        return (
            f"{section_name}.{name}={short_repr(value)} has a wrong type ({reason}); "
            f"give a value like {_example(section, name)}"
        )
    return ""


def _no_section(name: str, sections: Collection[str], settings: Collection[str]) -> str:
    said = f"{short_repr(name)[1:-1]} is no section"
    if name in settings:
        section, _, setting = name.partition(".")
        return f"{said}; a recipe has settings inside their section: {section}: {{{setting}: VALUE}}"
    if others := _of_that_name(name, settings):
        return f"{said}; write {others}"
    return f"{said}{nearest(name, sections)}; the sections are {', '.join(sections)}"


def _no_setting(section: str, name: str, known: Collection[str], settings: Collection[str]) -> str:
    said = f"{section}.{short_repr(name)[1:-1]} is no setting"
    if others := _of_that_name(name, settings):
        return f"{said}; write {others}"
    return f"{said}{nearest(name, known)}; {section} has {', '.join(known)}"


def _of_that_name(name: str, settings: Collection[str]) -> str:
    return " or ".join(setting for setting in settings if setting.partition(".")[2] == name)


def _with_home(value: Any) -> Any:
    """Return paths with the home folder in place of a `~` that begins them, as shells leave it there."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, list):
        return [_with_home(each) for each in value]
    if isinstance(value, dict):
        return {_with_home(key): _with_home(each) for key, each in value.items()}
    return value


def _misread(value: Any, *, takes_truth: bool) -> float | bool | None:
    """Return a value that may have been written as another text, such as 1e3, 2024_01_02 or off in YAML.

    In a list it is an entry, in a mapping a name; None if there is none.
    """
    for each in value if isinstance(value, list | dict) else [value]:
        is_number = isinstance(each, float) or (isinstance(each, int) and abs(each) >= LEAST_GROUPED)
        if is_number or (isinstance(each, bool) and not takes_truth):
            return each
    return None


def _literal(value: Any) -> Any:
    """Return a text, or a list of texts, in which OmegaConf finds no ${name} to replace."""
    if isinstance(value, list | tuple):
        return [_literal(each) for each in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)


def _example(section: DictConfig, name: str) -> str:
    default = getattr(cast(type, OmegaConf.get_type(section))(), name)
    if default == MISSING:
        return "train.jsonl"  # only data files have to be given
    if default == []:
        is_text = cast(Any, OmegaConf.get_type(section)).__dataclass_fields__[name].type == list[str]
        return "[a, b]" if is_text else "[1, 2]"
    return json.dumps(default)  # as a recipe has it
