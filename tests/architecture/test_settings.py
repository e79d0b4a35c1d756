"""A setting that nothing reads is a lie to the user."""

import ast
import dataclasses

import pytest

from tests.worlds import ROOT
from verl_megatron.config import SCHEMAS

# Checks, plans and this list of settings do not count as readers.
NOT_READERS = {"config", "presets.py", "checks", "planner"}


def attributes_read() -> set[tuple[str, str]]:
    """(object, attribute) of every `object.attribute` and `other.object.attribute` read in the code."""
    found = set()
    for package in ("parallel", "verl_megatron"):
        for path in (ROOT / package).rglob("*.py"):
            if NOT_READERS & set(path.parts):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Load)
                    and isinstance(node.value, ast.Name | ast.Attribute)
                ):
                    holder = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                    found.add((holder.lstrip("_"), node.attr))
    return found


def settings() -> list[tuple[str, str, str]]:
    found = []
    for schema in SCHEMAS.values():
        for section in dataclasses.fields(schema):
            found += [
                (schema.__name__, section.name, setting.name)
                for setting in dataclasses.fields(getattr(schema(), section.name))
            ]
    return found


READ = attributes_read()


@pytest.mark.parametrize(("schema", "section", "setting"), settings(), ids=str)
def test_every_setting_is_read(schema, section, setting):
    """A section goes by its own name, or by that of the parameter that takes it."""
    assert any((holder, setting) in READ for holder in (section, "config", "model"))


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_there_are_at_most_140_settings_on_two_levels(schema):
    sections = [getattr(schema(), section.name) for section in dataclasses.fields(schema)]
    values = [
        getattr(section, setting.name) for section in sections for setting in dataclasses.fields(section)
    ]
    assert len(values) <= 140
    assert not any(dataclasses.is_dataclass(value) or isinstance(value, dict) for value in values)
