"""The alarm, and the metrics that have a limit or are compared with their own history."""

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTH = 5  # points of the rolling median that is compared with a limit
LEAST_SMOOTH = 3  # points before it is compared
# Shares of its time for which a side has waited for the other.
TRAINING_WAITS, ROLLOUT_WAITS = "async/training_wait_fraction", "async/rollout_wait_fraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something wrong with a run."""

    name: str
    text: str  # what was found, with its value
    remedy: str
    metric: str = ""  # the curve that shows it; empty: none
    first: int | None = None  # iteration since which it holds, and the last one; None: of the whole run
    last: int | None = None
    count: int = 0  # iterations between them where it holds
    is_over: bool = False  # the run went on without it


def of_iterations(
    steps: Sequence[int], where: Sequence[int], *, name: str, metric: str, text: str, remedy: str
) -> Alarm:
    """Return an alarm of the points `where` of a curve; it is over if the last points are without."""
    return Alarm(
        name=name,
        metric=metric,
        text=text,
        remedy=remedy,
        first=steps[where[0]],
        last=steps[where[-1]],
        count=len(where),
        is_over=where[-1] < len(steps) - SMOOTH,
    )


def number(value: float) -> str:
    """Write a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A metric whose values above, or below, a limit mean something, whatever the run."""

    name: str
    metric: str
    limit: float
    text: str  # {value} and {limit} are put in
    remedy: str
    smooth: int = SMOOTH  # points of the rolling median that is compared; 1: each point counts
    share: bool = True  # values are shares, shown in percent
    is_least: bool = False  # values below the limit are those that mean something


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A metric that is compared with its own history."""

    name: str
    metric: str
    text: str  # of the value; {value} is put in
    remedy: str


LIMITS = (
    Limit(
        name="cut responses",
        metric="rollout/cut_fraction",
        limit=0.25,
        text="{value} of the responses end at rollout.max_tokens, without an answer (limit {limit})",
        remedy="raise rollout.max_tokens, make long responses cost something with reward.overlong_tokens, or "
        "give cut ones no loss with algorithm.mask_cut=true",
    ),
    Limit(
        name="zero-variance groups",
        metric="rollout/zero_variance_fraction",
        limit=0.5,
        text="in {value} of the prompts all samples have the same score and give no gradient (limit {limit})",
        remedy="take prompts of medium difficulty, raise data.samples_per_prompt, or replace such prompts "
        "with algorithm.dynamic_sampling=true",
    ),
    Limit(
        name="rewards failing",
        metric="reward/failed",
        limit=0.05,
        smooth=1,
        text="the reward function failed on up to {value} of the samples (limit {limit})",
        remedy="the console shows one example of each kind of failure; mend the function, or raise "
        "reward.timeout_s or reward.workers",
    ),
    Limit(
        name="clipped updates",
        metric="policy/clip_fraction",
        limit=0.4,
        text="{value} of the tokens are clipped: no gradient, or with cispo a limited one (limit {limit})",
        remedy="lower actor.lr, algorithm.epochs or algorithm.num_mini_batches, or set algorithm.target_kl",
    ),
    Limit(
        name="gap between sampler and trainer",
        metric="rollout/logprob_gap_mean",
        limit=0.1,
        share=False,
        text="log-probs of vLLM and of the trainer differ by {value} nats a token (limit {limit})",
        remedy="use the same dtype for both (rollout.dtype, engine.dtype), set reshard.verify=all, or "
        "correct for it with algorithm.correction",
    ),
    Limit(
        name="reused log-probs",
        metric="policy/reuse_error",
        limit=0.01,
        smooth=1,
        share=False,
        text="reused log-probs differ from those of a separate pass by up to {value} nats (limit {limit})",
        remedy="set algorithm.reuse_logprobs=false",
    ),
    Limit(
        name="few effective samples",
        metric="policy/effective_sample_size",
        limit=0.5,
        is_least=True,
        text="the samples count like {value} of their number: their weights are uneven (limit {limit})",
        remedy="lower async.max_staleness, actor.lr or algorithm.num_mini_batches; with long responses set "
        "algorithm.correction_level=token; without stale samples, look at the gap between sampler and "
        "trainer",
    ),
    Limit(
        name="slow replica",
        metric="async/slowest_replica",
        limit=0.5,
        is_least=True,
        text="a rollout replica makes {value} of the others' median of tokens a second (limit {limit})",
        remedy="the console names it: look at its GPUs and at what else its host does; with several rollout "
        "worlds, async.buffer=window gives it less to do",
    ),
)
TRAINED = ("policy", "critic", "reward_model")  # prefixes of the metrics of a trained model
STEP_SIZE = "lower the learning rate, or lower engine.clip_grad; look at rewards and lengths before it"
HISTORIES = (
    History(
        name="KL off its history",
        metric="kl/ref",
        text="the KL from the reference rose to {value} nats a sample",
        remedy="raise algorithm.kl_coef, set algorithm.target_kl, or lower actor.lr",
    ),
    History(
        name="KL off its history",
        metric="policy/approx_kl",
        text="the KL of an update rose to {value} nats a token",
        remedy="set algorithm.target_kl, or lower actor.lr",
    ),
    History(
        name="gap off its history",
        metric="rollout/logprob_gap_mean",
        text="the gap between sampler and trainer rose to {value} nats a token",
        remedy="set reshard.verify=all to rule out wrong weights, use the same dtype for both, or set "
        "algorithm.correction",
    ),
    *(
        History(
            name="gradient norm off its history",
            metric=f"{role}/grad_norm",
            text="the gradient norm rose to {value}",
            remedy=STEP_SIZE,
        )
        for role in TRAINED
    ),
    *(
        History(name="loss off its history", metric=metric, text="the loss rose to {value}", remedy=STEP_SIZE)
        for metric in ("critic/loss", "sft/loss", "dpo/loss", "reward_model/loss")
    ),
    History(
        name="slow iterations",
        metric="train/step_time_ms",
        text="an iteration took {value} ms",
        remedy="the plot of phases says which one grew; run.track_metrics=[console,jsonl,timeline] shows "
        "which rank the others wait for",
    ),
)
