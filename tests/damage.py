"""Ways to damage a checkpoint: spoiled files, and manifests rewritten with a valid digest."""

import copy
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from parallel.checkpoint import sealed
from parallel.checkpoint.folders import MANIFEST

# ---- spoiling --------------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 40)))


def garbage(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randint(0, 4000)))


def nested(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"[" * 200_000)


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def put(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def replaced(path: Path, chance: random.Random) -> None:
        path.unlink()
        make(path)

    replaced.__name__ = make.__name__
    return replaced


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 * 2**30)


SPOILS = (
    [flip] * 4
    + [truncate] * 2
    + [
        lengthen,
        garbage,
        garbage,
        nested,
        remove,
        *map(put, (a_folder, a_pipe, a_loop, a_device, a_socket, huge)),
    ]
)
VALUES = (None, True, -1, 1.5, 10**400, "text", "\ud800", [], {}, [[]], {"x": None})


def spoiled_files(step: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    files = sorted(path.relative_to(step) for path in step.rglob("*") if path.is_file())
    for number, (name, spoil) in enumerate((name, spoil) for name in files for spoil in SPOILS):
        chance = random.Random(number)
        yield (
            f"{spoil.__name__} of {name}",
            lambda path, name=name, spoil=spoil, chance=chance: spoil(path / name, chance),
        )


def places(content: dict, above: tuple = ()) -> Iterator[tuple]:
    """Every key of nested dictionaries, by its path."""
    for key, value in content.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def changed_keys(
    step: Path, chance: random.Random, *, seal: bool
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for name in (MANIFEST, "samples.json", "recorded.json"):
        content = json.loads((step / name).read_text())
        for place in places(content):
            for value in ("removed", *chance.sample(VALUES, 2)):
                text = rewritten(content, place, value, seal=seal)
                yield (
                    f"{name} {'.'.join(place)}: {value!r}",
                    lambda path, name=name, text=text: (path / name).write_text(text),
                )


def rewritten(content: dict, place: tuple, value: object, *, seal: bool) -> str:
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if value == "removed":
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return (
        sealed.sealed({key: part for key, part in content.items() if key != sealed.SEAL})
        if seal
        else json.dumps(content)
    )
