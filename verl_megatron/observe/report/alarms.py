"""Alarms of a run: what is wrong with its metrics, since when, by how much, and what helps.

Every check reads a `RunRecord` and returns its alarms; it knows nothing of the page. Limits and histories are
those of `rules`.
"""

from collections.abc import Callable, Iterable, Iterator

from verl_megatron.observe.report import history, worlds
from verl_megatron.observe.report.record import RunRecord
from verl_megatron.observe.report.rules import (
    HISTORIES,
    LEAST_SMOOTH,
    LIMITS,
    SMOOTH,
    TRAINED,
    Alarm,
    number,
    of_iterations,
    percent,
)

LEAST_CONSTANT = 10  # iterations before a constant reward is one
LEAST_ENTROPY, START = 30, 10  # iterations before the entropy is judged, by the median of the first ones
LEAST_MEMORY, FILLING = (
    60,
    10,
)  # iterations before memory is judged, without the first ones, which fill caches
REWARD_WINDOW = 20  # iterations of a reward's level
# Why a start ended, as run.json has it → name of the alarm and what helps.
ENDS = {
    "error": ("failed", "mend what the text names; run.log has the tracebacks, and the same command goes on"),
    "stuck": ("stalled", "read stacks/ in the run's folder; the same command goes on from its checkpoint"),
    "killed": ("killed", "read the end of run.log and the host's log; the same command goes on"),
}
SILENT_S = 300.0  # without a row of metrics before a run at work counts as stalled


def find_alarms(run: RunRecord) -> list[Alarm]:
    """Return the alarms of a run: those that last first, of these stalls, then by iteration."""
    found = [alarm for check in CHECKS for alarm in check(run)]
    return sorted(found, key=lambda alarm: (alarm.is_over, bool(alarm.metric), alarm.first or 0))


def iterations_of(alarm: Alarm) -> str:
    """Return when an alarm holds, in words."""
    if alarm.first is None or alarm.last is None:
        return "earlier in the run"
    if alarm.first == alarm.last:
        return f"iteration {alarm.first}"
    span = f"iterations {alarm.first} to {alarm.last}"
    is_partial = 0 < alarm.count < alarm.last - alarm.first + 1
    return f"{span}, in {alarm.count} of them" if is_partial else span


def failed(run: RunRecord) -> Iterator[Alarm]:
    """Starts that ended by an error, were stuck or killed: what `run.json` says of them."""
    for start in run.starts:
        is_last = start is run.starts[-1]
        if start.reason not in ENDS or (start.reason == "killed" and is_last and run.state.was_killed):
            continue
        name, remedy = ENDS[start.reason]
        yield Alarm(
            name=name,
            text=f"start {start.number} ended: {start.text or start.reason}".rstrip("."),
            remedy=remedy,
            first=start.step,
            last=start.step,
            is_over=not is_last,
        )


