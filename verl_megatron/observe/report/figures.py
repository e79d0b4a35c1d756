"""Figures of a report: which metrics share a plot, under which section, in which unit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

LINES, STACKED = "lines", "stacked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot of some metrics over the iterations."""

    section: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    kind: str = LINES  # STACKED: the sum matters; one plot for each run
    note: str = ""  # what the plot shows, where its title does not say it
    from_zero: bool = False  # the axis begins at 0


LEARNING, UPDATES, WORLDS, COST = "Learning", "Updates", "Training and rollout worlds", "Time and memory"
OTHERS = "Other metrics"
FIGURES = (
    Figure(
        section=LEARNING,
        title="Reward",
        unit="score of a sample",
        metrics=("reward/mean", "reward/max", "reward/greedy_mean", "reward/overlong_penalty"),
    ),
    Figure(section=LEARNING, title="Reward by source", unit="mean score", metrics=("reward/source/*",)),
    Figure(section=LEARNING, title="Sources of the curriculum", unit="share", metrics=("data/weight/*",)),
    Figure(section=LEARNING, title="Validation", unit="mean score", metrics=("validation/accuracy",)),
    Figure(
        section=LEARNING, title="Validation by source", unit="mean score", metrics=("validation/source/*",)
    ),
    Figure(
        section=LEARNING,
        title="Loss",
        unit="",
        metrics=("sft/loss", "dpo/loss", "reward_model/loss", "validation/loss"),
    ),
    Figure(
        section=LEARNING,
        title="Pairs in the right order",
        unit="share",
        metrics=("dpo/accuracy", "reward_model/accuracy", "validation/accuracy"),
    ),
    Figure(
        section=LEARNING,
        title="Rewards of pairs",
        unit="reward",
        metrics=tuple(
            f"{task}/{name}"
            for task in ("dpo", "reward_model")
            for name in ("margin", "chosen_reward", "rejected_reward")
        ),
    ),
    Figure(
        section=LEARNING,
        title="KL from the reference",
        unit="nats a sample",
        metrics=("kl/ref", "kl/teacher"),
        note="summed over the tokens of a sample",
    ),
    Figure(section=LEARNING, title="Entropy", unit="nats a token", metrics=("policy/entropy",)),
    Figure(
        section=LEARNING,
        title="Response length",
        unit="tokens",
        metrics=("rollout/response_tokens_mean", "rollout/response_tokens_max"),
        from_zero=True,
    ),
    Figure(
        section=LEARNING,
        title="Samples that teach little",
        unit="share",
        metrics=(
            *("rollout/cut_fraction", "rollout/no_eos_fraction"),
            *("rollout/zero_variance_fraction", "reward/failed"),
        ),
        note="cut responses; those without end of sequence; prompts whose samples all have one score; "
        "failed rewards",
        from_zero=True,
    ),
    Figure(
        section=LEARNING,
        title="Prompts drawn for dynamic sampling",
        unit="prompts",
        metrics=("rollout/groups_sampled", "rollout/groups_without_variance"),
    ),
    Figure(
        section=UPDATES,
        title="Clipped tokens",
        unit="share of tokens",
        metrics=("policy/clip_fraction", "critic/clip_fraction", "policy/correction_fraction"),
        from_zero=True,
    ),
    Figure(
        section=UPDATES,
        title="Gap between sampler and trainer",
        unit="nats a token",
        metrics=("rollout/logprob_gap_mean", "rollout/logprob_gap_max"),
        note="difference of vLLM's and the trainer's log-probs of the same tokens",
    ),
    Figure(
        section=UPDATES,
        title="Gradient norm",
        unit="before clipping",
        metrics=("policy/grad_norm", "critic/grad_norm", "reward_model/grad_norm"),
    ),
    Figure(
        section=UPDATES,
        title="KL of the updates",
        unit="nats a token",
        metrics=("policy/approx_kl", "kl/loss"),
        note="from the actor before the iteration's updates; in the loss: from the reference",
    ),
    Figure(
        section=UPDATES,
        title="Ratios and weights",
        unit="ratio",
        metrics=("policy/ratio_max", "policy/importance_weight", "policy/effective_sample_size"),
    ),
    Figure(section=UPDATES, title="Policy loss", unit="", metrics=("policy/loss",)),
    Figure(
        section=UPDATES,
        title="Critic",
        unit="value",
        metrics=("critic/loss", "critic/value_mean", "critic/return_mean"),
    ),
    Figure(
        section=WORLDS,
        title="Staleness",
        unit="updates",
        metrics=("async/staleness_min", "async/staleness_mean", "async/staleness_max"),
        note="by which the weights that made a sample lag behind those that train on it",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Share of waiting",
        unit="share of its time",
        metrics=("async/training_wait_fraction", "async/rollout_wait_fraction"),
        note="training waits for samples; the rollout waits for orders or weights",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Seconds of the rollout",
        unit="seconds an iteration",
        metrics=("async/generation_s", "async/rollout_wait_s"),
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Prompts in flight",
        unit="prompts",
        metrics=("async/groups_in_flight",),
        note="whose samples are ordered and not yet trained on",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Iterations in flight",
        unit="iterations",
        metrics=("async/iterations_in_flight",),
        note="whose samples are ordered and not yet trained on",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="What became of the samples",
        unit="samples since the run began",
        metrics=tuple(f"async/samples_{name}" for name in ("sampled", "trained", "dropped", "in_flight")),
        note="sampled is the sum of the others",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Tokens that are dropped or computed again",
        unit="tokens",
        metrics=("async/tokens_dropped", "async/tokens_aborted"),
        note="dropped since the run began; aborted in the iteration for new weights",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Scoring worlds",
        unit="seconds an iteration",
        metrics=tuple(
            f"async/{model}_{what}"
            for model in ("reference", "reward", "teacher")
            for what in ("s", "wait_s")
        ),
        note="of their work, and for which training waited for them",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Slowest replica",
        unit="share of the others' median",
        metrics=("async/slowest_replica",),
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="New weights within a sample",
        unit="",
        metrics=("async/versions_per_sample", "async/interrupted"),
        note="versions that made a sample's tokens; samples that went on with new weights",
        from_zero=True,
    ),
    Figure(
        section=WORLDS,
        title="Faults of the rollout",
        unit="",
        metrics=("async/worlds_lost", "async/dealt_again"),
        note="worlds that ended and were started again; prompts whose samples were made again",
        from_zero=True,
    ),
    Figure(
        section=COST,
        title="Phases of an iteration",
        unit="seconds",
        metrics=("time/*",),
        kind=STACKED,
        from_zero=True,
    ),
    Figure(
        section=COST,
        title="Generation",
        unit="tokens a second",
        metrics=("rollout/throughput_tokens_per_sec",),
        from_zero=True,
    ),
    Figure(
        section=COST,
        title="Throughput",
        unit="tokens a second and GPU",
        metrics=("train/throughput_tokens_per_sec_per_gpu",),
        note="prompts and responses, over the GPUs of all worlds",
        from_zero=True,
    ),
    Figure(
        section=COST,
        title="Memory in use after each phase",
        unit="MiB",
        metrics=("memory/*",),
        note="of the fullest rank",
    ),
    Figure(
        section=COST, title="Weight sync: bytes", unit="bytes", metrics=("reshard/bytes",), from_zero=True
    ),
    Figure(section=COST, title="Weight sync: time", unit="ms", metrics=("reshard/ms",), from_zero=True),
    Figure(
        section=COST, title="Reward calls", unit="ms a call", metrics=("reward/latency_ms",), from_zero=True
    ),
)
# Sums of what other plots show.
LEFT_OUT = ("train/step_time_ms", "critic/update_ms", "memory/actor_gpu_mem_mb")


