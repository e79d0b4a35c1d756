"""Checkpoints changed after they were written: passed over by name for the sound one before."""

import dataclasses
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tests.fuzz.case import ACCEPTED, REFUSED, Case, Mutation
from tests.fuzz.job import Job, clear
from verl_megatron.config import TrainerConfig

OLD, NEW = 3, 7  # steps
WEIGHTS, OWN, MANIFEST = "actor/__0_0.distcp", "rank_0.pt", "manifest.json"
VALUES: tuple[Any, ...] = (None, -1, 10**30, "text", [], {}, True, 1.5)
OF_NO_KEY = (None, -1, 10**30, "text", [], True, 1.5, ...)  # what no run writes, even under a seal
OF_NO_NUMBER = (None, -1, "text", [], {})
KEYS = (
    "step",
    "world_size",
    "files",
    "models",
    "roles",
    "cursor",
    "kl",
    "before",
    "validation",
    "layouts",
    "settings",
    "versions",
)
INNER = (
    ("kl", "coef"),
    ("roles", "actor", "optimizer_step"),
    ("cursor", "position"),
    ("cursor", "epoch"),
    ("before", "validation/accuracy"),
    ("settings", "run", "seed"),
    ("models", "actor", "hidden_size"),
)


def mutations() -> list[Mutation]:
    found: list[Mutation] = [
        partial(of_the_manifest, path=(key,), value=value) for key in KEYS for value in (*VALUES, ...)
    ]
    found += [
        partial(of_the_manifest, path=path, value=value) for path in INNER for value in (*VALUES, ..., 0.5)
    ]
    sealed = [*product([(key,) for key in KEYS], OF_NO_KEY), *product(INNER[:4], OF_NO_NUMBER)]
    found += [partial(of_the_manifest, path=path, value=value, is_sealed=True) for path, value in sealed]
    found += [
        partial(of_a_file, file=file, what=what, make=make)
        for file in (WEIGHTS, OWN, MANIFEST)
        for what, make in FILES.items()
    ]
    found += [partial(of_a_described_file, change=change) for change in DESCRIBED]
    return found + [flipped] * 8 + [cut] * 6 + [added, untouched, untouched, untouched]


def _case(job: Job, what: str, *, expected: str = REFUSED) -> Case:
    names = (f"step_{NEW}",) if expected == REFUSED else ()
    return Case(
        name=what, expected=expected, names=names, act=partial(resume_from, job.folder / "checkpoint")
    )


def _written(job: Job) -> Path:
    """The newer of two checkpoints, which a process of its own has written for all cases."""
    if not (job.toy / "checkpoint").exists():
        _in_a_process(partial(_write, job.toy / "checkpoint.new"))
        os.rename(job.toy / "checkpoint.new", job.toy / "checkpoint")
    shutil.copytree(job.toy / "checkpoint", job.folder / "checkpoint")
    return job.folder / f"checkpoint/step_{NEW}"


def _in_a_process(act: Callable[[], None]) -> None:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, "the checkpoints of the fuzz were not written"
        return
    try:
        act()
        os._exit(0)
    finally:
        os._exit(1)


def _write(folder: Path) -> None:
    import torch
    from torch.distributed.checkpoint import save

    from parallel.checkpoint import folders as checkpoints
    from parallel.checkpoint import random_state
    from parallel.checkpoint import training_state as checkpoint
    from tests.one_rank import join_alone

    world = join_alone()

    def weights(scratch: Path) -> None:
        tensors = {"weight": torch.arange(640.0)}
        save(tensors, storage_writer=checkpoint._Writer(scratch / "actor", sync_files=False))

    for step in (OLD, NEW):
        own = {"rng": random_state.rng_state()}
        checkpoints.save(folder, world, step=step, manifest=_manifest(step), rank_state=own, write=weights)


def _manifest(step: int) -> dict[str, Any]:
    """What a run tells of an actor on one rank."""
    scheduler = {"max_lr": 1e-6, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 9, "num_steps": step}
    scheduler |= {"lr_decay_style": "constant", "wd_incr_style": "constant"}
    scheduler |= {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 9}
    return {
        "models": {"actor": {"hidden_size": 64, "rope_theta": 1e4}},
        "layouts": {"actor": "tp1 on ranks [0]"},
        "versions": {"verl-megatron": "1.0"},
        "settings": dataclasses.asdict(TrainerConfig()),
        "validation": {"step": step, "validation/accuracy": 0.5},
        "before": {"validation/accuracy": 0.25},
        "kl": {"coef": 0.02},
        "cursor": {"epoch": 0, "position": 16 * step, "num_prompts": 200, "seed": 1, "shuffle": 1},
        "roles": {"actor": {"optimizer_step": step, "scheduler": scheduler}},
    }


