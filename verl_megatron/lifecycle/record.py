"""The record of a run: `config.yaml`, its settings as a recipe, and `run.json`, an entry for each start.

A start of the same folder appends an entry that says what changed since the one before. Secrets are masked,
and the environment is not recorded.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.cuda import nccl

from parallel import device
from parallel.checkpoint.sealed import opened
from parallel.rank_set import RankSet, agree
from parallel.runtime import endings
from verl_megatron.checks.output_folder import SETTINGS, SETTINGS_BEGIN, STARTS
from verl_megatron.checks.versions import versions_here
from verl_megatron.config.section import as_dict
from verl_megatron.lifecycle.secrets import masked_arguments, masked_value
from verl_megatron.manifest import settings_by_name
from verl_megatron.model_specs import layout_of, models_of
from verl_megatron.observe.tracking import replace_text, writing_to

PATIENCE_S = 2.0  # a rank that was stopped while it holds the lock does not hold up the others
GIT_S = 10.0  # for each question to git
MOST_BYTES = 2**24  # of either file
_KILLED = "no word of its end: it was killed, or its host was lost"

Start = dict[str, Any]


class RunRecord:
    """Writes the record of one start within a `with` block, which every rank enters.

    The block ends the entry: with `done`, `stopped` (SIGTERM), `error`, `stuck` (watchdog) or `interrupted`.
    An entry without an end is of a start that is at work, or that was killed.

    Args:
        config: all settings, with a section `run`.
        step: returns the completed iterations.

    Raises:
        ValueError: the files cannot be written.
    """

    def __init__(self, config: Any, world: RankSet, *, step: Callable[[], int] = lambda: 0):
        self.config, self.world, self._step = config, world, step
        self.folder = Path(config.run.output_dir)
        self.number = 0  # of this start, from 1
        self.stopped = ""  # why the run ends before its last iteration; the caller sets it
        self._git: threading.Thread | None = None

    def __enter__(self) -> "RunRecord":
        everyone = self.world.gather_object(_place_of_rank())

        def begin() -> int:
            return 0 if everyone is None else self._begin(_hosts(everyone))

        with writing_to(self.folder):
            self.number = self.world.broadcast_object(agree(begin, self.world))
        if everyone is not None:
            self._git = threading.Thread(target=self._add_git, name="git state", daemon=True)
            self._git.start()
        endings.listen(self._end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        endings.leave(self._end)
        if self._git is not None:
            self._git.join(timeout=2 * GIT_S)
        if isinstance(error, KeyboardInterrupt):
            self._end(*endings.INTERRUPTED)
        elif error is not None:
            self._end("error", f"{type(error).__name__}: {error}", **endings.place_of(error))
        elif self.world.is_first:
            reason = "stopped" if self.stopped else "done"
            self._end(reason, self.stopped or f"all {self.config.run.iterations} iterations")

    def resumed(self, step: int) -> None:
        """Record the iteration that the start goes on from."""
        if self.world.is_first:
            self._change(lambda start: start.update(resumed_from=step or None))

    def put_aside(self, folder: str) -> None:
        """Record where in the output folder the results of an earlier run are now."""
        self._change(lambda start: start.update(put_aside=folder))

    # ---- entries -------------------------------------------------------------------------------------------

    def _begin(self, hosts: list[dict]) -> int:
        """Append this start's entry and write the settings; return its number."""
        settings = masked_value("", as_dict(self.config))
        with _alone(self.folder):
            starts = readable_starts(self.folder)
            if starts and not starts[-1].get("exit"):
                starts[-1]["exit"] = {"reason": "killed", "text": _KILLED}
            start = self._entry(len(starts) + 1, hosts)
            if starts:
                start["settings_changed"] = _changed(_saved_settings(self.folder), settings_by_name(settings))
                start["versions_changed"] = _changed(starts[-1].get("versions"), start["versions"])
            starts.append(start)
            replace_text(self.folder / SETTINGS, _recipe(settings, starts))
            _write(self.folder, starts)
        return start["number"]

    def _entry(self, number: int, hosts: list[dict]) -> Start:
        launcher = _command_of_parent()
        size = self.world.size
        return {
            "number": number,
            "kind": type(self.config).__name__,
            "started": _now(),
            "ended": None,
            "exit": None,
            "command": shlex.join(masked_arguments(sys.orig_argv)),
            "launcher": launcher and shlex.join(masked_arguments(launcher)),
            "folder": os.getcwd(),
            "output_dir": str(self.folder.absolute()),
            "iterations": self.config.run.iterations,
            "resumed_from": None,
            "put_aside": None,
            "world_size": size,
            "layouts": {spec.name: str(layout_of(spec.model, size)) for spec in models_of(self.config)},
            "hosts": hosts,
            "versions": versions_here(),
            "drivers": _drivers(),
            "git": None,
            "settings_changed": {},
            "versions_changed": {},
        }

    def _end(self, reason: str, text: str, **place: Any) -> None:
        """Say why the start ended, unless it is said already; called by any rank."""
        rank = self.world.global_rank
        found = {"reason": reason, "text": text[:2000], "rank": rank, "step": self._step(), **place}

        def change(start: Start) -> None:
            if not start.get("exit"):
                start.update(ended=_now(), exit=found)

        self._change(change)

    def _add_git(self) -> None:
        if found := git_state(Path(__file__).parents[2]) or git_state(Path.cwd()):
            self._change(lambda start: start.update(git=found))

    def _change(self, change: Callable[[Start], None]) -> None:
        """Change this start's entry; a folder that cannot be written costs the entry, not the run."""
        with contextlib.suppress(OSError, ValueError), _alone(self.folder):
            starts = read_starts(self.folder)
            mine = next((start for start in starts if start["number"] == self.number), None)
            if mine is not None:
                change(mine)
                _write(self.folder, starts)


