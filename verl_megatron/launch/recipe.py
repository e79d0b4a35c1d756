"""Checks of a recipe file before Hydra reads it: refuse YAML that no recipe needs, with its line."""

import os
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from parallel.runtime.refusal import short_repr

_PACKAGE = Path(__file__).parents[1]
# In an installed package the recipes are a folder of it; in a clone they stand beside it.
SHIPPED = next((folder for folder in (_PACKAGE / "recipes",) if folder.is_dir()), _PACKAGE.parent / "recipes")
MOST_BYTES = 1 << 20
TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
}
TEXT = "tag:yaml.org,2002:str"
MOST_VALUES = 100_000  # with aliases expanded: a few lines can expand to billions


def folder_of(path: str | None) -> Path:
    """Return the absolute folder of recipes: the shipped one without `path`.

    A relative path is relative to the working directory or, if it leads nowhere there, to this package.
    """
    if path is None:
        return SHIPPED
    paths = (os.path.realpath(base / path) for base in (Path.cwd(), _PACKAGE))
    return Path(next(filter(os.path.isdir, paths), path))


def own_recipe(path: str) -> Path:
    """Return the file of a recipe anywhere.

    Raises:
        ValueError: there is no such file, or its name does not end in .yaml.
    """
    file = Path(os.path.realpath(os.path.expanduser(path)))  # Path.resolve raises for a circle of links
    if not os.path.lexists(os.path.expanduser(path)):
        raise ValueError(f"--config {short_repr(path)} does not exist; name a recipe file, such as mine.yaml")
    if file.suffix != ".yaml" or not file.is_file():
        raise ValueError(f"--config {short_repr(path)} is no .yaml file; name a recipe file")
    return file


def check_recipe(path: Path) -> MappingNode | None:
    """Check a recipe file, and return its YAML document; None if it is empty.

    Raises:
        ValueError: names the line; the file is too large, not UTF-8, not YAML, not a mapping of sections, or
            names a setting twice.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"recipe {path} is no regular file; name a .yaml file")
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"recipe {path} cannot be read ({error.strerror}); make it a readable file"
        ) from None
    if len(raw) > MOST_BYTES:
        raise ValueError(
            f"recipe {path} has more than {MOST_BYTES:,} bytes; a recipe holds settings only, "
            "put data into files of their own"
        )
    try:
        document = yaml.compose(raw.decode("utf-8"), Loader=yaml.SafeLoader)
        if document is None:
            return None
        if not isinstance(document, MappingNode):
            raise ValueError(
                f"recipe {path} must be sections with settings, such as `actor:` and below it `  lr: 1e-6`, "
                f"and is a {document.id}"
            )
        _check(document, path, {})
        return document
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {path} is no UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ValueError(
            f"recipe {path}{where}: not valid YAML ({reason}); mend it there: sections, "
            "and their settings indented by two spaces"
        ) from None
    except RecursionError:
        raise ValueError(
            f"recipe {path} is nested too deeply; recipes have two levels, sections and settings"
        ) from None


def _check(node: Node, path: Path, sizes: dict[int, int]) -> int:
    """Return the number of values that `node` expands to; `sizes` caches those of visited nodes."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = 1  # for recursive aliases, which Hydra refuses
    if node.tag not in TAGS:
        raise ValueError(
            f"recipe {path}, line {node.start_mark.line + 1}: the tag {short_repr(node.tag)} is none of a "
            "recipe's; write plain values"
        )
    if isinstance(node, MappingNode):
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise ValueError(
                    f"recipe {path}, line {key.start_mark.line + 1}: a setting's name must be a word; "
                    "write NAME: VALUE"
                )
            if key.value in names:
                raise ValueError(
                    f"recipe {path}, line {key.start_mark.line + 1}: {short_repr(key.value)} stands there "
                    "twice; leave one of them"
                )
            names.add(key.value)
    children = (
        [value for _, value in node.value]
        if isinstance(node, MappingNode)
        else node.value
        if isinstance(node, SequenceNode)
        else []
    )
    sizes[id(node)] = size = 1 + sum(_check(child, path, sizes) for child in children)
    if size > MOST_VALUES:
        raise ValueError(
            f"recipe {path} stands for more than {MOST_VALUES:,} values, aliases (*name) written out; "
            "shorten it"
        )
    return size
