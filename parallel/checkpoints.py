"""A run's checkpoints: folders step_N that are complete or do not exist, with a manifest that tells what is in them.

A checkpoint is written into a scratch folder, its manifest last, and gets its name in one step. Before it is used each file's size and
SHA-256 are compared with the manifest (about 1.5 GB/s a core; ranks, and their cores, share the files). All functions are collective over the
world, or over a group of all its ranks where one is given.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallel import device

MANIFEST, PARTIAL, REPLACED, DAMAGED, EARLIER = "manifest.json", ".partial", ".replaced", ".damaged", ".earlier"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; the same message on every rank."""


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, of the highest step first; not collective."""
    found = {path.parent.name.removeprefix("step_"): path.parent for path in folder.glob(f"step_*/{MANIFEST}")}
    return [found[name] for name in sorted((name for name in found if name.isdigit()), key=int, reverse=True)]


# ---- agreement --------------------------------------------------------------------------------------------------------


Group = dist.ProcessGroup | None


def _from_first(value, group: Group = None):
    """The first rank's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group=group)
    return values[0]


def _gathered(value, group: Group = None) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def _together(action: str, group: Group = None) -> Iterator[None]:
    """At the end of the block every rank knows whether one failed to read or write, and raises the same CheckpointError."""
    problem = None
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk with either
        problem = str(error)
    for rank, found in enumerate(_gathered(problem, group)):
        if found is not None:
            raise CheckpointError(f"{action}: {found} (rank {rank})")


# ---- saving -----------------------------------------------------------------------------------------------------------


def save(folder: Path, *, step: int, manifest: dict, own: dict, write: Callable[[Path], None], group: Group = None) -> Path:
    """Write the checkpoint of a step; one of the same step is replaced.

    Args:
        manifest: what the manifest tells besides the step, the number of ranks and the files; JSON values.
        own: this rank's state, in what `torch.load(weights_only=True)` reads; comes back from `own_state`.
        write: writes the shared files into the folder it is given.

    Raises:
        CheckpointError: a rank could not write; what was there before is as it was.
    """
    path, scratch, is_first = folder / f"step_{step}", folder / f"step_{step}{PARTIAL}", dist.get_rank() == 0
    action = f"the checkpoint of step {step} was not written to {folder}, earlier ones are untouched; make room or make the folder writable and start again"
    try:
        with _together(action, group):
            if is_first:
                for left in (*folder.glob(f"step_*{PARTIAL}"), *folder.glob(f"step_*{REPLACED}")):  # by a run that was killed
                    shutil.rmtree(left, ignore_errors=True)
                scratch.mkdir(parents=True)
        try:
            write(scratch)
        except CheckpointException as error:  # from torch, on every rank alike
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{action}: {cause} (rank {rank})") from None
        with _together(action, group):
            with (scratch / f"rank_{dist.get_rank()}.pt").open("wb") as file:
                torch.save(own, file)
        files = _describe_files(scratch, action, group)
        with _together(action, group):
            if is_first:
                text = json.dumps({"step": step, "world_size": dist.get_world_size(), **manifest, "files": files}, indent=1)
                _name(scratch, path, text)
    except CheckpointError:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return path


def _describe_files(scratch: Path, action: str, group: Group) -> dict[str, dict]:
    """Size and digest of every file, each read by one rank, which also makes sure that it is on the disk."""
    sizes, mine = {}, {}
    with _together(action, group):
        if dist.get_rank() == 0:
            sizes = {str(path.relative_to(scratch)): path.stat().st_size for path in scratch.rglob("*") if path.is_file()}
    names = _share(_from_first(sizes, group))
    with _together(action, group):
        mine = dict(zip(names, _each(lambda name: _describe_file(scratch / name), names)))
    return dict(sorted((name, file) for part in _gathered(mine, group) for name, file in part.items()))


