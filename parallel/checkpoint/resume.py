"""Resuming: find the newest undamaged checkpoint and its additions, and verify them before they are loaded.

The manifest, pickles and file types are all untrusted. Functions that take a RankSet are collective over it,
unless they say otherwise.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from parallel.checkpoint import metadata
from parallel.checkpoint.folders import (
    DAMAGED,
    EARLIER,
    MANIFEST,
    PARTIAL,
    CheckpointError,
    clean,
    each,
    named,
    share,
    step_of,
    together,
)
from parallel.checkpoint.sealed import (
    SEAL,
    file_damage,
    files_problem,
    load_tensors,
    read_sealed,
    sealed,
    shortened,
)
from parallel.rank_set import RankSet

BEGUN = "begun_anew.json"  # ids of the launch that has put the checkpoints of an earlier run aside
Check = Callable[[dict], str | None]  # returns an error message, or None


def _anything(content: dict) -> None:
    """Check that always passes."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= 2**53


def newest_sound(
    folder: Path, ranks: RankSet, *, say: Callable[[str], None], check: Check = _anything
) -> tuple[Path, dict] | None:
    """Return the newest undamaged checkpoint and its manifest; None if there is no checkpoint.

    A damaged one is reported and never loaded; if another can be used, it is renamed to step_N.damaged.
    Partly written checkpoints of a killed run are removed.

    Args:
        check: an additional check of a manifest.

    Raises:
        CheckpointError: all checkpoints are damaged, or the folder cannot be read.
    """
    damaged, first, paths = [], "", []
    action = f"the checkpoints in {folder} cannot be read; make the folder readable and writable"
    with together(action, ranks):
        if ranks.is_first:
            clean(folder)
            paths = named(folder)
    for path in ranks.broadcast_object(paths):
        manifest, problem = damage(path, ranks, check)
        if problem is None:
            with contextlib.suppress(OSError):  # renaming only saves the next start from reading it
                if ranks.is_first:
                    _put_aside(damaged, DAMAGED)
            ranks.barrier()
            return path, manifest
        damaged.append(path)
        first = first or f"{path.name}: {problem}"
        say(f"warning: checkpoint {path} is damaged and not used: {problem}")
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used; {first}; copy the files again, or set run.resume=never "
            "to begin anew"
        )
    return None


def has_begun_anew(folder: Path, ranks: RankSet, *, launch: str) -> bool:
    """Return whether this launch has put the earlier checkpoints aside, the same on every rank.

    Args:
        launch: id of the launch on this rank's host.
    """
    launches, begun = ranks.all_gather_object(launch), []
    if ranks.is_first:
        with contextlib.suppress(OSError, ValueError):  # unreadable: of no launch
            begun = read_sealed(folder / BEGUN).get("launches")
    begun = ranks.broadcast_object(begun)
    return isinstance(begun, list) and any(one in begun for one in launches)


def put_aside_all(folder: Path, ranks: RankSet, *, launch: str) -> list[Path]:
    """Rename the checkpoints of an earlier run, so that the new run does not take them for its own.

    Afterwards `has_begun_anew` is true for this launch.

    Returns:
        Their new paths, on every rank: step_N.earlier, or with a number if that is taken.

    Raises:
        CheckpointError: they cannot be renamed.
    """
    aside, launches = [], sorted(set(ranks.all_gather_object(launch)))
    action = f"the checkpoints in {folder} are of an earlier run and could not be put aside; move them away"
    with together(action, ranks):
        if ranks.is_first:
            clean(folder)
            aside = _put_aside(named(folder), EARLIER)
            folder.mkdir(parents=True, exist_ok=True)
            scratch = folder / f"{BEGUN}{PARTIAL}"
            scratch.write_text(sealed({"launches": launches}))
            os.replace(scratch, folder / BEGUN)
    return ranks.broadcast_object(aside)


def _put_aside(paths: list[Path], suffix: str) -> list[Path]:
    """Rename them; checkpoints renamed before stay. Not collective: the first rank calls it."""
    if not paths:
        return []

    def is_free(number: int | str) -> bool:
        return not any(os.path.lexists(f"{path}{suffix}{number}") for path in paths)

    free = next(filter(is_free, ("", *range(2, 10_000))))
    aside = [path.with_name(f"{path.name}{suffix}{free}") for path in paths]
    for path, new in zip(paths, aside):
        os.replace(path, new)
    return aside


def damage(path: Path, ranks: RankSet, check: Check = _anything) -> tuple[dict, str | None]:
    """Return the manifest, and an error message about it or the files, the same on every rank, or None."""
    manifest, problem = ranks.broadcast_object(read_manifest(path, check) if ranks.is_first else None)
    if problem is not None:
        return {}, problem
    problem = _damage_among(path, manifest["files"], ranks)
    if problem is None:  # the files are those of the manifest; now check which run wrote them
        problems = ranks.all_gather_object(_pickle_problem(path, manifest, ranks))
        problem = next(filter(None, problems), None)
    return manifest, problem


def _damage_among(path: Path, files: dict[str, dict], ranks: RankSet) -> str | None:
    """Return an error message if one of these files is damaged; the same on every rank."""
    found = each(
        lambda name: file_damage(path / name, files[name]),
        share({name: written["bytes"] for name, written in files.items()}, ranks),
    )
    all_found = ranks.all_gather_object(found)
    return next((problem for problems in all_found for problem in problems if problem), None)


