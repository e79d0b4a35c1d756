"""Worlds of their own for longer: many deaths, hundreds of iterations, and what stale samples teach."""

import os
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean

import pytest

from tests.end_to_end.conftest import settings_of
from tests.end_to_end.launch import GONE, Started, run
from tests.end_to_end.test_separate import (
    JOB,
    SEPARATE,
    assert_balanced,
    ended_of,
    kill,
    numbers,
    started,
    wait_for,
)
from verl_megatron.observe.tracking import read_metrics

# Five minutes for 400 iterations, and a quarter of an hour for what samples teach, on two idle cores.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
WAITED = re.compile(r"rollout world \d+ has joined; training has waited ([\d.]+) s")
SEEDS = (1, 2, 3)


# ---- deaths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "staleness"), [(0, 1), (1, 3)])
def test_at_whatever_moments_worlds_die_the_numbers_stay(toy, tmp_path, seed, staleness):
    """Ten kills of the rollout world and five of the training world at random moments, twice."""
    draw = random.Random(seed)
    longer = [*JOB, SEPARATE, "run.iterations=40", f"async.max_staleness={staleness}"]
    begin = time.monotonic()
    ended_of(tmp_path, *settings_of(toy, tmp_path / "undisturbed", *longer), timeout_s=600)
    undisturbed_s = time.monotonic() - begin
    roles = ["rollout"] * 10 + ["train"] * 5
    draw.shuffle(roles)
    begin = time.monotonic()
    with started(tmp_path, *settings_of(toy, tmp_path / "run", *longer), "--max-restarts", "5") as both:
        for place, role in enumerate(roles):
            kill(both, role, once=f"step {2 * place + 2}/40", after_s=draw.random() * 3, timeout_s=300)
        ended = both.wait(timeout_s=600)
        assert not ended.code and not both.leftovers(), ended.text
    lost_s = time.monotonic() - begin - undisturbed_s
    waits = [float(found) for found in WAITED.findall(ended.stdout)]
    print(
        f"{len(roles)} faults at staleness {staleness}: {lost_s / len(roles):.1f} s lost per fault; training "
        f"waited {mean(waits or [0]):.1f} s (at most {max(waits, default=0):.1f}) for a rollout world"
    )
    assert ended.stdout.count("is started again") == 10
    assert 0 < ended.stdout.count("resuming after") <= 5, "training starts again for its own deaths alone"
    assert numbers(tmp_path / "run") == numbers(tmp_path / "undisturbed")
    assert_balanced(tmp_path / "run")


