"""Python interface: a complete RL run, from the first validation to the exported model."""

import dataclasses
import gc
import json
from pathlib import Path

from parallel import device
from parallel.rank_set import agree, world
from parallel.runtime.preemption import Preemption, usual_grace_s
from parallel.runtime.refusal import short_repr, speak_once
from parallel.runtime.run_lock import RunLock
from parallel.runtime.watchdog import Watchdog
from verl_megatron.checks.batches import batch_arithmetic
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.versions import check_versions, optional_packages
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import GivenPrompts, Prompt
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.iteration import Collected, collect, learn
from verl_megatron.model_specs import models_of
from verl_megatron.observe.metrics import Sums
from verl_megatron.observe.profiling import record_profile
from verl_megatron.observe.report import draw_report
from verl_megatron.observe.timeline import record_timeline, write_timeline
from verl_megatron.observe.tracking import MetricsTracker, writing_to
from verl_megatron.planner import Case, kv_bytes_per_token, machine_here, samples_together
from verl_megatron.preflight import Inputs, inspect_run
from verl_megatron.rollout.sampler import Draw
from verl_megatron.run import Run, build_run
from verl_megatron.saved_state import SavedState

SLOW_S = 1800.0  # watchdog timeout of building models and of disk I/O, seconds


class RLTrainer:
    """RL training on the ranks that torchrun started, or on this process alone.

    Args:
        config: all settings; `actor_model`, `reward_model` and `reward_function` override actor.path,
            reward.path and reward.function.
        use_vllm: must be True; vLLM is the only rollout engine.

    Raises:
        ValueError: lists all problems of the settings, before a model is built.
    """

    def __init__(
        self,
        config: TrainerConfig | None = None,
        *,
        actor_model: str = "",
        reward_model: str = "",
        reward_function: str = "",
        use_vllm: bool = True,
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
        config.actor.path = actor_model or config.actor.path
        config.reward.path = reward_model or config.reward.path
        config.reward.function = reward_function or config.reward.function
        check_versions()
        device.initialize()
        self.config, self.world = config, world()
        self.is_first = self.world.is_first
        self.inputs = Inputs()
        agree(
            lambda: refuse(
                inspect_run(config, world_size=self.world.size, machine=machine_here(), inputs=self.inputs)
            ),
            self.world,
        )
        self.output_dir = Path(config.run.output_dir)
        self.say(optional_packages())
        for note in self.inputs.notes:
            self.say(note)
        self.say(batch_arithmetic(config, self.world.size))
        self.run: Run | None = None

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.is_first:
            print(text, flush=True)

    def train(self) -> dict[str, float]:
        """Run all iterations; return the last metrics.

        With validation data they include `validation/before` and `validation/after`. After a SIGTERM to any
        rank the run saves a checkpoint at the next opportunity and returns early; the same run resumes there.
        """
        config = self.config.run
        with (
            RunLock(self.output_dir, self.world),
            Watchdog(config.stall_timeout_s, self.output_dir, self.world) as self.watchdog,
            Preemption(grace_s=usual_grace_s()) as self.preemption,
        ):
            with self.watchdog.operation("build", timeout_s=SLOW_S):
                self.run = build_run(self.config, self.inputs, self.watchdog, self.world)
                self.state = SavedState(self.run, say=self.say)
            record_timeline(self.run.clock, config.track_metrics, self.world)
            record_profile(self.run.clock, self.watchdog, config.track_metrics, self.output_dir, self.world)
            self.say(
                f"built in {sum(self.run.built.values()):.0f} s: "
                f"{', '.join(f'{name} {seconds:.1f}' for name, seconds in self.run.built.items())}"
            )
            self.say(f"reshard.mode={self.config.reshard.mode}: {self.run.plan}")
            self.say(self._generation())
            gc.freeze()  # exclude what was built; the command line starts with collection disabled
            gc.enable()
            try:
                with self.watchdog.operation("resume", timeout_s=SLOW_S):
                    self.state.resume()
                return self._train()
            finally:
                self.run.close()

    def _generation(self) -> str:
        case, tokens = Case.of(self.config, world_size=self.world.size), self.run.engine.kv_cache_tokens
        return (
            f"vLLM: KV cache of {tokens:,} tokens a replica, "
            f"{samples_together(case, tokens * kv_bytes_per_token(case))}"
        )

    def _train(self) -> dict[str, float]:
        config, state, tracker, metrics, after = self.config.run, self.state, None, {}, {}
        if self.is_first:
            first_step = state.step + 1 if state.step else 0
            tracker = MetricsTracker(
                self.output_dir, config.track_metrics, first_step=first_step, total_steps=config.iterations
            )
        if state.step == 0 and not state.before:
            state.before = after = self.validate(tracker)
        elif state.validated.get("step") == config.iterations:  # only the export is missing
            after = state.validated
        while state.step < config.iterations:
            self.watchdog.iteration = state.step + 1
            learnt = self._iterate()
            if learnt is None:
                break
            metrics, is_last = learnt, state.step == config.iterations
            if is_last or self._due(config.validate_interval):
                after = self.validate(tracker, metrics)
            elif tracker is not None:
                tracker.log(state.step, metrics)
            if self._due(config.save_interval) or (is_last and config.save_interval):
                self.save()
        else:
            if config.export:
                self.export()
        with self.watchdog.operation("checkpoint", timeout_s=SLOW_S):
            state.finish()
        with writing_to(self.output_dir):
            write_timeline(self.run.clock, self.output_dir, self.world)
            if tracker is not None:
                tracker.close()
                if "jsonl" in config.track_metrics and (state.step or state.before):
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
        return metrics

    def _leave(self, collected: Collected | None = None, drawn_from: dict | None = None) -> None:
        self.preemption.hold()
        if not self.state.has_checkpoint:
            self.save(cursor=drawn_from)
        if collected is not None:
            self.state.keep_samples(collected)
        self.say(
            f"ending after iteration {self.state.step}, as SIGTERM asks for; {self._how_to_go_on()} from here"
        )

    def _how_to_go_on(self) -> str:
        return (
            "the same command goes on"
            if self.config.run.resume != "never"
            else "with run.resume=newest it goes on"
        )

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.state.step % interval == 0

    def save(self, *, cursor: dict | None = None) -> None:
        """Write a checkpoint, timed as part of the next iteration; see `SavedState.save`."""
        with self.watchdog.operation("checkpoint", timeout_s=SLOW_S), self.run.clock.phase("save"):
            self.state.save(cursor=cursor)

    def validate(
        self, tracker: MetricsTracker | None, metrics: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Generate and score responses to the validation prompts, and log the mean score with `metrics`.

        Responses are written as JSON lines. The time counts towards the next iteration, as for checkpoints.
        """
        found = {}
        if self.run.validation is not None:
            config, run, sums = self.config, self.run, Sums()
            prompts = list(run.validation)[: config.data.validation_samples or None]
            sampling = dataclasses.replace(run.draw.sampling, temperature=config.data.validation_temperature)
            with run.clock.phase("validation"):
                version = run.channel.adopt()
                draw = Draw(num_prompts=len(prompts), samples_per_prompt=1, sampling=sampling)
                batch = run.sampler.collect(GivenPrompts(prompts), draw, iteration=0, version=version)
                run.residency.enter_training()
                table = SampleTable.gather(batch, self.world, num_mini_batches=1)
                scores = run.sampler.score(batch, Sums()) + run.learner.score(batch, table)
            sums.add("validation/accuracy", scores.sum(), len(scores))
            found = sums.reduce(self.world)
            self.state.validated = {"step": self.state.step} | found
            self._dump(batch, scores.tolist(), prompts)
        if tracker is not None and (metrics or found):
            tracker.log(self.state.step, (metrics or {}) | found)
        return found

    def _dump(self, batch: RolloutBatch, scores: list[float], prompts: list[Prompt]) -> None:
        mine = []
        for b, sample in enumerate(batch.sample_id.tolist()):
            response = batch.generated_ids[b][batch.response_mask[b]].tolist()
            mine.append(
                {
                    "sample": sample,
                    "prompt": prompts[sample].text,
                    "response": self.run.tokenizer.decode(response),
                    "answer": prompts[sample].answer,
                    "score": scores[b],
                }
            )
        gathered = self.world.gather_object(mine)
        if gathered is not None:
            path = self.output_dir / "validation" / f"step_{self.state.step}.jsonl"
            samples = sorted(
                (sample for part in gathered for sample in part), key=lambda sample: sample["sample"]
            )
            text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
            with writing_to(self.output_dir):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(
                    text, encoding="utf-8", errors="backslashreplace"
                )  # lone surrogates, as JSON escapes them

    def export(self) -> None:
        """Export `output_dir/actor` (and `critic`) as Hugging Face folders."""
        for spec in models_of(self.config):
            if not spec.trainable:
                continue
            try:
                with self.watchdog.operation("export", timeout_s=SLOW_S):
                    self.run.learner.roles[spec.name].engine.export(
                        self.output_dir / spec.name, template=spec.model.path
                    )
            except ValueError as error:
                raise ValueError(f"{error}; {self._what_remains()}") from None
            self.say(f"exported {self.output_dir / spec.name}")

    def _what_remains(self) -> str:
        """Describe what is saved of a run whose export failed: the newest checkpoint, or nothing."""
        if not self.state.has_checkpoint:
            return "there is no checkpoint of this step, because run.save_interval=0"
        with self.watchdog.operation("checkpoint", timeout_s=SLOW_S):
            self.state.finish()
        return f"the checkpoint of step {self.state.step} remains, and {self._how_to_go_on()} from there"


def before_and_after(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the validation accuracy of the untrained and of the trained actor."""
    if not before or "validation/accuracy" not in after:
        return {}
    return {
        "validation/before": before["validation/accuracy"],
        "validation/after": after["validation/accuracy"],
    }
