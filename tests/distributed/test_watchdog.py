"""The watchdog names the rank that others wait for; preemption ends all ranks at one iteration."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel.runtime.verdict import ENDED, Report, verdict
from parallel.runtime.watchdog import EXIT_STATUS, Watchdog
from tests.distributed.watchdog_worker import END_S, NUM_RANKS, SCENARIOS, UNDER_TORCHRUN, VICTIM
from tests.end_to_end.launch import Started, start
from tests.one_rank import ONE_RANK
from tests.worlds import ROOT

WORKER = "tests.distributed.watchdog_worker"
START_S = 240  # to import
OTHERS = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
HANGS = re.compile(r"^error: (ranks? .* (?:made no progress|went on).*)$", re.MULTILINE)


# ---- who is to blame -------------------------------------------------------------------------------------


def report(
    operation: str = "rollout",
    sequence: int = 1,
    *,
    idle_s: float = 70,
    timeout_s: float = 60,
    waits: bool = True,
) -> Report:
    return Report(
        operation=operation,
        timeout_s=timeout_s,
        sequence=sequence,
        iteration=5,
        idle_s=idle_s,
        waits=waits,
        at="here (file.py:1)",
    )


AHEAD = report("actor_update", 3)
VERDICTS = {
    "the one behind": ([AHEAD, report(), AHEAD], "rank 1 made no progress for 70 s: it is in rollout"),
    "all that are behind": (
        [AHEAD, report(waits=False), report(waits=False)],
        "ranks 1, 2 made no progress for 70 s: they are in rollout",
    ),
    "the one behind outside collectives": (
        [AHEAD, report(), report(waits=False)],
        "rank 2 made no progress for 70 s: it is in rollout",
    ),
    "the one behind still has time": ([AHEAD, report(timeout_s=600), AHEAD], None),
    "the one behind moves": ([AHEAD, report(idle_s=1), AHEAD], None),
    "another at the same place moves": ([report(), report(idle_s=1), AHEAD], None),
    "the one outside collectives": ([report(), report(), report(waits=False)], "rank 2 made no progress"),
    "the one in another operation": (
        [report(), report("save"), report()],
        "rank 1 made no progress for 70 s: it is in save",
    ),
    "two branches, two ranks": (
        [report(), report("save")],
        "ranks 0, 1 made no progress for 70 s: rank 0 is in rollout",
    ),
    "all in collectives": ([report(), report()], "ranks 0, 1 made no progress for 70 s: they are in rollout"),
    "the one that went on": (
        [report(), AHEAD, report()],
        "rank 1 went on without the others, which made no progress for 70 s",
    ),
    "the one that has ended": (
        [report(), report("the end", ENDED), report()],
        "rank 1 went on without the others",
    ),
    "all have ended": ([report("the end", ENDED)] * 2, None),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(case):
    reports, expected = VERDICTS[case]
    said = verdict(dict(enumerate(reports)), silent={})
    assert said is None if expected is None else said.startswith(expected), said


def test_a_silent_rank_is_named_before_one_that_waits():
    said = verdict({0: report(idle_s=0), 1: report("save", 9, idle_s=0)}, silent={1: 63.0})
    assert said.startswith("rank 1 made no progress for 63 s and gave no sign of life") and said.endswith(
        "rank 0 waits for it in rollout (iteration 5)"
    )


def test_verdict_counts_all_that_wait():
    said = verdict(
        {
            0: AHEAD,
            1: AHEAD,
            2: report(waits=False),
            3: dataclasses.replace(AHEAD, operation="save", sequence=7),
        },
        silent={},
    )
    assert said.endswith(
        "ranks 0, 1 wait for it in actor_update (iteration 5), rank 3 waits for it in save (iteration 5)"
    )


@pytest.mark.parametrize("timeout_s", [-1, float("inf"), float("nan")])
def test_refuses_what_is_no_timeout(tmp_path, timeout_s):
    with pytest.raises(ValueError, match="timeout_s="):
        Watchdog(timeout_s, tmp_path, ONE_RANK)


def test_operations_nest_and_keep_their_timeouts(tmp_path):
    watchdog = Watchdog(0, tmp_path, ONE_RANK)
    with pytest.raises(ValueError, match="'start'"), watchdog.operation("start", timeout_s=0):
        pass
    with watchdog, watchdog.operation("start", timeout_s=600):
        with watchdog.operation("save"):
            assert (watchdog._position.operation, watchdog._position.timeout_s) == ("save", 600)
        assert watchdog._position.operation == "start"
    assert (watchdog._position.sequence, watchdog._position.timeout_s) == (4, 0)
    assert not list(tmp_path.iterdir()) and not dist.is_initialized()


# ---- worlds of four ranks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory) -> Iterator[dict[str, Started]]:
    """Scenarios under torchrun."""
    folders = {name: tmp_path_factory.mktemp(name) for name in UNDER_TORCHRUN}
    started = {
        name: start(NUM_RANKS, WORKER, str(folder), name, folder=folder / "output")
        for name, folder in folders.items()
    }
    yield started
    for command in started.values():
        if command.process.poll() is None:
            command.process.terminate()
            command.process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All scenarios at the same time: their ranks mostly wait."""
    folder = tmp_path_factory.mktemp("watchdog")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment["TORCH_CPP_LOG_LEVEL"] = (
        "ERROR"  # that a name server did not answer is torch's to say, and no output of ours
    )
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER, str(folder), *SCENARIOS],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.wait(START_S + END_S) == 0
        with pytest.raises(ProcessLookupError):  # nobody of its session is left
            os.killpg(process.pid, 0)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return folder