def test_at_whatever_moments_worlds_of_a_window_die_the_counts_balance(toy, tmp_path):
    """Ten kills of either rollout world and five of the training world, also between two weight syncs."""
    draw = random.Random(2)
    window = ("rollout.devices=1+2", "async.max_staleness=1", "async.buffer=window", "async.sync_interval=3")
    window += ("async.partial=continue", "rollout.max_num_seqs=4", "run.iterations=40")
    roles = ["rollout:0", "rollout:1"] * 5 + ["train"] * 5
    draw.shuffle(roles)
    settings = settings_of(toy, tmp_path / "run", *JOB, *window)
    with started(tmp_path, *settings, "--max-restarts", "5") as worlds:
        for place, role in enumerate(roles):
            kill(worlds, role, once=f"step {2 * place + 2}/40", after_s=draw.random() * 3, timeout_s=300)
        ended = worlds.wait(timeout_s=600)
        assert not ended.code and not worlds.leftovers(), ended.text
    assert ended.stdout.count("is started again") == 10
    assert 0 < ended.stdout.count("resuming after") <= 5, "training starts again for its own deaths alone"
    assert_balanced(tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert max(row["async/staleness_max"] for row in rows) <= 1


# ---- hundreds of iterations --------------------------------------------------------------------------------


def used_by(both: Started) -> dict[str, tuple[float, int, int, int]]:
    """MiB, threads, sockets and open files of each rank, by role and number."""
    found = {}
    for pid, environment in both.processes().items():
        files = []
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            status = Path(f"/proc/{pid}/status").read_text()
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(*GONE):  # it has just been closed
                    files.append(os.readlink(path))
        except GONE:
            continue
        is_rank = environment.get("RANK", "").isdecimal() and b"parallel.runtime.launch" not in words
        if not is_rank or b"verl_megatron.train" not in words or b"--role" not in words:
            continue
        key = f"{words[words.index(b'--role') + 1].decode()} {environment['RANK']} {words[0].decode()}"
        memory, threads = (re.search(rf"{name}:\s+(\d+)", status) for name in ("RssAnon", "Threads"))
        assert memory and threads
        sockets = sum(file.startswith("socket:") for file in files)
        found[key] = max(
            found.get(key, (0.0, 0, 0, 0)), (int(memory[1]) / 1024, int(threads[1]), sockets, len(files))
        )
    return found


@pytest.mark.parametrize("buffer", ["in_order", "window"])
def test_memory_threads_and_sockets_stay_flat_over_400_iterations(toy, tmp_path, buffer):
    job = ("run.iterations=400", "run.export=false", "run.validate_interval=0", "run.save_interval=100")
    job += ("data.prompts_per_iteration=8", "rollout.max_tokens=4", "actor.layout=tp1", "critic.layout=tp1")
    job += ("rollout.tp=1", "run.track_metrics=[console,jsonl]", SEPARATE, "async.max_staleness=2")
    settings = settings_of(toy, tmp_path / "run", *job, f"async.buffer={buffer}")
    with started(tmp_path, *settings) as both:
        wait_for(both, "step 150/400", timeout_s=900)
        early = used_by(both)
        wait_for(both, "step 390/400", timeout_s=900)
        late = used_by(both)
        ended = both.wait(timeout_s=120)
        assert not ended.code and not both.leftovers(), ended.text
    print(f"{buffer}, iteration 150: {early}\niteration 390: {late}")
    assert early.keys() == late.keys() and len(early) >= 2
    for rank, (memory, threads, sockets, files) in late.items():
        before = early[rank]
        assert memory < before[0] * 1.05 + 8, rank
        assert threads <= before[1] + 1 and sockets <= before[2] + 1 and files <= before[3] + 2, rank
    assert_balanced(tmp_path / "run")


# ---- what stale samples teach ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(toy, tmp_path_factory) -> Path:
    """The toy model after its fine-tuning, as the quickstart does it."""
    folder = tmp_path_factory.mktemp("tuned")
    settings = ("--config-path", "../recipes", "--config-name", "sft_toy_cpu")
    settings += (f"run.output_dir={folder}", f"data.train={toy}/sft.jsonl", f"actor.path={toy}/model")
    run(1, "verl_megatron.sft", *settings, folder=folder / "said")
    return folder / "actor"


def test_what_stale_samples_teach(toy, tuned, tmp_path):
    """Three seeds of the toy job: after 18 iterations stale samples have taught as much as fresh ones."""
    found: dict[tuple[int, str, int], list[float]] = {}
    ways = ((0, "in_order", 1), (1, "in_order", 1), (4, "in_order", 1), (4, "window", 1), (1, "window", 3))
    for staleness, buffer, interval in ways:
        behind = []
        for seed in SEEDS:
            folder = tmp_path / f"{staleness}_{buffer}_{interval}_{seed}"
            folder.mkdir()
            job = ("--config-name", "ppo_toy_cpu", f"run.output_dir={folder}/run", f"run.seed={seed}")
            job += (f"data.train={toy}/train.jsonl", f"data.validation={toy}/val.jsonl")
            job += (f"actor.path={tuned}", "actor.layout=tp1", "critic.layout=tp1", "rollout.tp=1")
            job += (SEPARATE, f"async.max_staleness={staleness}", f"async.buffer={buffer}")
            job += (f"async.sync_interval={interval}", "run.export=false")
            ended_of(folder, *job, timeout_s=900)
            rows = read_metrics(folder / "run")
            accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row][-1]
            found.setdefault((staleness, buffer, interval), []).append(accuracy)
            behind += [row["async/staleness_mean"] for row in rows if "async/staleness_mean" in row]
        accuracies = ", ".join(f"{each:.3f}" for each in found[staleness, buffer, interval])
        print(
            f"staleness {staleness}, {buffer}, weights sent every {interval} iterations: accuracy "
            f"{accuracies}; {mean(behind):.1f} weight syncs behind"
        )
    fresh = found[0, "in_order", 1]
    least = mean(fresh) - max(max(fresh) - min(fresh), 0.05)
    assert {key: accuracies for key, accuracies in found.items() if mean(accuracies) < least} == {}
