"""A whole run of any kind: locks, watchdog, SIGTERM, checkpoints, export and the files at its end."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallel import device, gate
from parallel.rank_set import agree, world
from parallel.runtime.preemption import Preemption, usual_grace_s
from parallel.runtime.refusal import speak_once
from parallel.runtime.run_lock import RunLock
from parallel.runtime.run_log import RunLog
from parallel.runtime.watchdog import Watchdog
from parallel.weights.remote.arriving import telling
from verl_megatron.checks.folders import find_not_finite, roles_of
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.ranks import not_started
from verl_megatron.checks.remote import different_versions, fetch_models
from verl_megatron.checks.versions import check_versions
from verl_megatron.data.shared import OncePerHost
from verl_megatron.lifecycle.agreement import agree_on_data, agree_on_settings
from verl_megatron.lifecycle.arrivals import Arrivals
from verl_megatron.lifecycle.earlier_results import put_aside
from verl_megatron.lifecycle.progress import Progress
from verl_megatron.lifecycle.record import RunRecord, readable_starts
from verl_megatron.model_specs import models_of
from verl_megatron.observe.metrics import PhaseTimer
from verl_megatron.observe.profiling import record_profile
from verl_megatron.observe.startup import StartClock
from verl_megatron.observe.timeline import Activity, record_timeline, write_timeline
from verl_megatron.observe.tracking import MetricsTracker, writing_to
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.preflight import machine_here
from verl_megatron.preflight import Inputs
from verl_megatron.roles.role import Role

SLOW_S = 1800.0  # watchdog timeout of building models and of disk I/O, seconds


class BaseTrainer:
    """A run on the ranks that torchrun started, or on this process alone.

    Args:
        config: all settings, with a section `run`.
        inspect: returns all problems of the settings and files, and fills `inputs` with what it read.
        vllm: the run needs vLLM.

    Raises:
        ValueError: lists all problems of the settings, before a model is built.
    """

    state: Progress
    clock: PhaseTimer
    roles: Mapping[str, Role]
    watchdog: Watchdog
    preemption: Preemption
    tracker: MetricsTracker | None = None  # on the first rank, once `make_tracker` was called
    record: RunRecord

    def __init__(self, config: Any, inspect: Callable[..., list[str]], *, vllm: bool):
        speak_once()
        check_versions(vllm=vllm)
        self.config, self.start = config, StartClock()
        if gate.is_here():
            with self.start.stage("imports"):
                self.import_engine()  # which takes time that the checks of the command may take as well
            with self.start.stage("gate"):
                gate.pass_through()
        with self.start.stage("world"):
            device.initialize()
            self.world = world()
        with self.start.stage("checks"):
            self._check(inspect)

    def _check(self, inspect: Callable[..., list[str]]) -> None:
        """Refuse a run that cannot work on these ranks, and fill `inputs` with the files that were read."""
        config = self.config
        self.is_first = self.world.is_first
        self.output_dir = Path(config.run.output_dir)
        self.inputs = Inputs()
        self._said: list[str] = []  # before the log begins
        machine: Machine | None = machine_here()
        world_size = self.world.size
        agree(lambda: refuse(not_started(config, world_size=world_size)), self.world)
        agree_on_settings(config, self.world)
        fetched = agree(lambda: fetch_models(config), self.world)
        everywhere = self.world.all_gather_object(fetched)
        agree(lambda: refuse(different_versions(everywhere)), self.world)
        for model in fetched:
            self.say(str(model))
        agree(partial(self._inspect, inspect, machine), self.world)
        agree_on_data(self.inputs.data, self.world)

    def check_weights(self, *dtypes: torch.dtype) -> None:
        """Refuse weights that are not finite in one of `dtypes`, and say how long the start has taken."""
        roles, place, of = roles_of(self.config), self.world.rank, self.world.size
        with self.start.stage("weights"):
            agree(lambda: refuse(find_not_finite(roles, dtypes, place=place, of=of)), self.world)
        self.say(str(self.start))

    def import_engine(self) -> None:
        """Import the rollout engine, if this rank has one."""

    def _inspect(self, inspect: Callable[..., list[str]], machine: Machine | None) -> None:
        inputs = self.inputs
        with OncePerHost(self.world) as inputs.once:
            refuse(inspect(self.config, world_size=self.world.size, machine=machine, inputs=inputs))

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.is_first:
            print(text, flush=True)
            self._said.append(text)

    def train(self) -> dict[str, float]:
        """Run all iterations; return the last metrics.

        After a SIGTERM to any rank the run saves a checkpoint at the next opportunity and returns early; the
        same run resumes there.
        """
        run, rank = self.config.run, self.world.global_rank
        with (
            RunLock(self.output_dir, self.world),
            RunLog(self.output_dir, rank=rank, node=node_of(rank)) as log,
            self._closing_metrics(),  # once the record says how the run ended
            RunRecord(self.config, self.world, step=self._step_reached) as self.record,
            Watchdog(run.stall_timeout_s, self.output_dir, self.world) as self.watchdog,
            Preemption(grace_s=usual_grace_s(), log=log.write) as self.preemption,
        ):
            log.write("\n".join([f"start {self.record.number}", *self._said]))
            with (
                self.watchdog.operation("build", timeout_s=SLOW_S),
                telling(Arrivals(self.say, self.watchdog.beat)),
            ):
                self.build()
            record_timeline(self.clock, run.track_metrics, self.world, ahead=self.ahead)
            record_profile(self.clock, self.watchdog, run.track_metrics, self.output_dir, self.world)
            self.announce()
            gc.freeze()  # exclude what was built; the command line starts with collection disabled
            gc.enable()
            try:
                with self.watchdog.operation("resume", timeout_s=SLOW_S):
                    self.resume()
                self.record.resumed(self.state.step)
                self._put_earlier_aside()
                found = self.loop()
            except BaseException:
                self.close(failed=True)
                raise
            self.close()
            return found

    @contextlib.contextmanager
    def _closing_metrics(self) -> Iterator[None]:
        """Close the metrics' sinks of a run that fails, so that its report shows the failure."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the run's own error is the one to tell
                if self.tracker is not None:
                    self.tracker.close()
            raise

    def _step_reached(self) -> int:
        """Return the completed iterations; 0 before the run is built."""
        return self.state.step if "state" in vars(self) else 0

    def build(self) -> None:
        """Build the models; set `state`, `clock` and `roles`."""
        raise NotImplementedError

    def announce(self) -> None:
        """Print what was built."""

    def loop(self) -> dict[str, float]:
        """Run the iterations that are left; return the last metrics."""
        raise NotImplementedError

    def resume(self) -> None:
        """Resume from an earlier checkpoint, as `run.resume` says; see `Progress.resume`."""
        self.state.resume()

    def _put_earlier_aside(self) -> None:
        """Move the results of an earlier run out of the way of one that begins."""
        if self.state.step or self.state.has_checkpoint:
            return

        def put() -> None:
            if not self.is_first:
                return
            with writing_to(self.output_dir):
                aside, left = put_aside(self.config, readable_starts(self.output_dir))
            if aside is not None:
                self.record.put_aside(aside.name)
                self.say(f"results of an earlier run are now in {aside}; remove what is not wanted")
            if left:
                self.say(
                    f"warning: {', '.join(left)} of an earlier run could not be moved; this run goes on there"
                )

        agree(put, self.world)

    def close(self, *, failed: bool = False) -> None:
        """Free what `build` has started.

        Args:
            failed: by an error, perhaps of this rank alone: others may wait elsewhere, and the run may start
                again. Nothing is collective, and other worlds are not told to end.
        """

    @property
    def ahead(self) -> int | None:
        """Iterations for which other worlds work ahead of time; None if there are none."""
        return None

    def other_ranks(self) -> Sequence[Activity]:
        """Return what the ranks of other worlds did; called on the first rank."""
        return ()

    # ---- parts of a loop -----------------------------------------------------------------------------------

    def make_tracker(self) -> MetricsTracker | None:
        """Open the metrics' sinks on the first rank."""
        run, step = self.config.run, self.state.step
        if not self.is_first:
            return None
        self.tracker = MetricsTracker(
            self.output_dir,
            run.track_metrics,
            first_step=step + 1 if step else 0,
            total_steps=run.iterations,
        )
        return self.tracker

    def is_due(self, interval: int) -> bool:
        """Whether the completed iteration is a multiple of `interval`."""
        return interval > 0 and self.state.step % interval == 0

    def save_if_due(self) -> None:
        """Write a checkpoint if one is due, and after the last iteration if there are any."""
        run = self.config.run
        is_last = self.state.step == run.iterations
        if is_last:
            self.preemption.hold()  # all that is left is saving
        if self.is_due(run.save_interval) or (is_last and run.save_interval):
            self.save()

    def save(self, *, cursor: dict | None = None) -> None:
        """Write a checkpoint, timed as part of the next iteration; see `Progress.save`."""
        with self.watchdog.operation("checkpoint", timeout_s=SLOW_S), self.clock.phase("save"):
            self.state.save(cursor=cursor)

    def leave(self, *, cursor: dict | None = None) -> None:
        """Save before the end that a SIGTERM asks for, unless the state is on disk already."""
        self.preemption.hold()
        if not self.state.has_checkpoint:
            self.save(cursor=cursor)
        self.record.stopped = f"SIGTERM: saved after iteration {self.state.step}"
        self.say(
            f"ending after iteration {self.state.step}, as SIGTERM asks for; {self._how_to_go_on()} from here"
        )

    def _how_to_go_on(self) -> str:
        return (
            "the same command goes on"
            if self.config.run.resume != "never"
            else "with run.resume=newest it goes on"
        )

    def finish(self, tracker: MetricsTracker | None) -> None:
        """Wait for the checkpoints and complete the files of the run."""
        with self.watchdog.operation("checkpoint", timeout_s=SLOW_S):
            self.state.finish()
        with writing_to(self.output_dir):
            write_timeline(self.clock, self.output_dir, self.world, self.other_ranks)
            if tracker is not None:
                tracker.close()

    def export(self) -> None:
        """Export each trained model as a Hugging Face folder in output_dir; a value head with its trunk."""
        self.preemption.hold()
        for spec in models_of(self.config):
            for name, head in spec.exports.items() if spec.trainable else ():
                folder, engine = self.output_dir / name, self.roles[spec.name].engine
                try:
                    with self.watchdog.operation("export", timeout_s=SLOW_S):
                        engine.export(folder, template=spec.model.path, head=head)
                except ValueError as error:
                    raise ValueError(f"{error}; {self._what_remains()}") from None
                self.say(f"exported {folder}")

    def _what_remains(self) -> str:
        """Describe what is saved of a run whose export failed: the newest checkpoint, or nothing."""
        if not self.state.has_checkpoint:
            return "there is no checkpoint of this step, because run.save_interval=0"
        with self.watchdog.operation("checkpoint", timeout_s=SLOW_S):
            self.state.finish()
        return f"the checkpoint of step {self.state.step} remains, and {self._how_to_go_on()} from there"


def node_of(rank: int) -> int:
    """Return the number of this host among those of the world."""
    node = os.environ.get("GROUP_RANK", "")
    return int(node) if node.isdecimal() else device.host_of(rank)
