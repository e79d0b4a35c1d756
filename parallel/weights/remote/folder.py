"""A folder of the cache for each URL: small files at once, weights as they are read."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from parallel.weights.json_files import MOST_BYTES, is_file_name, parse_object
from parallel.weights.remote import arriving
from parallel.weights.remote.source import RemoteFile, Source, UnreachableError, open_source, shown

CACHE = "VERL_MEGATRON_CACHE"  # environment variable: the cache's folder
SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "tekken.json", "chat_template.jinja", "chat_template.json"),
)
SINGLE, INDEX, DIGESTS = "model.safetensors", "model.safetensors.index.json", "SHA256SUMS"
ABOUT = "source.json"  # in the cache's folder: the URL, and the size and version of each file
_DIGEST = re.compile(r"^([0-9a-f]{64}) [ *](?:\./)?(.+)$", re.MULTILINE)

Known = dict[str, RemoteFile]


def cache_folder() -> Path:
    """Return the folder of the cache: VERL_MEGATRON_CACHE, or verl_megatron in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(CACHE) or Path(home) / "verl_megatron").expanduser().absolute()


def folder_of(url: str) -> Path:
    """Return the cache's folder of a URL."""
    url = url.rstrip("/")
    readable = re.sub(r"[^\w.-]+", "_", shown(url).partition("://")[2])[-80:].lstrip("._") or "model"
    return cache_folder() / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file among the processes of all ranks and runs."""
    with arriving.said_in_words(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_folder(url: str, *, weights: bool = True) -> Path:
    """Return the cache's folder of a URL with its small files and the tables of its weights' files.

    What is there already is taken again if its size and version are the server's. Where the server cannot
    be reached, a folder that is complete is used as it is.

    Args:
        weights: False leaves the weights out, for plans.

    Raises:
        ValueError: no config.json, a server that does not answer as it should, or a full disk.
    """
    folder = folder_of(url)
    with locked(folder / ".lock"):
        source, before = open_source(url), _read_about(folder)
        try:
            present = _look(source, SMALL_FILES)
            if SMALL_FILES[0] not in present:
                raise ValueError(
                    f"{shown(url)} has no config.json that may be read; name the folder of the model's files"
                )
        except UnreachableError:
            if not before or (weights and not _is_complete(folder, before)):
                raise
            return folder
        for name, remote in present.items():
            _keep_small(source, folder, name, remote, before)
        for name in set(SMALL_FILES) & before.keys() - present.keys():
            (folder / name).unlink(missing_ok=True)
        if weights:
            present |= _expect_weights(source, folder, before)
        else:
            present = before | present
        _write_about(folder, url, present)
    return folder


def complete(folder: Path) -> None:
    """Wait until all weights of a cache's folder have arrived, for readers that take whole files."""
    for incomplete in sorted(folder.glob(f"*{arriving.INCOMPLETE}")):
        path = incomplete.with_name(incomplete.name.removesuffix(arriving.INCOMPLETE))
        if (file := arriving.arriving(path)) is not None:
            file.fetch(0, file.size)


def digest_of(folder: Path) -> str:
    """Return a digest of sizes and versions of all files of a cache's folder."""
    files = sorted((name, remote.size, remote.version) for name, remote in _read_about(folder).items())
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _look(source: Source, names: Iterable[str]) -> Known:
    """Return those of the files that are there."""
    names = list(names)
    with ThreadPoolExecutor(8) as pool:
        found = zip(names, pool.map(source.look, names))
        return {name: remote for name, remote in found if remote is not None}


def _keep_small(source: Source, folder: Path, name: str, remote: RemoteFile, before: Known) -> None:
    """Fetch a file as a whole, unless it is there already."""
    path = folder / name
    if remote.size > MOST_BYTES:
        raise ValueError(f"{shown(source.url)}/{name} has {remote.size:,} bytes, more than {MOST_BYTES:,}")
    if (
        remote.version
        and before.get(name) == remote
        and path.is_file()
        and path.stat().st_size == remote.size
    ):
        return
    content = bytearray(remote.size)
    if remote.has_ranges and remote.size:
        content[:] = source.read(name, 0, remote.size, version=remote.version)
    elif remote.size:
        source.copy(name, lambda position, piece: content.__setitem__(_span(position, piece), piece))
    partial = arriving.beside(path, f".{os.getpid()}")
    with arriving.said_in_words(path):
        partial.write_bytes(content)
        partial.replace(path)


def _span(position: int, piece: bytes) -> slice:
    return slice(position, position + len(piece))


def _expect_weights(source: Source, folder: Path, before: Known) -> Known:
    """Make room for the weights' files that are not there yet; return all of them."""
    present = _look(source, (SINGLE, INDEX, DIGESTS))
    for name in (INDEX, DIGESTS):
        if name in present:
            _keep_small(source, folder, name, present[name], before)
    names = [SINGLE]
    if SINGLE not in present and INDEX in present:
        names = _named_files(folder / INDEX)
        if not names:
            raise ValueError(f"{shown(source.url)}/{INDEX} is no index of safetensors files")
        present |= _look(source, names)
    if missing := [name for name in names if name not in present]:
        raise ValueError(
            f"{shown(source.url)} lacks {', '.join(missing[:8])}; name a folder with the model's safetensors "
            f"files: {SINGLE}, or those of a {INDEX}"
        )
    if SINGLE in present:
        (folder / INDEX).unlink(missing_ok=True)
    digests = _read_digests(folder) if DIGESTS in present else {}
    for name in names:
        _expect(source, folder / name, present[name], before.get(name), sha256=digests.get(name, ""))
    return present


def _named_files(index: Path) -> list[str]:
    """Return the files that an index names; none if it is no index."""
    try:
        names = sorted(set(parse_object(index.read_bytes())["weight_map"].values()))
        return names if all(is_file_name(name, ".safetensors") for name in names) else []
    except (ValueError, KeyError, AttributeError, TypeError):
        return []


def _expect(
    source: Source, path: Path, remote: RemoteFile, before: RemoteFile | None, *, sha256: str
) -> None:
    """Make room for a file, unless it is there or arriving in the version of the server."""
    same = before is not None and (before.size, before.version) == (remote.size, remote.version)
    if same and path.is_file() and path.stat().st_size == remote.size:
        return
    if not (same and arriving.beside(path, arriving.SOURCE).exists()):
        path.unlink(missing_ok=True)  # processes that have it open keep it
        arriving.expect(path, source.url, remote, sha256=sha256)


def _read_digests(folder: Path) -> dict[str, str]:
    text = (folder / DIGESTS).read_text(encoding="utf-8", errors="replace")
    return {name: digest for digest, name in _DIGEST.findall(text)}


# ---- what is known of the files ----------------------------------------------------------------------------


def _read_about(folder: Path) -> Known:
    try:
        files = parse_object((folder / ABOUT).read_bytes())["files"]
        return {name: RemoteFile(**remote) for name, remote in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing yet, or damaged: fetch again
        return {}


def _write_about(folder: Path, url: str, files: Known) -> None:
    described = {name: asdict(remote) for name, remote in files.items()}
    path = folder / ABOUT
    partial = arriving.beside(path, f".{os.getpid()}")
    with arriving.said_in_words(path):
        partial.write_text(json.dumps({"url": shown(url), "files": described}, indent=1))
        partial.replace(path)


def _is_complete(folder: Path, files: Known) -> bool:
    weights = [name for name in files if name.endswith(".safetensors")]
    return bool(weights) and all((folder / name).is_file() for name in files)
