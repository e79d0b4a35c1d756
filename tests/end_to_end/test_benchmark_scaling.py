"""The scaling benchmark on CPU ranks: runs the toy recipe on one and two, writes figures and model."""

import csv
import json
import os
import subprocess
import sys

import pytest

from tests.scaled import PHASES
from tests.worlds import ROOT
from verl_megatron.observe.tracking import read_metrics

SKEW_US = 10e6  # between the starts of two ranks' clocks, on a busy machine
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def folder(toy, tmp_path_factory):
    """What the benchmark wrote, with its output as `stdout`."""
    out = tmp_path_factory.mktemp("scaling")
    command = [
        sys.executable,
        "tools/benchmark_scaling.py",
        "--recipe",
        "ppo_toy_cpu",
        "--gpus",
        "1,2",
        "--steps",
        "2",
        "--layouts",
        "2:tp2",
        "--rollout",
        "2:2",
    ]
    command += [
        "--prompts",
        "16",
        "--prompt-tokens",
        "24",
        "--response-tokens",
        "5",
        "--to",
        "32",
        "--out",
        str(out),
        f"actor.path={toy}/model",
    ]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (out / "stdout").write_text(done.stdout)
    return out


def test_the_table_has_measured_and_modelled_sizes_of_fixed_length(folder):
    text = (folder / "scaling.md").read_text()
    assert text in (folder / "stdout").read_text() and (folder / "scaling.png").stat().st_size > 10_000
    with (folder / "scaling.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["gpus"], row["source"], row["actor"], row["critic"], row["rollout"]) for row in rows] == [
        ("1", "measured", "tp1", "tp1", "1 x tp1"),
        ("2", "measured", "tp2", "tp2", "1 x tp2"),
        *((str(n), "modelled", f"tp2dp{n // 2}", f"tp2dp{n // 2}", f"{n // 2} x tp2") for n in (8, 16, 32)),
    ]
    assert [(int(row["rows"]), int(row["tokens"])) for row in rows] == [
        (8 * n, 8 * n * 29) for n in (1, 2, 8, 16, 32)
    ]
    assert "MFU" not in text and float(rows[0]["flops_per_s_updates"]) > 0, "a CPU has no MFU"
    assert float(rows[0]["efficiency"]) == 1.0 and float(rows[1]["bubble"]) == 0.0
    assert (
        all(0 < float(row["phases_of_wall"]) <= 1.0 for row in rows[:2]) and rows[2]["phases_of_wall"] == ""
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_measured_are_the_seconds_of_the_run_after_its_first_iteration(folder, ranks):
    first, second = read_metrics(folder / f"n{ranks}")
    with (folder / "scaling.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["gpus"] == str(ranks))
    assert {phase: float(row[f"{phase}_s"]) for phase in PHASES} == {
        phase: second[f"time/{phase}_s"] for phase in PHASES
    }
    assert first["rollout/response_tokens_mean"] == second["rollout/response_tokens_max"] == 5
    assert float(row["iteration_s"]) == pytest.approx(second["train/step_time_ms"] / 1e3)


def test_the_timeline_has_both_ranks_with_each_phase_once_and_no_overlap(folder):
    trace = json.loads((folder / "n2/timeline.json").read_text())
    assert (folder / "n2/timeline.png").stat().st_size > 5_000
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1}
    waits = []
    for rank in (0, 1):
        mine = sorted((event for event in complete if event["tid"] == rank), key=lambda event: event["ts"])
        assert [event["name"] for event in mine if event["cat"] == "work"] == list(PHASES)
        assert [event["args"]["phase"] for event in mine if event["cat"] == "wait"] == list(PHASES)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in zip(mine, mine[1:]))
        waits.append([(event["ts"], event["ts"] + event["dur"]) for event in mine if event["cat"] == "wait"])
    # A rank's clock starts where it leaves a barrier: one shift between the clocks has to put all in order.
    least = max(done - end for (done, _), (_, end) in zip(*waits))
    most = min(end - done for (_, end), (done, _) in zip(*waits))
    assert max(least, -SKEW_US) <= min(most, SKEW_US), "no rank ends a phase before all have done its work"
    seconds = [row for row in read_metrics(folder / "n2")][-1]
    lasting = waits[0][-1][1] / 1e6
    assert lasting >= 0.9 * sum(seconds[f"time/{phase}_s"] for phase in PHASES)


@pytest.mark.long
def test_ways_of_the_job_beside_verl_are_compared(toy, tmp_path):
    """Without verl: `benchmark verl --only ours`."""
    command = [sys.executable, "-m", "verl_megatron", "benchmark", "verl", "--only", "ours"]
    command += f"--hf {toy}/model --gpus 2 --tp 2 --rollout-tp 2 --out {tmp_path} --iterations 3".split()
    command += "--prompts 8 --samples 2 --steps 2 --prompt-tokens 16 --response-tokens 8".split()
    command += ["--way", "row_by_row", "engine.shared_prompts=false"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout and "2 x CPU rank, TP2 -> TP2: 8 prompts x 2 samples of 16 + 8" in table
    assert [line.split()[1] for line in table.splitlines() if " | " in line][2:] == ["ours", "row_by_row"]
    for way in ("ours", "row_by_row"):
        lengths = [row.get("rollout/response_tokens_mean") for row in read_metrics(tmp_path / way)]
        assert [length for length in lengths if length] == [8.0] * 3
