"""Worlds whose ranks are forked after the imports; they end as under torchrun, and save most of the time."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from parallel.runtime.store import reserved_port

PATIENCE_S = 15  # from SIGTERM to SIGKILL, once a rank has failed
LEEWAY_S = 60  # a world ends its ranks on time, and the first one waits for the imports


class Server:
    """Worlds of scripts and modules, each a child of one process with tests/preloaded.py in memory."""

    def __init__(self, folder: Path):
        """Commands run in `folder`."""
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preloaded"])

    def run(
        self,
        command: Sequence[str],
        nproc: int,
        *,
        stdout: Path,
        stderr: Path,
        environment: dict[str, str],
        timeout_s: float,
    ) -> list[int]:
        """Run `command`, "-m MODULE ..." or "SCRIPT ...", on `nproc` ranks.

        The process starts with the first world, in that one's environment.

        Returns:
            Exit codes in the order of ends.
        """
        results = Path(tempfile.mkstemp()[1])
        options = dict(nproc=nproc, stdout=stdout, stderr=stderr, timeout_s=timeout_s)
        arguments = (command, self._folder, results, options, environment)
        world = self._context.Process(target=_world, args=arguments)
        before = dict(os.environ)
        os.environ |= environment
        try:
            world.start()
        finally:
            os.environ.clear()
            os.environ |= before
        try:
            world.join(timeout_s + PATIENCE_S + LEEWAY_S)
            return [int(code) for code in results.read_text().split()] or [-1]
        finally:
            world.kill()
            results.unlink()


def _world(
    command: Sequence[str], folder: Path, results: Path, options: dict, environment: dict[str, str]
) -> None:
    os.chdir(folder)
    codes = run_ranks(lambda: _run(command), list(command), **options, **environment)
    results.write_text(" ".join(map(str, codes)))


def _run(command: Sequence[str]) -> None:
    """Run a module or script as Python's command line does."""
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def run_ranks(
    run: Callable[[], None],
    arguments: list[str],
    *,
    nproc: int,
    stdout: Path,
    stderr: Path | None = None,
    timeout_s: float,
    **environment: str,
) -> list[int]:
    """Exit codes in the order of ends; after one error the others get SIGTERM, then SIGKILL.

    Args:
        run: what each rank does, with `arguments` as `sys.argv`.
        stderr: by default where stdout goes.
        timeout_s: after which all are killed.
    """
    with reserved_port() as holder:
        os.environ |= {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(holder.getsockname()[1]),
            **environment,
        }
        files = [stdout, stderr or stdout]
        return _codes_of({_fork(rank, run, arguments, files) for rank in range(nproc)}, timeout_s)


def _codes_of(running: set[int], timeout_s: float) -> list[int]:
    """Exit codes of child processes, as of `run_ranks`."""
    codes, deadline = [], time.monotonic() + timeout_s
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            running.discard(child)
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1] and not any(codes[:-1]):
                deadline = time.monotonic() + PATIENCE_S
                for other in running:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.02)
    return codes


def _fork(rank: int, run: Callable[[], None], arguments: list[str], files: list[Path]) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        # A line is one write, also under PYTHONUNBUFFERED: ranks share the file.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
        sys.argv[:] = arguments
        code = _end(run)
    finally:
        os._exit(code)


def _end(run: Callable[[], None]) -> int:
    """Exit code of `run`, after what Python does at a process's end."""
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
