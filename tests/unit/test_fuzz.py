"""What the fuzz calls right and wrong; its runner is shown cases of every kind, in a process of its own."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.fuzz.__main__ import KINDS, counts_line, make_case, names_of
from tests.fuzz.case import (
    ACCEPTED,
    EITHER,
    FAULTS,
    HANG,
    LEFT,
    LONG,
    OTHER,
    REFUSED,
    SILENT,
    TRACEBACK,
    UNCLEAR,
    UNNAMED,
    WRONGLY,
    Case,
    Ended,
    verdict,
)
from tests.worlds import ROOT

ERROR = "error: run.seed=abc has a wrong type\n  - and more\n"

# Ends of processes on which the runner is tried: what each does, and what has to be found.
ENDS = {
    "refused": ("print('error: x', file=sys.stderr); sys.exit(2)", REFUSED),
    "accepted": ("print('dry run: fine')", SILENT),
    "raises": ("raise ValueError('x')", TRACEBACK),
    "ends in silence": ("os._exit(0)", SILENT),
    "sleeps": ("time.sleep(60)", HANG),
    "kills its parent": ("os.kill(os.getppid(), 15); os.killpg(os.getppid(), 15); time.sleep(60)", OTHER),
    "closes its output": ("os.close(1); os.close(2); print('x', flush=True)", OTHER),
    "leaves a child": (
        "subprocess.Popen(['sleep', '60'], start_new_session=True); print('error: x'); sys.exit(2)",
        LEFT,
    ),
    "leaves a fork": ("os.fork() or time.sleep(60); print('error: x', flush=True); sys.exit(2)", LEFT),
    "eats memory": ("bytearray(1 << 40)", TRACEBACK),
}
RUNNER = """
import json, os, subprocess, sys, time
from pathlib import Path
from tests.fuzz import runner
from tests.fuzz.case import REFUSED, Case, verdict

runner.LIMIT_S, runner.PATIENCE_S = 10.0, 0.5
ends = json.loads(sys.argv[2])
make = lambda does: lambda: Case(name=does, expected=REFUSED, act=lambda: exec(does, globals()))
cases = [(name, make(does)) for name, does in ends.items()]
ran = runner.run_cases(cases, logs=Path(sys.argv[1]), at_once=4)
found = {name: verdict(case, ended) for name, case, ended in ran}
print(json.dumps(found))
"""


def judged(expected: str, code: int | None, stdout: str = "", stderr: str = "", *, names=(), left=()) -> str:
    case = Case(name="", expected=expected, names=names, act=lambda: None)
    return verdict(case, Ended(code=code, stdout=stdout, stderr=stderr, seconds=0.1, left=list(left)))


@pytest.mark.parametrize(
    ("found", "as_it_should"),
    [
        (judged(REFUSED, 2, stderr=ERROR, names=("run.seed",)), REFUSED),
        (judged(REFUSED, 2, stderr=ERROR, names=(("data", "wrong type"),)), REFUSED),
        (judged(ACCEPTED, 0, "dry run: 4 ranks"), ACCEPTED),
        (judged(EITHER, 0), EITHER),
        (judged(EITHER, 2, stderr=ERROR), EITHER),
        (judged(REFUSED, 3, "It does not fit: run.seed", names=("run.seed",)), REFUSED),
        (judged(REFUSED, 0), SILENT),
        (judged(REFUSED, None), HANG),
        (judged(EITHER, 2, stderr=ERROR + "Traceback (most recent call last):\n"), TRACEBACK),
        (judged(ACCEPTED, 2, stderr=ERROR), WRONGLY),
        (judged(REFUSED, 2, stderr=ERROR, names=("run.seed", "run.iterations")), UNNAMED),
        (judged(EITHER, 0, "fine", names=("assistant",)), UNNAMED),
        (judged(REFUSED, 2, stderr="usage: train.py\ntrain.py: error: no\n"), UNCLEAR),
        (judged(REFUSED, 2, stderr=ERROR + ERROR), UNCLEAR),
        (judged(REFUSED, 2, "dry run: 4 ranks", ERROR), UNCLEAR),
        (judged(ACCEPTED, 0, stderr=ERROR), UNCLEAR),
        (judged(EITHER, 1), OTHER),
        (judged(EITHER, -11), OTHER),
        (judged(REFUSED, 2, stderr=ERROR + "x" * 100_000), LONG),
        (judged(REFUSED, 2, stderr=ERROR, left=["sleep 300"]), LEFT),
    ],
)
def test_what_comes_of_a_case_is_called_by_its_name(found, as_it_should):
    assert found == as_it_should


def test_the_runner_finds_what_became_of_each_process(tmp_path):
    ends = json.dumps({name: does for name, (does, _) in ENDS.items()})
    command = [sys.executable, "-c", RUNNER, tmp_path, ends]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: expected for name, (_, expected) in ENDS.items()}


@pytest.mark.parametrize("kind", ["settings", "lines", "layouts", "environment"])
def test_a_number_is_the_same_case_whatever_runs_beside_it(tmp_path, kind):
    def described(numbers, *, seed: int) -> dict[int, tuple]:
        scratch = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        scratch.mkdir()
        cases = {
            n: make_case(f"{kind}:{n}", seed=seed, toy=tmp_path / "toy", scratch=scratch) for n in numbers
        }
        return {
            n: (case.name, case.expected, case.names)
            for n, case in cases.items()
            if str(tmp_path) not in case.name
        }

    whole, part = described(range(20), seed=1), described(range(10, 15), seed=1)
    assert part.items() <= whole.items() and part
    assert described(range(20), seed=2) != whole


def test_every_kind_has_its_share_and_enough_cases():
    shares = Counter(name.partition(":")[0] for name in names_of(list(KINDS), 1000))
    assert shares.keys() == KINDS.keys() and shares.total() >= 1000
    assert sum(share for _, share in KINDS.values()) == 100
    assert all(len(module.mutations()) >= shares[kind] * 0.6 for kind, (module, _) in KINDS.items())


def test_every_setting_is_spoiled_in_each_way():
    from tests.fuzz.settings import SCHEMAS, described, mutations

    spoiled = Counter(one.keywords.get("setting") for one in mutations())
    for program, schema in SCHEMAS.items():
        for section, name, _ in described(schema):
            assert spoiled[f"{section}.{name}"] >= 4, f"{program}: {section}.{name}"


def test_the_counts_are_one_line():
    line = counts_line(1, Counter({REFUSED: 1800, ACCEPTED: 20, SILENT: 3}), 12.4)
    assert line.startswith(
        "fuzz seed 1: 1,823 cases in 12 s: 1,800 refused as they should, 20 accepted as they should"
    )
    assert (
        "3 silently accepted" in line
        and "0 hang" in line
        and "\n" not in line
        and all(fault in line for fault in FAULTS)
    )
