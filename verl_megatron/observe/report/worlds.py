"""Alarms of a run whose rollout has worlds of its own: who waits, what is too old or lost, who has ended."""

from collections.abc import Iterator, Sequence

from verl_megatron.observe.report import history
from verl_megatron.observe.report.record import RunRecord
from verl_megatron.observe.report.rules import (
    LEAST_SMOOTH,
    ROLLOUT_WAITS,
    SMOOTH,
    TRAINING_WAITS,
    Alarm,
    number,
    of_iterations,
    percent,
)

MOST_WAITING = 0.5  # share of its time
MOST_DROPPED = 0.5  # of the samples that are made
MOST_ABORTED = 1.0  # tokens of aborted samples, for each token that is trained on


def stale(run: RunRecord) -> Iterator[Alarm]:
    """Samples of older weights than `async.max_staleness` allows; the setting is that of the last start."""
    if (limit := run.max_staleness) is None:
        return
    since = (run.starts[-1].resumed_from or 0) if run.starts else 0
    steps, values = run.finite("async/staleness_max")
    where = [place for place, value in enumerate(values) if value > limit and steps[place] > since]
    if where:
        oldest = max(values[place] for place in where)
        yield of_iterations(
            steps,
            where,
            name="samples too old",
            metric="async/staleness_max",
            text=f"weights of samples lag {number(oldest)} syncs behind, and async.max_staleness={limit}",
            remedy="a run must never do this: report it with the files of its folder, and go on from a "
            "checkpoint before it",
        )


def waiting(run: RunRecord) -> Iterator[Alarm]:
    """Sides that wait most of the time. At staleness 0 both take turns, and waiting is no fault."""
    _, behind = run.finite("async/staleness_max")
    if run.max_staleness == 0 or not any(behind):
        return
    for metric, name, text, remedy in (
        (
            TRAINING_WAITS,
            "training waits",
            "training waits for samples in {} of its time",
            "give the rollout more of the ranks (rollout.devices); verl-megatron plan --separate finds the "
            "split; async.buffer=window waits for no long response",
        ),
        (
            ROLLOUT_WAITS,
            "rollout waits",
            "the rollout waits for orders or weights in {} of its time",
            "give training more of the ranks (rollout.devices); verl-megatron plan --separate finds the "
            "split",
        ),
    ):
        steps, values = run.finite(metric)
        where, level = _above(values, MOST_WAITING)
        if where:
            yield of_iterations(
                steps,
                where,
                name=name,
                metric=metric,
                text=f"{text.format(percent(level))} (limit {percent(MOST_WAITING)})",
                remedy=remedy,
            )


def dropped(run: RunRecord) -> Iterator[Alarm]:
    """Samples that are made and not trained on."""
    steps, sampled = run.finite("async/samples_sampled")
    _, dropped_so_far = run.finite("async/samples_dropped")
    if len(sampled) != len(dropped_so_far):
        return
    made = [after - before for before, after in zip([0.0, *sampled], sampled)]
    lost = [after - before for before, after in zip([0.0, *dropped_so_far], dropped_so_far)]
    shares = [max(each, 0.0) / of if of > 0 else 0.0 for each, of in zip(lost, made)]
    where, level = _above(shares, MOST_DROPPED)
    if where:
        yield of_iterations(
            steps,
            where,
            name="samples dropped",
            metric="async/samples_dropped",
            text=f"{percent(level)} of the samples that are made are not trained on "
            f"(limit {percent(MOST_DROPPED)})",
            remedy="dynamic sampling drops prompts whose samples all have one score: take prompts of medium "
            "difficulty or raise data.samples_per_prompt; a resumption drops what is older than "
            "async.max_staleness",
        )


def aborted(run: RunRecord) -> Iterator[Alarm]:
    """Caches that new weights compute again, beside the tokens that are trained on."""
    steps, tokens = run.finite("async/tokens_aborted")
    lengths = dict(zip(*run.finite("rollout/response_tokens_mean")))
    trained = dict(zip(*run.finite("async/samples_trained")))
    shares = []
    for step, again in zip(steps, tokens):
        of = lengths.get(step, 0.0) * (trained.get(step, 0.0) - trained.get(step - 1, 0.0))
        shares.append(again / of if of > 0 else 0.0)
    where, level = _above(shares, MOST_ABORTED)
    if where:
        yield of_iterations(
            steps,
            where,
            name="tokens aborted",
            metric="async/tokens_aborted",
            text=f"new weights compute the cache of {percent(level)} as many tokens again as are trained on "
            f"(limit {percent(MOST_ABORTED)})",
            remedy="async.partial=pause keeps the old cache, and finish lets running samples end; "
            "a lower rollout.max_num_seqs has fewer samples running",
        )


def ended(run: RunRecord) -> Iterator[Alarm]:
    """Rollout worlds that ended and were started again."""
    steps, values = run.finite("async/worlds_lost")
    if where := [place for place, value in enumerate(values) if value > 0]:
        again = dict(zip(*run.finite("async/dealt_again")))
        prompts = sum(again.get(steps[place], 0.0) for place in where)
        times = sum(values[place] for place in where)
        yield of_iterations(
            steps,
            where,
            name="rollout world ended",
            metric="async/worlds_lost",
            text=f"rollout worlds ended {number(times)} time{'s' * (times > 1)} and were started again; "
            f"the samples of {number(prompts)} prompts were made again",
            remedy="read the end of the log of that world, in the folder rollout of the run's folder, and "
            "the host's log",
        )


def _above(values: Sequence[float], limit: float) -> tuple[list[int], float]:
    """Return the points at which the rolling median is above a limit, and its largest value there."""
    points = min(SMOOTH, max(len(values), LEAST_SMOOTH))
    level = history.rolling_median(values, points).tolist()
    where = [place + points - 1 for place, value in enumerate(level) if value > limit]
    return where, max(level, default=0.0)


CHECKS = (stale, waiting, dropped, aborted, ended)
