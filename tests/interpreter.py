"""Triton's interpreter, in which kernels run on a CPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.worlds import ROOT

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="no Triton here: the kernels run where there are GPUs, and in its interpreter",
)


def run_interpreted(program: str) -> None:
    """Run `program` in a process of its own, as Triton reads TRITON_INTERPRET when it is imported.

    The program prints "interpreted" at its end.
    """
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0 and "interpreted" in ran.stdout, ran.stderr
