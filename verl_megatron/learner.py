"""Training on scored samples: log-probs, values, advantages and updates. Independent of the rollout engine.

These functions and the methods of roles are collective over the ranks of the run. Ranks outside a role's
layout only dispatch their samples.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_megatron.algorithms import Algorithm
from verl_megatron.algorithms.diagnostics import batch_sums
from verl_megatron.algorithms.kl import KLController
from verl_megatron.algorithms.losses import PolicyTokens, value_loss
from verl_megatron.algorithms.normalizers import token_mean
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.observe.metrics import PhaseTimer, Sums
from verl_megatron.residency import Residency
from verl_megatron.roles.engine import Engine, Outputs
from verl_megatron.roles.role import DispatchedBatch, Role, infer_together

POLICY_FIELDS = ("logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
VALUE_FIELDS = ("values", "returns")


class Learner:
    """The models of a run, trained by an algorithm.

    Args:
        roles: "actor", and if the run has them "critic", "reference" and "reward".
        residency: loads the training state of the next model to update onto the GPU.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        *,
        algorithm: Algorithm,
        config: AlgorithmConfig,
        kl: KLController,
        residency: Residency,
        clock: PhaseTimer,
    ):
        self.roles, self.algorithm, self.config, self.kl, self.residency, self.clock = (
            roles,
            algorithm,
            config,
            kl,
            residency,
            clock,
        )
        self.actor, self.critic = roles["actor"], roles.get("critic")
        self.world = self.actor.world

    @property
    def trainable(self) -> dict[str, Role]:
        """Trainable roles by name."""
        return {name: self.roles[name] for name in ("actor", "critic") if name in self.roles}

    @property
    def first_trained(self) -> Engine:
        """The first model that an iteration updates."""
        return (self.critic or self.actor).engine

    def score(self, batch: RolloutBatch, table: SampleTable) -> Tensor:
        """Return the reward model's scores of the samples owned by this rank, [B] float32; 0 without one."""
        if "reward" not in self.roles:
            return torch.zeros(len(batch))
        return self.roles["reward"].infer(batch, table, ("values",), last_token=True)["values"].sum(1)

    def learn(self, batch: RolloutBatch, table: SampleTable, sums: Sums, *, step: int) -> dict[str, float]:
        """Update the models on scored samples.

        Args:
            batch: the samples owned by this rank.
            sums: metrics of these samples so far.
            step: iteration number, from 1.

        Returns:
            Training metrics of the iteration, the same on every rank.
        """
        clock = self.clock
        with clock.phase("log_probs"):
            for_actor = self._log_probs(batch, table)
        if self.critic is not None:
            with clock.phase("values"):
                for_critic = self.critic.dispatch(batch, table)
                (results,) = infer_together([self.critic], for_critic, batch, table, ("values",))
                batch.values = results["values"]
        with clock.phase("advantages"):
            batch = self.algorithm.advantages(
                batch,
                self.config,
                kl_coef=self.kl.coef,
                num_groups=table.num_groups,
                all_sum=self.world.all_sum,
            )
            sums.merge(batch_sums(batch, kl_estimator=self.config.kl_estimator))
        if self.critic is not None:
            with clock.phase("critic_update"):
                sums.merge(self._update_critic(for_critic, batch, table))
        if step > self.config.critic_warmup:
            with clock.phase("actor_update"):
                self.residency.enter_training(self.actor.engine)
                sums.merge(self._update_actor(for_actor, batch, table))
        metrics = sums.reduce(self.world)
        if "kl/ref" in metrics:
            self.kl.update(metrics["kl/ref"], len(table.lengths_B))
            metrics["kl/coef"] = self.kl.coef
        return metrics

    def _log_probs(self, batch: RolloutBatch, table: SampleTable) -> DispatchedBatch:
        """Compute old and reference log-probs in one pass; the update reuses the dispatched samples."""
        roles = [self.roles[name] for name in ("actor", "reference") if name in self.roles]
        dispatched = self.actor.dispatch(batch, table)
        results = infer_together(roles, dispatched, batch, table, ("logprobs",))
        batch.logprobs = results[0]["logprobs"]
        if "reference" in self.roles:
            batch.ref_logprobs = results[1]["logprobs"]
        return dispatched

    def _update_actor(self, dispatched: DispatchedBatch, batch: RolloutBatch, table: SampleTable) -> Sums:
        """Run the epochs and mini-batches of the policy loss."""
        config, kl_coef = self.config, self.kl.coef

        def loss(outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Sums]:
            return self.algorithm.loss(
                outputs["logprobs"], outputs["entropy"], PolicyTokens.of(micro), config, kl_coef
            )

        def too_far(metrics: Sums) -> bool:
            return metrics.reduce(self.world).get("policy/approx_kl", 0.0) > config.target_kl

        self.actor.send_fields(dispatched, batch, POLICY_FIELDS)
        stop = too_far if config.target_kl else None
        sums, steps = self.actor.update(
            dispatched,
            table,
            loss,
            self.algorithm.normalizer,
            fields=POLICY_FIELDS,
            epochs=config.epochs,
            stop=stop,
        )
        sums.add("policy/steps", steps, 1)
        return sums

    def _update_critic(self, dispatched: DispatchedBatch, batch: RolloutBatch, table: SampleTable) -> Sums:
        """Run the epochs and mini-batches of the value loss."""

        def loss(outputs: Outputs, micro: MicroBatch) -> tuple[Tensor, Sums]:
            return value_loss(outputs["values"], micro.fields["values"], micro.fields["returns"], self.config)

        self.critic.send_fields(dispatched, batch, VALUE_FIELDS)
        return self.critic.update(
            dispatched, table, loss, token_mean, fields=VALUE_FIELDS, epochs=self.config.epochs
        )[0]
