"""Python interface: a complete RL run, from the first validation to the exported model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from parallel.rank_set import agree
from parallel.runtime.refusal import short_repr, speak_once
from parallel.sealed_store import given_address
from verl_megatron.checks.batches import batch_arithmetic
from verl_megatron.checks.versions import optional_packages
from verl_megatron.config import TrainerConfig, older_settings
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import GivenPrompts, Prompt
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.iteration import collect, learn
from verl_megatron.learner import Collected
from verl_megatron.lifecycle.base_trainer import BaseTrainer
from verl_megatron.model_specs import has_worlds, is_separate, models_apart, models_of
from verl_megatron.observe import samples
from verl_megatron.observe.activity import activities_of
from verl_megatron.observe.metrics import Sums
from verl_megatron.observe.pictures import draw_report
from verl_megatron.observe.timeline import Activity
from verl_megatron.observe.tracking import MetricsTracker, writing_to
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.serving import kv_bytes_per_token
from verl_megatron.planner.text import samples_together
from verl_megatron.preflight import inspect_run
from verl_megatron.rewards.callables import spec_of
from verl_megatron.roles.compute import compute_of, rollout_dtype
from verl_megatron.rollout.curriculum import Hook
from verl_megatron.rollout.sampler import Draw
from verl_megatron.rollout.vllm_process import import_vllm
from verl_megatron.run import Run, build_run
from verl_megatron.saved_state import SavedState
from verl_megatron.separate.training_side import RemoteEngine


class RLTrainer(BaseTrainer):
    """RL training on the ranks that torchrun started, or on this process alone.

    Args:
        config: all settings; `actor_model`, `reward_model` and `reward_function` override actor.path,
            reward.path and reward.function.
            A function may be given itself: a lambda, or one of a notebook; so may a list of functions, some
            with a weight (function, weight), and a mapping of either by data_source.
        curriculum: gives the weights of the sources of `data.curriculum` after each iteration: from a list of
            `Source` (data/order/curriculum.py) to a dict with a number from 0 on for each name. None: by the
            variance of scores. It is called on the first rank, and must not change while a run is resumed.
        use_vllm: must be True; vLLM is the only rollout engine.
        older: names of the older interface (`OLDER_NAMES` of the configuration), such as `checkpoint_config`.

    Raises:
        ValueError: lists all problems of the settings, before a model is built.
    """

    def __init__(
        self,
        config: TrainerConfig | None = None,
        *,
        actor_model: str = "",
        reward_model: str = "",
        reward_function: Any = "",
        curriculum: Hook | None = None,
        use_vllm: bool = True,
        **older: Any,
    ):
        speak_once()
        if use_vllm is not True:
            raise ValueError(
                f"use_vllm={short_repr(use_vllm)}: rollouts come from vLLM only; leave use_vllm at True"
            )
        config = TrainerConfig() if config is None else config
        if not isinstance(config, TrainerConfig):
            raise ValueError(
                f"config={short_repr(config)} is a {type(config).__name__}; give a TrainerConfig, "
                "such as that of get_trainer_config()"
            )
        for name, value in older_settings(older, where="RLTrainer()").items():
            config.set(name, value)
        config.actor.path = actor_model or config.actor.path
        config.reward.path = reward_model or config.reward.path
        is_given = reward_function is not None and not isinstance(reward_function, str) or reward_function
        function = reward_function if is_given else config.reward.function
        config.reward.function = spec_of(function, config.run.output_dir)
        if curriculum is not None and (problem := _hook_problem(curriculum, config.data.curriculum)):
            raise ValueError(problem)
        super().__init__(config, inspect_run, vllm=True)
        self.inputs.curriculum = curriculum
        if has_worlds(config):
            agree(given_address, self.world)
        self.say(optional_packages())
        for note in self.inputs.notes:
            self.say(note)
        self.say(batch_arithmetic(config, self.world.size))
        self.run: Run  # once `train` has built it

    def import_engine(self) -> None:
        if not is_separate(self.config):
            import_vllm()

    def build(self) -> None:
        """Check the values of the weights, then build all components of the run."""
        engine, specs = self.config.engine, (*models_of(self.config), *models_apart(self.config))
        dtypes = {compute_of(engine, fp8_weights_by=spec.fp8_weights_by).dtype for spec in specs}
        self.check_weights(*dtypes, rollout_dtype(self.config))
        self.run = build_run(self.config, self.inputs, self.watchdog, self.world)
        self.clock, self.roles = self.run.clock, self.run.learner.roles
        self.state: SavedState = SavedState(self.run, say=self.say)

    def announce(self) -> None:
        """Print what was built, the plan of the weight sync, and the size of vLLM's cache."""
        built = self.run.built
        self.say(
            f"built in {sum(built.values()):.0f} s: "
            f"{', '.join(f'{name} {seconds:.1f}' for name, seconds in built.items())}"
        )
        self.say(f"reshard.mode={self.config.reshard.mode}: {self.run.plan}")
        self.say(self._generation())

    def close(self, *, failed: bool = False) -> None:
        self.run.close(failed=failed)

    @property
    def ahead(self) -> int | None:
        return self.config.async_.max_staleness if has_worlds(self.config) else None

    def other_ranks(self) -> Sequence[Activity]:
        engine, scoring = self.run.engine, self.run.scoring
        bridges = engine.bridges if isinstance(engine, RemoteEngine) else []
        return activities_of(bridges + (scoring.bridges if scoring is not None else []))

    def _generation(self) -> str:
        planned = PlannedRun.of(self.config, world_size=self.world.size)
        tokens = self.run.engine.kv_cache_tokens
        return (
            f"vLLM: KV cache of {tokens:,} tokens a replica, "
            f"{samples_together(planned, tokens * kv_bytes_per_token(planned))}"
        )

    def loop(self) -> dict[str, float]:
        """Run the iterations that are left; return the last metrics.

        With validation data they include `validation/before` and `validation/after`.
        """
        config, state, metrics, after = self.config.run, self.state, {}, {}
        tracker = self.make_tracker()
        if tracker is not None:
            samples.remove_later(self.output_dir / samples.FOLDER, state.step + 1)
        if state.step == 0 and not state.before:
            state.before = after = self.validate(tracker)
        elif state.validated.get("step") == config.iterations:  # only the export is missing
            after = state.validated
        while state.step < config.iterations:
            self.watchdog.iteration = state.step + 1
            latest = self._iterate()
            if latest is None:
                break
            metrics = latest
            if state.step == config.iterations or self.is_due(config.validate_interval):
                after = self.validate(tracker, metrics)
            elif tracker is not None:
                tracker.log(state.step, metrics)
            self.save_if_due()
        else:
            if config.export:
                self.export()
        self.finish(tracker)
        if tracker is not None and "jsonl" in config.track_metrics and (state.step or state.before):
            with writing_to(self.output_dir):
                draw_report(self.output_dir)
        return metrics | (before_and_after(state.before, after) if state.step == config.iterations else {})

    def _iterate(self) -> dict[str, float] | None:
        """Run an iteration and return its metrics; None after a SIGTERM, with state and samples saved."""
        run, state, drawn_from = self.run, self.state, self.run.source.cursor.state_dict()
        if self.preemption.requested(self.world):
            return self._leave()
        collected = state.collected() or collect(run, state.step + 1)
        if self.preemption.requested(self.world):
            return self._leave(collected, drawn_from)
        state.keep_samples(collected)
        metrics = learn(run, state.step + 1, collected)
        with self.watchdog.operation("record"):
            state.done(metrics)
            self._record_samples(collected.batch)
        return metrics

    def _record_samples(self, batch: RolloutBatch) -> None:
        """Write samples of the completed iteration if it is due, the first, or the last one."""
        rollout, step = self.config.rollout, self.state.step
        is_end = rollout.record_interval > 0 and step in (1, self.config.run.iterations)
        if is_end or self.is_due(rollout.record_interval):
            path = self.output_dir / samples.FOLDER / f"step_{step}.jsonl"
            with writing_to(self.output_dir):
                samples.record_samples(
                    batch, self.run.tokenizer, self.world, prompts=rollout.record_prompts, path=path
                )

    def _leave(self, collected: Collected | None = None, drawn_from: dict | None = None) -> None:
        """Save the state and the samples of the next iteration, if there are any."""
        self.leave(cursor=drawn_from)
        if collected is not None:
            self.state.keep_samples(collected)

    def validate(
        self, tracker: MetricsTracker | None, metrics: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Generate and score responses to the validation prompts, and log the mean score with `metrics`.

        Responses are written as JSON lines. The time counts towards the next iteration, as for checkpoints.
        """
        validated = {}
        if (validation := self.run.validation) is not None:
            config, run, sums = self.config, self.run, Sums()
            prompts = list(validation)[: config.data.validation_samples or None]
            sampling = dataclasses.replace(run.draw.sampling, temperature=config.data.validation_temperature)
            with run.clock.phase("validation"):
                version = run.channel.adopt()
                draw = Draw(num_prompts=len(prompts), samples_per_prompt=1, sampling=sampling)
                batch = run.sampler.collect(GivenPrompts(prompts), draw, iteration=0, version=version)
                run.residency.enter_training()
                table = SampleTable.gather(batch, self.world, num_mini_batches=1)
                scores = run.sampler.score(batch, Sums()) + run.learner.score(batch, table)
            sums.add("validation/accuracy", scores.sum(), len(scores))
            run.sources.add(sums, "validation", scores, batch.source_id)
            validated = sums.reduce(self.world)
            self.state.validated = {"step": self.state.step} | validated
            self._dump(batch, scores.tolist(), prompts)
        if tracker is not None and (metrics or validated):
            tracker.log(self.state.step, (metrics or {}) | validated)
        return validated

    def _dump(self, batch: RolloutBatch, scores: list[float], prompts: list[Prompt]) -> None:
        own = []
        for b, sample in enumerate(batch.sample_id.tolist()):
            response = batch.generated_ids[b][batch.response_mask[b]].tolist()
            own.append(
                {
                    "sample": sample,
                    "prompt": prompts[sample].text,
                    "response": self.run.tokenizer.decode(response),
                    "answer": prompts[sample].answer,
                    "score": scores[b],
                }
            )
        gathered = self.world.gather_object(own)
        if gathered is not None:
            path = self.output_dir / samples.VALIDATION_FOLDER / f"step_{self.state.step}.jsonl"
            with writing_to(self.output_dir):
                samples.write_rows(path, (row for part in gathered for row in part))


def before_and_after(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the validation accuracy of the untrained and of the trained actor."""
    if not before or "validation/accuracy" not in after:
        return {}
    return {
        "validation/before": before["validation/accuracy"],
        "validation/after": after["validation/accuracy"],
    }


def _hook_problem(hook: Any, by: str) -> str:
    """Return what is wrong with `curriculum` of a run whose data.curriculum is `by`; empty if nothing."""
    given = f"curriculum={short_repr(hook)}"
    if not callable(hook):
        return f"{given} is a {type(hook).__name__}; give a function from sources to weights"
    if not by:
        return (
            f"{given} gives weights to the sources of data.curriculum, which is empty; set it to files, or "
            "to a column such as data_source"
        )
    return ""
