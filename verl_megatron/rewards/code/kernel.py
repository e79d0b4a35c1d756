"""Calls of the kernel that Python has no function for, and a filter of those that a program may make."""

import ctypes
import errno
import os
import platform
import struct
from typing import Any

from verl_megatron.rewards.sandbox import LIBC

_SET_SECCOMP, _FILTER = 22, 2  # linux/prctl.h, linux/seccomp.h
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _IS_EQUAL, _IS_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
# Numbers on these machines. They give memory that no limit counts, or reach other processes, mounts, keys or
# rarely used parts of the kernel.
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_X32 = 0x40000000  # other numbers of the same calls on x86_64


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; OSError with its name if it fails. Numbers are passed as longs."""
    given = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if getattr(LIBC, name)(*given) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def refuse_calls() -> None:
    """Refuse this process and its children the calls of `_REFUSED`, for good.

    Raises:
        OSError: there are no numbers for this machine, or the kernel has no filters.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"programs are confined on {' and '.join(_MACHINES)}, not on {machine}")
    refused = [numbers[list(_MACHINES).index(machine)] for numbers in _REFUSED.values()]
    left = len(refused)
    lines = [
        (_LOAD, 0, 0, 4),  # the machine whose numbers these are: x86_64 also takes those of i386
        (_IS_EQUAL, 0, left + 3, _MACHINES[machine]),
        (_LOAD, 0, 0, 0),  # the number
        (_IS_AT_LEAST, left + 1, 0, _X32),
        *((_IS_EQUAL, left - at, 0, number) for at, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    call("prctl", _SET_SECCOMP, _FILTER, program, 0, 0)
