"""What `data.train` names: a file, a folder of shards, or several of both; each file's format is recognized.

The first bytes decide between JSON lines, Parquet and Arrow. CSV and TSV, which have none of their own, go by
the suffix.
"""

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.data.formats import arrow_tables, csv_lines, json_lines
from verl_megatron.data.formats.arrow_tables import ARROW, PARQUET, STREAM

JSON, CSV, TSV = "JSON lines", "CSV", "TSV"
SHARDS = (".jsonl", ".parquet", ".arrow", ".feather", ".csv", ".tsv")  # files of a folder that are read
NAME_ONE = "name a .jsonl, .parquet, .arrow or .csv file, or a folder of them"
PYARROW = "pip install 'pyarrow>=17'"

_MAGIC = ((b"PAR1", PARQUET), (b"ARROW1", ARROW), (b"\xff\xff\xff\xff", STREAM))
_BINARY = (".parquet", ".arrow", ".feather")


@dataclass(kw_only=True)
class DataFile:
    """A data file and its format."""

    path: str
    kind: str  # JSON, CSV, TSV, PARQUET, ARROW or STREAM
    part: int = 0  # of the paths that the setting names, which one it belongs to
    unread: dict[str, str] = field(default_factory=dict)  # types of columns left out, once rows are read

    @property
    def notes(self) -> list[str]:
        """User messages about what is not read, once rows have been."""
        left_out = [f"{short_repr(name)} ({kind})" for name, kind in list(self.unread.items())[:20]]
        return [f"columns of types that are not read: {', '.join(left_out)}"] * bool(left_out)

    @property
    def unit(self) -> str:
        """What the numbers of `rows` count."""
        return "line" if self.kind in (JSON, CSV, TSV) else "row"

    @property
    def hint(self) -> str:
        """What to say of a column that is not there."""
        return "; the first line of the file must name its columns" if self.kind in (CSV, TSV) else ""

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield numbers (from 1) and rows; ValueError, with the file's name, for one that cannot be read."""
        if self.kind == JSON:
            return json_lines.numbered_rows(self.path)
        if self.kind in (CSV, TSV):
            return csv_lines.numbered_rows(self.path, delimiter="," if self.kind == CSV else "\t")
        return arrow_tables.numbered_rows(self.path, self.kind, self.unread)


def source_problem(text: str) -> str:
    """Return why `text` names no data that can be read, as a clause ("does not exist; ..."), or ""."""
    try:
        find_files(text)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the paths that a setting names."""

    path: str
    weight: float | None = None  # share of the prompts, relative to the others'; None: no part has one


def find_files(text: str) -> list[DataFile]:
    """Return the files that a setting names, in the order in which they are read.

    Args:
        text: path of a file or folder, or several, separated by commas, each with a weight (`:0.7`) or none.

    Raises:
        ValueError: a clause ("does not exist; ...") about the first of them that is no data.
    """
    parts = parts_of(text)
    found: list[DataFile] = []
    for number, part in enumerate(parts):
        try:
            files = _files_of(part.path)
        except ValueError as error:
            several = f"names {short_repr(part.path)}, which {error}"
            raise ValueError(several if len(parts) > 1 else str(error)) from None
        for file in files:
            file.part = number
        found += files
    return found


def parts_of(text: str) -> list[Part]:
    """Return the paths that a setting names, with their weights; ValueError (a clause) for wrong weights."""
    names = [text] if "," not in text or _exists(text) else [name.strip() for name in text.split(",")]
    parts = [_part(name) for name in names]
    bare = next((part.path for part in parts if part.weight is None), None)
    if bare is not None and any(part.weight is not None for part in parts):
        raise ValueError(
            f"gives {short_repr(bare)} no weight, and others have one; give all of them one, or none"
        )
    return parts


def has_weights(text: str) -> bool:
    """Whether a setting gives its files weights, right or wrong ones."""
    try:
        return parts_of(text)[0].weight is not None
    except ValueError:
        return True


def _part(name: str) -> Part:
    path, colon, written = name.rpartition(":")
    if not (colon and path) or _exists(name):
        return Part(name)
    try:
        weight = float(written)
    except ValueError:
        return Part(name)
    if not 0 < weight < math.inf:
        raise ValueError(
            f"gives {short_repr(path)} the weight {short_repr(written)[1:-1]}; give a number above 0"
        )
    return Part(path, weight)


def _exists(path: str) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:  # a zero byte
        return False


def _files_of(part: str) -> list[DataFile]:
    try:
        is_folder = os.path.isdir(part)
    except ValueError:
        is_folder = False
    if not is_folder:
        return [DataFile(path=part, kind=_recognized(part))]
    files = []
    for path in _shards(Path(part)):
        try:
            files.append(DataFile(path=str(path), kind=_recognized(path)))
        except ValueError as error:
            raise ValueError(f"has {short_repr(path.name)}, which {error}") from None
    return files


def _shards(folder: Path) -> list[Path]:
    """Return the data files of a folder, sorted by name, numbers by value."""
    if (folder / "dataset_dict.json").exists():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise ValueError(f"is a folder of several splits ({_some(splits)}); name one of them")
    try:
        paths = [
            path for path in folder.iterdir() if path.suffix.lower() in SHARDS and path.name[0] not in "._"
        ]
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); {NAME_ONE}") from None
    if not paths:
        raise ValueError(f"is a folder without data files ({', '.join(SHARDS)}); {NAME_ONE}")
    kinds = sorted({re.sub(r"\d+", "N", path.name) for path in paths})
    if len(kinds) > 1:
        raise ValueError(
            f"is a folder of files that do not belong together ({_some(kinds)}); "
            "name one file, or several as [a.parquet,b.parquet]"
        )
    return sorted(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])


def _some(names: list[str]) -> str:
    return ", ".join(short_repr(name)[1:-1] for name in names[:8]) + ", ..." * (len(names) > 8)


def _how_to_fetch(path: str) -> str:
    """Return what to do about an address, or a data set of the Hugging Face hub; data are not fetched."""
    if "://" in path:
        return "data are files here: download it, and name the file"
    if re.fullmatch(r"[\w-]+/[\w-]+", path) and not Path(path).parent.exists():
        command = f"hf download --repo-type dataset {path} --local-dir DIR"
        return f"a data set of the hub is fetched with: {command}"
    return ""


def _recognized(path: str | Path) -> str:
    """Return the format of a file; ValueError (a clause) if it is none that is read."""
    try:
        with json_lines.opened(path) as file:
            head = file.peek(512)[:512]
    except FileNotFoundError:
        raise ValueError(f"does not exist; {_how_to_fetch(str(path)) or NAME_ONE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(json_lines.read_problem(error).replace("name a .jsonl file", NAME_ONE)) from None
    suffix = Path(path).suffix.lower()
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            if importlib.util.find_spec("pyarrow") is None:
                raise ValueError(
                    f"is a {kind} file, which pyarrow reads and which is not installed; {PYARROW}"
                )
            return kind
    is_table, is_object = (
        suffix in (".csv", ".tsv"),
        head.removeprefix(json_lines.UTF8_MARK).lstrip()[:1] == b"{",
    )
    if problem := json_lines.magic_problem(head, expected=suffix[1:].upper() if is_table else JSON):
        raise ValueError(problem)
    if is_table and not is_object:
        return CSV if suffix == ".csv" else TSV
    if suffix in _BINARY and not is_object:
        raise ValueError(
            f"is named {suffix} and does not begin as such a file ({short_repr(head[:8])[1:]}); copy it again"
        )
    return JSON
