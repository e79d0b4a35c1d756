"""A run's checkpoints: folders step_N that are complete or do not exist, with a manifest that tells what is in them.

A checkpoint is written into a scratch folder, its manifest last, and gets its name in one step. The manifest has each file's size and
SHA-256, and a digest of itself; resume.py compares them before it is used (about 1.5 GB/s a core; ranks, and their cores, share the files).
All functions are collective over the world, or over a group of all its ranks where one is given.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallel import device
from parallel.checkpoint.sealed import SEAL, described, read_sealed, sealed

MANIFEST, PARTIAL, REPLACED, DAMAGED, EARLIER = (
    "manifest.json",
    ".partial",
    ".replaced",
    ".damaged",
    ".earlier",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; the same message on every rank."""


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, of the highest step first; not collective."""
    return [path for path in named(folder) if os.path.lexists(path / MANIFEST)]


def named(folder: Path) -> list[Path]:
    """Everything in `folder` that has the name of a complete checkpoint, of the highest step first; not collective."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = [folder / name for name in names if re.fullmatch(r"step_(0|[1-9][0-9]*)", name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


# ---- agreement --------------------------------------------------------------------------------------------------------


Group = dist.ProcessGroup | None


def from_first(value, group: Group = None):
    """The first rank's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group=group)
    return values[0]


def gathered(value, group: Group = None) -> list:
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def together(action: str, group: Group = None) -> Iterator[None]:
    """At the end of the block every rank knows whether one failed to read or write, and raises the same CheckpointError."""
    problem = None
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk with either
        problem = str(error)
    for rank, found in enumerate(gathered(problem, group)):
        if found is not None:
            raise CheckpointError(f"{action}: {found} (rank {rank})")


# ---- saving -----------------------------------------------------------------------------------------------------------


def save(
    folder: Path, *, step: int, manifest: dict, own: dict, write: Callable[[Path], None], group: Group = None
) -> Path:
    """Write the checkpoint of a step; one of the same step is replaced.

    Args:
        manifest: what the manifest tells besides the step, the number of ranks and the files; JSON values.
        own: this rank's state, in what `torch.load(weights_only=True)` reads; comes back from `own_state`.
        write: writes the shared files into the folder it is given.

    Raises:
        CheckpointError: a rank could not write; what was there before is as it was.
    """
    path, scratch, is_first = folder / f"step_{step}", folder / f"step_{step}{PARTIAL}", dist.get_rank() == 0
    action = (
        f"the checkpoint of step {step} was not written to {folder}, earlier ones are untouched; make room "
        "or make the folder writable and start again"
    )
    try:
        with together(action, group):
            if is_first:
                clean(folder)
                scratch.mkdir(parents=True)
        try:
            write(scratch)
        except CheckpointException as error:  # from torch, on every rank alike
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{action}: {cause} (rank {rank})") from None
        with together(action, group):
            with (scratch / f"rank_{dist.get_rank()}.pt").open("wb") as file:
                torch.save(own, file)
        files = _describe_files(scratch, action, group)
        with together(action, group):
            if is_first:
                _name(
                    scratch,
                    path,
                    sealed({"step": step, "world_size": dist.get_world_size(), **manifest, "files": files}),
                )
    except CheckpointError:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return path


def clean(folder: Path) -> None:
    """Remove what a run that was killed left half-written or half-removed in the folder of its checkpoints; not collective.

    A checkpoint whose forerunner had made room for it when the run was killed gets its name.
    """
    scratch = re.compile(rf"(step_[0-9]+)({re.escape(PARTIAL)}|{re.escape(REPLACED)})")
    left = [path for path in folder.iterdir() if scratch.fullmatch(path.name)] if folder.is_dir() else []
    for path in sorted(left):  # .partial comes before .replaced
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


def _describe_files(scratch: Path, action: str, group: Group) -> dict[str, dict]:
    """Size and digest of every file, each read by one rank, which also makes sure that it is on the disk."""
    sizes, mine = {}, {}
    with together(action, group):
        if dist.get_rank() == 0:
            sizes = {
                str(path.relative_to(scratch)): path.stat().st_size
                for path in scratch.rglob("*")
                if path.is_file()
            }
    names = share(from_first(sizes, group))
    with together(action, group):
        mine = dict(zip(names, each(lambda name: _describe_file(scratch / name), names)))
    return dict(sorted((name, file) for part in gathered(mine, group) for name, file in part.items()))


def _describe_file(path: Path) -> dict:
    _sync(path)
    return described(path)


def share(sizes: dict[str, int]) -> list[str]:
    """Of the files with these bytes, those that this rank reads: about as much as any other."""
    largest_first = sorted(sizes, key=lambda name: (-sizes[name], name))
    return largest_first[dist.get_rank() :: dist.get_world_size()]


def each(read: Callable[[str], dict | str | None], names: list[str]) -> list:
    """`read` of every name, on as many cores as write a rank's files."""
    with ThreadPoolExecutor(writing_threads()) as pool:
        return list(pool.map(read, names))


