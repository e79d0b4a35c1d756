"""Program that the doctor starts twice: one process owns a value, and another one reads it.

`own` prints its process id and the value's address and waits; `read PID ADDRESS` prints "read", or why not.
Needs only the standard library.
"""

import ctypes
import os
import sys

VALUE = b"shared"


class Part(ctypes.Structure):
    """struct iovec, of process_vm_readv(2)."""

    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def own() -> None:
    value = ctypes.create_string_buffer(VALUE)
    print(os.getpid(), ctypes.addressof(value), flush=True)
    sys.stdin.read()


def read(pid: int, address: int) -> str:
    copy = ctypes.create_string_buffer(len(VALUE))
    here, there = Part(ctypes.addressof(copy), len(VALUE)), Part(address, len(VALUE))
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return "read" if copy.raw == VALUE else os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    own() if sys.argv[1] == "own" else print(read(*map(int, sys.argv[2:])))
