"""Where the ranks of a world leave each other notes (torch's TCPStore), listening only where the world is."""

import ctypes
import ipaddress
import os
import signal
import socket
import warnings

import torch.distributed as dist

from parallel import process

LOCAL = "127.0.0.1"


def serve(address: str, port: int = 0, *, one_host: bool) -> dist.TCPStore:
    """A store that this process serves: on the loopback for one host, else on the interface of `address`."""
    listener = listen(address, port, one_host=one_host)
    return _store_on(listener, LOCAL if one_host else address)


def serve_apart(address: str, port: int, *, one_host: bool) -> None:
    """Serve a store from a process of its own, which answers while this one is stopped and ends with it."""
    listener, parent = listen(address, port, one_host=one_host), os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of Python 3.12: the child uses nothing that another thread may hold
        child = os.fork()
    if child:
        return listener.close()
    try:
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
        ):  # for the rank, which still wants the store
            signal.signal(number, signal.SIG_IGN)
        process.end_with(signal.SIGKILL, is_orphan=lambda: os.getppid() != parent)
        ctypes.CDLL(None).prctl(15, b"store", 0, 0, 0)  # PR_SET_NAME, for those who list processes
        _kept = _store_on(listener, LOCAL if one_host else address)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def listen(address: str, port: int, *, one_host: bool) -> socket.socket:
    """A listening socket that other hosts reach under `address`, or none of them.

    A name that means the loopback here (as in Debian's /etc/hosts), or no interface of this host, means one
    to the others: then all interfaces listen.

    Raises:
        OSError: the port is taken.
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
            if one_host or error.errno == 98:  # EADDRINUSE
                raise OSError(
                    error.errno, f"port {port} of {address} is taken; choose another MASTER_PORT"
                ) from None
    raise OSError(f"no interface of this host can listen for {address}")


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
        if is_literal or not ipaddress.ip_address(place[0].partition("%")[0]).is_loopback
    ]


def _store_on(listener: socket.socket, address: str) -> dist.TCPStore:
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
