"""A reward worker as the trainer sees it: a sandboxed process that is sent samples and answers each."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.rewards.functions import OUT_OF_TOP_LEVEL, described
from verl_megatron.rewards.sandbox import KILLED

KILLED_BY_OTHERS = (KILLED, -signal.SIGKILL)  # for example by the OOM killer; a retry may succeed
GRACE_S = 5.0  # for a worker's processes to exit after its connection closes

_MAIN = (
    "import sys; sys.path[:] = {path!r}; from verl_megatron.rewards.worker import main; "
    "main({specs!r}, {options!r}, connection={connection}, parent={parent}, output_bytes={output})"
)
_LONGEST_S = 1e6  # longest socket timeout
_LONGEST_ANSWER = 1 << 20  # bytes


class LostWorkerError(Exception):
    """A worker ended or sent a malformed answer."""


class WorkerProcess:
    """A sandboxed process that imports the reward functions `specs`.

    `options` are keyword arguments of built-in functions, by their names.

    Raises:
        ValueError: no process can be started.
    """

    def __init__(self, specs: Sequence[str], options: Mapping[str, Any], *, output_bytes: int):
        self.refused = ""  # why it has no own namespaces
        self.columns: dict[str, list[str]] = {}  # of the data that each function needs
        self._specs = list(specs)
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        command = _MAIN.format(
            path=sys.path,
            specs=self._specs,
            options=dict(options),
            connection=theirs.fileno(),
            parent=os.getpid(),
            output=output_bytes,
        )
        try:
            with theirs:
                # Its own session: torchrun sends SIGTERM to the trainer's group, which still needs answers.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", command],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            self._close()
            raise ValueError(
                f"reward.function={short_repr(self._specs[0])}: no worker process can be started: "
                f"{described(error)}"
            ) from None

    def wait(self, timeout_s: float) -> list[str]:
        """Wait until all functions are imported, each within `timeout_s`; return the problems."""
        problems = []
        for spec in self._specs:
            try:
                answer = self.ask(b"", timeout_s)
            except TimeoutError:
                problem = f"takes longer than {timeout_s:.0f} s"
            except LostWorkerError:
                problem = f"ends its process ({cause_of(self.end(grace_s=GRACE_S))})"
            else:
                if "problem" in answer:
                    problems.append(answer["problem"])
                else:
                    self.refused, self.columns[spec] = answer["refused"], answer["columns"]
                continue
            setting = f"reward.function={short_repr(spec)}"
            return [*problems, f"{setting}: importing the file {problem}; {OUT_OF_TOP_LEVEL}"]
        return problems

    def ask(self, request: bytes, timeout_s: float) -> Any:
        """Send a request and wait for the answer.

        Raises:
            TimeoutError: no answer within `timeout_s`.
            LostWorkerError: the worker ended or sent a malformed answer.
        """
        self._socket.settimeout(min(timeout_s, _LONGEST_S))
        try:
            self._socket.sendall(request)
            return json.loads(self._answers.readline(_LONGEST_ANSWER))
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            raise LostWorkerError from error

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, *, grace_s: float = 0.0) -> int | None:
        """End all its processes.

        Returns:
            The exit code if they exited by themselves within `grace_s`, else None.
        """
        try:
            code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            code = None
        self.stop()
        self._close()
        return code

    def stop(self) -> None:
        self._process.terminate()  # the warden ends the others
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close(self) -> None:
        self._answers.close()
        self._socket.close()


def cause_of(code: int | None) -> str:
    """Describe how a worker ended, from its exit code."""
    if code is None:
        return "it closed its connection"
    number = -code if code < 0 else code - 128
    return (
        f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
    )
