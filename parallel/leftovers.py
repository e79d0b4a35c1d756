"""Names in shared folders (temporary files, shared memory, semaphores) that say which process they belong to.

A process that is killed cannot remove what it has made. The next command of this program removes it, where
the name proves that the owner was a process of this machine, since its start, that has ended.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import tempfile
import zlib
from multiprocessing import shared_memory
from pathlib import Path

PREFIX = "vmeg"
OWNED = re.compile(rf"(?:sem\.)?{PREFIX}-(\d+)-(\d+)-([0-9a-f]{{8}})(?:-.*)?")
SHARED_MEMORY = Path("/dev/shm")
LONGEST = (
    107 - 37
)  # of a folder for vLLM's sockets: their names have 36 letters, and Linux takes 107 for the path of one
SHORT = Path("/tmp")  # for them where the folder of temporary files is longer

_own_folders: list[Path] = []


def begin(*, keep_folder: bool = False) -> None:
    """Remove what ended processes have left, and mark what this process names from here on.

    Its temporary files get a folder of their own.

    Args:
        keep_folder: the launcher has made one for its ranks.
    """
    shared = Path(tempfile.gettempdir())
    sweep(shared, SHORT)
    mark = mark_of(os.getpid())
    multiprocessing.current_process()._config["semprefix"] = (
        f"/{mark}"  # of semaphores that spawned processes open by their names
    )
    shared_memory._SHM_NAME_PREFIX, shared_memory._SHM_SAFE_NAME_LENGTH = f"/{mark}-", len(mark) + 10
    _mark_torchruns_folder(shared)
    if keep_folder:
        return
    with contextlib.suppress(
        OSError
    ):  # a full disk or a folder that cannot be written is for those to say who need it
        folder = _make(shared / mark)
        _keep_compiled(shared)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        if len(str(folder)) > LONGEST and "VLLM_RPC_BASE_PATH" not in os.environ:
            os.environ["VLLM_RPC_BASE_PATH"] = str(_make(SHORT / mark))


def end() -> None:
    """Remove this process's folders of temporary files."""
    for folder in _own_folders:
        if folder.name == mark_of(os.getpid()):  # not of a forked child's parent
            shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    _own_folders.append(folder)
    return folder


def sweep(*folders: Path) -> None:
    """Remove what ended processes of this program have left in these folders and in shared memory."""
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
    """How names of the process begin: its id, when it was started, and in which numbering of processes."""
    return f"{PREFIX}-{pid}-{_started(pid)}-{_numbering()}"


def has_ended(name: str) -> bool:
    """Whether the name is one of ours, and proves that its owner has ended."""
    owner = OWNED.fullmatch(name)
    if not owner or owner[3] != _numbering():
        return False
    try:
        return _started(int(owner[1])) != int(owner[2])
    except OSError:
        return True


def _started(pid: int) -> int:
    """Clock ticks from the machine's start to that of the process.

    Raises:
        OSError: there is no such process, or it has ended and nobody has taken notice yet.
    """
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if after_name[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(after_name[19])


@functools.cache
def _numbering() -> str:
    """Tell this machine since its start, and this container: only there a process id says who it is."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{zlib.crc32((boot + os.readlink('/proc/self/ns/pid')).encode()):08x}"


def _mark_torchruns_folder(shared: Path) -> None:
    """Leave torchrun's mark in the folder that it makes for its ranks' errors, and never removes."""
    inside = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts
    place = next((i for i, part in enumerate(inside) if part.startswith("torchelastic_")), None)
    if place is not None and Path(*inside[:place]) == shared:
        with contextlib.suppress(OSError):
            (Path(*inside[: place + 1]) / mark_of(os.getppid())).touch()


def _keep_compiled(shared: Path) -> None:
    """Kernels that PyTorch compiled for a GPU stay where the next run looks for them."""
    if os.path.exists("/dev/nvidiactl"):
        user = re.sub(r"[\\/:*?\"<>|]", "_", os.environ.get("USER") or str(os.getuid()))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(shared / f"torchinductor_{user}"))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