def figures_of(metrics: Iterable[str]) -> list[Figure]:
    """Return the figures of these metrics: those of `FIGURES` that have any, and one for each other metric.

    `PREFIX/*` takes all metrics of a prefix that no earlier figure has.
    """
    known = dict.fromkeys(metrics)
    is_paired = any(key.startswith(("dpo/", "reward_model/")) for key in known)
    found, shown = [], set(LEFT_OUT)
    for figure in FIGURES:
        if figure.title == "Validation" and is_paired:
            continue  # the accuracy of pairs is shown with that of the training pairs
        keys = [key for name in figure.metrics for key in matching(name, known) if key not in shown]
        if keys:
            shown |= set(keys)
            found.append(replace(figure, metrics=tuple(keys)))
    rest = [key for key in known if key not in shown]
    return found + [Figure(section=OTHERS, title=key, unit="", metrics=(key,)) for key in rest]


def matching(name: str, known: Iterable[str]) -> list[str]:
    """Return the metrics that a name of `FIGURES` stands for."""
    if name.endswith("/*"):
        return [key for key in known if key.startswith(name[:-1])]
    return [name] if name in known else []


def labels_of(keys: Sequence[str]) -> list[str]:
    """Return what a legend calls each metric of a plot: its name, with the prefix if two share it."""
    names = list(map(_name_of, keys))
    return [
        name if names.count(name) == 1 else f"{key.partition('/')[0].replace('_', ' ')}: {name}"
        for key, name in zip(keys, names)
    ]


def _name_of(key: str) -> str:
    name = key.partition("/")[2] or key
    if key.startswith(("time/", "memory/", "async/")):
        name = name.removesuffix("_s").removesuffix("_mb")
    return name.replace("_", " ")
