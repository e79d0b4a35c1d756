"""The ranks of all worlds of a run on this host, started by `python -m verl_megatron.launch.node`.

It takes torchrun's arguments. A run with one world is handed on to `parallel.runtime.launch`. One with
several gets a launcher for each world that has ranks here. The hosts meet on a `Board`, which host
0 serves at --rdzv-endpoint; so do the launchers of a world on several hosts. All end with the status of the
training world, or of the first world that has ended by an error of its own. A rollout world that was killed
or is stuck starts again, on all of its hosts. With --check, a dry run of the module comes first. Ranks import
their modules meanwhile if the host has a core to spare.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from parallel.gate import Gate, may_go_ahead
from parallel.runtime import process
from parallel.runtime.forking.client import may_fork
from parallel.runtime.refusal import NO_ROOM, REFUSED

if TYPE_CHECKING:
    from verl_megatron.config import TrainerConfig

MODULE = "verl_megatron.train"  # whose runs may have several worlds
LAUNCHER = "parallel.runtime.launch"
CHECK = "--check"
SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")  # environment variables by which a dry run knows the ranks


@dataclass(frozen=True, kw_only=True)
class Call:
    """torchrun's arguments as recipes give them, and what each rank runs."""

    nnodes: int
    node_rank: int
    nproc_per_node: int
    max_restarts: int
    rdzv_id: str
    endpoint: tuple[str, int]  # where hosts meet
    address: str  # under which others reach this host
    module: str
    arguments: list[str]
    checks: bool = False

    @classmethod
    def here(cls, module: str, arguments: Sequence[str], *, ranks: int, restarts: int) -> "Call":
        """Return the call for all ranks on this host alone."""
        return cls(
            nnodes=1,
            node_rank=0,
            nproc_per_node=ranks,
            max_restarts=restarts,
            rdzv_id="verl_megatron",
            endpoint=("127.0.0.1", 29500),  # of several hosts; unused
            address="127.0.0.1",
            module=module,
            arguments=list(arguments),
        )

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "Call":
        """Read a command line of `recipes/launch/local.sh`."""
        place = list(arguments).index("-m")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for name, usual in (("nnodes", 1), ("node-rank", 0), ("nproc-per-node", 1), ("max-restarts", 0)):
            parser.add_argument(f"--{name}", type=int, default=usual)
        parser.add_argument("--rdzv-id", default="verl_megatron")
        parser.add_argument("--rdzv-conf")  # of a world on its own
        parser.add_argument("--rdzv-endpoint", default="127.0.0.1:29500")
        parser.add_argument("--local-addr")
        parser.add_argument(CHECK, action="store_true")
        given = parser.parse_args(arguments[:place])
        host, _, port = given.rdzv_endpoint.rpartition(":")
        return cls(
            nnodes=given.nnodes,
            node_rank=given.node_rank,
            nproc_per_node=given.nproc_per_node,
            max_restarts=given.max_restarts,
            rdzv_id=given.rdzv_id,
            endpoint=(host.strip("[]"), int(port)),
            address=given.local_addr or socket.getfqdn(),
            module=arguments[place + 1],
            arguments=list(arguments[place + 2 :]),
            checks=given.check,
        )


def main(arguments: Sequence[str]) -> int:
    """Run this host's ranks until all worlds have ended, and return the exit status.

    Raises:
        ValueError: the settings cannot be read, or the worlds do not fit the hosts.
    """
    process.open_streams()
    process.keep_exit_statuses()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        process.say_interrupted()
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str]) -> int:
    call = Call.read(arguments)
    gate = Gate(partial(_check, call)) if call.checks else None
    try:
        config = _worlds(call.arguments) if call.module == MODULE else None
        early = not config and may_go_ahead(call.nproc_per_node, forked=may_fork(call.module))
        if gate and not early and (status := gate.wait()):
            return status
    except ValueError:
        if gate and (status := gate.wait()):  # it has said more than this error does
            return status
        raise
    if config:
        from verl_megatron.launch.supervisor import supervise

        return supervise(call, config)
    from parallel.runtime import launch

    place = list(arguments).index("-m")
    ours = [argument for argument in arguments[:place] if argument != CHECK]
    return launch.main([*ours, *arguments[place:]], gate)


def _check(call: Call) -> None:
    """Exit with what a dry run of the module refuses, except for want of room on the GPU that it supposes."""
    told = {name: value for name, value in os.environ.items() if name not in SIZES}
    if not any(argument.partition("=")[0] == "--role" for argument in call.arguments):
        told |= dict.fromkeys(SIZES, str(call.nproc_per_node))  # else these are one world's ranks only
    command = [sys.executable, "-m", call.module, *call.arguments, "--dry-run"]
    done = subprocess.run(command, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode in (0, NO_ROOM):
        return
    refusal = re.search(r"^([a-z]+\.py: )?error: .*", done.stderr, re.MULTILINE | re.DOTALL)
    sys.stderr.write(refusal[0] if refusal else done.stderr)
    if done.returncode < 0 and not refusal:
        print(f"error: the checks were {process.ended_by(-done.returncode)}", file=sys.stderr)
    sys.exit(done.returncode if done.returncode > 0 else 128 - done.returncode)


def _worlds(arguments: list[str]) -> "TrainerConfig | None":
    """Return the devices of a command line that starts several worlds; None for one world or --role."""
    from verl_megatron.config import TrainerConfig
    from verl_megatron.launch.command_line import settings_of
    from verl_megatron.launch.merging import devices_in

    known, settings = settings_of(arguments)
    config = devices_in(settings)
    if known.role or config == TrainerConfig():
        return None
    from verl_megatron.model_specs import has_worlds  # with torch, for which other ranks do not wait

    return config if has_worlds(config) else None


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED if isinstance(error, ValueError) else 1)
