"""Names in shared folders (temporary files, shared memory, semaphores) that identify their owner process.

A killed process cannot remove its files. The next command of this program removes them if the name proves
that the owner ran on this machine since its last boot and has exited.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

PREFIX = "vmeg"
OWNED = re.compile(rf"(?:sem\.)?{PREFIX}-(\d+)-(\d+)-([0-9a-f]{{8}})(?:-.*)?")
SHARED_MEMORY = Path("/dev/shm")
# Longest folder for vLLM's sockets: their names have 36 characters, and Linux limits a socket path to 107.
LONGEST = 107 - 37
SHORT = Path("/tmp")  # for sockets, if the folder of temporary files is longer

_own_folders: list[Path] = []
_removals: list[tuple[int, Callable[[], None]]] = []  # with the process that they are of


def begin(*, keep_folder: bool = False) -> None:
    """Remove files of exited processes, and mark the names that this process creates from now on.

    Temporary files go to a folder of this process.

    Args:
        keep_folder: keep the current folder of temporary files, which the launcher made for its ranks.
    """
    shared = Path(tempfile.gettempdir())
    sweep(shared, SHORT)
    mark = mark_of(os.getpid())
    this_process: Any = multiprocessing.current_process()
    this_process._config["semprefix"] = (
        # prefix of semaphores that spawned processes open by name
        f"/{mark}"
    )
    private: Any = shared_memory
    private._SHM_NAME_PREFIX, private._SHM_SAFE_NAME_LENGTH = f"/{mark}-", len(mark) + 10
    _mark_torchruns_folder(shared)
    if keep_folder:
        return
    # a full disk or a read-only folder is reported by the code that needs it
    with contextlib.suppress(OSError):
        folder = _make(shared / mark)
        _keep_compiled(shared)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        if len(str(folder)) > LONGEST and "VLLM_RPC_BASE_PATH" not in os.environ:
            os.environ["VLLM_RPC_BASE_PATH"] = str(_make(SHORT / mark))


def add(removal: Callable[[], None]) -> None:
    """Have `end` call `removal`, which removes files that mean that this process is at work."""
    _removals.append((os.getpid(), removal))


def drop(removal: Callable[[], None]) -> None:
    """Undo `add`."""
    with contextlib.suppress(ValueError):
        _removals.remove((os.getpid(), removal))


def end() -> None:
    """Remove what is only for this process: what was `add`ed, and its folders of temporary files."""
    for pid, removal in reversed(_removals):
        if pid == os.getpid():  # not in a forked child, whose parent is at work
            with contextlib.suppress(Exception):  # the process has to end
                removal()
    for folder in _own_folders:
        if folder.name == mark_of(os.getpid()):  # not in a forked child, whose parent still uses its folder
            shutil.rmtree(folder, ignore_errors=True)


def socket_folder() -> str:
    """Return a folder for vLLM's sockets, which it leaves: VLLM_RPC_BASE_PATH, or the `process_folder`."""
    return os.environ.get("VLLM_RPC_BASE_PATH") or str(process_folder())


def process_folder() -> Path:
    """Return a folder for files that last as long as this process: its end or the next command removes it.

    Where `begin` has been called, that is the folder of temporary files; a caller's own program has none.
    """
    shared = Path(tempfile.gettempdir())
    if OWNED.fullmatch(shared.name):
        return shared
    mark = mark_of(os.getpid())
    folder = (shared if len(str(shared / mark)) <= LONGEST else SHORT) / mark
    if folder not in _own_folders:
        try:
            _make(folder)
        except OSError:  # who writes there says so
            return shared
        atexit.register(end)
    return folder


def lasting_folder() -> Path:
    """Return the folder for temporary files that outlast this process and its launcher."""
    folder = Path(tempfile.gettempdir())
    while OWNED.fullmatch(folder.name):
        folder = folder.parent
    return folder


def _make(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    _own_folders.append(folder)
    return folder


def sweep(*folders: Path) -> None:
    """Remove files that exited processes of this program left in these folders and in shared memory."""
    for folder in {*folders, SHARED_MEMORY}:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if has_ended(path.name):
                    _remove(path)
                elif path.name.startswith("torchelastic_") and any(
                    has_ended(inner.name) for inner in path.iterdir()
                ):
                    _remove(path)


def mark_of(pid: int) -> str:
    """Return the prefix of a process's names: its id, start time and PID namespace."""
    return f"{PREFIX}-{pid}-{started_at(pid)}-{_numbering()}"


def has_ended(name: str) -> bool:
    """Return whether the name is one of ours and proves that its owner has exited."""
    owner = OWNED.fullmatch(name)
    if not owner or owner[3] != _numbering():
        return False
    try:
        return started_at(int(owner[1])) != int(owner[2])
    except OSError:
        return True


def started_at(pid: int) -> int:
    """Return the process's start time in clock ticks since boot.

    Raises:
        OSError: there is no such process, or it is a zombie.
    """
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if after_name[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(after_name[19])


@functools.cache
def _numbering() -> str:
    """Return an id of this boot and PID namespace, within which a process id is meaningful."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{zlib.crc32((boot + os.readlink('/proc/self/ns/pid')).encode()):08x}"


def _mark_torchruns_folder(shared: Path) -> None:
    """Put torchrun's mark on its folder for rank errors, from its first rank; torchrun never removes it."""
    inside = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts
    place = next((i for i, part in enumerate(inside) if part.startswith("torchelastic_")), None)
    if place is not None and Path(*inside[:place]) == shared:
        with contextlib.suppress(OSError):
            (Path(*inside[: place + 1]) / mark_of(os.getppid())).touch()


def _keep_compiled(shared: Path) -> None:
    """Keep kernels that PyTorch compiled for a GPU in a folder where the next run finds them."""
    if os.path.exists("/dev/nvidiactl"):
        user = re.sub(r"[\\/:*?\"<>|]", "_", os.environ.get("USER") or str(os.getuid()))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(shared / f"torchinductor_{user}"))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