def writing_threads() -> int:
    """A rank writes so many files at once."""
    return min(4, device.cores_per_rank())


def _name(scratch: Path, path: Path, manifest: str) -> None:
    """Add the manifest and give the scratch folder its name, in an order that a power failure leaves consistent."""
    (scratch / MANIFEST).write_text(manifest)
    for written in (scratch / MANIFEST, *(part for part in scratch.rglob("*") if part.is_dir()), scratch):
        _sync(written)
    if path.exists():
        shutil.rmtree(replaced := path.with_name(path.name + REPLACED), ignore_errors=True)
        os.replace(path, replaced)
        os.replace(scratch, path)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.replace(scratch, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- what is added to a checkpoint afterwards -------------------------------------------------------------------------


def add(path: Path, name: str, own: dict, *, group: Group = None) -> None:
    """Add this rank's `own` (as in `save`) to the checkpoint in `path`; what had that name before is replaced.

    Raises:
        CheckpointError: a rank could not write; the checkpoint is what it was.
    """
    action, is_first = f"{name} were not added to {path}", dist.get_rank() == 0
    with together(action, group):
        file = path / f"{name}_{dist.get_rank()}.pt"
        file.with_suffix(PARTIAL).unlink(missing_ok=True)
        torch.save(own, file.with_suffix(PARTIAL))
        written = {file.name: _describe_file(file.with_suffix(PARTIAL))}
    files = {name: description for part in gathered(written, group) for name, description in part.items()}
    with together(action, group):
        if is_first:
            (path / f"{name}.json").unlink(
                missing_ok=True
            )  # no time at which old digests stand beside new files
    with together(action, group):
        os.replace(file.with_suffix(PARTIAL), file)
    with together(action, group):
        if is_first:
            tell(path, name, {"world_size": dist.get_world_size(), "files": files})


def tell(path: Path, name: str, told: dict) -> None:
    """Write `told` (JSON values) into the checkpoint in `path`, whole or not at all; not collective.

    Raises:
        OSError: it cannot be written, or the checkpoint is no longer what was written.
    """
    scratch = path / f"{name}{PARTIAL}"
    try:
        text = sealed({"of": read_sealed(path / MANIFEST)[SEAL], "told": told})
    except ValueError as error:
        raise OSError(str(error)) from None
    scratch.unlink(missing_ok=True)
    scratch.write_text(text)
    _sync(scratch)
    os.replace(scratch, path / f"{name}.json")


def remove_old(folder: Path, *, step: int, keep_last: int, keep_best: int) -> None:
    """Once the checkpoint of `step` is complete: keep the newest and, besides, those of the best validation accuracy.

    Args:
        keep_last: how many of the newest up to `step` stay; 0: all.
        keep_best: how many stay for the accuracy that was measured at their own step.
    """
    if dist.get_rank() or not keep_last:
        return
    paths = [path for path in complete(folder) if step_of(path) <= step]
    best = sorted(
        (path for path in paths if _accuracy(path) is not None),
        key=lambda path: (-_accuracy(path), -step_of(path)),
    )
    for path in set(paths) - set(paths[:keep_last]) - set(best[:keep_best]):
        shutil.rmtree(gone := path.with_name(path.name + REPLACED), ignore_errors=True)
        with contextlib.suppress(OSError):  # one too many does no harm
            os.replace(path, gone)  # it is not complete while it is being removed
        shutil.rmtree(gone, ignore_errors=True)


def _accuracy(path: Path) -> float | None:
    """What validation found at the step of a checkpoint; None: nothing that can be compared."""
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