def read_manifest(path: Path, check: Check) -> tuple[dict, str | None]:
    """Return the manifest of checkpoint `path` and an error message about it, or None; not collective."""
    try:
        manifest = read_sealed(path / MANIFEST)
    except ValueError as error:
        return {}, str(error)
    files: Any = manifest.get("files")
    world_size = manifest.get("world_size")
    if type(manifest.get("step")) is not int or manifest["step"] != step_of(path):
        return {}, f"{MANIFEST} is of step {shortened(manifest.get('step'), 40)}, not of the folder's"
    if not _is_count(world_size) or not world_size:
        return {}, f"{MANIFEST} tells no number of ranks"
    if problem := files_problem(files):
        return {}, f"{MANIFEST} is damaged: {problem}"
    if missing := _missing(files, "rank", world_size):
        return {}, f"{MANIFEST} does not list {missing}"
    return manifest, check(manifest)


def _pickle_problem(path: Path, manifest: dict, ranks: RankSet) -> str | None:
    """Return an error message if a pickle that this rank will read is invalid."""
    try:
        if manifest["world_size"] == ranks.size:
            read_rank_state(path, ranks.rank)
        for name in manifest["files"] if ranks.is_first else ():
            if name.endswith(f"/{metadata.FILE}"):
                folder = name.removesuffix(metadata.FILE)
                stored = metadata.read_tensor_table(path / folder).storage_data.values()
                unlisted = [
                    one.relative_path for one in stored if folder + one.relative_path not in manifest["files"]
                ]
                if unlisted:
                    return f"{path / name} names {shortened(unlisted[0])}, which {MANIFEST} does not list"
    except ValueError as error:
        return str(error)
    return None


def refuse_other_models(path: Path, manifest: dict, models: dict[str, dict]) -> None:
    """Compare the architectures of the trained roles with the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is of other models; the message names the differences.
    """
    saved, models = manifest["models"], json.loads(json.dumps(models))
    if saved.keys() != models.keys():
        raise CheckpointError(
            f"checkpoint {path} holds {', '.join(saved)}, this run trains {', '.join(models)}; choose the "
            "same algorithm, or set run.resume=never"
        )
    for role, model in models.items():
        for name in sorted(model.keys() | saved[role].keys()):
            if model.get(name) != saved[role].get(name):
                held, given = shortened(saved[role].get(name)), shortened(model.get(name))
                raise CheckpointError(
                    f"checkpoint {path} holds an {role} with {shortened(name)}={held}, this run's has "
                    f"{name}={given};"
                    f" set {role}.path to the model that it was trained from, or run.resume=never"
                )


def read_rank_state(path: Path, rank: int) -> dict:
    """Return the state that a rank passed to `save`. Not collective.

    Raises:
        ValueError: it is not what a run saves, or would run code.
    """
    return load_tensors(path / f"rank_{rank}.pt")


# ---- additions to a checkpoint -----------------------------------------------------------------------------


def read_record(
    path: Path, name: str, ranks: RankSet, *, say: Callable[[str], None], check: Check = _anything
) -> dict | None:
    """Return what `write_record` wrote, on every rank; None, with a warning if it is unusable."""

    def read() -> tuple[dict | None, str | None]:
        try:
            if not os.path.lexists(path / f"{name}.json"):
                return None, None
            content = read_sealed(path / f"{name}.json")
            if content.get("of") != read_sealed(path / MANIFEST)[SEAL] or not isinstance(
                content.get("told"), dict
            ):
                return None, f"{name}.json belongs to another checkpoint"
            problem = check(content["told"])
            return (None, f"{name}.json is damaged: {problem}") if problem else (content["told"], None)
        except (OSError, ValueError) as error:
            return None, str(error)

    found, problem = ranks.broadcast_object(read() if ranks.is_first else None)
    if problem:
        say(f"warning: {name} of {path} are not used: {problem}")
    return found


def read_attachment(
    path: Path, name: str, ranks: RankSet, *, say: Callable[[str], None], check: Check = _anything
) -> tuple[list[dict], int] | None:
    """Return what `attach` wrote, if it is undamaged, and the number of ranks that wrote it.

    With the same number of ranks now, each gets its own part; otherwise each gets all parts.

    Args:
        check: returns an error message for an unusable part of a rank; then nothing is used.
    """
    listed = read_record(path, name, ranks, say=say, check=lambda listed: _listing_problem(listed, name))
    if listed is None:
        return None
    problem, parts = _damage_among(path, listed["files"], ranks), []
    if problem is None:
        is_same = listed["world_size"] == ranks.size
        wanted = [ranks.rank] if is_same else range(listed["world_size"])
        parts, problem = _parts(path, name, wanted, check)
        problem = next(filter(None, ranks.all_gather_object(problem)), None)
    if problem:
        say(f"warning: {name} of {path} are not used: {problem}")
        return None
    return parts, listed["world_size"]


def _listing_problem(listed: dict, name: str) -> str | None:
    if not _is_count(listed.get("world_size")) or not listed["world_size"]:
        return "it tells no number of ranks"
    if problem := files_problem(listed.get("files")):
        return problem
    missing = _missing(listed["files"], name, listed["world_size"])
    return f"it does not list {missing}" if missing else None


def _missing(files: dict, name: str, world_size: int) -> str | None:
    """Return the first rank's file that is not listed."""
    if world_size > len(files):  # an invalid number, too large to iterate over
        return f"the files of {world_size} ranks"
    return next((file for rank in range(world_size) if (file := f"{name}_{rank}.pt") not in files), None)


def _parts(path: Path, name: str, ranks: Iterable[int], check: Check) -> tuple[list[dict], str | None]:
    parts = []
    try:
        for rank in ranks:
            parts.append(load_tensors(path / f"{name}_{rank}.pt"))
            if problem := check(parts[-1]):
                return [], f"{path / f'{name}_{rank}.pt'} is refused: {problem}"
    except ValueError as error:
        return [], str(error)
    return parts, None
