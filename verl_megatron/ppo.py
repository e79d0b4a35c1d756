"""One iteration of reinforcement learning: collect rows, learn from them. Read this first.

Every rank runs these functions. A role's method is called on all ranks; those outside the role's layout only pass their rows on.
"""

from dataclasses import dataclass
from functools import partial

from parallel.collectives import all_sum
from verl_megatron.batch import RolloutBatch
from verl_megatron.losses import PolicyTokens, policy_loss, value_loss
from verl_megatron.metrics import Sums, batch_sums, iteration_metrics
from verl_megatron.roles.role import infer_together
from verl_megatron.roles.rows import RowTable
from verl_megatron.run import Run

POLICY_FIELDS = ("logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
VALUE_FIELDS = ("values", "returns")


@dataclass(kw_only=True)
class Collected:
    """An iteration's rows with their scores, before anything is learnt from them."""

    batch: RolloutBatch  # the rows at home on this rank
    rows: RowTable
    sums: Sums
    reshard_bytes: int


def collect(run: Run, step: int) -> Collected:
    """Hand the weights to vLLM, draw prompts, generate and score."""
    clock, sums = run.clock, Sums()
    with clock.phase("reshard"):
        report = run.hand_over()
    with clock.phase("rollout"):
        batch = run.generate(run.draw_prompts(), iteration=step)
        clock.own_work_ends()
        rows = run.table_of(batch)  # waits for the slowest replica
    with clock.phase("return"):
        run.end_rollout()
        run.turn_to(run.critic or run.actor)
    with clock.phase("reward"):
        batch.rewards = run.score(batch, rows, sums)
    return Collected(batch=batch, rows=rows, sums=sums, reshard_bytes=report.bytes_received + report.bytes_local)


def learn(run: Run, step: int, collected: Collected) -> dict[str, float]:
    """Log-probs, values, advantages and the updates; returns the iteration's metrics."""
    config, clock, batch, rows, sums = run.config.algorithm, run.clock, collected.batch, collected.rows, collected.sums
    with clock.phase("log_probs"):
        roles = [role for role in (run.actor, run.reference) if role is not None]
        found = [results["logprobs"] for results in infer_together(roles, batch, rows)]
        batch.logprobs, batch.ref_logprobs = found if run.reference is not None else (*found, None)
    if run.critic is not None:
        with clock.phase("values"):
            batch.values = run.critic.infer(batch, rows)["values"]
    with clock.phase("advantages"):
        batch = advantages_of(run, batch)
        sums.merge(batch_sums(batch, kl_estimator=config.kl_estimator))
    if run.critic is not None:
        with clock.phase("critic_update"):
            sums.merge(update_critic(run, batch, rows))
    if step > config.critic_warmup:
        with clock.phase("actor_update"):
            run.turn_to(run.actor)
            sums.merge(update_actor(run, batch, rows))
    metrics = run.reduce(sums)
    run.adapt_kl(metrics)
    run.weights_changed()
    costs = iteration_metrics(
        clock.pop(),
        response_tokens=int(rows.response_R.sum()),
        reshard_bytes=collected.reshard_bytes,
        memory_bytes=run.used_memory(),
    )
    return metrics | costs


def update_actor(run: Run, batch: RolloutBatch, rows: RowTable) -> Sums:
    """Epochs and mini-batches of the clipped policy loss."""
    config = run.config.algorithm

    def loss(outputs, fields):
        tokens = PolicyTokens(fields["logprobs"], fields["advantages"], fields.get("ref_logprobs"), fields.get("rollout_logprobs"))
        return policy_loss(outputs["logprobs"], outputs["entropy"], tokens, config, run.kl.coef)

    def too_far(metrics: Sums) -> bool:
        return run.reduce(metrics).get("policy/approx_kl", 0.0) > config.stop_kl

    sums, steps = run.actor.update(batch, rows, loss, fields=POLICY_FIELDS, epochs=config.epochs, stop=too_far if config.stop_kl else None)
    sums.add("policy/steps", steps, 1)
    return sums


def update_critic(run: Run, batch: RolloutBatch, rows: RowTable) -> Sums:
    """Epochs and mini-batches of the value loss."""
    config = run.config.algorithm

    def loss(outputs, fields):
        return value_loss(outputs["values"], fields["values"], fields["returns"], config)

    return run.critic.update(batch, rows, loss, fields=VALUE_FIELDS, epochs=config.epochs)[0]


def advantages_of(run: Run, batch: RolloutBatch) -> RolloutBatch:
    """Token rewards, advantages and returns by the run's algorithm."""
    data = run.config.data
    credit = partial(run.algorithm.advantages, kl_coef=run.kl.coef, num_prompts=data.prompts_per_iteration, samples_per_prompt=data.samples_per_prompt)
    return credit(batch, run.config.algorithm, all_sum=all_sum)
