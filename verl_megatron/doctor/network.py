"""Checks of what ranks need to find each other: the host's name, the loopback and the port."""

import os
import socket
import sys
from collections.abc import Iterator

from verl_megatron.doctor.finding import Case, Finding, ask

NAME_S = 10.0  # for the host's own name
PORT = 29500


def check_hostname(case: Case) -> Iterator[Finding]:
    """Whether the host's name has an address; asked in another process, as a name server may not answer."""
    name = socket.gethostname()
    program = "import socket,sys; print(socket.gethostbyname(sys.argv[1]))"
    answer = ask([sys.executable, "-I", "-S", "-c", program, name], timeout_s=NAME_S)
    if not answer.problem:
        yield Finding(check="hostname", status="ok", found=f"{name} is {answer.text.strip()}")
        return
    yield Finding(
        check="hostname",
        status="warning",
        found=f"{name} has no address: {answer.problem}",
        why="gloo asks for it where GLOO_SOCKET_IFNAME is not set, as in runs on several hosts",
        remedy=f"add a line such as 127.0.1.1 {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME",
    )


def check_port(case: Case) -> Iterator[Finding]:
    """Whether a process can be reached on the loopback, and whether MASTER_PORT is free."""
    try:
        with socket.socket() as listener, socket.socket() as caller:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            caller.settimeout(5)
            caller.connect(listener.getsockname())
    except OSError as error:
        yield Finding(
            check="port",
            status="problem",
            found=f"127.0.0.1 cannot be reached ({error})",
            why="ranks of a host meet there",
            remedy="ip link set lo up",
        )
        return
    text = os.environ.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() and int(text) < 65536 else PORT
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
    except OSError as error:
        yield Finding(
            check="port",
            status="warning",
            found=f"port {port} is taken ({error.strerror})",
            why="runs on several hosts meet there; runs on one host choose a free port",
            remedy="set MASTER_PORT to another one",
        )
        return
    yield Finding(check="port", status="ok", found=f"127.0.0.1 is reached; port {port} is free")
