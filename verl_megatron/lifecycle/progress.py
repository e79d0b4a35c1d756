"""Progress of a run, in memory and on disk: completed steps and their checkpoints."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from parallel import device
from parallel.bridge import START
from parallel.checkpoint import folders as checkpoints
from parallel.checkpoint import random_state, resume
from parallel.checkpoint.background import Background
from parallel.checkpoint.folders import CheckpointError
from parallel.checkpoint.training_state import Snapshot
from parallel.rank_set import RankSet
from parallel.runtime.run_lock import launch_identity
from verl_megatron.checks.versions import versions_here
from verl_megatron.config.section import as_dict
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.manifest import changed_settings, manifest_problem, recorded_problem, refuse_other_run
from verl_megatron.roles.engine import Engine
from verl_megatron.roles.role import Role

RECORDED = "recorded"  # attachment of a checkpoint: the metrics of the next iteration
NO_RECORD = (
    "run.resume=verify: iteration {} has no complete record, as when the run ended at the checkpoint before "
    "it; nothing to compare with"
)
# Ends of metrics that follow the speed and the free memory of the moment.
NOT_RESULTS = ("_ms", "/tokens_per_micro_batch")


class Progress:
    """Completed iterations or optimizer steps, and checkpoints. All methods are collective over `world`.

    A checkpoint is of the end of an iteration. The metrics of the next one are attached to it; a run that
    resumes there can compare with them (`run.resume=verify`).

    Args:
        config: settings of the run, with a section `run`.
        trainable: the roles whose weights and optimizer state are saved, by name.
        cursor: position in the training data.
        enter: called before the training state of an engine is read or written.
        say: prints a message on one rank.
    """

    # Prefixes of the metrics that a repeated iteration reproduces.
    compared: tuple[str, ...] = ("policy/", "sft/", "dpo/", "reward_model/")
    repeated_on = ""  # what a repeated iteration is computed from, for messages

    def __init__(
        self,
        config: Any,
        world: RankSet,
        *,
        trainable: Mapping[str, Role],
        cursor: PromptCursor,
        enter: Callable[[Engine], None] = lambda engine: None,
        say: Callable[[str], None],
    ):
        self.config, self.world, self.say = config, world, say
        self.trainable, self.cursor, self.enter = trainable, cursor, enter
        self.step = 0
        self.before: dict[str, float] = {}  # validation metrics of the untrained actor
        self.validated: dict[str, float] = {}  # metrics and step of the latest validation
        self.folder = Path(config.run.output_dir) / "checkpoint"
        self._newest: Path | None = None  # the checkpoint of `step`, if there is one
        self._is_repeated = False  # the next iteration was begun before, from the same checkpoint and data
        self._is_same_layout = False
        is_async = config.run.async_save and config.run.save_interval > 0
        self._background = Background(world, enabled=is_async)
        if is_async:
            reserved = sum(role.engine.reserve_copies() for role in trainable.values())
            most = world.all_max(torch.tensor(float(reserved), dtype=torch.float64)).item()
            say(
                f"run.async_save: {most / 2**30:.2f} GiB of {'pinned ' if device.is_gpu() else ''}host "
                "memory a rank for the copy that is written, at most"
            )

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint of the current step is on disk or being written."""
        return self._newest is not None

    # ---- saving --------------------------------------------------------------------------------------------

    def save(self, *, cursor: dict | None = None) -> None:
        """Write a checkpoint of all state that the next iteration needs, then remove expired checkpoints.

        Args:
            cursor: state of the data cursor, if it has moved since the end of the last iteration.

        Raises:
            CheckpointError: writing it, or the one before, failed; earlier checkpoints are untouched.
        """
        self._background.wait()  # its host copies are reused
        step, run = self.step, self.config.run
        manifest = self._manifest() | {"cursor": cursor or self.cursor.state_dict(), "roles": {}}
        snapshots, rank_state = self._snapshots(manifest["roles"]), self._rank_state()
        if run.async_save:
            snapshots = list(snapshots)  # copy all now; otherwise one at a time, as they are written

        def write(ranks: RankSet) -> None:
            def write_roles(scratch: Path) -> None:
                for name, snapshot in snapshots:
                    snapshot.write(scratch / name, ranks)

            checkpoints.save(
                self.folder, ranks, step=step, manifest=manifest, rank_state=rank_state, write=write_roles
            )
            checkpoints.remove_old(
                self.folder, ranks, step=step, keep_last=run.keep_last_k, keep_best=run.keep_best_k
            )

        self._newest = self.folder / f"step_{step}"
        self._background.submit(write)

    def _rank_state(self) -> dict:
        """Return what each rank saves of its own, for a run under the same layout."""
        return {"rng": random_state.rng_state()}

    def _restore_rank_state(self, saved: dict) -> None:
        random_state.set_rng_state(saved.get("rng") or {})

    def _restore_other_layout(self, path: Path, num_ranks: int) -> None:
        """Load what a run under another layout, of `num_ranks` ranks, can use of what each of them saved."""

    def _snapshots(self, metadata: dict) -> Iterator[tuple[str, Snapshot]]:
        for name, role in self.trainable.items():
            self.enter(role.engine)
            snapshot, metadata[name] = role.engine.snapshot()
            yield name, snapshot

    def _manifest(self) -> dict:
        """Return the manifest: enough to identify the checkpoint and to repeat the run."""
        roles = self.trainable
        return {
            "kind": type(self.config).__name__,
            "layouts": {
                name: f"{role.engine.layout} on ranks {list(role.engine.layout.ranks)}"
                for name, role in roles.items()
            },
            "models": {name: role.engine.arch.to_hf() for name, role in roles.items()},
            "versions": versions_here(),
            "settings": as_dict(self.config),
            "validation": self.validated,
            "before": self.before,
            "kl": {},
        }

    def finish(self) -> None:
        """Wait until all checkpoints are on disk.

        Raises:
            CheckpointError: a write failed.
        """
        self._background.close()

    def done(self, metrics: dict[str, float]) -> None:
        """Count a completed iteration and attach its metrics to the checkpoint that it started from.

        Raises:
            CheckpointError: with `run.resume=verify`, if the metrics differ from the recorded ones.
        """
        self.step += 1
        path, is_repeated, self._newest, self._is_repeated = self._newest, self._is_repeated, None, False
        if path is None:
            return
        norms = {
            f"{name}/{kind}": value
            for name, role in self.trainable.items()
            for kind, value in self._norms(role).items()
        }
        results = {name: value for name, value in metrics.items() if name.startswith(self.compared)}
        results = {name: value for name, value in results.items() if not name.endswith(NOT_RESULTS)} | norms
        if is_repeated and self.config.run.resume == "verify":
            self._verify(path, results)
        else:
            self._background.submit(lambda _: self._record(path, results))

    def _norms(self, role: Role) -> dict[str, float]:
        self.enter(role.engine)
        return role.engine.norms()

    def _record(self, path: Path, results: dict[str, float]) -> None:
        if self.world.is_first:
            try:
                checkpoints.write_record(path, RECORDED, results)
            except OSError as error:
                self.say(f"warning: iteration {self.step} was not recorded in {path}: {error}")

    def _verify(self, path: Path, results: dict[str, float]) -> None:
        recorded = resume.read_record(path, RECORDED, self.world, say=self.say, check=recorded_problem)
        if recorded is None:
            return self.say(NO_RECORD.format(self.step))
        recorded = {name: value for name, value in recorded.items() if not name.endswith(NOT_RESULTS)}
        # On GPUs the summation order of some kernels is not deterministic; fitted micro-batches may differ.
        is_exact = self._is_same_layout and not (device.is_gpu() or self.config.engine.dynamic_batching)
        apart = differences(recorded, results, relative=0 if is_exact else 1e-2)
        if apart:
            numbers = "; ".join(f"{name}={found!r}, recorded {was!r}" for name, was, found in apart[:5])
            raise CheckpointError(
                f"run.resume=verify: iteration {self.step}, repeated from {path}{self.repeated_on}, "
                f"differs in {len(apart)} of {len(recorded)} numbers: {numbers};"
                " compare versions and settings with the manifest there, or set run.resume=newest"
            )
        self.say(
            f"run.resume=verify: iteration {self.step}, repeated{self.repeated_on}, "
            f"gives all {len(recorded)} recorded numbers"
        )

    # ---- resuming ------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume from the newest valid checkpoint, if there is one and the settings ask for it.

        Raises:
            CheckpointError: all checkpoints are damaged, or it is of other models.
        """
        begin = time.perf_counter()
        if self.config.run.resume == "never" and not self._has_begun_anew():
            if earlier := resume.put_aside_all(self.folder, self.world, launch=launch_identity()):
                self.say(
                    f"run.resume=never: earlier checkpoints are now {', '.join(map(str, earlier))}; "
                    "remove what is not wanted"
                )
            return
        newest = resume.newest_sound(self.folder, self.world, say=self.say, check=manifest_problem)
        if newest is None:
            if self.config.run.resume == "verify":
                self.say("run.resume=verify: there is no checkpoint; nothing to compare with")
            return
        path, saved = newest
        manifest = self._manifest()
        refuse_other_run(path, saved, kind=manifest["kind"], models=manifest["models"])
        if changed := changed_settings(saved["settings"], manifest["settings"]):
            self.say(f"settings changed since {path}: {', '.join(changed)}")
        self.cursor.load_state_dict(saved["cursor"])  # first, because it rejects other data
        for name, role in self.trainable.items():
            self.enter(role.engine)
            role.engine.load(path / name, saved["roles"][name])
        self.step, self.before, self.validated = saved["step"], saved["before"], saved["validation"]
        self._restore(saved)
        self._newest, how = path, "with its random states"
        self._is_same_layout = (
            saved["world_size"] == self.world.size and saved["layouts"] == manifest["layouts"]
        )
        if self._is_same_layout:
            with checkpoints.together(
                f"{path} does not hold the random states of a run; remove it, or set run.resume=never",
                self.world,
            ):
                self._restore_rank_state(resume.read_rank_state(path, self.world.rank))
        else:
            random_state.seed_anew(
                next(iter(self.trainable.values())).engine.groups, seed=self.config.run.seed, step=self.step
            )
            how = (
                f"of layouts {saved['layouts']} under {manifest['layouts']}; "
                "random states start from run.seed and the step"
            )
            self._restore_other_layout(path, saved["world_size"])
        attached = self._resume_attached(path)
        self._check_repeatable(path)
        self.say(
            f"resuming after iteration {self.step} from {path}, {how}{attached} (read in "
            f"{time.perf_counter() - begin:.1f} s)"
        )

    def _check_repeatable(self, path: Path) -> None:
        """Raise CheckpointError if the next iteration shall be verified, and its samples are other ones."""
        run = self.config.run
        if run.resume != "verify" or self._is_repeated or self.step >= run.iterations:
            return
        recorded = resume.read_record(path, RECORDED, self.world, say=self.say, check=recorded_problem)
        if recorded is None:
            self.say(NO_RECORD.format(self.step + 1))
        else:
            raise CheckpointError(
                f"run.resume=verify: iteration {self.step + 1} cannot be repeated from {path}, as its "
                "samples are not there or were collected with other settings; restore them, or set "
                "run.resume=newest"
            )

    def _has_begun_anew(self) -> bool:
        """Return whether an earlier attempt of this launch has, so that the checkpoints are its own."""
        starts = [os.environ.get(name) or "0" for name in ("TORCHELASTIC_RESTART_COUNT", START)]
        # torchrun counts on each host the attempts that ended there
        is_restarted = any(self.world.all_gather_object(starts != ["0", "0"]))
        return is_restarted and resume.has_begun_anew(self.folder, self.world, launch=launch_identity())

    def _restore(self, saved: dict) -> None:
        """Load what else a manifest holds; a subclass may have more."""

    def _resume_attached(self, path: Path) -> str:
        """Load what is attached to a checkpoint; return what it is, for the message of resumption.

        Set `_is_repeated` if the next iteration will be computed from the same data as before.
        """
        self._is_repeated = True
        return ""


def differences(
    recorded: dict[str, float], found: dict[str, float], *, relative: float, absolute: float = 1e-4
) -> list[tuple[str, float | None, float | None]]:
    """Return names and both values of metrics that differ by more than `relative` times the larger.

    With `relative=0` they must be equal.

    Args:
        absolute: absolute tolerance, unless `relative` is 0: a mean of signed terms may be near 0.
    """

    def agree(a: float | None, b: float | None) -> bool:
        if a is None or b is None:
            return False
        return (
            a == b
            or (math.isnan(a) and math.isnan(b))
            or (relative > 0 and math.isclose(a, b, rel_tol=relative, abs_tol=absolute))
        )

    names = sorted(recorded.keys() | found.keys())
    return [
        (name, recorded.get(name), found.get(name))
        for name in names
        if not agree(recorded.get(name), found.get(name))
    ]
