"""Ranks of a command line, forked after the imports; they end as under torchrun."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from parallel.device import _free_port

PATIENCE_S = 15  # from SIGTERM to SIGKILL, once a rank has failed


def run_ranks(
    nproc: int,
    run: Callable[[], None],
    settings: list[str],
    log: Path,
    *,
    timeout_s: float,
    **environment: str,
) -> list[int]:
    """Exit codes in the order of ends; after one error the others get SIGTERM, then SIGKILL.

    Args:
        run: what each rank does, with `settings` as its command line; output goes to `log`.
        timeout_s: after which all are killed.
    """
    os.environ |= {
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **environment,
    }
    running, codes, deadline = (
        {_fork(rank, run, settings, log) for rank in range(nproc)},
        [],
        time.monotonic() + timeout_s,
    )
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


def _fork(rank: int, run: Callable[[], None], settings: list[str], log: Path) -> int:
    if child := os.fork():
        return child
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv[1:] = settings
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)
