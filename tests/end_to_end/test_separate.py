"""A rollout world of its own: the toy job beside the same job on one set of ranks, and deaths of a world."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from parallel.runtime.store import reserved_port
from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import GONE, MARK, Ended, Started, parent_of, run
from tests.end_to_end.measured import learned
from tests.end_to_end.test_signals import listening
from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.observe.timeline import Timeline
from verl_megatron.observe.tracking import read_metrics

JOB = [
    *("actor.layout=tp1", "critic.layout=tp1", "rollout.tp=1", "run.iterations=4", "run.export=false"),
    *("run.validate_interval=2", "run.save_interval=2", "algorithm.num_mini_batches=2"),
    "rollout.adaptive_sampling=[0-5:as_set,6-:temperature:0.8]",  # samples have temperatures of their own
]
SEPARATE = "rollout.devices=1"
ARRIVED = ("async/samples_sampled", "async/samples_in_flight")  # by the time of an iteration
WRONG = (
    "rollout rank 0 generated the samples of iteration 2 with wrong weights: they should be those of "
    "version 1 and are "
)
STALE = (SEPARATE, "async.max_staleness=2", "run.iterations=6")


def command(*settings: str) -> list[str]:
    """The command that starts both worlds; the recipe's folder is the command's own default."""
    rest = [setting for setting in settings if setting not in ("--config-path", "../recipes")]
    return [sys.executable, "-m", "verl_megatron", "train", *rest]


@contextmanager
def started(folder: Path, *settings: str, wrong_weights: str = "", kills: str = "") -> Iterator[Started]:
    """Start both worlds, with their output in `folder`; they are ended with the block.

    Args:
        wrong_weights, kills: faults of planted/sitecustomize.py.
    """
    mark = uuid.uuid4().hex
    environment = environment_of_ranks() | {MARK: mark}
    planted = {"WRONG_WEIGHTS": wrong_weights, "KILLS": kills}
    if wrong_weights or kills:
        path = f"{Path(__file__).with_name('planted')}{os.pathsep}{environment['PYTHONPATH']}"
        environment |= {"PYTHONPATH": path} | {name: what for name, what in planted.items() if what}
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
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        process.wait(60)


def ended_of(folder: Path, *settings: str, timeout_s: float = 300.0) -> Ended:
    with started(folder, *settings) as both:
        ended = both.wait(timeout_s=timeout_s)
        assert not ended.code, ended.text
        assert not both.leftovers()
        return ended


@pytest.fixture(scope="module")
def together(toy, tmp_path_factory) -> Path:
    """The run on one set of ranks."""
    folder = tmp_path_factory.mktemp("together")
    run(1, TRAIN, *settings_of(toy, folder / "run", *JOB), folder=folder)
    return folder / "run"


def numbers(folder: Path, but: str = "no such metric") -> list[dict]:
    """What the run has learned, without times, and without metrics of one kind."""
    left_out = (
        "reshard/bytes",
        "async/generation_s",
        "async/rollout_wait_s",
        "async/weights_",
        "async/sample_transfer",
        "async/dealt_again",
        "async/worlds_lost",
        *ARRIVED,
        but,
    )
    rows = learned(folder)
    for row in rows:
        for key in [key for key in row if key.startswith(left_out)]:
            del row[key]
    return rows


@pytest.mark.parametrize(
    ("devices", "buffer"), [("1+2", "in_order"), pytest.param("1", "window", marks=pytest.mark.long)]
)
def test_in_turns_it_is_the_run_on_one_set_of_ranks(together, toy, tmp_path, devices, buffer):
    separate = (f"rollout.devices={devices}", f"async.buffer={buffer}")
    settings = settings_of(toy, tmp_path / "run", *JOB, *separate)
    ended = ended_of(tmp_path, *settings)
    assert numbers(tmp_path / "run", but="async/") == numbers(together)
    assert all(row["async/staleness_max"] == 0 for row in read_metrics(tmp_path / "run")[1:])
    assert ended.last_line.startswith("validation accuracy")


@pytest.fixture(scope="module")
def stale(toy, tmp_path_factory) -> Path:
    """A run with stale samples."""
    folder = tmp_path_factory.mktemp("stale")
    timeline = "run.track_metrics=[console,jsonl,timeline]"
    ended_of(folder, *settings_of(toy, folder / "run", *JOB, *STALE, timeline))
    return folder / "run"


def test_samples_are_as_stale_as_allowed_and_both_worlds_work_at_once(stale):
    assert_balanced(stale)
    rows = read_metrics(stale)[1:]
    assert [row["async/staleness_max"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert [row["async/iterations_in_flight"] for row in rows] == [2, 2, 2, 2, 1, 0]
    assert rows[0]["policy/effective_sample_size"] > 0.99  # truncated importance weights, by default
    assert all(row["policy/importance_weight"] <= 2 for row in rows)
    training, rollout = Timeline.read(stale / "timeline.json").ranks
    assert (training.world, rollout.world) == ("training", "rollout")
    assert [event.name for event in training.events].count("actor_update") == 3, "three iterations"
    generated = [event for event in rollout.events if event.name == "rollout"]
    work = [event for event in training.events if event.busy_end_s > event.start_s + 0.01]
    assert any(
        one.start_s < other.busy_end_s and other.start_s < one.busy_end_s
        for one in generated
        for other in work
    ), "both work at once"
    assert any(row["async/sample_transfer_s"] > 0 for row in rows)
    for row in rows:
        seconds = row["train/step_time_ms"] / 1e3
        assert row["async/training_wait_fraction"] == pytest.approx(row["time/rollout_s"] / seconds)
        assert row["async/weights_transfer_s"] > 0 and row["async/weights_adopt_s"] > 0
        assert row["async/sample_transfer_fraction"] >= 0  # 0: they came with an earlier iteration's
        assert 0 <= row["async/rollout_wait_fraction"] < 1 and row["async/tokens_dropped"] == 0
        of_responses = 16 * row["rollout/response_tokens_mean"] / seconds / 2  # one training GPU, one rollout
        assert row["train/throughput_tokens_per_sec_per_gpu"] > of_responses


def test_worlds_that_die_are_started_again_and_the_numbers_stay(stale, toy, tmp_path):
    settings = (*settings_of(toy, tmp_path / "run", *JOB, *STALE), "--max-restarts", "1")
    with started(tmp_path, *settings, kills="rollout=4 train=5") as both:
        wait_for(both, "step 1/6")
        assert listening(both.processes()) == {"0100007F"}, "on the loopback only"
        ended = both.wait(timeout_s=300)
        assert not ended.code and not both.leftovers(), ended.text
    assert ended.stdout.count("the rollout world ended with 137 and is started again") == 1
    assert ended.stdout.count("rollout world 2 has joined") == 1
    assert "resuming after iteration 4" in ended.text
    assert numbers(tmp_path / "run") == numbers(stale)
    assert_balanced(tmp_path / "run")


@pytest.mark.long
def test_an_error_of_training_is_recovered_like_its_death(stale, toy, tmp_path):
    """The rollout world is not told to end."""
    settings = (*settings_of(toy, tmp_path / "run", *JOB, *STALE), "--max-restarts", "1")
    with started(tmp_path, *settings, wrong_weights="error") as both:
        ended = both.wait(timeout_s=300)
        assert not ended.code and not both.leftovers(), ended.text
    assert ended.stderr.count("a planted error") == 1 and "resuming after iteration 2" in ended.text, (
        ended.text
    )
    assert numbers(tmp_path / "run") == numbers(stale)
    assert_balanced(tmp_path / "run")


def test_two_worlds_generate_without_pause_and_may_die(toy, tmp_path):
    """A window over two rollout worlds; one of them is killed between two weight syncs, then training."""
    window = ("async.max_staleness=1", "async.buffer=window", "async.partial=continue", "run.iterations=6")
    window += ("async.sync_interval=2",)
    window += ("algorithm.old_logprobs=loglinear", "algorithm.kl_in=loss", "algorithm.kl_estimator=k3")
    settings = settings_of(toy, tmp_path / "run", *JOB, "rollout.devices=1+2", *window)
    settings += ["rollout.max_num_seqs=2", "--max-restarts", "1"]
    with started(tmp_path, *settings, kills="rollout:1=12 train=5") as worlds:
        ended = worlds.wait(timeout_s=300)
        assert not ended.code and not worlds.leftovers(), ended.text
    assert ended.stdout.count("the rollout:1 world ended with 137 and is started again") == 1, ended.text
    assert "resuming after iteration" in ended.text
    assert_balanced(tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["async/staleness_max"] for row in rows) <= 1
    assert max(row["async/versions_per_sample"] for row in rows) <= 3
    assert all(0 < row["rollout/logprob_gap_mean"] < 1 and row["policy/ratio_max"] > 1 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(("devices", "rank"), [("1+2", 0), ("1+2-3", 1)], ids=str)
def test_a_world_with_a_stopped_rank_is_named_and_its_work_dealt_out(toy, tmp_path, devices, rank):
    """All of the world is stopped, or one rank of two; the other world makes its samples."""
    stopped = (f"rollout.devices={devices}", "run.stall_timeout_s=5", "async.max_staleness=1")
    stopped += ("run.validate_interval=0", "run.iterations=8")  # validation's samples are not counted
    with started(tmp_path, *settings_of(toy, tmp_path / "run", *JOB, *stopped)) as worlds:
        wait_for(worlds, "step 4/8")  # both have joined
        os.kill(pid_of(worlds, "rollout:1", rank), signal.SIGSTOP)
        ended = worlds.wait(timeout_s=300)
        assert not ended.code and not worlds.leftovers(), ended.text
    named = f"rank {rank} of the rollout:1 world gave no sign of life for "
    said = named in ended.stdout and "its work is dealt out again" in ended.stdout
    assert said or f"rank {rank} made no progress" in ended.stderr, ended.text
    assert "resuming" not in ended.text
    assert_balanced(tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert sum(row["async/dealt_again"] for row in rows) > 0 and len(rows) == 8


@pytest.mark.long
def test_a_stopped_training_world_is_ended_and_resumes(stale, toy, tmp_path):
    settings = settings_of(toy, tmp_path / "run", *JOB, *STALE, "run.stall_timeout_s=5")
    with started(tmp_path, *settings, "--max-restarts", "1") as both:
        wait_for(both, "step 4/6")
        os.kill(pid_of(both, "train"), signal.SIGSTOP)
        ended = both.wait(timeout_s=300)
        assert not ended.code and not both.leftovers(), ended.text
    assert "the training world gave no sign of life for " in ended.stdout
    assert "resuming after iteration" in ended.text
    assert numbers(tmp_path / "run") == numbers(stale)
    assert_balanced(tmp_path / "run")


def test_worlds_that_are_started_by_hand_are_the_same_run(together, toy, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_MEGATRON_TOKEN", "a secret of this run")
    settings = settings_of(toy, tmp_path / "run", *JOB, SEPARATE)
    (tmp_path / "rollout").mkdir()
    with reserved_port() as holder:
        monkeypatch.setenv("VERL_MEGATRON_BRIDGE", f"127.0.0.1:{holder.getsockname()[1]}")
        end_of_both(tmp_path, settings)
    assert numbers(tmp_path / "run", but="async/") == numbers(together)


def end_of_both(folder: Path, settings: list[str]) -> None:
    """Start each world by a command of its own, and wait for both."""
    with (
        started(folder, *settings, "--role", "train") as training,
        started(folder / "rollout", *settings, "--role", "rollout") as rollout,
    ):
        for world in (training, rollout):
            ended = world.wait(timeout_s=300)
            assert not ended.code and not world.leftovers(), ended.text


@pytest.mark.long
def test_a_training_world_that_dies_ends_the_run_and_the_same_command_resumes_it(together, toy, tmp_path):
    settings = settings_of(toy, tmp_path / "run", *JOB, SEPARATE)
    with started(tmp_path, *settings) as both:
        kill(both, "train", once="step 3/4")
        ended = both.wait(timeout_s=300)
        assert ended.code == 137 and len(ended.error_lines) == 1, ended.text
        assert "was ended by SIGKILL" in ended.error_lines[0] and "Traceback" not in ended.text
        assert not both.leftovers()
    ended_of(tmp_path, *settings)
    expected, found = learned(together), learned(tmp_path / "run")
    assert [row["policy/loss"] for row in found[1:]] == [row["policy/loss"] for row in expected[1:]]


def test_an_interrupt_ends_both_worlds_with_one_line(toy, tmp_path):
    settings = settings_of(toy, tmp_path / "run", *JOB, SEPARATE, "run.iterations=1000")
    with started(tmp_path, *settings) as both:
        wait_for(both, "step 1/1000")
        os.killpg(both.process.pid, signal.SIGINT)  # as a terminal does
        ended = both.wait(timeout_s=300)
        assert ended.code == 130 and not both.leftovers(), ended.text
    said = (ended.stdout + ended.stderr).splitlines()
    assert sum(line.startswith("interrupted") for line in said) == 1 and "Traceback" not in ended.text


def test_an_error_of_the_rollout_world_ends_the_run_with_one_message(toy, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(prompt, response, ground_truth, extra):\n    raise KeyError('no such thing')\n"
    )
    settings = settings_of(toy, tmp_path / "run", *JOB, SEPARATE, f"reward.function={reward}:score")
    with started(tmp_path, *settings, "run.validate_interval=0") as both:
        ended = both.wait(timeout_s=300)
        assert ended.code == 2 and not both.leftovers(), ended.text
    assert len(ended.error_lines) == 1 and "failed on all" in ended.error_lines[0], ended.text


def assert_balanced(folder: Path) -> None:
    """Every sample that was made was trained on or dropped, or is in flight."""
    rows = [row for row in read_metrics(folder) if "async/samples_sampled" in row]
    for row in rows:
        made, trained, dropped, in_flight = (
            row[f"async/samples_{name}"] for name in ("sampled", "trained", "dropped", "in_flight")
        )
        assert (
            made == trained + dropped + in_flight
            and trained == row["step"] * rows[0]["async/samples_trained"]
        )
    assert rows[-1]["async/samples_in_flight"] == 0


@pytest.mark.parametrize(
    ("wrong", "buffer", "found"),
    [
        ("stale", "window", "should be those of version 1 and are those of version 0"),
        *(
            pytest.param(wrong, "in_order", found, marks=pytest.mark.long)
            for wrong, found in (
                ("skipped", f"{WRONG}of no version that was published"),
                ("stale", f"{WRONG}those of version 0"),
                ("changed", f"{WRONG}of no version that was published"),
                ("unsent", "version 1 of the weights equals the one before, though the update had a"),
            )
        ),
    ],
)
def test_wrong_weights_end_the_run_before_samples_are_used(toy, tmp_path, wrong, buffer, found):
    settings = settings_of(toy, tmp_path / "run", *JOB, SEPARATE, f"async.buffer={buffer}")
    with started(tmp_path, *settings, "run.validate_interval=0", wrong_weights=wrong) as both:
        ended = both.wait(timeout_s=300)
        assert ended.code and not both.leftovers(), ended.text
    (line,) = ended.error_lines
    assert found in line, ended.text
    trained = [row["step"] for row in read_metrics(tmp_path / "run") if "policy/loss" in row]
    assert trained == [1] * (wrong != "unsent")


def kill(both: Started, role: str, *, once: str, after_s: float = 0.0, timeout_s: float = 300.0) -> None:
    """Kill the first rank of a world some time after a line of the run was printed."""
    wait_for(both, once, timeout_s=timeout_s)
    time.sleep(after_s)
    os.kill(pid_of(both, role), signal.SIGKILL)


def wait_for(both: Started, text: str, *, timeout_s: float = 300.0) -> None:
    """Wait until a run has printed something."""
    deadline = time.monotonic() + timeout_s
    while text not in (said := (both.folder / "stdout").read_text()):
        assert time.monotonic() < deadline and both.process.poll() is None, said
        time.sleep(0.05)


def pid_of(both: Started, role: str, rank: int = 0) -> int:
    """Process id of a rank of a world, which may be about to be started again."""
    deadline = time.monotonic() + 300
    while (pid := rank_of(both, role, rank)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pid


def rank_of(both: Started, role: str, number: int = 0) -> int | None:
    """Process id of a rank of a world, if it is running."""
    for pid, environment in both.processes().items():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            launcher = Path(f"/proc/{parent_of(pid)}/cmdline").read_bytes()
        except GONE:
            continue
        is_rank = environment.get("RANK") == str(number) and b"verl_megatron.train" in words
        of_launcher = b"parallel.runtime.launch" in launcher
        if is_rank and of_launcher and words[words.index(b"--role") + 1] == role.encode():
            return pid
    return None
