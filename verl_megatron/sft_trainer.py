"""Supervised fine-tuning on the same engine as RL."""

import gc
from functools import partial
from pathlib import Path

from torch import Tensor

from parallel import device
from parallel.rank_set import RankSet, agree, world
from parallel.runtime.refusal import short_repr, speak_once
from parallel.runtime.run_lock import RunLock
from parallel.runtime.watchdog import Watchdog
from parallel.weights.architecture import read_architecture
from verl_megatron.algorithms.losses import cross_entropy
from verl_megatron.algorithms.normalizers import token_mean
from verl_megatron.checks.folders import find_not_finite
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.versions import check_versions
from verl_megatron.config import SFTConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import Demonstration, PromptCursor
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.model_specs import layout_of
from verl_megatron.observe.metrics import PhaseTimer
from verl_megatron.observe.profiling import record_profile
from verl_megatron.observe.timeline import record_timeline, write_timeline
from verl_megatron.observe.tracking import MetricsTracker
from verl_megatron.planner import machine_here
from verl_megatron.preflight import Inputs, inspect_supervised
from verl_megatron.roles.engine import compute_of
from verl_megatron.roles.role import Role, Update, make_role


class SFTTrainer:
    """Supervised fine-tuning: cross-entropy over the response tokens, averaged over the tokens of a step.

    Raises:
        ValueError: lists all problems of the settings, before a model is built.
    """

    def __init__(self, config: SFTConfig):
        speak_once()
        if not isinstance(config, SFTConfig):
            raise ValueError(f"config={short_repr(config)} is a {type(config).__name__}; give an SFTConfig")
        check_versions(vllm=False)
        device.initialize()
        self.config, self.world = config, world()
        self.is_first = self.world.is_first
        self.inputs = Inputs()
        agree(
            lambda: refuse(
                inspect_supervised(
                    config, world_size=self.world.size, machine=machine_here(), inputs=self.inputs
                )
            ),
            self.world,
        )
        for note in self.inputs.notes if self.is_first else []:
            print(note, flush=True)

    def train(self) -> dict[str, float]:
        """Run all optimizer steps and the export; return the last metrics."""
        run = self.config.run
        with (
            RunLock(run.output_dir, self.world),
            Watchdog(run.stall_timeout_s, run.output_dir, self.world) as watchdog,
        ):
            return self._train(watchdog)

    def _train(self, watchdog: Watchdog) -> dict[str, float]:
        config, run = self.config, self.config.run
        folders, place = (
            {"actor": (config.actor.path, "lm")},
            dict(place=self.world.rank, of=self.world.size),
        )
        agree(
            lambda: refuse(find_not_finite(folders, (compute_of(config.engine).dtype,), **place)), self.world
        )
        demonstrations, held_out, arch = (
            self.inputs.train,
            self.inputs.validation,
            read_architecture(config.actor.path),
        )
        learning = dict(seed=run.seed, temperature=1.0, train_steps=run.iterations, progress=watchdog.beat)
        actor = make_role(
            config.actor,
            layout_of(config.actor, self.world.size),
            self.world,
            arch=arch,
            engine=config.engine,
            head="lm",
            **learning,
        )
        gc.freeze()  # exclude what was built; the command line starts with collection disabled
        gc.enable()
        cursor = PromptCursor(num_prompts=len(demonstrations), seed=run.seed, shuffle=config.data.shuffle)
        tracker = (
            MetricsTracker(run.output_dir, run.track_metrics, first_step=0, total_steps=run.iterations)
            if self.is_first
            else None
        )
        clock, metrics = PhaseTimer(device.synchronize_stream, around=watchdog.operation), {}
        record_timeline(clock, run.track_metrics, self.world)
        record_profile(clock, watchdog, run.track_metrics, run.output_dir, self.world)
        for step in range(1, run.iterations + 1):
            with clock.phase("update"):
                metrics = self._step(
                    actor, [demonstrations[i] for i in cursor.draw(config.data.samples_per_step)]
                )
            if held_out is not None and (
                step == run.iterations or (run.validate_interval and step % run.validate_interval == 0)
            ):
                with clock.phase("validation"):
                    metrics["validation/loss"] = self._loss(actor, list(held_out))
            seconds = clock.pop()
            if tracker is not None:
                tracker.log(step, metrics | {f"time/{name}_s": value for name, value in seconds.items()})
        if run.export:
            actor.engine.export(Path(run.output_dir) / "actor", template=config.actor.path)
        write_timeline(clock, run.output_dir, self.world)
        if tracker is not None:
            tracker.close()
        return metrics

    def _step(self, actor: Role, demonstrations: list[Demonstration]) -> dict[str, float]:
        batch, table = spread(demonstrations, self.world)
        dispatched = actor.dispatch(batch, table)
        update = Update(
            loss=lambda outputs, micro: cross_entropy(outputs["logprobs"]),
            normalizer=partial(token_mean, max_tokens=0),
        )
        sums, _ = actor.update(dispatched, table, update)
        return sums.reduce(self.world)

    def _loss(self, actor: Role, demonstrations: list[Demonstration]) -> float:
        """Return the mean negative log-likelihood of the response tokens."""
        batch, table = spread(demonstrations, self.world)
        logprobs_BT: Tensor = actor.infer(batch, table, ("logprobs",))["logprobs"]
        return -self.world.all_sum(logprobs_BT.double().sum()).item() / int(table.response_B.sum())


def spread(demonstrations: list[Demonstration], world: RankSet) -> tuple[RolloutBatch, SampleTable]:
    """Distribute demonstrations over the ranks; return this rank's samples and the table of all."""
    mine = range(world.rank, len(demonstrations), world.size)
    batch = RolloutBatch.from_lists(
        list(mine),
        [demonstrations[i].prompt_token_ids for i in mine],
        [demonstrations[i].response_token_ids for i in mine],
    )
    return batch, SampleTable.gather(batch, world, num_mini_batches=1)
