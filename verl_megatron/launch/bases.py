"""Recipes that extend others: their files, in the order in which their settings apply."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.launch.recipe import SHIPPED, check_recipe

SELF = "_self_"  # the recipe's own settings, among those that it extends
OF_HYDRA = "Hydra's own settings have no effect on a run; leave it out"
FORM = "write names of recipes, such as `defaults: [grpo_8b, ./base]`"


def shipped_names() -> list[str]:
    """Return the names of the shipped recipes, such as toy_cpu/grpo."""
    paths = (path for path in sorted(SHIPPED.rglob("*.yaml")) if path.parent.name != "launch")
    return [path.relative_to(SHIPPED).with_suffix("").as_posix() for path in paths]


def find_recipe(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of the recipe `name`, of the first folder that has it."""
    paths = (f"{folder}/{name.removesuffix('.yaml')}.yaml" for folder in folders)
    return next((Path(os.path.abspath(path)) for path in paths if _is_there(path)), None)


def files_of(recipe: Path, folders: Sequence[Path] = (SHIPPED,)) -> list[Path]:
    """Return the recipes that a recipe extends, and itself; settings of later ones win.

    A recipe that is extended twice stands at its first place.

    Args:
        folders: where recipes are looked for that are not next to the one that extends them.

    Raises:
        ValueError: as `check_recipe`, or a recipe has settings of Hydra, or extends itself or none that is
            there; names file and line.
    """
    files: list[Path] = []
    _visit(Path(os.path.abspath(recipe)), folders, (), files)
    return files


def _visit(path: Path, folders: Sequence[Path], above: tuple[Path, ...], files: list[Path]) -> None:
    if path in files:
        return
    entries = _entries(path, check_recipe(path))
    for line, name in entries:
        if name == SELF:
            files.append(path)
            continue
        base = _base(name, f"recipe {path}, line {line}, defaults", path, folders)
        circle = (*above, path)
        if base in circle:
            names = [each.stem for each in (*circle[circle.index(base) :], base)]
            raise ValueError(
                f"recipe {path}, line {line}, defaults: {short_repr(name)} extends itself "
                f"({' -> '.join(names)}); take one of them out"
            )
        _visit(base, folders, circle, files)
    if path not in files:
        files.append(path)


def _entries(path: Path, document: MappingNode | None) -> list[tuple[int, str]]:
    """Return line and text of each entry of `defaults`."""
    values = dict((key.value, value) for key, value in document.value) if document else {}
    if "hydra" in values:
        raise ValueError(f"recipe {path}: section 'hydra': {OF_HYDRA}")
    node = values.get("defaults")
    if node is None or node.tag.endswith(":null"):
        return []
    if not isinstance(node, SequenceNode):
        _refuse_form(path, node.start_mark.line, "is no list")
    found: list[tuple[int, str]] = []
    for entry in node.value:
        line = entry.start_mark.line
        if not (isinstance(entry, ScalarNode) and entry.tag.endswith(":str") and entry.value.strip()):
            _refuse_form(path, line, "has an entry that is no name")
        if entry.value == SELF and any(name == SELF for _, name in found):
            _refuse_form(path, line, f"has {SELF} twice")
        found.append((line + 1, entry.value))
    return found


def _refuse_form(path: Path, line: int, reason: str) -> NoReturn:
    raise ValueError(f"recipe {path}, line {line + 1}, defaults: it {reason}; {FORM}")


def _base(name: str, where: str, path: Path, folders: Sequence[Path]) -> Path:
    """Return the file that an entry of `defaults` names: next to `path`, or else in `folders`.

    A recipe that names itself means another one of its name, in a folder further on.
    """
    is_near = name.startswith(("./", "../"))
    near = [] if name.startswith("/") else [path.parent]
    found = (find_recipe(name.lstrip("/"), [folder]) for folder in (*near, *([] if is_near else folders)))
    files = list(dict.fromkeys(file for file in found if file is not None))
    if files:
        return next((file for file in files if file != path), files[0])
    if name.startswith("/"):
        raise ValueError(
            f"{where}: {short_repr(name)} is an absolute path; name it relative to this recipe, as ./base"
        )
    known = [*shipped_names(), *(each.stem for each in path.parent.glob("*.yaml"))]
    raise ValueError(
        f"{where}: there is no recipe {short_repr(name)}{nearest(name, known)}; name a .yaml file relative "
        "to this recipe, or a shipped recipe (`verl-megatron recipes` lists them)"
    )


def _is_there(path: str) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:  # a null byte
        return False
