"""Old log-probs of an iteration's policy updates, as far as no pass before the updates has computed them."""

import torch
from torch import Tensor

from verl_megatron.algorithms.correction import add_weights
from verl_megatron.algorithms.kl import MAX_LOG_RATIO
from verl_megatron.algorithms.proximal import is_recomputed, loglinear
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.heads import Outputs
from verl_megatron.roles.role import DispatchedBatch, Role


class OldLogprobs:
    """Gives the loss its old log-probs, and keeps what the updates' own forward passes compute.

    Args:
        reuses: with algorithm.old_logprobs=recompute, the first step takes those of its own pass.
    """

    def __init__(self, actor: Role, dispatched: DispatchedBatch, config: AlgorithmConfig, *, reuses: bool):
        self._actor, self._dispatched, self._config, self._reuses = actor, dispatched, config, reuses
        self._approximates = not is_recomputed(config)
        self._mini_batches = dispatched.table.mini_batches
        self._steps = 0  # that have been made
        self._own: list[tuple[MicroBatch, Outputs]] = []

    @property
    def _num_own(self) -> int:
        """First steps of which each one's own log-probs are kept."""
        return len(self._mini_batches) if self._approximates else int(self._reuses)

    def give(self, tokens: PolicyTokens, outputs: Outputs, micro: MicroBatch) -> Sums:
        """Set the old log-probs of a micro-batch that have not been computed; return metrics."""
        logprobs_N, sums = outputs["logprobs"].detach(), Sums()
        if self._steps < self._num_own:
            self._own.append((micro, {"logprobs": logprobs_N}))
        if self._approximates:
            exact_N = micro.fields.get("logprobs")
            tokens.old_logprobs_N = old_N = self._approximate(logprobs_N, micro)
            if self._config.old_logprobs == "sampler":
                add_weights(sums, (logprobs_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
            if exact_N is not None:
                sums.add("policy/proximal_error", (old_N - exact_N).abs().sum(), exact_N.numel())
        return sums

    def _approximate(self, logprobs_N: Tensor, micro: MicroBatch) -> Tensor:
        sampler_N = micro.fields["rollout_logprobs"]
        if self._config.old_logprobs == "sampler":
            return sampler_N
        done = self._steps / (len(self._mini_batches) * self._config.epochs)
        return loglinear(logprobs_N, sampler_N, micro.fields["behind"], done=done)

    def after_step(self, steps: int) -> None:
        """Note how many steps have been made; later epochs find the first one's own log-probs."""
        self._steps = steps
        if not self._reuses or steps > 1 or self._config.epochs == 1:
            return
        for micro, outputs in self._own:
            place = micro.sample.cpu(), micro.offset.cpu()
            self._dispatched.batch.required("logprobs")[place] = outputs["logprobs"].cpu()

    def return_own(self, batch: RolloutBatch, *, checks: bool) -> Sums:
        """Set `batch.logprobs` where the updates' own passes have computed them; return metrics.

        Args:
            checks: they are known already where steps reuse their own; compare both.
        """
        sums, num_own = Sums(), min(self._steps, self._num_own)
        if not num_own:
            return sums
        own_BT = self._actor.to_owner(self._dispatched, self._own, batch, ("logprobs",))["logprobs"]
        known_BT = batch.required("logprobs")
        is_own_B = batch.sample_id < self._mini_batches[num_own - 1].stop
        if checks and self._reuses and is_own_B.any():
            sums.max("policy/reuse_error", (known_BT - own_BT)[is_own_B].abs().max())
        batch.logprobs = torch.where(is_own_B.unsqueeze(1), own_BT, known_BT)
        return sums
