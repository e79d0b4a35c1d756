"""Where sinks of metrics write: the output folder, the range of steps, and files replaced as a whole."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

IDS = "tracking.json"  # ids of the run at services, by name of the sink


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a killed run leaves the old or the new one. Lone surrogates are escaped.

    Raises:
        OSError: it cannot be written, or the name is that of a device, which a file must not replace.
    """
    if path.is_char_device() or path.is_block_device():
        raise OSError(errno.EINVAL, "it is a device", str(path))
    scratch = path.with_suffix(path.suffix + ".new")
    scratch.unlink(missing_ok=True)
    scratch.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(scratch, path)


@dataclass(frozen=True, slots=True)
class Destination:
    """Output location and step range of a sink."""

    output_dir: Path
    first_step: int  # rows of an earlier run at or after it are dropped
    total_steps: int

    @property
    def is_resumed(self) -> bool:
        return self.first_step > 0

    @property
    def settings(self) -> dict[str, Any]:
        """The run's settings by section, as `config.yaml` has them: secrets masked; empty without it."""
        try:
            found = yaml.safe_load((self.output_dir / "config.yaml").read_text())
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    def known_id(self, sink: str) -> str:
        """Return the id under which a service knows the run that is resumed; empty for a new run."""
        return self._ids().get(sink, "") if self.is_resumed else ""

    def remember_id(self, sink: str, identity: str) -> None:
        """Store the id under which a service knows the run."""
        replace_text(self.output_dir / IDS, json.dumps(self._ids() | {sink: identity}) + "\n")

    def _ids(self) -> dict[str, str]:
        try:
            found = json.loads((self.output_dir / IDS).read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {name: value for name, value in found.items() if isinstance(value, str)}
