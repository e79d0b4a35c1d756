"""Folders of runs for tests of the report: healthy metrics of any length, and illnesses planted in them."""

import json
import math
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

from verl_megatron.observe.metrics import PhaseEvent
from verl_megatron.observe.timeline import RankPhases, chrome_trace

Rows = list[dict]
PHASES = {
    "reshard": 0.6,
    "rollout": 9.0,
    "reward": 0.4,
    "log_probs": 2.5,
    "advantages": 0.05,
    "actor_update": 7.0,
}
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
SEPARATORS = "line\u2028separator\u2029 <!-- & \ud800"


def healthy_rows(iterations: int, *, seed: int = 1) -> Rows:
    """Rows of a run that learns, with the noise and the trends of a real one."""
    rng = random.Random(seed)

    def noise(relative: float) -> float:
        return math.exp(rng.gauss(0, relative))

    rows = [{"step": 0, "validation/accuracy": 0.2}]
    for step in range(1, iterations + 1):
        done = step / iterations
        learnt = 1 / (1 + math.exp(6 - 12 * done))
        length = 180 + 150 * learnt
        row = {
            "step": step,
            "reward/mean": 0.2 + 0.55 * learnt + rng.gauss(0, 0.025),
            "reward/max": 1.0,
            "reward/failed": 0.0 if rng.random() < 0.9 else 1 / 512,
            "reward/latency_ms": 3.0 * noise(0.3),
            "reward/format": 0.5 + 0.4 * learnt,
            "kl/ref": 6 * done * noise(0.12),
            "policy/loss": rng.gauss(0, 0.01),
            "policy/approx_kl": 4e-4 * noise(0.3),
            "policy/clip_fraction": 0.02 * noise(0.3),
            "policy/entropy": (0.35 + 0.75 * (1 - learnt)) * noise(0.03),
            "policy/grad_norm": 0.4 * noise(0.25),
            "policy/ratio_max": 1 + 0.6 * noise(0.3),
            "rollout/logprob_gap_mean": 0.011 * noise(0.05),
            "rollout/logprob_gap_max": 0.6 * noise(0.3),
            "rollout/response_tokens_mean": length * noise(0.03),
            "rollout/response_tokens_max": 1024.0,
            "rollout/cut_fraction": max(0.03 * noise(0.4), 0),
            "rollout/zero_variance_fraction": 0.1 + 0.25 * learnt + rng.gauss(0, 0.02),
            "rollout/throughput_tokens_per_sec": 21_000 * noise(0.03),
            "reshard/ms": 600 * noise(0.05),
            "reshard/bytes": 16_060_522_496.0,
        }
        seconds = {phase: usual * noise(0.05) for phase, usual in PHASES.items()}
        row |= {f"time/{phase}_s": value for phase, value in seconds.items()}
        row |= {
            f"memory/{phase}_mb": 40_000 + 900 * place + rng.gauss(0, 20)
            for place, phase in enumerate(seconds)
        }
        row["train/step_time_ms"] = 1e3 * sum(seconds.values())
        if step % 25 == 0:
            row["validation/accuracy"] = 0.2 + 0.5 * learnt + rng.gauss(0, 0.01)
        rows.append(row)
    return rows


def separate_rows(iterations: int, *, seed: int = 1) -> Rows:
    """Rows of a healthy run at staleness 1, whose rollout has ranks of its own."""
    rng, rows = random.Random(seed), healthy_rows(iterations, seed=seed)
    for row in rows[1:]:
        step, generated, waited = row["step"], 9.0 * math.exp(rng.gauss(0, 0.1)), 1.5 * rng.random()
        row["train/step_time_ms"] += 1e3 * (waited - row["time/rollout_s"])
        row |= {
            "time/rollout_s": waited,
            "async/staleness_min": 0.0,
            "async/staleness_mean": 1.0 - 0.3 * rng.random(),
            "async/staleness_max": float(step > 1),
            "async/rollout_wait_s": 1.0 + rng.random(),
            "async/generation_s": generated,
            "async/training_wait_fraction": 1e3 * waited / row["train/step_time_ms"],
            "async/rollout_wait_fraction": 1.5 / (1.5 + generated),
            "async/groups_in_flight": 60.0 + rng.randint(0, 4),
            "async/versions_per_sample": 1.2,
            "async/interrupted": float(rng.randint(0, 40)),
            "async/samples_sampled": 512.0 * (step + 1),
            "async/samples_trained": 512.0 * step,
            "async/samples_dropped": 0.0,
            "async/samples_in_flight": 512.0,
            "async/dealt_again": 0.0,
            "async/worlds_lost": 0.0,
            "async/tokens_aborted": 20_000.0 * rng.random(),
            "async/slowest_replica": 0.9 + 0.1 * rng.random(),
            "policy/effective_sample_size": 0.9 + 0.02 * rng.random(),
        }
    return rows


