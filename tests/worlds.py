"""Start a small world of gloo processes: one worker script, one process per rank, output on failure."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(nproc: int, *arguments: object) -> list[str]:
    """The command that starts `nproc` ranks of one host."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [sys.executable, *launcher, *map(str, arguments)]


def environment_of_ranks() -> dict[str, str]:
    """This process's environment, with the repository on the path and one thread a rank."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": path}


def run_world(
    worker: str | Path, nproc: int, *args: object, timeout: float = 240, env: dict[str, str] | None = None
) -> str:
    """Run `worker` (a path, relative to the repository's root or absolute) on `nproc` processes of torchrun.

    Args:
        args: handed to the worker as command-line arguments, the same for each process.
        timeout: seconds after which every process of the world is killed and the test fails.
        env: added to the environment.

    Returns:
        stdout and stderr of all processes, as they came.

    Raises:
        AssertionError: a process failed or the time ran out; the message ends with the output.
    """
    command = torchrun(nproc, ROOT / worker, *args)
    environment = environment_of_ranks() | (env or {})
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # On SIGTERM torchrun ends its ranks, which have sessions of their own; on SIGKILL it cannot.
        process.terminate()
        output, _ = process.communicate(timeout=60)
        raise AssertionError(
            f"{worker} on {nproc} processes did not end within {timeout} s:\n{output[-8000:]}"
        ) from None
    assert process.returncode == 0, (
        f"{worker} on {nproc} processes ended with code {process.returncode}:\n{output[-8000:]}"
    )
    return output
