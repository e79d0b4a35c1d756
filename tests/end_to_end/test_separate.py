"""A rollout world of its own: the toy job beside the same job on one set of ranks, and deaths of a world."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import MARK, Ended, Started, run
from tests.end_to_end.measured import learned
from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.observe.tracking import read_metrics

JOB = [
    *("actor.layout=tp1", "critic.layout=tp1", "rollout.tp=1", "run.iterations=4", "run.export=false"),
    *("run.validate_interval=2", "run.save_interval=2", "algorithm.num_mini_batches=2"),
]
SEPARATE = "rollout.devices=1"


def command(*settings: str) -> list[str]:
    """The command that starts both worlds; the recipe's folder is the command's own default."""
    rest = [setting for setting in settings if setting not in ("--config-path", "../recipes")]
    return [sys.executable, "-m", "verl_megatron", "train", *rest]


@contextmanager
def started(folder: Path, *settings: str) -> Iterator[Started]:
    """Start both worlds, with their output in `folder`; they are ended with the block."""
    mark = folder.name
    environment = environment_of_ranks() | {MARK: mark}
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command(*settings),
            cwd=ROOT,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    both = Started(process=process, folder=folder, mark=mark)
    try:
        yield both
    finally:
        for pid in both.processes():
            os.kill(pid, signal.SIGKILL)
        process.wait(60)


def ended_of(folder: Path, *settings: str) -> Ended:
    with started(folder, *settings) as both:
        ended = both.wait(timeout_s=120)
        assert not ended.code, ended.text
        assert not both.leftovers()
        return ended


@pytest.fixture(scope="module")
def together(toy, tmp_path_factory) -> Path:
    """The run on one set of ranks."""
    folder = tmp_path_factory.mktemp("together")
    run(1, TRAIN, *settings_of(toy, folder / "run", *JOB), folder=folder)
    return folder / "run"


def test_in_turns_it_is_the_run_on_one_set_of_ranks(together, toy, tmp_path):
    ended = ended_of(tmp_path, *settings_of(toy, tmp_path / "run", *JOB, SEPARATE))
    expected, found = learned(together), learned(tmp_path / "run")
    for row in [*expected, *found]:
        for key in [key for key in row if key == "reshard/bytes" or key.startswith("async/")]:
            del row[key]
    assert found == expected
    assert all(row["async/staleness_max"] == 0 for row in read_metrics(tmp_path / "run")[1:])
    assert ended.last_line.startswith("validation accuracy")


def test_samples_are_as_stale_as_allowed_and_both_worlds_work_at_once(toy, tmp_path):
    settings = settings_of(toy, tmp_path / "run", *JOB, SEPARATE, "async.max_staleness=3", "run.iterations=6")
    ended_of(tmp_path, *settings)
    rows = read_metrics(tmp_path / "run")[1:]
    assert [row["async/staleness_max"] for row in rows] == [0, 1, 2, 3, 3, 3]
    assert [row["async/iterations_in_flight"] for row in rows] == [3, 3, 3, 2, 1, 0]
    assert rows[0]["policy/effective_sample_size"] > 0.99  # truncated importance weights, by default
    assert all(row["policy/importance_weight"] <= 2 for row in rows)


@pytest.mark.parametrize("role", ["train", "rollout"])
def test_a_world_that_dies_ends_the_other_and_a_restart_goes_on(together, toy, tmp_path, role):
    settings = settings_of(toy, tmp_path / "run", *JOB, SEPARATE)
    with started(tmp_path, *settings) as both:
        deadline = time.monotonic() + 100
        while "step 3/4" not in (tmp_path / "stdout").read_text():
            assert time.monotonic() < deadline and both.process.poll() is None, (
                tmp_path / "stdout"
            ).read_text()
            time.sleep(0.05)
        os.kill(rank_of(both, role), signal.SIGKILL)
        ended = both.wait(timeout_s=60)
        assert ended.code == 137 and len(ended.error_lines) == 1, ended.text
        assert "was ended by SIGKILL" in ended.error_lines[0] and "Traceback" not in ended.text
        assert not both.leftovers()
    ended_of(tmp_path, *settings)
    expected, found = learned(together), learned(tmp_path / "run")
    assert [row["policy/loss"] for row in found[1:]] == [row["policy/loss"] for row in expected[1:]]


def rank_of(both: Started, role: str) -> int:
    """Process id of the first rank of a world."""
    for pid, environment in both.processes().items():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        is_rank = environment.get("RANK") == "0" and b"verl_megatron.train" in words
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        of_launcher = b"parallel.runtime.launch" in Path(f"/proc/{parent}/cmdline").read_bytes()
        if is_rank and of_launcher and words[words.index(b"--role") + 1] == role.encode():
            return pid
    raise AssertionError(f"no rank of {role}")
