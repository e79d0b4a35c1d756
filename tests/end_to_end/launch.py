"""Start `python -m verl_megatron...` under torchrun as a user does, and see what becomes of its processes."""

import contextlib
import subprocess
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.worlds import ROOT, environment_of_ranks, forked, torchrun

MARK = "VERL_MEGATRON_TEST"
GONE = (FileNotFoundError, ProcessLookupError)  # of what /proc has of a process that has just ended


@dataclass(kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """Of what it printed for the user."""
        return self.stdout.strip().splitlines()[-1]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in (self.stdout + self.stderr).splitlines() if line.startswith("error:")]

    @property
    def text(self) -> str:
        """For a failing test to show."""
        return f"exit code {self.code}\n{self.stdout[-4000:]}\n{self.stderr[-8000:]}"


@dataclass(kw_only=True)
class Started:
    """A running torchrun with all its descendants, recognised by a mark in their environment."""

    process: subprocess.Popen
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def processes(self) -> dict[int, dict[str, str]]:
        """Process id and environment of all that are alive."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                environment = dict(
                    entry.split("=", 1)
                    for entry in (path / "environ").read_bytes().decode(errors="replace").split("\0")
                    if "=" in entry
                )
                dead = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue  # it has just ended
            if environment.get(MARK) == self.mark and not dead:
                found[int(path.name)] = environment
        return found

    def rank(self, number: int) -> int:
        """Process id of a rank: torchrun's child with that RANK."""
        for pid, environment in self.processes().items():
            with contextlib.suppress(*GONE):
                if parent_of(pid) == self.process.pid and environment.get("RANK") == str(number):
                    return pid
        raise AssertionError(f"no process of rank {number}")

    def wait(self, *, timeout_s: float) -> Ended:
        """Wait for the end; past the time everything is ended and the test fails."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(60)
            raise AssertionError(f"not done within {timeout_s} s\n{self._ended(-1).text}") from None
        return self._ended(code)

    def _ended(self, code: int) -> Ended:
        return Ended(
            code=code,
            stdout=(self.folder / "stdout").read_text(),
            stderr=(self.folder / "stderr").read_text(),
        )

    def leftovers(self, *, patience_s: float = 30) -> list[str]:
        """Command lines of processes that are still there some seconds after the end."""
        deadline = time.monotonic() + patience_s
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return command_lines(alive)


def parent_of(pid: int) -> int:
    """Process id of a process's parent.

    Raises:
        FileNotFoundError, ProcessLookupError: it has ended.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_lines(pids: Iterable[int]) -> list[str]:
    """Command lines of those that have not ended meanwhile."""
    found = []
    for pid in pids:
        with contextlib.suppress(*GONE):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def start(nproc: int, module: str, *settings: str, folder: Path, launcher: Sequence[str] = ()) -> Started:
    """Start `torchrun --nproc-per-node nproc ... -m module settings...`, with its output in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = torchrun(nproc, *launcher, "-m", module, *settings)
    mark = uuid.uuid4().hex
    environment = environment_of_ranks() | {MARK: mark}
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)
    return Started(process=process, folder=folder, mark=mark)


def run(nproc: int, module: str, *settings: str, folder: Path, timeout_s: float = 300) -> Ended:
    """The same on ranks that are forked after the imports, until they have ended with code 0."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / name for name in ("stdout", "stderr")}
    codes = forked(
        ["-m", module, *settings], nproc, environment=environment_of_ranks(), timeout_s=timeout_s, **files
    )
    ended = Ended(code=max(codes, key=abs), **{name: path.read_text() for name, path in files.items()})
    assert not ended.code, ended.text
    return ended
