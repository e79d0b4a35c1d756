"""A run goes on by itself after a rank was killed, at whatever moment, and ends well when it is asked to."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from parallel.checkpoint.folders import write_record
from tests.end_to_end.conftest import TRAIN, adaptive_settings
from tests.end_to_end.launch import start
from tests.end_to_end.measured import learned
from tests.worlds import ROOT

PLACES = ("actor.layout=tp2", "critic.layout=pp2", "rollout.tp=2")


@pytest.mark.parametrize(("moments", "least"), [(2, 1), pytest.param(4, 3, marks=pytest.mark.long)])
def test_killed_at_random_moments_it_learns_the_same_to_the_bit(tmp_path, moments, least):
    """Checkpoints are written while training goes on, so that kills strike in that, too."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.end_to_end.kill_worker",
        str(tmp_path),
        "--moments",
        str(moments),
        "--settings",
        "run.async_save=true",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
    }
    ended = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=1200)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    kills, struck = re.search(r"(\d+) kills in \d+ attempts: (\{.*\})", ended.stdout).groups()
    assert int(kills) >= least and len(struck.split(",")) >= least, (
        ended.stdout
    )  # most of them; where they strike is chance


@pytest.fixture(scope="module")
def undisturbed(toy, tmp_path_factory):
    """Four iterations on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = start(2, TRAIN, *adaptive_settings(toy, folder / "run"), *PLACES, folder=folder).wait(
        timeout_s=300
    )
    assert ended.code == 0, ended.text
    return folder / "run"


@pytest.mark.long
def test_torchrun_starts_it_again(undisturbed, toy, tmp_path, monkeypatch):
    """One attempt hangs, two are killed; weights, optimizer, schedules and random states continue."""
    kills = [
        {"rank": 0, "operation": "advantages", "entry": 3, "delay_s": None},
        {"rank": 1, "operation": "actor_update", "entry": 1, "delay_s": 0},
        {"rank": 0, "operation": "save", "entry": 1, "delay_s": 0.01},
    ]
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    monkeypatch.setenv("KILLS", str(tmp_path / "kills.json"))
    settings = [*adaptive_settings(toy, tmp_path / "run"), *PLACES, "run.stall_timeout_s=20"]
    started = start(
        2, "tests.end_to_end.killed_train", *settings, folder=tmp_path, launcher=["--max-restarts=3"]
    )
    ended = started.wait(timeout_s=500)
    assert ended.code == 0, ended.text
    assert [line.split()[0] for line in (tmp_path / "kills.log").read_text().splitlines()][:2] == [
        "advantages",
        "actor_update",
    ]
    named = (
        r"rank 0 made no progress for \d+ s: it is in advantages \(iteration 3\), at struck .*, "
        r"rank 1 waits for it in advantages"
    )
    assert len(re.findall(named, ended.stderr)) == 1, ended.text
    assert (
        " in struck\n" in (tmp_path / "run/stacks/rank_0.txt").read_text()
        and (tmp_path / "run/stacks/rank_1.txt").stat().st_size
    )
    assert (
        ended.stdout.count("resuming after iteration 2") == 3
        and "with the samples collected for the next" in ended.stdout
    ), ended.text
    assert "command_line.py" not in ended.stderr, ended.text  # the rank that lost its peer adds no traceback
    expected = learned(undisturbed)
    assert [row["step"] for row in expected] == [0, 1, 2, 3, 4] and learned(tmp_path / "run") == expected
    assert len({row["kl/coef"] for row in expected[1:]}) == 4, "the KL coefficient did not adapt"
    assert not started.leftovers()


def test_sigterm_saves_and_exits_with_0(undisturbed, toy, tmp_path, monkeypatch):
    """To one rank, in the middle of an iteration; the same command then goes on, to the same end."""
    asked = {"rank": 1, "operation": "actor_update", "entry": 2, "delay_s": 0, "signal": "SIGTERM"}
    (tmp_path / "kills.json").write_text(json.dumps([asked]))
    monkeypatch.setenv("KILLS", str(tmp_path / "kills.json"))
    settings = [*adaptive_settings(toy, tmp_path / "run"), *PLACES, "run.save_interval=3"]
    started = start(2, "tests.end_to_end.killed_train", *settings, folder=tmp_path)
    ended = started.wait(timeout_s=300)
    assert ended.code == 0 and not ended.error_lines, ended.text
    (step,) = re.findall(r"ending after iteration (\d), as SIGTERM asks for", ended.stdout)
    assert (tmp_path / f"run/checkpoint/step_{step}/manifest.json").exists() and 1 <= int(step) < 4
    assert not started.leftovers() and not (tmp_path / "run/actor").exists()

    again = start(2, TRAIN, *settings, folder=tmp_path / "again").wait(timeout_s=300)
    assert again.code == 0 and f"resuming after iteration {step}" in again.stdout, again.text
    assert learned(tmp_path / "run") == learned(undisturbed)


def test_verify_names_what_differs(undisturbed, toy, tmp_path):
    """The first iteration after a checkpoint, repeated on its samples, gives the recorded metrics.

    The one metric that was changed in the record is reported.
    """
    shutil.copytree(undisturbed / "checkpoint/step_2", tmp_path / "run/checkpoint/step_2")
    path = tmp_path / "run/checkpoint/step_2"
    recorded = json.loads((path / "recorded.json").read_text())["told"]
    assert {
        "policy/loss",
        "critic/grad_norm",
        "kl/ref",
        "actor/norm/value",
        "critic/norm/exp_avg_sq",
    } <= recorded.keys()
    write_record(path, "recorded", recorded | {"actor/norm/exp_avg": recorded["actor/norm/exp_avg"] * 1.001})
    ended = start(
        2, TRAIN, *adaptive_settings(toy, tmp_path / "run"), *PLACES, "--verify", folder=tmp_path
    ).wait(timeout_s=300)
    assert ended.code != 0 and len(ended.error_lines) == 1, ended.text
    assert (
        f"differs in 1 of {len(recorded)} numbers: actor/norm/exp_avg=" in ended.error_lines[0]
        and "run.resume=newest" in ended.error_lines[0]
    )
