"""File system of a program: Python and the system's libraries, read-only, and a little memory.

It is made in a mount namespace of its own.
"""

import os
import re
import sys
from pathlib import Path

from verl_megatron.rewards.code.kernel import call

MAIN = "/tmp/main.py"  # the program
FILE_BYTES = 64 << 20  # of a file, and of each folder in memory

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32  # linux/mount.h
_MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME = 1 << 10, 1 << 11, 1 << 21
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_ST_RELATIME = 4096  # statvfs.h; the other flags have the numbers of mount.h
_MNT_DETACH = 2
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime"),
    *("/etc/alternatives", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
_IN_MEMORY = ("/tmp", "/var/tmp", "/dev/shm")


def make_file_system(source: str) -> None:
    """Make the file system of this mount namespace that of the program `source`.

    Raises:
        OSError: the system does not let this process do so.
    """
    sources = _sources()
    top = next(path for path in ("/mnt", "/srv", "/media", "/tmp") if _can_be_root(path, sources))
    _mount("", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", top, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    root = f"{top}/root"
    for path in _IN_MEMORY:  # before Python, which may be in one of them
        os.makedirs(root + path, exist_ok=True)
        options = f"size={FILE_BYTES},nr_inodes=4096,mode=1777"
        _mount("tmpfs", root + path, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in sources:
        _show(path, root + path)
    shown = [Path(root + path) for path in sources]
    for place in _mounts():
        if any(Path(place).is_relative_to(path) for path in shown):
            _make_read_only(place)
    Path(root + MAIN).write_text(source, encoding="utf-8", errors="replace")
    _mount("", top, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir(top)
    call("pivot_root", b".", b".")  # the old root now lies over the new one
    call("umount2", b".", _MNT_DETACH)
    os.chroot("/root")  # below another root, nobody can make a user namespace, which has all rights inside
    os.chdir("/tmp")


def _sources() -> list[str]:
    """Return the files and folders that a program sees, none inside another."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.realpath(sys.base_prefix))
    found: list[str] = []
    for path in (*_SYSTEM, *sorted(set(prefixes), key=len)):
        if os.path.exists(path) and not any(Path(path).is_relative_to(one) for one in found):
            found.append(path)
    return found


def _can_be_root(path: str, sources: list[str]) -> bool:
    return os.path.isdir(path) and not any(Path(source).is_relative_to(path) for source in sources)


def _show(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        return os.symlink(os.readlink(source), target)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, target, "", _MS_BIND | _MS_REC)


def _mounts() -> list[str]:
    """Return the places of all mounts."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        places = [line.split(" ")[4] for line in file]
    return [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), place) for place in places]


def _make_read_only(path: str) -> None:
    """Remount with the flags that it has, which may not be taken away, and more."""
    flags = os.statvfs(path).f_flag
    kept = flags & (_MS_NODEV | _MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME)
    kept |= _MS_RELATIME * bool(flags & _ST_RELATIME)
    _mount("", path, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (os.fsencode(text) or None for text in (source, target, kind, options))
    first, place, kind_, options_ = texts
    call("mount", first, place, kind_, flags, options_)