def ended(folder: Path, name: str) -> tuple[list[int | None], str]:
    return json.loads((folder / name / "codes").read_text()), (folder / name / "output").read_text()


# What the one sentence says of the victim.
HUNG = {
    "sleeping": r"rank 2 made no progress for \d+ s: it is in rollout \(iteration 5\), at "
    r"sleep_forever \(watchdog_worker.py:\d+\), ranks 0, 1, 3 wait for it in actor_update",
    "same_operation": r"rank 2 made no progress for \d+ s: it is in actor_update \(iteration 5\), at "
    r"sleep_forever",
    "other_collective": r"rank 2 made no progress for \d+ s: it is in critic_update \(iteration 5\), "
    r"at meet .*, ranks 0, 1, 3 wait for it in actor_update",
    "skipped": r"rank 2 went on without the others, which made no progress for \d+ s: it is in "
    r"actor_update .*, ranks 0, 1, 3 wait for it in log_probs",
    "stopped": r"rank 2 made no progress for \d+ s and gave no sign of life .*: it is in "
    r"(actor_update|no named operation) .*, ranks 0, 1, 3 wait for it in actor_update",
    "keeps_lock": r"rank 2 made no progress for \d+ s and gave no sign of life .*, ranks 0, 1, 3 "
    r"wait for it in actor_update",
}


@pytest.mark.parametrize("name", HUNG)
def test_the_stuck_rank_is_named_once(folder, name):
    _, output = ended(folder, name)
    said = HANGS.findall(output)
    assert (
        len(said) == 1
        and re.match(HUNG[name], said[0])
        and said[0].endswith(f"stacks in {folder / name / 'stacks'}")
    ), output


@pytest.mark.parametrize("name", HUNG)
def test_every_rank_that_can_leaves_its_stacks_and_ends(folder, name):
    codes, output = ended(folder, name)
    victims = {"stopped": None, "keeps_lock": 1}.get(
        name, EXIT_STATUS
    )  # the test kills a stopped rank; faulthandler ends the other
    assert codes[VICTIM] == victims and [codes[rank] for rank in OTHERS] == [EXIT_STATUS] * len(OTHERS), (
        output
    )
    for rank in range(NUM_RANKS):
        stacks = (folder / name / "stacks" / f"rank_{rank}.txt").read_text()
        if (name, rank) == ("stopped", VICTIM):
            assert stacks == ""
        else:
            assert f" in {name}\n" in stacks and "watchdog.py" in stacks, (
                stacks
            )  # the main thread and the watching one


def test_each_set_of_ranks_has_a_watchdog_of_its_own(folder):
    codes, output = ended(folder, "halves")
    said = HANGS.findall(output)
    expected = r"rank 2 made no progress for \d+ s: it is in rollout .*, rank 1 waits for it in actor_update"
    assert len(said) == 1 and re.match(expected, said[0]), output
    assert codes == [0, EXIT_STATUS, EXIT_STATUS, 0]
    stacks = {path.name for path in (folder / "halves/stacks").iterdir()}
    assert stacks == {"rank_1.txt", "rank_2.txt"}


@pytest.mark.parametrize("name", ["slow", "off"])
def test_slow_ranks_are_left_alone(folder, name):
    codes, output = ended(folder, name)
    assert codes == [0] * NUM_RANKS and output == ""
    assert not list((folder / name).glob("stacks/*"))


def test_sigterm_to_one_rank_ends_all_at_the_same_iteration(folder):
    codes, output = ended(folder, "preempted")
    assert codes == [0] * NUM_RANKS, output
    assert output.count(f"rank {VICTIM}: SIGTERM") == output.count("SIGTERM") == 1
    assert sorted(re.findall(r"rank (\d) ends after iteration (\d+)", output)) == [
        (str(rank), "3") for rank in range(NUM_RANKS)
    ]


def test_torchrun_ends_with_the_status_and_leaves_nothing_behind(torchrun):
    hung = torchrun["sleeping"]
    result = hung.wait(timeout_s=START_S + END_S)
    assert result.code != 0 and len(re.findall(HUNG["sleeping"], result.stderr)) == 1, result.text
    assert re.search(rf"exitcode *: {EXIT_STATUS}\b", result.stderr), result.text
    stacks = hung.folder.parent / "stacks"
    assert all(" in sleeping\n" in (stacks / f"rank_{rank}.txt").read_text() for rank in range(NUM_RANKS))
    assert not hung.leftovers()


def test_torchrun_passes_sigterm_on_and_waits_for_the_iteration(torchrun):
    started = torchrun["terminated"]
    deadline = time.monotonic() + START_S
    while not (started.folder.parent / "ready").exists():
        assert time.monotonic() < deadline and started.process.poll() is None
        time.sleep(0.05)
    started.process.terminate()
    result = started.wait(timeout_s=END_S)
    assert result.code != 0  # torchrun's own way to end by a signal
    assert (
        len(set(re.findall(r"rank \d ends after iteration (\d+)", result.stdout))) == 1
        and result.stdout.count("ends after") == NUM_RANKS
    ), result.text
    assert not started.leftovers()
