"""torchrun for recipes: `python -m parallel.launch` takes torchrun's arguments and starts the same ranks.

What differs: on one host nothing listens but on the loopback, on several on the interface of MASTER_ADDR;
the exit status is that of the rank that failed first; on SIGTERM the ranks save and end by themselves, and
so does this process, with their status; Ctrl-C ends them in one line; what they have left in shared folders
is removed.
"""

import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta

from parallel import leftovers, process

OTHERS_S = 10.0  # between the ends of two nodes' ranks that are asked to end
BACKEND = "listening_where_told"  # torchrun's name for our rendezvous
SIGNALS = (signal.SIGTERM, signal.SIGINT)
TELLING = (
    2,
    75,
)  # what is wrong with the settings, and a rank that is stuck: other ranks fail by it, with other statuses
PARENT = "LAUNCH_PARENT"  # environment: process id of a shell without which this process has to end, too


def main(arguments: list[str]) -> int:
    """Run the ranks of this node until they have ended; returns the exit status."""
    if parent := os.environ.pop(PARENT, ""):
        process.end_with(signal.SIGTERM, is_orphan=lambda: os.getppid() != int(parent))
    _Asked.listen()
    leftovers.begin()
    os.environ[process.LAUNCHER] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # torch's shared store listens on every interface, and `Rendezvous` has one
    )
    try:
        return _run(arguments)
    finally:
        leftovers.end()
        leftovers.sweep()  # what killed ranks have left


class _Asked:
    """What signals asked for: SIGTERM goes on to the ranks, each of which ends by itself; SIGINT ends them."""

    by: signal.Signals | None = None

    @classmethod
    def listen(cls) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, cls._take)

    @classmethod
    def _take(cls, number: int, frame: object) -> None:
        ranks = children()
        if number == signal.SIGINT:
            if cls.by != signal.SIGINT:
                process.say_interrupted()
            for rank in ranks:
                _signal_group(rank, signal.SIGKILL)
        for rank in ranks if number == signal.SIGTERM else []:
            os.kill(rank, signal.SIGTERM)  # without its group: processes of the rank end when it wants
        if cls.by is None:
            threading.Thread(target=_end_without_others, daemon=True).start()
        cls.by = signal.Signals(number)
        if number == signal.SIGINT or not ranks:
            raise Ended


def _end_without_others() -> None:
    """End when this node's ranks have: torchrun waits for other nodes, which may be gone, for five minutes."""
    gone_at = None
    while True:
        gone_at = None if children() else gone_at or time.monotonic()
        if gone_at and time.monotonic() > gone_at + OTHERS_S:
            process.end(128 + _Asked.by)
        time.sleep(0.5)


class Ended(BaseException):
    """This process was asked to end, and no rank is there, or shall be there."""


def children() -> list[int]:
    """Process ids of the ranks."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)  # torchrun gives each rank a session
    except ProcessLookupError:  # not yet, or it has just ended
        os.kill(leader, number)


def _run(arguments: list[str]) -> int:
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # the agent's own reports of what the ranks have said
    try:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import elastic_launch
        from torch.distributed.run import config_from_args, parse_args

        register()
        config, command, its_arguments = config_from_args(parse_args(arguments))
        config.rdzv_backend = BACKEND
        config.signals_to_handle = (
            "SIGQUIT" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else "SIGQUIT,SIGHUP"
        )  # nohup's wish counts
        try:
            elastic_launch(config, command)(*its_arguments)
        except ChildFailedError as error:
            return _status(error)
        except SignalException as error:
            return 128 + error.sigval
        except (OSError, RendezvousError, DistError) as error:
            print(f"error: the nodes do not meet: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return 1
        return 0
    except Ended:
        return 128 + (_Asked.by or signal.SIGTERM)


def _status(error) -> int:
    """What the first rank to fail ended with, or one that had a reason of its own; said in a line."""
    rank, failure = min(
        error.failures.items(), key=lambda found: (found[1].exitcode not in TELLING, found[1].timestamp)
    )
    status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    why = f"on {_Asked.by.name}: " if _Asked.by else ""
    print(f"{why}rank {rank} (process {failure.pid}) ended with {status}", file=sys.stderr, flush=True)
    return status


# ---- where the ranks meet ---------------------------------------------------------------------------------


def register() -> None:
    """Tell torchrun of a rendezvous that listens nowhere else than it has to."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def create(params: RendezvousParameters):
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

        store = _meeting_point(params)
        return _rendezvous(
            create_handler(store, C10dRendezvousBackend(store, params.run_id), params),
            one_host=params.max_nodes == 1,
        )

    rendezvous_handler_registry.register(BACKEND, create)


def _meeting_point(params):
    """Of the agents: in memory for one; on node 0 (is_host=1) for several.

    Raises:
        OSError: the port is taken.
    """
    import torch.distributed as dist

    from parallel.store import serve

    if params.max_nodes == 1:
        return dist.HashStore()
    host, _, port = params.endpoint.rpartition(":")
    if params.get_as_bool("is_host"):
        return serve(host.strip("[]"), int(port), one_host=False)
    return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=300))


def _rendezvous(inner, *, one_host: bool):
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

    from parallel.store import serve

    class Rendezvous(RendezvousHandler):
        """torch's own, with the store of each attempt in the first agent, which no stopped rank takes along."""

        store = None
        use_agent_store = True

        def next_rendezvous(self) -> RendezvousInfo:
            if _Asked.by:  # torchrun would start ranks again that ended because they were asked to
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
