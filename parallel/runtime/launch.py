"""torchrun for recipes: `python -m parallel.runtime.launch` takes torchrun's arguments.

It starts the same agent and the same ranks as torchrun, with these differences:

- On one host, sockets listen on the loopback only; on several, on the interface of MASTER_ADDR.
- With VERL_MEGATRON_TOKEN, hosts that do not know this secret cannot join.
- The exit status is that of the first rank that failed.
- On SIGTERM, ranks save and exit on their own; the launcher then exits with their status.
- Ctrl-C ends the ranks with a one-line message.
- Files that ranks leave in shared folders are removed.
- Ranks of our own modules begin to import them at once. Without GPUs, they are forked from one process
  (`parallel.runtime.forking`).
"""

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time

from parallel.gate import Gate
from parallel.runtime import leftovers, process
from parallel.runtime.forking.client import preparing
from parallel.runtime.seal import TOKEN, seal, unseal

OTHERS_S = 10.0  # allowed between the exits of two nodes' ranks after a signal
RECORDING_S = 1.5  # for ranks to record that they were interrupted
STATE = "the state of the rendezvous"  # name under which it is sealed
BACKEND = "listening_where_told"  # name of our rendezvous in torchrun's registry
SIGNALS = (signal.SIGTERM, signal.SIGINT)
STUCK = 75  # status of ranks that the watchdog has ended; it has printed the error at once
TELLING = (2, STUCK)  # statuses that name a cause; the other ranks then fail with different ones
# Environment variables of the ranks, unless they are set.
USUAL = {
    "OMP_NUM_THREADS": "1",  # torchrun's default, too, but it prints eight lines about it
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "40",  # s from SIGTERM to SIGKILL: more than a run needs to save
    "NCCL_DEBUG": "WARN",  # the reason of a failure, in the log of the rank that saw it
    "NCCL_IB_TIMEOUT": "22",  # 4.096 us * 2^22 = 17 s: a link that is down for a moment does not end a run
}
PARENT = "LAUNCH_PARENT"  # environment variable: process id of a shell; this process ends when the shell ends


def main(arguments: list[str], gate: Gate | None = None) -> int:
    """Run this node's ranks until they exit, and return the exit status.

    Args:
        gate: checks that the ranks wait for. If they do not pass, the ranks end, and the status is theirs.
    """
    if parent := os.environ.pop(PARENT, ""):
        process.end_with(signal.SIGTERM, is_orphan=lambda: os.getppid() != int(parent))
    process.keep_exit_statuses()
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    _Asked.listen()
    try:
        return _begin(arguments, gate)
    except BaseException as error:
        if not _is_of_an_end(error):
            raise
        return _Asked.refused or 128 + (_Asked.by or signal.SIGTERM)
    finally:
        _Asked.stop_listening()  # there are no ranks
        leftovers.end()
        leftovers.sweep()  # files of killed ranks


def _begin(arguments: list[str], gate: Gate | None) -> int:
    if gate is not None:
        _Asked.gate = gate
        os.environ |= gate.environment
        gate.watch(_Asked.refuse)
    leftovers.begin()
    os.environ[process.LAUNCHER] = str(os.getpid())
    os.environ.setdefault(process.LAUNCH, secrets.token_hex(8))  # a supervisor has one for all its launchers
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        # torch's shared store listens on every interface; `Rendezvous` has its own
        "1"
    )
    status = _run(arguments)
    return _Asked.refused or status


class _Asked:
    """Signal received by the launcher.

    SIGTERM is forwarded to the ranks, which exit on their own. SIGINT lets them record it, and kills them
    after RECORDING_S; a second one kills them at once.
    """

    by: signal.Signals | None = None
    gate: Gate | None = None
    refused = 0  # status of the checks, if they have not passed

    @classmethod
    def listen(cls) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, cls._take)

    @classmethod
    def stop_listening(cls) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @classmethod
    def refuse(cls, status: int) -> None:
        """End the ranks, which have begun nothing, since the checks have ended with `status`."""
        if cls.by is None:  # else the checks have ended by that signal
            cls.refused = status
            os.kill(os.getpid(), signal.SIGTERM)

    @classmethod
    def _take(cls, number: int, frame: object) -> None:
        ranks, before = process.ranks(), cls.by
        cls.by = signal.Signals(number)
        for rank in ranks if number == signal.SIGTERM else []:
            # not to its process group: the rank decides when its child processes end
            os.kill(rank, signal.SIGTERM)
        if before is None:
            threading.Thread(target=_end_without_others, daemon=True).start()
        if cls.gate is not None:
            cls.gate.end()
        if number == signal.SIGINT:
            if before != signal.SIGINT:
                process.say_interrupted()
                process.interrupt(ranks, within_s=RECORDING_S)  # another signal is taken meanwhile
            for rank in ranks:
                _signal_group(rank, signal.SIGKILL)
        if number == signal.SIGINT or not ranks:
            raise Ended


def _end_without_others() -> None:
    """Exit once this node's ranks have exited after a signal, without waiting for other nodes.

    Those nodes may be gone; torchrun would wait five minutes for them.
    """
    gone_at = None
    while True:
        gone_at = None if process.ranks() else gone_at or time.monotonic()
        if gone_at and time.monotonic() > gone_at + OTHERS_S:
            process.end(128 + (_Asked.by or signal.SIGTERM))
        time.sleep(0.5)


class Ended(BaseException):
    """The launcher received a signal while no rank was running or should be started."""


