"""A run's checkpoints: folders step_N that are complete or do not exist, each with a manifest.

A checkpoint is written to a scratch folder, its manifest last, and renamed atomically. The manifest has the
size and SHA-256 of each file, and a digest of itself. resume.py verifies them before use, at about 1.5 GB/s
per core; the ranks and their cores share the files.

Functions that take a RankSet are collective over it.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from parallel import device
from parallel.checkpoint.sealed import SEAL, described, read_sealed, sealed, torch_save
from parallel.rank_set import RankSet

MANIFEST, PARTIAL, REPLACED, DAMAGED, EARLIER = (
    "manifest.json",
    ".partial",
    ".replaced",
    ".damaged",
    ".earlier",
)


class CheckpointError(ValueError):
    """A checkpoint cannot be written or used; the same message on every rank."""


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, highest step first; not collective."""
    return [path for path in named(folder) if os.path.lexists(path / MANIFEST)]


def named(folder: Path) -> list[Path]:
    """Return everything in `folder` named like a complete checkpoint, highest step first; not collective."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = [folder / name for name in names if re.fullmatch(r"step_(0|[1-9][0-9]*)", name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


@contextlib.contextmanager
def together(action: str, ranks: RankSet) -> Iterator[None]:
    """Raise the same CheckpointError on every rank if the block failed to read or write on any of them."""
    problem = None
    try:
        yield
    except (OSError, RuntimeError) as error:  # `set_rng_state` raises the latter
        problem = str(error)
    for rank, found in zip(ranks.ranks, ranks.all_gather_object(problem)):
        if found is not None:
            raise CheckpointError(f"{action}: {found} (rank {rank})")


# ---- saving ------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    ranks: RankSet,
    *,
    step: int,
    manifest: dict,
    rank_state: dict,
    write: Callable[[Path], None],
) -> Path:
    """Write the checkpoint of a step, replacing an earlier one of the same step.

    Args:
        manifest: entries besides the step, the number of ranks and the files; JSON values.
        rank_state: of this rank, of types that `torch.load(weights_only=True)` reads; `read_rank_state`
            returns it.
        write: writes the shared files to the given folder.

    Raises:
        CheckpointError: a rank could not write; an earlier checkpoint is unchanged.
    """
    path, scratch, is_first = folder / f"step_{step}", folder / f"step_{step}{PARTIAL}", ranks.is_first
    action = (
        f"the checkpoint of step {step} was not written to {folder}, earlier ones are untouched; make room "
        "or make the folder writable and start again"
    )
    try:
        with together(action, ranks):
            if is_first:
                clean(folder)
                scratch.mkdir(parents=True)
        try:
            write(scratch)
        except CheckpointException as error:  # from torch, the same on every rank
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{action}: {cause} (rank {rank})") from None
        with together(action, ranks):
            with (scratch / f"rank_{ranks.rank}.pt").open("wb") as file:
                torch_save(rank_state, file)
        files = _describe_files(scratch, action, ranks)
        with together(action, ranks):
            if is_first:
                _name(
                    scratch,
                    path,
                    sealed({"step": step, "world_size": ranks.size, **manifest, "files": files}),
                )
    except CheckpointError:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return path


def clean(folder: Path) -> None:
    """Remove partly written or partly removed checkpoints of a killed run; not collective.

    A complete checkpoint whose predecessor was already renamed when the run was killed gets its final name.
    """
    scratch = re.compile(rf"(step_[0-9]+)({re.escape(PARTIAL)}|{re.escape(REPLACED)})")
    left = [path for path in folder.iterdir() if scratch.fullmatch(path.name)] if folder.is_dir() else []
    for path in sorted(left):  # .partial sorts before .replaced
        whole = path.with_suffix("")
        if (
            path.suffix == PARTIAL
            and path.with_suffix(REPLACED) in left
            and (path / MANIFEST).exists()
            and not whole.exists()
        ):
            os.replace(path, whole)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in (part for whole in named(folder) for part in whole.glob(f"*{PARTIAL}") if part.is_file()):
        path.unlink(missing_ok=True)


def _describe_files(scratch: Path, action: str, ranks: RankSet) -> dict[str, dict]:
    """Return the size and digest of every file, each read by one rank, which also syncs it to the disk."""
    sizes, mine = {}, {}
    with together(action, ranks):
        if ranks.is_first:
            sizes = {
                str(path.relative_to(scratch)): path.stat().st_size
                for path in scratch.rglob("*")
                if path.is_file()
            }
    names = share(ranks.broadcast_object(sizes), ranks)
    with together(action, ranks):
        mine = dict(zip(names, each(lambda name: _describe_file(scratch / name), names)))
    parts = ranks.all_gather_object(mine)
    return dict(sorted((name, file) for part in parts for name, file in part.items()))


def _describe_file(path: Path) -> dict:
    sync(path)
    return described(path)


def share(sizes: dict[str, int], ranks: RankSet) -> list[str]:
    """Return this rank's share of the files, given their sizes in bytes; all shares are about equal.

    Not collective.
    """
    largest_first = sorted(sizes, key=lambda name: (-sizes[name], name))
    return largest_first[ranks.rank :: ranks.size]


def each(read: Callable[[str], dict | str | None], names: list[str]) -> list:
    """Return `read(name)` for every name, with as many threads as write a rank's files."""
    with ThreadPoolExecutor(writing_threads()) as pool:
        return list(pool.map(read, names))


