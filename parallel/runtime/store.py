"""Key-value store of the ranks of a world (torch's TCPStore), listening only where the world can reach it."""

import ctypes
import errno
import ipaddress
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.runtime import process

LOCAL = "127.0.0.1"
SILENT = 4  # above the highest level of torch's C++ log
_level_lock = threading.RLock()  # else one thread could put back what another one has set


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's C++ code from logging: its clients print a stack for each answer that does not come.

    For clients of a store that may not be served yet, or no longer. Their errors are raised all the same.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # a build of torch with another log
        yield
        return
    with _level_lock:
        before, level.value = level.value, SILENT
        try:
            yield
        finally:
            level.value = before


def connect(address: str, port: int, *, within_s: float) -> dist.TCPStore:
    """Return a client of a store, which may not be served.

    Raises:
        OSError, RuntimeError: it is not served.
    """
    socket.create_connection((address, port), within_s).close()  # torch's client would wait longer
    with quiet():
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=within_s))


def meet(address: str, port: int, *, within_s: float) -> dist.TCPStore:
    """Return a client of a store that another host may serve later; signals are handled meanwhile.

    Raises:
        OSError, RuntimeError: it is not served in time.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            client = connect(address, port, within_s=2)
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            client.set_timeout(timedelta(seconds=within_s))
            return client


def serve(address: str, port: int = 0, *, one_host: bool) -> dist.TCPStore:
    """Serve a store in this process, on the loopback for one host, else on the interface of `address`."""
    listener = listen(address, port, one_host=one_host)
    return _store_on(listener, LOCAL if one_host else address)


def serve_apart(address: str, port: int, *, one_host: bool) -> None:
    """Serve a store in a child process, which answers even while this one is stopped and ends with it."""
    listener, parent = listen(address, port, one_host=one_host), os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads; the child needs no lock that another thread may hold
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return listener.close()
    try:
        # meant for the rank, which still needs the store
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        process.end_with(signal.SIGKILL, is_orphan=lambda: os.getppid() != parent)
        ctypes.CDLL(None).prctl(15, b"store", 0, 0, 0)  # PR_SET_NAME: the name in process listings
        _kept = _store_on(listener, LOCAL if one_host else address)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def listen(address: str, port: int, *, one_host: bool) -> socket.socket:
    """Return a listening socket that other hosts reach under `address`.

    If the name resolves here to the loopback (as in Debian's /etc/hosts) or to no interface of this host, the
    socket listens on all interfaces: on other hosts the name resolves to one of them.

    Raises:
        OSError: the port is taken, or may not be used.
    """
    places = [(socket.AF_INET, (LOCAL, port))] if one_host else _places(address, port)
    for family, place in [*places, (socket.AF_INET, ("", port))]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError as error:
            listener.close()
            where = f"port {port} of {address}"
            if error.errno == errno.EADDRINUSE:
                raise OSError(error.errno, f"{where} is taken; choose another MASTER_PORT") from None
            if one_host or error.errno == errno.EACCES:
                reason = f"{where} cannot be used ({error.strerror}); choose another MASTER_PORT"
                raise OSError(error.errno, reason) from None
    raise OSError(f"no interface of this host can listen for {address}")


def reserved_port() -> socket.socket:
    """Return a socket that holds a free port: while it is open, only `listen` and torch's store get the port.

    It never listens itself.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def _places(address: str, port: int) -> list[tuple[socket.AddressFamily, tuple]]:
    try:
        is_literal = bool(ipaddress.ip_address(address))
    except ValueError:
        is_literal = False
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [
        (family, place)
        for family, *_, place in found
        if is_literal or not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
    ]


def _store_on(listener: socket.socket, address: str) -> dist.TCPStore:
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
