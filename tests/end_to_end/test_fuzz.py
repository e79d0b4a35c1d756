"""A part of the fuzz (tests/fuzz); the whole: python -m tests.fuzz --cases 1000."""

import os
import subprocess
import sys

from tests.worlds import ROOT

CASES = 60


def test_bad_inputs_are_refused_in_a_sentence_and_good_ones_are_not():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "1", "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("fuzz seed 1: ")
