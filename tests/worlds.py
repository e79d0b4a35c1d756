"""Run a worker script on a small world of processes, one per rank, and return its output."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from parallel import device
from tests.forked import Server

ROOT = Path(__file__).resolve().parents[1]


def torchrun(nproc: int, *arguments: object) -> list[str]:
    """The command that starts `nproc` ranks of one host."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [sys.executable, *launcher, *map(str, arguments)]


OF_A_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_of_ranks() -> dict[str, str]:
    """This process's environment outside any world, with the repository on the path, one thread a rank."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    outside = {name: value for name, value in os.environ.items() if name not in OF_A_WORLD}
    return {**outside, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": path}


def run_world(
    worker: str | Path,
    nproc: int,
    *args: object,
    timeout: float = 240,
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> str:
    """Run `worker` (a path, relative to the repository's root or absolute) on `nproc` processes.

    Args:
        args: handed to the worker as command-line arguments, the same for each process.
        timeout: seconds after which every process of the world is killed and the test fails.
        env: added to the environment.
        fresh: start new interpreters with torchrun, as on GPUs, instead of forking ranks that have imported
            everything.

    Returns:
        stdout and stderr of all processes, as they came.

    Raises:
        AssertionError: a process failed or the time ran out; the message ends with the output.
    """
    command = [str(ROOT / worker), *map(str, args)]
    environment = environment_of_ranks() | (env or {})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "output")
        if fresh or device.is_gpu():
            codes = _launched(torchrun(nproc, *command), environment, log, timeout)
        else:
            codes = forked(command, nproc, environment=environment, stdout=log, timeout_s=timeout)
        output = log.read_text()
    assert not any(codes), f"{worker} on {nproc} processes: exit codes {codes}:\n{output[-8000:]}"
    return output


def forked(
    command: list[str], nproc: int, *, stdout: Path, stderr: Path | None = None, **options
) -> list[int]:
    """Run a script or "-m MODULE" on ranks forked from this process's server; see `Server.run`."""
    return _server().run(command, nproc, stdout=stdout, stderr=stderr or stdout, **options)


@functools.cache
def _server() -> Server:
    return Server(ROOT)


def _launched(command: list[str], environment: dict[str, str], log: Path, timeout: float) -> list[int]:
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        return [process.wait(timeout)]
    except subprocess.TimeoutExpired:
        # On SIGTERM torchrun ends its ranks, which have sessions of their own; on SIGKILL it cannot.
        process.terminate()
        return [process.wait(60) or -1]