def _is_of_an_end(error: BaseException | None) -> bool:
    """Whether it is `Ended`, or what torch's clean-up raised after that, of things that were half begun."""
    return error is not None and (isinstance(error, Ended) or _is_of_an_end(error.__context__))


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just exited
        os.killpg(leader, number)  # each rank has a session of its own


def _run(arguments: list[str]) -> int:
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # the agent's reports, which repeat those of the ranks
    with preparing(arguments):
        return _run_agent(arguments)


def _run_agent(arguments: list[str]) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    register()
    config, command, its_arguments = config_from_args(parse_args(arguments))
    config.rdzv_backend = BACKEND
    # respect nohup
    config.signals_to_handle = (
        "SIGQUIT" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else "SIGQUIT,SIGHUP"
    )
    try:
        elastic_launch(config, command)(*its_arguments)
    except ChildFailedError as error:
        return _status(error, ranks_per_host=config.nproc_per_node)
    except SignalException as error:
        return 128 + error.sigval
    except (OSError, RendezvousError, DistError) as error:
        if _is_of_an_end(error):
            raise
        print(f"error: the nodes do not meet: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    return 0


def _status(error, *, ranks_per_host: int) -> int:
    """Return the exit status of the first rank that failed, and print its error as the last line.

    A rank whose status names a cause (`TELLING`) takes precedence.
    """
    rank, failure = min(
        error.failures.items(), key=lambda found: (found[1].exitcode not in TELLING, found[1].timestamp)
    )
    status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    if _Asked.refused:
        return status
    said = failure.error_file_data.get("message") if failure.error_file_data else None
    if isinstance(said, dict):
        is_said_elsewhere = said.get("extraInfo", {}).get("agreed") and rank >= ranks_per_host
        line = "" if is_said_elsewhere else f"error: {said.get('message', '')}"
    else:
        line = "" if status == STUCK else _unexplained(rank, failure, status)
    if line:
        print(line, file=sys.stderr, flush=True)
    return status


def _unexplained(rank: int, failure, status: int) -> str:
    """Return a line about a rank that has not said why it ended."""
    if _Asked.by:
        return f"on {_Asked.by.name}: rank {rank} (process {failure.pid}) ended with {status}"
    if failure.exitcode >= 0:
        return f"error: rank {rank} (process {failure.pid}) ended with {status}; its output says why"
    cause = process.ended_by(-failure.exitcode, otherwise="see run.log")
    return f"error: rank {rank} (process {failure.pid}) was {cause}"


# ---- rendezvous --------------------------------------------------------------------------------------------


def register() -> None:
    """Register a torchrun rendezvous that listens only where necessary."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def create(params: RendezvousParameters):
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

        store = _meeting_point(params)
        backend = C10dRendezvousBackend(store, params.run_id)
        if secret := os.environ.get(TOKEN):
            backend = _sealed(backend, secret)
        return _rendezvous(create_handler(store, backend, params), one_host=params.max_nodes == 1)

    rendezvous_handler_registry.register(BACKEND, create)


def _meeting_point(params):
    """Return the agents' store: in memory for one node; served by node 0 (is_host=1) for several.

    Raises:
        OSError: the port is taken.
    """
    import torch.distributed as dist

    from parallel.runtime.store import meet, serve

    if params.max_nodes == 1:
        return dist.HashStore()
    host, _, port = params.endpoint.rpartition(":")
    if params.get_as_bool("is_host"):
        return serve(host.strip("[]"), int(port), one_host=False)
    return meet(host.strip("[]"), int(port), within_s=300)  # the first host may start later


def _sealed(inner, secret: str):
    """Return a backend whose state is sealed: torch unpickles it, from a store that others may reach, too."""
    from torch.distributed.elastic.rendezvous.api import RendezvousStateError
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    class Sealed(RendezvousBackend):
        """torch's backend, of sealed states."""

        @property
        def name(self) -> str:
            return inner.name

        def get_state(self):
            found = inner.get_state()
            return found and (_opened(found[0]), found[1])

        def set_state(self, state: bytes, token=None):
            found = inner.set_state(seal(STATE, state, secret), token)
            return found and (_opened(found[0]), found[1], found[2])

    def _opened(state: bytes) -> bytes:
        try:
            return unseal(STATE, state, secret)
        except ValueError as error:
            raise RendezvousStateError(str(error)) from None

    return Sealed()


def _rendezvous(inner, *, one_host: bool):
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from parallel.runtime.store import serve

    class Rendezvous(RendezvousHandler):
        """torch's rendezvous, with a store for the ranks of each attempt in the first agent.

        The store answers even when a rank is stopped.
        """

        store = None
        use_agent_store = True  # pyright: ignore[reportAssignmentType]  # torch's property, fixed here

        def next_rendezvous(self) -> RendezvousInfo:
            if _Asked.by:  # torchrun would restart ranks that exited on request
                raise Ended
            info = inner.next_rendezvous()
            at = info.bootstrap_store_info
            if info.rank == 0:
                self.store = serve(at.master_addr, at.master_port, one_host=one_host)
            return info

        def get_backend(self) -> str:
            return BACKEND

        get_run_id, is_closed, set_closed, num_nodes_waiting, shutdown = (
            inner.get_run_id,
            inner.is_closed,
            inner.set_closed,
            inner.num_nodes_waiting,
            inner.shutdown,
        )

    return Rendezvous()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