# ---- files -------------------------------------------------------------------------------------------------


def read_starts(folder: str | Path) -> list[Start]:
    """Return the entries of `run.json`, oldest first; empty without the file.

    Raises:
        ValueError: it is no list of entries.
    """
    path = Path(folder) / STARTS
    try:
        with opened(path) as file:
            starts = json.loads(file.read(MOST_BYTES).decode())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); move it away") from None
    if not isinstance(starts, list) or not all(map(_is_start, starts)):
        raise ValueError(f"{path} is no list of a run's starts; move it away")
    return starts


def readable_starts(folder: Path) -> list[Start]:
    """`read_starts`; a file that no run has written is put aside, with a warning."""
    try:
        return read_starts(folder)
    except ValueError as error:
        path = folder / STARTS
        aside = path.with_name(f"{STARTS}.damaged")
        os.replace(path, aside)
        print(f"warning: {error}: it is now {aside}", flush=True)
        return []


def _is_start(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("number")) is int


def _write(folder: Path, starts: list[Start]) -> None:
    replace_text(folder / STARTS, json.dumps(starts, indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Exclude other ranks of this host from the block, if the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_locked(handle) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool:
    """Try to lock; True as well where a file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _saved_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the start before, by section.name; empty if the file is not a run's."""
    try:
        with opened(folder / SETTINGS) as file:
            saved = yaml.safe_load(file.read(MOST_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    is_ours = isinstance(saved, dict) and all(isinstance(part, dict) for part in saved.values())
    return settings_by_name(saved) if is_ours else {}


def _recipe(settings: dict[str, dict], starts: list[Start]) -> str:
    """Return the settings as a recipe; comments at its end say what earlier starts had."""
    number = starts[-1]["number"]
    lines = [
        f"{SETTINGS_BEGIN} {number}, with every default; run.json has the commands.",
        yaml.safe_dump(json.loads(json.dumps(settings)), sort_keys=False, allow_unicode=True, width=100),
    ]
    for start in starts[1:]:
        for name, (old, new) in start.get("settings_changed", {}).items():
            change = f"{name}: {json.dumps(old)} -> {json.dumps(new)}"
            lines.append(f"# start {start['number']}, {start.get('started')}: {change}\n")
    return "\n".join(lines[:2]) + "".join(lines[2:])


def _changed(old: Any, new: dict[str, Any]) -> dict[str, list]:
    """Return [old, new] of every value that differs; None stands for an absent one."""
    if not isinstance(old, dict) or not old:
        return {}
    after = json.loads(json.dumps(new))  # as it was written
    names = [*after, *(name for name in old if name not in after)]
    pairs = {name: [old.get(name), after.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ---- what is recorded --------------------------------------------------------------------------------------


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _place_of_rank() -> dict:
    gpu = torch.cuda.get_device_name() if device.is_gpu() else None
    return {"host": socket.gethostname(), "gpu": gpu, "cores": len(os.sched_getaffinity(0))}


def _hosts(ranks: list[dict]) -> list[dict]:
    """Return each host with its ranks and their GPUs."""
    hosts: dict[str, dict] = {}
    for rank, place in enumerate(ranks):
        host = hosts.setdefault(
            place["host"], {"name": place["host"], "ranks": [], "gpus": [], "cores": place["cores"]}
        )
        host["ranks"].append(rank)
        host["gpus"] += [place["gpu"]] if place["gpu"] else []
    return list(hosts.values())


def _command_of_parent() -> list[str] | None:
    """Return the launcher's command line; None without a launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return [word.decode(errors="replace") for word in words]
    return None


def _drivers() -> dict[str, str]:
    found = {"kernel": platform.release()}
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if version := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text):
            found["nvidia"] = version[0]
    if device.is_gpu():
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def git_state(folder: Path) -> dict | None:
    """Return commit, branch and changed files of the checkout that `folder` is in; None without one."""

    def ask(*question: str) -> str:
        asked = subprocess.run(
            ["git", "-C", str(folder), *question],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # a run takes no lock of the user's checkout
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_S,
            check=True,
        )
        return asked.stdout

    try:
        top, commit, branch = ask("rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD").splitlines()
        changed = [line[3:] for line in ask("status", "--porcelain").splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return {
        "folder": top,
        "commit": commit,
        "branch": branch,
        "dirty": bool(changed),
        "changed": changed[:50],
    }
