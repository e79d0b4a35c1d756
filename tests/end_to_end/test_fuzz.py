"""A part of the fuzz (tests/fuzz); the whole: python -m tests.fuzz --cases 1000."""

import os
import subprocess
import sys

import pytest

from tests.worlds import ROOT

CASES = {"": 60, "commands reports extended": 70}  # of which kinds; "": of all


@pytest.mark.parametrize("kinds", CASES)
def test_bad_inputs_are_refused_in_a_sentence_and_good_ones_are_not(kinds):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "1", "--cases", str(CASES[kinds])]
    command += ["--kind", *kinds.split()] if kinds else []
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("fuzz seed 1: ")