def stalled(run: RunRecord) -> Iterator[Alarm]:
    """Runs that stand still: by the watchdog's stacks, by a dead process, by the age of the last row."""
    state, step = run.state, run.last_step
    if state.stalled_ranks and not any(start.reason == "stuck" for start in run.starts):
        ranks = ", ".join(map(str, state.stalled_ranks[:8])) + " …" * (len(state.stalled_ranks) > 8)
        yield Alarm(
            name="stalled",
            text=f"a rank made no progress and the run ended; there are stacks of ranks {ranks}",
            remedy=ENDS["stuck"][1],
            first=step if state.stalled_last else None,
            last=step if state.stalled_last else None,
            is_over=not state.stalled_last,
        )
    if state.was_killed and not state.stalled_last:
        yield Alarm(
            name="killed",
            text="the process that held the folder is gone and did not finish",
            remedy=ENDS["killed"][1],
            first=step,
            last=step,
        )
    _, times_ms = run.finite("train/step_time_ms")
    usual_s = sorted(times_ms)[len(times_ms) // 2] / 1e3 if times_ms else 60.0
    if state.at_work and state.silent_s > max(SILENT_S, 10 * usual_s):
        yield Alarm(
            name="stalled",
            text=f"no iteration has ended for {state.silent_s:,.0f} s; one takes {number(usual_s)} s",
            remedy="look at the processes; the watchdog names the rank after run.stall_timeout_s",
            first=step,
            last=step,
        )


def not_finite(run: RunRecord) -> Iterator[Alarm]:
    """Metrics that were NaN or infinite."""
    bad: dict[str, list[int]] = {}
    for key, curve in run.series.items():
        if None in curve.values:
            bad[key] = [step for step, value in zip(curve.steps, curve.values) if value is None]
    if not bad:
        return
    steps = sorted({step for those in bad.values() for step in those})
    first = [key for key, those in bad.items() if those[0] == steps[0]]
    names = ", ".join(first[:4]) + (f" and {len(first) - 4} more" if len(first) > 4 else "")
    yield Alarm(
        name="NaN",
        metric=first[0],
        text=f"not a finite number: {names}",
        remedy="look at rewards and lengths of that iteration; go back to a checkpoint before it with a "
        "lower learning rate; engine.dtype=float32 tells whether rounding is the cause",
        first=steps[0],
        last=steps[-1],
        count=len(steps),
        is_over=steps[-1] <= run.last_step - SMOOTH,
    )


def beyond_limits(run: RunRecord) -> Iterator[Alarm]:
    """Metrics beyond their `LIMITS`."""
    for rule in LIMITS:
        steps, values = run.finite(rule.metric)
        points = min(rule.smooth, max(len(values), LEAST_SMOOTH if rule.smooth > 1 else 1))
        level = history.rolling_median(values, points).tolist()
        sign = -1.0 if rule.is_least else 1.0
        where = [place + points - 1 for place, value in enumerate(level) if sign * value > sign * rule.limit]
        if where:
            shown = percent if rule.share else number
            worst = sign * max(sign * level[place - points + 1] for place in where)
            text = rule.text.format(value=shown(worst), limit=shown(rule.limit))
            yield of_iterations(
                steps, where, name=rule.name, metric=rule.metric, text=text, remedy=rule.remedy
            )


def above_histories(run: RunRecord) -> Iterator[Alarm]:
    """Metrics far above their own history."""
    for rule in HISTORIES:
        steps, values = run.finite(rule.metric)
        where, usual = history.above_history(values)
        if where:
            worst = max(range(len(where)), key=lambda at: values[where[at]])
            text = (
                f"{rule.text.format(value=number(values[where[worst]]))} in iteration {steps[where[worst]]}; "
                f"the median before was {number(usual[worst])}"
            )
            yield of_iterations(
                steps, where, name=rule.name, metric=rule.metric, text=text, remedy=rule.remedy
            )


def entropy_collapse(run: RunRecord) -> Iterator[Alarm]:
    """An entropy below a tenth of that of the first iterations."""
    steps, values = run.finite("policy/entropy")
    level = history.rolling_median(values, START).tolist()
    if len(values) < LEAST_ENTROPY or level[0] <= 0:
        return
    where = [place + START - 1 for place, value in enumerate(level) if value < 0.1 * level[0]]
    if where:
        lowest = level[where[-1] - START + 1]
        text = (
            f"the entropy fell to {number(lowest)} nats a token, {percent(lowest / level[0])} of the "
            f"{number(level[0])} at the start: the policy hardly explores"
        )
        yield of_iterations(
            steps,
            where,
            name="entropy collapse",
            metric="policy/entropy",
            text=text,
            remedy="set algorithm.entropy_coef, raise algorithm.clip_ratio_high, or lower actor.lr",
        )


def reward_falling(run: RunRecord) -> Iterator[Alarm]:
    """A reward that stays below its best level by more than its noise and a quarter of what was learnt."""
    steps, values = run.finite("reward/mean")
    level = history.rolling_median(values, REWARD_WINDOW)
    if len(values) < 2 * REWARD_WINDOW:
        return
    best = int(level.argmax())
    limit = level[best] - max(
        3 * history.spread_around(values, REWARD_WINDOW), 0.25 * (level[best] - level[0]), 1e-9
    )
    where = [place + REWARD_WINDOW - 1 for place in range(best, len(level)) if level[place] < limit]
    if where and level[-1] < limit:
        around = steps[best + REWARD_WINDOW // 2]
        yield of_iterations(
            steps,
            where,
            name="reward falling",
            metric="reward/mean",
            text=f"the reward fell from {number(level[best])} near iteration {around} to {number(level[-1])}",
            remedy="go back to the checkpoint of the best validation; lower actor.lr or raise "
            "algorithm.kl_coef; look at KL, entropy and gradient norm where it begins",
        )


def reward_constant(run: RunRecord) -> Iterator[Alarm]:
    """A reward that is the same number in every iteration."""
    steps, values = run.finite("reward/mean")
    if len(values) >= LEAST_CONSTANT and min(values) == max(values):
        yield Alarm(
            name="reward constant",
            metric="reward/mean",
            text=f"the reward is {number(values[0])} in every iteration: nothing can be learnt from it",
            remedy="compare responses and answers, in the table of samples, with what the reward expects",
            first=steps[0],
            last=steps[-1],
            count=len(steps),
        )


def validation_worse(run: RunRecord) -> Iterator[Alarm]:
    """A validation that got worse for two measurements, by more than its usual changes."""
    for metric, sign, name, least in (
        ("validation/accuracy", 1.0, "validation falling", 0.15),
        ("validation/loss", -1.0, "validation loss rising", 0.05),
    ):
        steps, values = run.finite(metric)
        if len(values) < 5:
            continue
        goodness = [sign * value for value in values]
        best = max(range(len(goodness)), key=goodness.__getitem__)
        changes = sorted(abs(after - before) for before, after in zip(goodness, goodness[1:]))
        drop = max(least * abs(goodness[best]), 2 * changes[len(changes) // 2])
        where = [place for place in range(best, len(goodness)) if goodness[place] < goodness[best] - drop]
        if where[-2:] == [len(goodness) - 2, len(goodness) - 1]:
            change = f"{number(values[best])} in iteration {steps[best]} to {number(values[-1])}"
            yield of_iterations(
                steps,
                where,
                name=name,
                metric=metric,
                text=f"{metric} went from {change}",
                remedy=f"use the checkpoint of iteration {steps[best]} (run.keep_best_k keeps such ones); "
                "train less, or with a lower learning rate",
            )


def memory_growth(run: RunRecord) -> Iterator[Alarm]:
    """Memory of a phase that grows without end."""
    worst: tuple[float, str, float, float] | None = None
    for key in run.series:
        _, values = run.finite(key)
        if not key.startswith("memory/") or len(values) < LEAST_MEMORY:
            continue
        ends = history.grows_steadily(values[FILLING:], parts=6)
        if ends is not None and ends[1] > 1.05 * ends[0] and (worst is None or ends[1] - ends[0] > worst[0]):
            worst = ends[1] - ends[0], key, *ends
    if worst is not None:
        _, key, before, after = worst
        steps = run.series[key].steps
        yield Alarm(
            name="memory growth",
            metric=key,
            text=f"memory after the phase {key.removeprefix('memory/').removesuffix('_mb')} grew steadily "
            f"from {number(before)} to {number(after)} MiB",
            remedy="look for what a reward function or a hook keeps; a checkpoint and a restart free it",
            first=steps[FILLING],
            last=steps[-1],
            count=len(steps) - FILLING,
        )


def no_gradient(run: RunRecord) -> Iterator[Alarm]:
    """Updates without a gradient."""
    for role in TRAINED:
        metric = f"{role}/grad_norm"
        steps, values = run.finite(metric)
        where = [place for place, value in enumerate(values) if value == 0]
        if len(where) >= LEAST_SMOOTH:
            yield of_iterations(
                steps,
                where,
                name="no gradient",
                metric=metric,
                text="the gradient is exactly 0: these samples teach nothing",
                remedy="all advantages are 0: look at zero-variance groups and the reward; "
                "algorithm.dynamic_sampling=true replaces such prompts",
            )


Check = Callable[[RunRecord], Iterable[Alarm]]
CHECKS: tuple[Check, ...] = (
    failed,
    stalled,
    not_finite,
    beyond_limits,
    above_histories,
    entropy_collapse,
    reward_falling,
    reward_constant,
    validation_worse,
    memory_growth,
    no_gradient,
    *worlds.CHECKS,
)
