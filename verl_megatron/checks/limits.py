"""Checks of each setting on its own: its type, and the interval or choices declared in `config/`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast, get_args, get_origin

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.config.section import sections_of, shown


def inside(value: float, interval: str) -> bool:
    """Whether `value` is in an interval such as "(0, 1]"; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def check_types(config: Any) -> list[str]:
    """Return a problem for each section and setting of `config` with a wrong type."""
    problems = []
    for section in fields(config):
        values, kind = getattr(config, section.name), cast(type, section.type)
        if type(values) is not kind:
            problems.append(
                f"{shown(section.name)}={short_repr(values)} is no section; give a {kind.__name__}"
            )
            continue
        for field in fields(values):
            value = getattr(values, field.name, None)
            if not _has_type(value, field.type):
                problems.append(
                    f"{shown(section.name)}.{field.name}={short_repr(value)} has a wrong type "
                    f"({type(value).__name__}); "
                    f"give {TYPES[field.type]}"
                )
    return problems


TYPES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a text",
    list[str]: "a list of texts",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
}


def _has_type(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(
            _has_type(element, get_args(kind)[0]) for element in value
        )
    if isinstance(value, bool) or kind is bool:  # bool is a subclass of int
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int | float if kind is float else kind)


def check_values(config: Any) -> list[str]:
    """Return a problem for each setting of `config` outside its interval or choices; types must be right."""
    problems = []
    for name, values in sections_of(config).items():
        for field in fields(values):
            problems += value_problems(f"{name}.{field.name}", getattr(values, field.name), field.metadata)
    return problems


def value_problems(name: str, value: Any, limits: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a setting outside the interval or choices of its metadata, `limits`."""
    within, choices = limits["within"], limits["choices"]
    numbers = value if isinstance(value, list | tuple) else [value]
    if within and not all(inside(number, within) for number in numbers):
        return [f"{name}={short_repr(value)} lies outside {within}; choose a value inside"]
    if choices and value not in choices:
        return [
            f"{name}={short_repr(value)} is not known{nearest(value, choices)}; choose one of "
            f"{', '.join(choices)}"
        ]
    return []
