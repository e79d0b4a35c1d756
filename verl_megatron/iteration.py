"""One RL iteration: sync the weights, collect samples, train, publish the new weights. Start reading here.

These functions are collective over the world.
"""

from verl_megatron.learner import Collected
from verl_megatron.model_specs import has_worlds, num_ranks
from verl_megatron.observe.metrics import Amounts, Sums, iteration_metrics
from verl_megatron.run import Run


def collect(run: Run, step: int) -> Collected:
    """Sync the newest weights to the rollout engine, draw prompts, generate and score."""
    clock, sums = run.clock, Sums()
    with clock.phase("reshard"):
        version = run.channel.adopt()
    with clock.phase("rollout"):
        batch = run.sampler.collect(
            run.source, run.draw, iteration=step, version=version, keep_group=run.keep_group
        )
        clock.own_work_ends()
        table = run.table_of(batch)  # waits for the slowest replica
    if not run.draw.with_greedy:  # else the samples to train on are not known yet
        run.learner.begin(batch, table, rewards=run.config.reward.is_given)
    with clock.phase("return"):
        run.residency.enter_training(run.learner.first_trained)
    with clock.phase("reward"):
        scores_B = run.sampler.score(batch, sums)
        if run.config.reward.is_given:
            batch.rewards = scores_B + run.learner.score(batch, table)
        if run.curriculum is not None:
            run.curriculum.follow(batch, sums)
        batch, table = run.shape_rewards(batch, table, sums)
        if batch.rewards is not None:
            run.sources.add(sums, "reward", batch.rewards, batch.source_id)
    return Collected(
        batch=batch,
        table=table,
        sums=sums,
        reshard_bytes=run.channel.report.bytes_received + run.channel.report.bytes_local,
    )


def learn(run: Run, step: int, collected: Collected) -> dict[str, float]:
    """Update the models, publish the weights and return the iteration's metrics."""
    for said in run.learner.fit_budgets():
        if run.world.is_first:
            print(said, flush=True)
    metrics = run.learner.learn(collected.batch, collected.table, collected.sums, step=step)
    run.channel.publish(step, was_updated=metrics.get("policy/grad_norm", 0.0) > 0)
    amounts = Amounts(
        tokens=int(collected.table.lengths_B.sum()),
        response_tokens=int(collected.table.response_B.sum()),
        gpus=num_ranks(run.config) if has_worlds(run.config) else run.world.size,
        reshard_bytes=collected.reshard_bytes,
        memory_bytes=run.used_memory(),
    )
    costs = iteration_metrics(
        run.clock.pop(),
        amounts,
        waited_s=metrics.get("async/rollout_wait_s"),
        made_s=metrics.get("async/generation_s"),
    )
    if "async/sample_transfer_s" in metrics:
        share = 1e3 * metrics["async/sample_transfer_s"] / costs["train/step_time_ms"]
        costs["async/sample_transfer_fraction"] = share
    if run.learner.remote:
        waited_s = sum(metrics[f"async/{name}_wait_s"] for name in run.learner.remote)
        costs["async/score_wait_fraction"] = 1e3 * waited_s / costs["train/step_time_ms"]
    return metrics | costs
