"""What a run has measured, for a later call on the same machine."""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_megatron.benchmarks.beside_verl.job import Job
from verl_megatron.benchmarks.beside_verl.runs import Measured

BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one after each start of the machine


class Record:
    """OUT/NAME/measured.json: a line of the table, and what it was measured of.

    Args:
        made_of: of the model and prompts, from `write_job`.
        settings: of the run alone.
    """

    def __init__(self, job: Job, name: str, *, made_of: dict[str, Any], settings: Sequence[str]):
        self.folder = job.folder / name
        self._path = self.folder / "measured.json"
        machine = [socket.gethostname(), BOOT.read_text().strip() if BOOT.exists() else ""]
        described = asdict(job) | {"folder": str(job.folder)}
        self._iterations = job.iterations
        self._of: dict[str, Any] = {
            "job": described,
            "made_of": made_of,
            "settings": list(settings),
            "machine": machine,
        }

    def read(self) -> Measured | None:
        """Return the line; None if there is none of this run."""
        try:
            found = json.loads(self._path.read_text())
            return Measured(**found["line"]) if found["of"] == self._of else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, line: Measured) -> None:
        """Write the line, unless the run ended before its last iteration: a later call runs it again."""
        if line.problem and line.iterations < self._iterations:
            return
        self._path.write_text(json.dumps({"of": self._of, "line": asdict(line)}))
