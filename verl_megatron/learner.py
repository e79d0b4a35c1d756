"""Training on scored samples: log-probs, values, advantages and updates. Independent of the rollout engine.

These functions and the methods of roles are collective over the ranks of the run. Ranks outside a role's
layout only dispatch their samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from verl_megatron.algorithms import get_algorithm, get_normalizer, get_objective, reuses_logprobs
from verl_megatron.algorithms.advantages.distillation import add_teacher
from verl_megatron.algorithms.correction import add_sample_size
from verl_megatron.algorithms.diagnostics import batch_sums, reference_gap, zero_variance_fraction
from verl_megatron.algorithms.kl import KLController
from verl_megatron.algorithms.losses import policy_loss, value_loss
from verl_megatron.algorithms.normalizers import LossScale, leave_out, token_mean
from verl_megatron.algorithms.proximal import is_recomputed
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.observe.metrics import PhaseTimer, Sums
from verl_megatron.residency import Residency
from verl_megatron.roles.engine import Engine, Outputs
from verl_megatron.roles.old_logprobs import OldLogprobs
from verl_megatron.roles.role import DispatchedBatch, RemoteRole, Role, Update, infer_together

POLICY_FIELDS = ("logprobs", "advantages", "ref_logprobs", "rollout_logprobs", "behind")
VALUE_FIELDS = ("values", "returns")
LOGPROBS_OF = {  # fields of the batch
    "actor": "logprobs",
    "reference": "ref_logprobs",
    "teacher": "teacher_logprobs",
}


@dataclass(kw_only=True)
class Collected:
    """Samples and scores of an iteration, before training."""

    batch: RolloutBatch  # the samples owned by this rank
    table: SampleTable
    sums: Sums
    reshard_bytes: int


class Learner:
    """The models of a run, trained by an algorithm.

    Args:
        roles: "actor", and if the run has them "critic", "reference", "teacher" and "reward".
        max_tokens: limit of a response, the constant of the normalizer `sequence_sum`.
        residency: loads the training state of the next model to update onto the GPU.
    """

    def __init__(
        self,
        roles: Mapping[str, Role | RemoteRole],
        *,
        config: AlgorithmConfig,
        max_tokens: int,
        kl: KLController,
        residency: Residency,
        clock: PhaseTimer,
    ):
        self.roles = {name: role for name, role in roles.items() if isinstance(role, Role)}
        self.remote = {name: role for name, role in roles.items() if isinstance(role, RemoteRole)}
        self.models = set(roles)
        self.config, self.kl, self.residency, self.clock = config, kl, residency, clock
        self.algorithm, self.objective = get_algorithm(config), get_objective(config)
        self.normalizer = partial(get_normalizer(config), max_tokens=max_tokens)
        self.actor, self.critic = self.roles["actor"], self.roles.get("critic")
        self.value_head = self.actor.engine.value_head  # settings of a critic on the actor's trunk
        self.world = self.actor.world

    @property
    def trainable(self) -> dict[str, Role]:
        """Trainable roles by name."""
        return {name: self.roles[name] for name in ("actor", "critic") if name in self.roles}

    @property
    def first_trained(self) -> Engine:
        """The first model that an iteration updates."""
        return (self.critic or self.actor).engine

    def fit_budgets(self) -> list[str]:
        """With engine.dynamic_batching, measure once which micro-batches fit; return what to say of it."""
        said = []
        for name, role in self.trainable.items():  # the first to be updated comes last
            if role.budget is not None and not role.budget.is_fitted:
                self.residency.enter_training(role.engine)
                said.append(f"engine.dynamic_batching: {name} takes {role.budget.fit()}")
        return said

    def score(self, batch: RolloutBatch, table: SampleTable) -> Tensor:
        """Return the reward model's scores of the samples owned by this rank, [B] float32; 0 without one."""
        model = self.remote.get("reward") or self.roles.get("reward")
        if model is None:
            return torch.zeros(len(batch))
        return model.infer(batch, table, ("values",), last_token=True)["values"].sum(1)

    def begin(self, batch: RolloutBatch, table: SampleTable, *, rewards: bool) -> None:
        """Start the passes of frozen models on ranks of their own, which `score` and `learn` wait for.

        Args:
            rewards: start that of the reward model, too.
        """
        for name in filter(self.remote.__contains__, ("reward", *LOGPROBS_OF)):
            if rewards or name in LOGPROBS_OF:
                self.remote[name].begin(batch, table)

    def learn(self, batch: RolloutBatch, table: SampleTable, sums: Sums, *, step: int) -> dict[str, float]:
        """Update the models on scored samples.

        Args:
            batch: the samples owned by this rank; gets its log-probs.
            sums: metrics of these samples so far.
            step: iteration number, from 1.

        Returns:
            Training metrics of the iteration, the same on every rank.
        """
        clock, config, trains_actor = self.clock, self.config, step > self.config.critic_warmup
        given = batch
        reuses = trains_actor and self.value_head is None and reuses_logprobs(config, self.models)
        approximates = trains_actor and not is_recomputed(config)
        self.begin(batch, table, rewards=False)
        with clock.phase("log_probs"):
            checks = (reuses or approximates) and self._is_checked(step)
            left_out = 0 if checks else len(table.mini_batches) if approximates else int(reuses)
            for_actor = self._log_probs(batch, table, left_out=left_out)
            exact_BT = batch.logprobs if checks else None
            if approximates:
                batch.set_behind(step - 1)
                batch.logprobs = batch.rollout_logprobs
        if self.critic is not None:
            with clock.phase("values"):
                for_critic = self.critic.dispatch(batch, table)
                (results,) = infer_together([self.critic], for_critic, batch, ("values",))
                batch.values = results["values"]
        if self.remote:
            with clock.phase("scores"):
                self._take_log_probs(batch, table, sums)
        with clock.phase("advantages"):
            batch = self.algorithm.advantages(
                batch,
                config,
                kl_coef=self.kl.coef,
                num_groups=table.num_groups,
                all_sum=self.world.all_sum,
            )
            if batch.teacher_logprobs is not None:
                batch = add_teacher(batch, coef=config.teacher_coef)
        if self.critic is not None:
            with clock.phase("critic_update"):
                sums.merge(self._update_critic(for_critic, batch))
        if trains_actor:
            with clock.phase("actor_update"):
                self.residency.enter_training(self.actor.engine)
                sums.merge(self._update_actor(for_actor, batch, reuses=reuses, exact_BT=exact_BT))
        given.logprobs = batch.logprobs  # those that the update's own pass computed too
        sums.merge(self._statistics(batch, table, step=step))
        metrics = sums.reduce(self.world)
        add_sample_size(metrics)
        if "kl/ref" in metrics:
            metrics["kl/coef"] = self.kl.coef
            if trains_actor:  # in a critic's warm-up there is nothing to steer
                self.kl.update(metrics["kl/ref"], len(table.lengths_B))
        return metrics

    def _statistics(self, batch: RolloutBatch, table: SampleTable, *, step: int) -> Sums:
        """Sum statistics of the samples owned by this rank. Collective over `world`."""
        sums = batch_sums(batch, kl_estimator=self.config.kl_estimator)
        if step == 1 and is_recomputed(self.config):
            sums.merge(reference_gap(batch))
        if self.algorithm.min_samples > 1:
            share = zero_variance_fraction(batch, num_groups=table.num_groups, all_max=self.world.all_max)
            sums.add("rollout/zero_variance_fraction", share, 1)
        return sums

    def _is_checked(self, step: int) -> bool:
        """Whether iteration `step` compares reused log-probs with those of a separate pass."""
        interval = self.config.check_logprobs_interval
        return interval > 0 and step % interval == 0

    def _log_probs(self, batch: RolloutBatch, table: SampleTable, *, left_out: int) -> DispatchedBatch:
        """Set the log-probs of actor, reference and teacher; the update reuses the dispatched samples.

        Models of the actor's layout run in one pass, which gives the values of a head on the actor's trunk.

        Args:
            left_out: first mini-batches whose log-probs of the actor stay at 0.
        """
        dispatched = self.actor.dispatch(batch, table)
        together = ["actor", "reference"] if "reference" in self.roles else ["actor"]
        if left_out:
            batch.logprobs = torch.zeros(batch.generated_ids.shape)
            together.remove("actor")
            if len(table.mini_batches) > left_out:
                (results,) = infer_together(
                    [self.actor], dispatched, batch, ("logprobs",), first_mini_batch=left_out
                )
                batch.logprobs = results["logprobs"]
        if together:
            roles = [self.roles[name] for name in together]
            results = infer_together(roles, dispatched, batch, ("logprobs", "values"))
            for name, result in zip(together, results):
                setattr(batch, LOGPROBS_OF[name], result["logprobs"])
                batch.values = result.get("values", batch.values)
        if "teacher" in self.roles:
            results = self.roles["teacher"].infer(batch, table, ("logprobs",))
            batch.teacher_logprobs = results["logprobs"]
        return dispatched

    def _take_log_probs(self, batch: RolloutBatch, table: SampleTable, sums: Sums) -> None:
        """Wait for the log-probs of frozen models on ranks of their own."""
        for name, model in self.remote.items():
            if name in LOGPROBS_OF:
                setattr(batch, LOGPROBS_OF[name], model.infer(batch, table, ("logprobs",))["logprobs"])
            model.add_metrics(sums)

    def _update_actor(
        self, dispatched: DispatchedBatch, batch: RolloutBatch, *, reuses: bool, exact_BT: Tensor | None
    ) -> Sums:
        """Run the epochs and mini-batches of the policy loss.

        Args:
            reuses: take the old log-probs of the first step from its own forward pass.
            exact_BT: old log-probs of a pass before the update, to compare with those that are not from it.
        """
        config, kl_coef, critic = self.config, self.kl.coef, self.value_head
        fields = POLICY_FIELDS if critic is None else POLICY_FIELDS + VALUE_FIELDS
        groups, num_samples = self.actor.engine.groups, len(dispatched.batch)
        old = OldLogprobs(self.actor, dispatched, config, reuses=reuses)

        def loss(outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Sums]:
            tokens = PolicyTokens.of(
                micro, num_samples=num_samples, cp_group=groups.cp if groups.layout.cp > 1 else None
            )
            old_sums = old.give(tokens, outputs, micro)
            loss_N, sums = policy_loss(
                outputs["logprobs"], outputs["entropy"], tokens, self.objective, config, kl_coef
            )
            sums.merge(old_sums)
            if critic is not None:
                value_N, value_sums = self._value_loss(outputs, micro)
                loss_N = loss_N + critic.value_coef * value_N
                sums.merge(value_sums)
            return loss_N, sums

        def too_far(metrics: Sums) -> bool:
            return metrics.reduce(self.world).get("policy/approx_kl", 0.0) > config.target_kl

        sent = batch if is_recomputed(config) else replace(batch, logprobs=exact_BT)
        self.actor.send_fields(dispatched, sent, fields)
        update = Update(
            loss=loss,
            normalizer=self._normalizer(self.normalizer, dispatched.table),
            fields=fields,
            first_fields=fields[1:] if reuses else fields,
            after_step=old.after_step,
            epochs=config.epochs,
            stop=too_far if config.target_kl else None,
        )
        sums, steps = self.actor.update(dispatched, update)
        sums.add("policy/steps", steps, 1)
        sums.merge(old.return_own(batch, checks=exact_BT is not None))
        return sums

    def _update_critic(self, dispatched: DispatchedBatch, batch: RolloutBatch) -> Sums:
        """Run the epochs and mini-batches of the value loss."""
        critic = self.roles["critic"]
        critic.send_fields(dispatched, batch, VALUE_FIELDS)
        update = Update(
            loss=self._value_loss,
            normalizer=self._normalizer(token_mean, dispatched.table),
            fields=VALUE_FIELDS,
            epochs=self.config.epochs,
        )
        return critic.update(dispatched, update)[0]

    def _value_loss(self, outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Sums]:
        return value_loss(outputs["values"], micro.fields["values"], micro.fields["returns"], self.config)

    def _normalizer(
        self, normalizer: Callable[[Tensor, range], LossScale], table: SampleTable
    ) -> Callable[[Tensor, range], LossScale]:
        """Return the normalizer of an iteration: with `algorithm.mask_cut` without its cut responses."""
        if not self.config.mask_cut or table.is_cut_B is None:
            return normalizer
        return leave_out(normalizer, table.is_cut_B)
