"""Supervised training on the same engine as RL: imitation, preferences, reward models.

Methods are collective over the world.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from parallel import device
from parallel.groups import ProcessGroups
from parallel.rank_set import RankSet
from parallel.runtime.refusal import short_repr, speak_once
from parallel.weights.architecture import read_architecture
from verl_megatron.checks.batches import supervised_arithmetic
from verl_megatron.config import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.pairs import Pair, items_per_step
from verl_megatron.data.prompts import Demonstration
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.lifecycle.base_trainer import BaseTrainer
from verl_megatron.lifecycle.progress import Progress
from verl_megatron.model_specs import ModelSpec, layout_of, models_of
from verl_megatron.observe.metrics import PhaseTimer
from verl_megatron.observe.tracking import MetricsTracker
from verl_megatron.preflight import inspect_supervised
from verl_megatron.roles.compute import compute_of
from verl_megatron.roles.engine import EngineOptions
from verl_megatron.roles.role import DispatchedBatch, Role, Training, Update, infer_together, make_role
from verl_megatron.roles.token_budget import LongestRows
from verl_megatron.supervised.dpo import DPO
from verl_megatron.supervised.reward_model import REWARD_MODEL
from verl_megatron.supervised.sft import SFT
from verl_megatron.supervised.task import Step, Task

TASKS: dict[type[SupervisedConfig], Task] = {SFTConfig: SFT, DPOConfig: DPO, RewardModelConfig: REWARD_MODEL}
FIELDS = {"actor": "logprobs", "reference": "ref_logprobs", "reward": "values"}  # of the batch, by role


class SupervisedTrainer(BaseTrainer):
    """A supervised run. The class of its settings says which task it is.

    Raises:
        ValueError: lists all problems of the settings, before a model is built.
    """

    def __init__(self, config: SupervisedConfig):
        speak_once()
        if type(config) not in TASKS:
            names = ", ".join(kind.__name__ for kind in TASKS)
            raise ValueError(f"config={short_repr(config)} is a {type(config).__name__}; give one of {names}")
        super().__init__(config, inspect_supervised, vllm=False)
        self.task = TASKS[type(config)]
        for note in self.inputs.notes:
            self.say(note)
        self.say(supervised_arithmetic(config, self.world.size, items=len(self.inputs.train)))

    def build(self) -> None:
        """Check the values of the weights, then build the models."""
        config = self.config
        self.check_weights(compute_of(config.engine).dtype)
        specs = models_of(config)
        self.roles = {spec.name: self._role(spec) for spec in specs}
        self.trained = self.roles[specs[0].name]
        self.frozen = {name: role for name, role in self.roles.items() if role is not self.trained}
        self.cursor = self.inputs.train.cursor(seed=config.run.seed)
        self.clock = PhaseTimer(device.synchronize_stream, around=self.watchdog.operation)
        trainable = {specs[0].name: self.trained}
        self.state = Progress(config, self.world, trainable=trainable, cursor=self.cursor, say=self.say)

    def _role(self, spec: ModelSpec) -> Role:
        run, data, layout = self.config.run, self.config.data, layout_of(spec.model, self.world.size)
        rows = LongestRows(
            prompt_tokens=1,
            response_tokens=data.max_tokens - 1,
            count=-(-items_per_step(data) // layout.dp) * self.task.samples_per_item,
        )
        return make_role(
            spec.model,
            ProcessGroups(layout, self.world),
            arch=read_architecture(spec.model.path),
            head=spec.head,
            options=EngineOptions(config=self.config.engine, seed=run.seed, progress=self.watchdog.beat),
            training=Training(steps=run.iterations, rows=rows) if spec.trainable else None,
        )

    def loop(self) -> dict[str, float]:
        """Take the optimizer steps that are left, validate before and after, and export the model."""
        run, state = self.config.run, self.state
        metrics: dict[str, float] = {}
        tracker = self.make_tracker()
        if not state.step:
            state.before = self._validate()
            self._log(tracker, state.before)
        while state.step < run.iterations:
            self.watchdog.iteration = state.step + 1
            if self.preemption.requested(self.world):
                self.leave()
                break
            metrics = self._step(
                [self.inputs.train[i] for i in self.cursor.draw(items_per_step(self.config.data))]
            )
            with self.watchdog.operation("record"):
                state.done(metrics)
            if state.step == run.iterations or self.is_due(run.validate_interval):
                metrics |= self._validate()
            self._log(tracker, metrics)
            self.save_if_due()
        else:
            if run.export:
                self.export()
        self.finish(tracker)
        return metrics

    def _log(self, tracker: MetricsTracker | None, metrics: dict[str, float]) -> None:
        """Log the metrics, if there are any, with the seconds of each phase."""
        seconds = self.clock.pop()
        if tracker is not None and metrics:
            tracker.log(
                self.state.step, metrics | {f"time/{name}_s": value for name, value in seconds.items()}
            )

    def _step(self, items: Sequence[Demonstration | Pair]) -> dict[str, float]:
        """Take one optimizer step on these entries of the data set; return its metrics."""
        task, clock, budget = self.task, self.clock, self.trained.budget
        if budget is not None and not budget.is_fitted:
            self.say(f"engine.dynamic_batching: {budget.fit()}")
        fields = tuple(FIELDS[name] for name in self.frozen)
        with clock.phase("log_probs" if self.frozen else "update"):
            batch, table = spread(items, task.samples_per_item, self.world)
            dispatched = self.trained.dispatch(batch, table)
            if self.frozen:
                self._infer(self.frozen, dispatched, batch)
                self.trained.send_fields(dispatched, batch, fields)
        with clock.phase("update"):
            groups = self.trained.engine.groups
            step = Step(
                config=self.config,
                num_samples=len(dispatched.batch),
                cp_group=groups.cp if groups.layout.cp > 1 else None,
            )
            update = Update(loss=partial(task.loss, step=step), normalizer=task.normalizer, fields=fields)
            sums, _ = self.trained.update(dispatched, update)
        return sums.reduce(self.world)

    def _validate(self) -> dict[str, float]:
        """Return the metrics of the held-out data; empty without any."""
        if self.inputs.validation is None:
            return {}
        with self.clock.phase("validation"):
            batch, table = spread(self.inputs.validation, self.task.samples_per_item, self.world)
            self._infer(self.roles, self.trained.dispatch(batch, table), batch)
            metrics = self.task.evaluate(self.config, batch).reduce(self.world)
        self.state.validated = {"step": self.state.step} | metrics
        return metrics

    def _infer(self, roles: Mapping[str, Role], dispatched: DispatchedBatch, batch: RolloutBatch) -> None:
        """Set the outputs of each model for the samples, in one pass; all have the same layout."""
        output = self.task.output
        results = infer_together(
            list(roles.values()), dispatched, batch, (output,), last_token=output == "values"
        )
        for name, result in zip(roles, results):
            setattr(batch, FIELDS[name], result[output])


def spread(
    items: Sequence[Demonstration | Pair], samples_per_item: int, world: RankSet
) -> tuple[RolloutBatch, SampleTable]:
    """Distribute entries of a data set over the ranks; return this rank's samples and the table of all."""
    ids, prompts, responses = [], [], []
    own = range(world.rank, len(items), world.size)
    for number in own:
        for place, (prompt, response) in enumerate(items[number].samples()):
            ids.append(number * samples_per_item + place)
            prompts.append(prompt)
            responses.append(response)
    batch = RolloutBatch.from_lists(ids, prompts, responses)
    for b, item in enumerate(items[number] for number in own):
        if isinstance(item, Demonstration) and item.is_target is not None:
            batch.set_targets(b, item.is_target)
    return batch, SampleTable.gather(batch, world, num_mini_batches=1, unit=samples_per_item)