def resume_from(folder: Path) -> None:
    """Which checkpoint a run goes on from: the newest, or with an error that tells why not."""
    from parallel.checkpoint import folders as checkpoints
    from parallel.checkpoint import resume
    from tests.one_rank import join_alone
    from verl_megatron.manifest import manifest_problem

    world = join_alone()
    said: list[str] = []
    try:
        found = resume.newest_sound(folder, world, say=said.append, check=manifest_problem)
        path, manifest = found
        resume.read_rank_state(path, world.rank)
    except checkpoints.CheckpointError as error:
        sys.exit(f"the sound checkpoint was not used: {error}")
    if path.name == f"step_{NEW}":
        print(f"goes on from {path}")
    elif said and manifest["step"] == OLD:
        print("error:", "; ".join(said), file=sys.stderr)
        sys.exit(2)
    else:
        sys.exit(f"goes on from {path} without a word")


# ---- mutations -------------------------------------------------------------------------------------------


def of_the_manifest(
    job: Job, rng: random.Random, *, path: tuple[str, ...], value: Any, is_sealed: bool = False
) -> Case:
    """A value of the manifest changed, or (...) removed; sealed: as if a run had written it so."""
    file = _written(job) / MANIFEST
    manifest = json.loads(file.read_text())
    holder = manifest
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    job.write(file, _sealed(manifest) if is_sealed else manifest)
    seal = " under a new seal" * is_sealed
    return _case(job, f"{'.'.join(path)} is {'gone' if value is ... else repr(value)}{seal}")


def _sealed(manifest: dict[str, Any]) -> str:
    from parallel.checkpoint.sealed import SEAL, sealed

    return sealed({name: told for name, told in manifest.items() if name not in (SEAL, "format")})


DESCRIBED: tuple[Callable[[dict], dict], ...] = (
    lambda files: {},
    lambda files: {name: None for name in files},
    lambda files: {name: {} for name in files},
    lambda files: {name: [1] for name in files},
    lambda files: {name: about | {"bytes": "many"} for name, about in files.items()},
    lambda files: {name: about | {"bytes": -1} for name, about in files.items()},
    lambda files: {name: about | {"sha256": None} for name, about in files.items()},
    lambda files: {name: about | {"sha256": about["sha256"].upper()} for name, about in files.items()},
    lambda files: {"../../../" + name: about for name, about in files.items()},
    lambda files: files | {"/etc/passwd": {"bytes": 1, "sha256": ""}},
    lambda files: files | {"a\0b": {"bytes": 1, "sha256": ""}},
    lambda files: {name: about for name, about in files.items() if name != OWN},
    lambda files: {name: about for name, about in files.items() if name == OWN},
)


def of_a_described_file(job: Job, rng: random.Random, *, change: Callable[[dict], dict]) -> Case:
    file = _written(job) / MANIFEST
    manifest = json.loads(file.read_text())
    manifest["files"] = change(manifest["files"])
    job.write(file, manifest)
    return _case(job, f"files are {str(manifest['files'])[:120]}")


FILES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "deep": lambda path: path.write_text("[" * 50_000 + "]" * 50_000),
    "a pickle that runs code": lambda path: path.write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR."),
}


def of_a_file(job: Job, rng: random.Random, *, file: str, what: str, make: Callable[[Path], object]) -> Case:
    path = _written(job) / file
    clear(path)
    make(path)
    if file == MANIFEST and what == "gone":  # a checkpoint without a manifest was never finished
        return Case(
            name=f"{file} is gone", expected=REFUSED, act=partial(unfinished, job.folder / "checkpoint")
        )
    return _case(job, f"{file} is {what}")


def unfinished(folder: Path) -> None:
    """The older one is used without a word: the newer was not complete."""
    from parallel.checkpoint import resume
    from tests.one_rank import join_alone

    world = join_alone()
    path, _ = resume.newest_sound(folder, world, say=lambda text: None)
    if path.name == f"step_{OLD}":
        print("error: the newer one is not complete", file=sys.stderr)
        sys.exit(2)


def flipped(job: Job, rng: random.Random) -> Case:
    path = _written(job) / rng.choice((WEIGHTS, OWN, MANIFEST))
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    content[at] ^= 1 << rng.randrange(8)
    job.write(path, bytes(content))
    return _case(job, f"a bit of byte {at} of {path.name} is the other")


def cut(job: Job, rng: random.Random) -> Case:
    path = _written(job) / rng.choice((WEIGHTS, OWN, MANIFEST))
    at = rng.randrange(path.stat().st_size)
    os.truncate(path, at)
    return _case(job, f"{path.name} is cut at {at}")


def added(job: Job, rng: random.Random) -> Case:
    """Files beside those of the checkpoint do no harm."""
    job.write(_written(job) / "notes.txt", "mine")
    return _case(job, "a file more", expected=ACCEPTED)


def untouched(job: Job, rng: random.Random) -> Case:
    _written(job)
    return _case(job, "as it was written", expected=ACCEPTED)