def writing_threads() -> int:
    """Return the number of files that a rank writes concurrently."""
    return min(4, device.cores_per_rank())


def _name(scratch: Path, path: Path, manifest: str) -> None:
    """Write the manifest and rename the scratch folder, in an order that survives a power failure."""
    (scratch / MANIFEST).write_text(manifest)
    for written in (scratch / MANIFEST, *(part for part in scratch.rglob("*") if part.is_dir()), scratch):
        sync(written)
    if path.exists():
        shutil.rmtree(replaced := path.with_name(path.name + REPLACED), ignore_errors=True)
        os.replace(path, replaced)
        os.replace(scratch, path)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.replace(scratch, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Return once what has been written to a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- additions to a checkpoint -----------------------------------------------------------------------------


def attach(path: Path, name: str, rank_state: dict, ranks: RankSet) -> None:
    """Attach this rank's state (as in `save`) to the checkpoint in `path` as `name`; replaces an earlier one.

    Raises:
        CheckpointError: a rank could not write; the checkpoint is unchanged.
    """
    action, is_first = f"{name} were not added to {path}", ranks.is_first
    with together(action, ranks):
        file = path / f"{name}_{ranks.rank}.pt"
        file.with_suffix(PARTIAL).unlink(missing_ok=True)
        with file.with_suffix(PARTIAL).open("wb") as partial:
            torch_save(rank_state, partial)
        written = {file.name: _describe_file(file.with_suffix(PARTIAL))}
    parts = ranks.all_gather_object(written)
    files = {name: description for part in parts for name, description in part.items()}
    with together(action, ranks):
        if is_first:
            # old digests never coexist with new files
            (path / f"{name}.json").unlink(missing_ok=True)
    with together(action, ranks):
        os.replace(file.with_suffix(PARTIAL), file)
    with together(action, ranks):
        if is_first:
            write_record(path, name, {"world_size": ranks.size, "files": files})


def write_record(path: Path, name: str, record: dict) -> None:
    """Write a record of JSON values atomically to the checkpoint in `path`; not collective.

    Raises:
        OSError: it cannot be written, or the checkpoint is not what was saved.
    """
    scratch = path / f"{name}{PARTIAL}"
    try:
        text = sealed({"of": read_sealed(path / MANIFEST)[SEAL], "told": record})
    except ValueError as error:
        raise OSError(str(error)) from None
    scratch.unlink(missing_ok=True)
    scratch.write_text(text)
    sync(scratch)
    os.replace(scratch, path / f"{name}.json")


def remove_old(folder: Path, ranks: RankSet, *, step: int, keep_last: int, keep_best: int) -> None:
    """Remove old checkpoints once that of `step` is complete, from the first rank; not collective.

    The newest ones are kept and, in addition, those of the best validation accuracy.

    Args:
        keep_last: number of the newest up to `step` to keep; 0: all.
        keep_best: number to keep by the accuracy measured at their own step.
    """
    if not ranks.is_first or not keep_last:
        return
    paths = [path for path in complete(folder) if step_of(path) <= step]
    measured = [(accuracy, path) for path in paths if (accuracy := _accuracy(path)) is not None]
    best = [path for _, path in sorted(measured, key=lambda pair: (-pair[0], -step_of(pair[1])))]
    for path in set(paths) - set(paths[:keep_last]) - set(best[:keep_best]):
        shutil.rmtree(gone := path.with_name(path.name + REPLACED), ignore_errors=True)
        with contextlib.suppress(OSError):  # an extra checkpoint does no harm
            os.replace(path, gone)  # incomplete while it is being removed
        shutil.rmtree(gone, ignore_errors=True)


def _accuracy(path: Path) -> float | None:
    """Return the validation accuracy at a checkpoint's own step; None if there is no comparable value."""
    try:
        manifest = read_sealed(path / MANIFEST)
        accuracy = (
            manifest["validation"]["validation/accuracy"]
            if manifest["validation"]["step"] == manifest["step"]
            else None
        )
        return float(accuracy) if accuracy is not None else None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
