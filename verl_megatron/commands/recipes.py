"""verl-megatron recipes [list]            recipes, with what each is for
verl-megatron recipes show NAME         the file
verl-megatron recipes copy NAME [DIR]   the file as DIR/NAME.yaml, to be changed and given as --config

A recipe may extend another one: `defaults: [NAME, _self_]`. Names ending in .sh are scripts for GPUs.
"""

import shutil
from pathlib import Path

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.commands.options import Options
from verl_megatron.launch.help import recipe_summaries, summary_of
from verl_megatron.launch.recipe import SHIPPED


def run(arguments: list[str]) -> int:
    """List, show or copy recipes.

    Raises:
        ValueError: an unknown recipe, or a place that cannot be written.
    """
    options = Options(description=__doc__)
    options.add_argument("action", nargs="?", default="list", choices=("list", "show", "copy"))
    options.add_argument("name", nargs="?", default="", metavar="NAME")
    options.add_argument("folder", nargs="?", default=".", metavar="DIR", type=Path)
    given = options.parse_args(arguments)
    if given.action == "list":
        print(_list())
        return 0
    if not given.name:
        raise ValueError(f"recipes {given.action} needs a recipe's name; `verl-megatron recipes` lists them")
    path = _find(given.name)
    if given.action == "show":
        print(path.read_text(), end="")
    else:
        for copied in _copy(path, given.folder):
            print(f"written: {copied}")
    return 0


def _scripts() -> dict[str, Path]:
    return {path.name: path for path in sorted(SHIPPED.glob("*.sh"))}


def _list() -> str:
    recipes = recipe_summaries()
    scripts = {name: summary_of(path) for name, path in _scripts().items()}
    width = max(map(len, [*recipes, *scripts])) + 2
    return "\n".join(f"{name:<{width}}{summary}" for name, summary in (recipes | scripts).items())


def _find(name: str) -> Path:
    names = {each: SHIPPED / f"{each}.yaml" for each in recipe_summaries()} | _scripts()
    wanted = name.removesuffix(".yaml")
    if wanted not in names:
        raise ValueError(
            f"{short_repr(name)} is no recipe{nearest(wanted, names)}; `verl-megatron recipes` lists them"
        )
    return names[wanted]


def _copy(path: Path, folder: Path) -> list[Path]:
    """Copy a recipe, and with a script what it starts; return the new files.

    Raises:
        ValueError: a file is there already, or the folder cannot be written.
    """
    sources = [path, *sorted((SHIPPED / "launch").iterdir())] if path.suffix == ".sh" else [path]
    places = {source: folder / source.relative_to(path.parent) for source in sources}
    if taken := [str(place) for place in places.values() if place.exists() and place.name == path.name]:
        raise ValueError(f"{taken[0]} exists already; remove it, or name another folder")
    try:
        for source, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); name a folder that can") from None
    return [place for place in places.values() if place.name == path.name]
