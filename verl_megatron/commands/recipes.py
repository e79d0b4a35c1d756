"""Lists recipes, shows one, or copies one to be changed and given as --config.

recipes list [DIR]        the shipped recipes, or those of a folder of yours, with what each is for
recipes show NAME         the file
recipes copy NAME [DIR]   the file as DIR/NAME.yaml, with the files next to it that it extends

A recipe may extend others: `defaults: [NAME, folder/base]`. Names ending in .sh are scripts for GPUs. NAME
may also be a .yaml file of yours.
"""

import os
import shutil
from pathlib import Path

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.launch.bases import files_of, find_recipe, shipped_names
from verl_megatron.launch.help import recipe_summaries, summary_of
from verl_megatron.launch.options import Options
from verl_megatron.launch.recipe import SHIPPED, check_recipe, own_recipe

ACTIONS = ("list", "show", "copy")
EXAMPLES = ("list", "show ppo_toy_cpu", "copy grpo_8b mine")


def run(arguments: list[str]) -> int:
    """List, show or copy recipes.

    Raises:
        ValueError: an unknown recipe, or a place that cannot be written.
    """
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument(
        "action",
        nargs="?",
        default="list",
        metavar="COMMAND",
        choices=ACTIONS,
        help="default: list",
    )
    options.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="a recipe, or a .yaml file of yours"
    )
    options.add_argument(
        "folder", nargs="?", default=None, metavar="DIR", type=Path, help="of the copy; default: this folder"
    )
    given = options.parse_args(arguments)
    if given.folder is not None and given.action != "copy":
        raise ValueError(
            f"recipes {given.action} does not take {short_repr(str(given.folder))}; leave it out"
        )
    if given.action == "list":
        print(_list(given.name))
        return 0
    if not given.name:
        raise ValueError(f"recipes {given.action} needs a recipe's name; `verl-megatron recipes` lists them")
    path = _find(given.name)
    if given.action == "show":
        if path.suffix == ".yaml":
            check_recipe(path)
        print(path.read_text(encoding="utf-8"), end="")
    else:
        for copied in _copy(path, given.folder or Path()):
            print(f"written: {copied}")
    return 0


def _scripts() -> dict[str, Path]:
    return {path.name: path for path in sorted(SHIPPED.glob("*.sh"))}


def _list(folder: str) -> str:
    if folder and not Path(folder).is_dir():
        raise ValueError(f"recipes list {short_repr(folder)}: it is no folder; name a folder of recipes")
    recipes = recipe_summaries(Path(folder)) if folder else recipe_summaries()
    scripts = {} if folder else {name: summary_of(path) for name, path in _scripts().items()}
    if not recipes:
        raise ValueError(f"recipes list {short_repr(folder)}: it has no .yaml file; name another folder")
    width = max(map(len, [*recipes, *scripts])) + 2
    return "\n".join(f"{name:<{width}}{summary}".rstrip() for name, summary in (recipes | scripts).items())


def _find(name: str) -> Path:
    """Return the file of a recipe: a shipped one by its name, another one by its path."""
    shipped = {each: SHIPPED / f"{each}.yaml" for each in shipped_names()} | _scripts()
    wanted = name.removesuffix(".yaml")
    if wanted in shipped:
        return shipped[wanted]
    if name.endswith(".yaml") and os.path.lexists(name):
        return own_recipe(name)
    raise ValueError(
        f"{short_repr(name)} is no recipe{nearest(wanted, shipped)}; `verl-megatron recipes` lists them, and "
        "FILE.yaml names one of yours"
    )


def _copy(path: Path, folder: Path) -> list[Path]:
    """Copy a recipe with those next to it that it extends, or a script with what it starts.

    Returns:
        The new files, the recipe's own last.

    Raises:
        ValueError: a file is there already, one that is extended lies elsewhere, or the folder cannot be
            written.
    """
    is_script = path.suffix == ".sh"
    with_it = sorted((SHIPPED / "launch").iterdir()) if is_script else _near(path)
    places = {source: folder / source.relative_to(path.parent) for source in (*with_it, path)}
    shown = [place for source, place in places.items() if source == path or not is_script]
    taken = [str(place) for place in shown if os.path.lexists(place)]
    if taken := taken or [str(place) for source, place in places.items() if _differ(source, place)]:
        raise ValueError(f"{taken[0]} exists already; remove it, or name another folder")
    try:
        for source, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); name a folder that can") from None
    return shown


def _differ(source: Path, place: Path) -> bool:
    """Whether there is something else at the place of a copy."""
    if not os.path.lexists(place):
        return False
    return not place.is_file() or place.read_bytes() != source.read_bytes()


def _near(path: Path) -> list[Path]:
    """Return the recipes that a recipe extends, without shipped ones, which are found from anywhere."""
    near: list[Path] = []
    for base in files_of(path):
        if base == path or find_recipe(base.stem, [SHIPPED]) == base:
            continue
        if not base.is_relative_to(path.parent):
            raise ValueError(f"{path} extends {base}, which is not below its folder; copy both by hand")
        near.append(base)
    return near