def from_on(rows: Rows, share: float) -> Rows:
    """The rows after this share of the run."""
    return rows[round(share * len(rows)) :]


def setting(key: str, value: float | None, *, begin: float, end: float = 1.0) -> Callable[[Rows], None]:
    """An illness that sets a metric in a part of the run."""

    def plant(rows: Rows) -> None:
        for row in rows[round(begin * len(rows)) : round(end * len(rows))]:
            row[key] = value

    return plant


def scaling(key: str, factor: float, *, begin: float, end: float = 1.0) -> Callable[[Rows], None]:
    """An illness that multiplies a metric in a part of the run."""

    def plant(rows: Rows) -> None:
        for row in rows[round(begin * len(rows)) : round(end * len(rows))]:
            if key in row:
                row[key] *= factor

    return plant


def reusing(rows: Rows) -> None:
    """Reused log-probs that are wrong for a while; all are checked."""
    setting("policy/reuse_error", 1e-6, begin=0.0)(rows)
    setting("policy/reuse_error", 0.5, begin=0.5, end=0.6)(rows)


def leaking(rows: Rows) -> None:
    """Memory that grows by a little in each iteration."""
    for row in rows[1:]:
        row["memory/reward_mb"] += 20 * row["step"]


def dropping(rows: Rows) -> None:
    """Three of four samples that are made are dropped, from the middle on."""
    dropped = 0.0
    for row in rows[1:]:
        dropped += 1536.0 * (2 * row["step"] > len(rows))
        row["async/samples_dropped"] = dropped
        row["async/samples_sampled"] += dropped


def losing_a_world(rows: Rows) -> None:
    """A rollout world that ends twice, and whose samples are made again."""
    for step in (200, 203):
        rows[step] |= {"async/worlds_lost": 1.0, "async/dealt_again": 12.0}


# Name of the alarm → what is done to the rows. Each is found by this name, and nothing else is.
ILLNESSES: dict[str, Callable[[Rows], None]] = {
    "cut responses": setting("rollout/cut_fraction", 0.4, begin=0.6),
    "zero-variance groups": setting("rollout/zero_variance_fraction", 0.9, begin=0.5),
    "KL off its history": scaling("kl/ref", 6.0, begin=0.8),
    "gap off its history": scaling("rollout/logprob_gap_mean", 6.0, begin=0.7),
    "gradient norm off its history": scaling("policy/grad_norm", 40.0, begin=0.7, end=0.71),
    "rewards failing": setting("reward/failed", 0.3, begin=0.3, end=0.34),
    "NaN": setting("policy/loss", None, begin=0.9, end=0.905),
    "entropy collapse": scaling("policy/entropy", 0.05, begin=0.5),
    "reward falling": scaling("reward/mean", 0.4, begin=0.75),
    "memory growth": leaking,
    "slow iterations": scaling("train/step_time_ms", 5.0, begin=0.4, end=0.42),
    "clipped updates": setting("policy/clip_fraction", 0.6, begin=0.5),
    "gap between sampler and trainer": setting("rollout/logprob_gap_mean", 0.3, begin=0.0),
    "no gradient": setting("policy/grad_norm", 0.0, begin=0.5, end=0.6),
    "reward constant": setting("reward/mean", 0.0, begin=0.0),
    "validation falling": scaling("validation/accuracy", 0.4, begin=0.85),
    "reused log-probs": reusing,
}