def _describe_file(path: Path) -> dict:
    _sync(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _share(sizes: dict[str, int]) -> list[str]:
    """Of the files with these bytes, those that this rank reads: about as much as any other."""
    largest_first = sorted(sizes, key=lambda name: (-sizes[name], name))
    return largest_first[dist.get_rank() :: dist.get_world_size()]


def _each(read: Callable[[str], dict | str | None], names: list[str]) -> list:
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- what is added to a checkpoint afterwards -------------------------------------------------------------------------


def add(path: Path, name: str, own: dict, *, group: Group = None) -> None:
    """Add this rank's `own` (as in `save`) to the checkpoint in `path`; what had that name before is replaced.

    Raises:
        CheckpointError: a rank could not write; the checkpoint is what it was.
    """
    action = f"{name} were not added to {path}"
    with _together(action, group):
        file = path / f"{name}_{dist.get_rank()}.pt"
        torch.save(own, file.with_suffix(PARTIAL))
        described = {file.name: _describe_file(file.with_suffix(PARTIAL))}
    files = {name: description for part in _gathered(described, group) for name, description in part.items()}
    with _together(action, group):
        if dist.get_rank() == 0:
            (path / f"{name}.json").unlink(missing_ok=True)  # no time at which old digests stand beside new files
    with _together(action, group):
        os.replace(file.with_suffix(PARTIAL), file)
    with _together(action, group):
        if dist.get_rank() == 0:
            tell(path, name, {"world_size": dist.get_world_size(), "files": files})


def tell(path: Path, name: str, told: dict) -> None:
    """Write `told` (JSON values) into the checkpoint in `path`, whole or not at all; not collective."""
    scratch = path / f"{name}{PARTIAL}"
    scratch.write_text(json.dumps(told, indent=1))
    _sync(scratch)
    os.replace(scratch, path / f"{name}.json")


def told(path: Path, name: str) -> dict | None:
    """What `tell` wrote, on every rank; None: nothing that can be read."""

    def read() -> dict | None:
        try:
            return json.loads((path / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None

    return _from_first(read() if dist.get_rank() == 0 else None)


def added(path: Path, name: str, *, say: Callable[[str], None]) -> tuple[list[dict], int] | None:
    """What `add` wrote, where it is whole, and on how many ranks: this rank's own part if there are as many as then, else those of all, on each."""
    described = told(path, name)
    if described is None:
        return None
    if problem := _damage_among(path, described["files"]):
        say(f"warning: {name} of {path} are not used: {problem}")
        return None
    ranks = [dist.get_rank()] if described["world_size"] == dist.get_world_size() else range(described["world_size"])
    return [torch.load(path / f"{name}_{rank}.pt", map_location="cpu", weights_only=True) for rank in ranks], described["world_size"]


def remove_old(folder: Path, *, step: int, keep_last: int, keep_best: int) -> None:
    """Once the checkpoint of `step` is complete: keep the newest and, besides, those of the best validation accuracy.

    Args:
        keep_last: how many of the newest up to `step` stay; 0: all.
        keep_best: how many stay for the accuracy that was measured at their own step.
    """
    if dist.get_rank() or not keep_last:
        return
    paths = [path for path in complete(folder) if _step_of(path) <= step]
    best = sorted((path for path in paths if _accuracy(path) is not None), key=lambda path: (-_accuracy(path), -_step_of(path)))
    for path in set(paths) - set(paths[:keep_last]) - set(best[:keep_best]):
        shutil.rmtree(gone := path.with_name(path.name + REPLACED), ignore_errors=True)
        with contextlib.suppress(OSError):  # one too many does no harm
            os.replace(path, gone)  # it is not complete while it is being removed
        shutil.rmtree(gone, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _accuracy(path: Path) -> float | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return manifest["validation"]["validation/accuracy"] if manifest["validation"]["step"] == manifest["step"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---- resuming ---------------------------------------------------------------------------------------------------------


def newest_sound(folder: Path, *, say: Callable[[str], None]) -> tuple[Path, dict] | None:
    """The newest complete checkpoint whose files are as they were written, and its manifest; None: there is no checkpoint.

    A damaged one is told of, put aside as step_N.damaged if another can be used, and never loaded.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    damaged, first = [], ""
    for path in _from_first(complete(folder)):
        manifest, problem = damage(path)
        if problem is None:
            with contextlib.suppress(OSError):  # it only saves the next start the reading
                _put_aside(damaged, DAMAGED)
            dist.barrier()
            return path, manifest
        damaged.append(path)
        first = first or f"{path.name}: {problem}"
        say(f"warning: checkpoint {path} is damaged and not used: {problem}")
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} can be used; {first}; copy the files again, or set run.resume=never to begin anew")
    return None


def put_aside_all(folder: Path) -> list[Path]:
    """For a run that begins anew in the folder of another: the checkpoints there get names under which no run takes them for its own.

    Returns:
        Their new paths: step_N.earlier, or with a number where that is taken; on every rank.

    Raises:
        CheckpointError: they cannot be renamed.
    """
    paths, suffix, number = complete(folder) if dist.get_rank() == 0 else [], EARLIER, 1
    while any(path.with_name(path.name + suffix).exists() for path in paths):
        number += 1
        suffix = f"{EARLIER}{number}"
    with _together(f"the checkpoints in {folder} are of an earlier run and could not be put aside; move them away"):
        _put_aside(paths, suffix)
    return _from_first([path.with_name(path.name + suffix) for path in paths])


def _put_aside(paths: list[Path], suffix: str) -> None:
    if dist.get_rank() == 0:
        for path in paths:
            shutil.rmtree(aside := path.with_name(path.name + suffix), ignore_errors=True)
            os.replace(path, aside)


def damage(path: Path) -> tuple[dict, str | None]:
    """The manifest of a checkpoint, and what is wrong with its files: a sentence that is the same on every rank, or None."""
    manifest, problem = _from_first(_read_manifest(path) if dist.get_rank() == 0 else None)
    if problem is not None:
        return {}, problem
    return manifest, _damage_among(path, manifest["files"])


def _damage_among(path: Path, files: dict[str, dict]) -> str | None:
    """What is wrong with one of these files, if anything is; the same on every rank."""
    found = _each(lambda name: _file_damage(path / name, files[name]), _share({name: written["bytes"] for name, written in files.items()}))
    return next((problem for problems in _gathered(found) for problem in problems if problem), None)


def _read_manifest(path: Path) -> tuple[dict, str | None]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return {}, f"{MANIFEST} cannot be read ({error})"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return {}, f"{MANIFEST} lists no files; it was written by another version"
    return manifest, None


def _file_damage(path: Path, written: dict) -> str | None:
    try:
        size = path.stat().st_size
        if size != written["bytes"]:
            return f"{path} has {size} bytes of {written['bytes']}"
        return None if _digest(path) == written["sha256"] else f"{path} is not what was written: its SHA-256 differs"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error})"


def refuse_other_models(path: Path, manifest: dict, models: dict[str, dict]) -> None:
    """Compare the architectures of the roles that learn.

    Raises:
        CheckpointError: the checkpoint is of other models, with what differs.
    """
    saved, models = manifest["models"], json.loads(json.dumps(models))
    if saved.keys() != models.keys():
        raise CheckpointError(f"checkpoint {path} holds {', '.join(saved)}, this run trains {', '.join(models)}; choose the same algorithm, or set run.resume=never")
    for role, model in models.items():
        for name in sorted(model.keys() | saved[role].keys()):
            if model.get(name) != saved[role].get(name):
                raise CheckpointError(
                    f"checkpoint {path} holds an {role} with {name}={saved[role].get(name)}, this run's has {name}={model.get(name)};"
                    f" set {role}.path to the model that it was trained from, or run.resume=never"
                )


def own_state(path: Path) -> dict:
    """What this rank gave to `save` as its own; only if the number of ranks is the same."""
    return torch.load(path / f"rank_{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