# The same for `separate_rows`.
SEPARATE_ILLNESSES: dict[str, Callable[[Rows], None]] = {
    "samples too old": setting("async/staleness_max", 2.0, begin=0.4, end=0.42),
    "training waits": setting("async/training_wait_fraction", 0.7, begin=0.5),
    "rollout waits": setting("async/rollout_wait_fraction", 0.8, begin=0.5),
    "samples dropped": dropping,
    "few effective samples": scaling("policy/effective_sample_size", 0.3, begin=0.6),
    "tokens aborted": setting("async/tokens_aborted", 300_000.0, begin=0.5),
    "slow replica": scaling("async/slowest_replica", 0.3, begin=0.6),
    "rollout world ended": losing_a_world,
}


def write_run(folder: Path, rows: Rows, *, hostile: bool = False) -> Path:
    """Write a run's folder with metrics, samples and a timeline."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = rows[-1]["step"] if rows else 0
    for step in sorted({1, last // 2, last} - {0}):
        write_samples(folder, step, hostile=hostile)
    ranks = [timeline_of(rank) for rank in range(8)]
    trace = chrome_trace(ranks, began_at=0.0, wall_s=ranks[0].events[-1].end_s)
    (folder / "timeline.json").write_text(json.dumps(trace))
    return folder


def timeline_of(rank: int) -> RankPhases:
    """Phases of a rank that waits in each of them, more or less."""
    events, start = [], 0.0
    for place, (phase, seconds) in enumerate(PHASES.items()):
        end = start + seconds
        events.append(PhaseEvent(phase, start, end - 0.06 * seconds * ((rank + place) % 5), end))
        start = end
    return RankPhases(rank=rank, events=tuple(events))


ANSWER = (
    "Natalia sold 48 clips in April and half as many in May , that is 48 + 24 = 72 . The answer is 72".split()
)


def write_samples(
    folder: Path, step: int, *, hostile: bool = False, prompts: int = 2, samples: int = 8
) -> None:
    """Write the training samples of an iteration, and a validation."""
    rng, training, validation = random.Random(step), [], []
    question = "how many clips did Natalia sell altogether in April and May?"
    for number in range(prompts * samples):
        words = [f" {word}" for word in ANSWER[: rng.randint(12, len(ANSWER))]]
        if hostile and number == 1:
            words[3:3] = [HOSTILE, SEPARATORS]
        logprobs = [-rng.expovariate(2.0) for _ in words]
        row = {
            "sample": number,
            "group": number // samples,
            "prompt": f"Question {number // samples}: {question}",
            "response": "".join(words),
            "score": float(rng.random() < 0.5),
            "is_cut": rng.random() < 0.2,
            "tokens": words,
            "logprobs": logprobs,
            "rollout_logprobs": [value + rng.gauss(0, 0.02) for value in logprobs],
        }
        training.append(row)
    for number in range(4):
        text = f"{number} and {step}"
        validation.append(
            {"sample": number, "prompt": f"What is {number}?", "response": text, "answer": "72", "score": 0.5}
        )
    for name, rows in (("samples", training), ("validation", validation)):
        (folder / name).mkdir(exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / f"step_{step}.jsonl").write_text(lines)


def plant_stall(folder: Path) -> None:
    """Leave what the watchdog leaves: the stacks of the ranks, newer than the last row of metrics."""
    (folder / "stacks").mkdir()
    for rank in range(2):
        (folder / "stacks" / f"rank_{rank}.txt").write_text("Current thread (most recent call first)\n")
    long_ago = time.time() - 600
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))


def starts_of(*ends: tuple[str, str]) -> list[dict]:
    """What `run.json` has of starts that ended so."""
    return [
        {
            "number": number,
            "started": "2026-01-01T00:00:00Z",
            "exit": {"reason": reason, "text": text, "step": 10 * number} if reason else None,
            "command": "python -m verl_megatron train",
            "iterations": 60,
            "resumed_from": 10 * (number - 1) or None,
            "world_size": 4,
            "layouts": {"actor": "tp2pp2"},
            "hosts": [{"name": "worker-0", "ranks": [0, 1, 2, 3]}],
            "versions": {"torch": "2.13.0", "other": "1"},
            "git": {"commit": "abc", "dirty": True},
            "settings_changed": {"actor.lr": [1e-6, 2e-6]} if number > 1 else {},
        }
        for number, (reason, text) in enumerate(ends, 1)
    ]


def data_in(html: str) -> dict:
    """The JSON that the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)
