"""Four gloo ranks of which one hangs or gets a signal; watchdog and preemption report to stderr.

Arguments: a folder and a scenario (a key of SCENARIOS). Under torchrun this is one rank of one scenario.
Alone it runs all scenarios concurrently: it forks their ranks after the imports and serves their stores, as
torchrun does. FOLDER/SCENARIO then has their `output`, and in `codes` the four exit codes as JSON.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.rank_set import RankSet, rank_set, world
from parallel.runtime.preemption import Preemption
from parallel.runtime.store import reserved_port
from parallel.runtime.watchdog import Watchdog

NUM_RANKS, VICTIM = 4, 2
END_S = 90  # from the start of the ranks until all have ended
TIMEOUT_S = 3.0
# Of those that do not hang, and of those in which the other ranks do something before one hangs.
TIMEOUTS_S = {"off": 0.0, "slow": 8.0, "preempted": END_S, "terminated": END_S}
TIMEOUTS_S |= dict.fromkeys(("stopped", "other_collective", "skipped"), 8.0)


def meet(group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def sleep_forever() -> None:
    threading.Event().wait()


def sleeping(watchdog: Watchdog, rank: int) -> None:
    """One sleeps in its rollout; the others go on to the update and wait for it there."""
    with watchdog.operation("rollout"):
        if rank == VICTIM:
            sleep_forever()
    with watchdog.operation("actor_update"):
        meet()


def same_operation(watchdog: Watchdog, rank: int) -> None:
    """All are in the update; only the lines of their main threads tell them apart."""
    with watchdog.operation("actor_update"):
        if rank == VICTIM:
            sleep_forever()
        meet()


def stopped(watchdog: Watchdog, rank: int) -> None:
    """One is stopped from outside, once it has made its file, in a loop of short operations."""
    watched_from = time.monotonic()
    while True:
        with watchdog.operation("actor_update"):
            meet()
            time.sleep(0.05)
        if rank == VICTIM and time.monotonic() > watched_from + 2.5:  # it has told of this operation
            (watchdog.stacks.parent / "ready").touch()


def keeps_lock(watchdog: Watchdog, rank: int) -> None:
    """One is in a C call that does not give up Python's lock."""
    import ctypes

    with watchdog.operation("rollout"):
        if rank == VICTIM:
            ctypes.PyDLL(None).sleep(END_S)
    with watchdog.operation("actor_update"):
        meet()


def other_collective(watchdog: Watchdog, rank: int) -> None:
    """One took another branch, and waits for the rest in a collective of another group."""
    other = dist.new_group(list(range(NUM_RANKS)))
    with watchdog.operation("critic_update" if rank == VICTIM else "actor_update"):
        meet(other if rank == VICTIM else None)


def skipped(watchdog: Watchdog, rank: int) -> None:
    """One left out a collective that the others wait in, and is ahead of them."""
    other = dist.new_group(list(range(NUM_RANKS)))
    with watchdog.operation("log_probs"):
        if rank != VICTIM:
            meet()
    with watchdog.operation("actor_update"):
        meet(other)


def slow(watchdog: Watchdog, rank: int) -> None:
    """Waits shorter than the timeout, longer together: a long one with beats, one with its own timeout."""
    for turn in range(2):
        with watchdog.operation("rollout"):
            time.sleep(1.0 if rank == turn else 0)
            meet()
    with watchdog.operation("critic_update"):
        for _ in range(5 if rank == VICTIM else 0):
            time.sleep(2)
            watchdog.beat()
    with watchdog.operation("start", timeout_s=END_S), watchdog.operation("save"):
        time.sleep(TIMEOUTS_S["slow"] + 1.5 if rank == VICTIM else 0)
    with watchdog.operation("actor_update"):
        meet()


def off(watchdog: Watchdog, rank: int) -> None:
    """Longer than any timeout of another scenario, with the watchdog turned off."""
    with watchdog.operation("rollout"):
        time.sleep(1.0 if rank == VICTIM else 0)
        watchdog.beat()
        meet()


def preempted(watchdog: Watchdog, rank: int) -> None:
    """One receives SIGTERM, the others learn of it at the end of the iteration; nobody enters the next."""

    def signal_itself(preemption: Preemption) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption._asked.wait(timeout=30)  # until the listening thread has noticed

    iterate(watchdog, rank, signal_itself)


def terminated(watchdog: Watchdog, rank: int) -> None:
    """The same, where the signal comes from outside once this rank has made its file."""
    iterate(watchdog, rank, lambda _: (watchdog.stacks.parent / "ready").touch())


def iterate(watchdog: Watchdog, rank: int, on_third: Callable[[Preemption], None]) -> None:
    with Preemption(grace_s=END_S) as preemption:
        for iteration in itertools.count(1):
            watchdog.iteration = iteration
            with watchdog.operation("actor_update"):
                meet()
                if rank == VICTIM and iteration == 3:
                    on_third(preemption)
                time.sleep(0.1)
            if preemption.requested(world()):
                print(f"rank {rank} ends after iteration {iteration}", flush=True)
                return


def halves(watchdog: Watchdog, rank: int) -> None:
    """Two sets of ranks with a watchdog each: one ends; in the other a rank sleeps and the other waits."""
    with watchdog.operation("rollout"):
        if rank == VICTIM:
            sleep_forever()
    with watchdog.operation("actor_update"):
        watchdog.ranks.barrier()


_functions = (
    halves,
    sleeping,
    same_operation,
    stopped,
    keeps_lock,
    other_collective,
    skipped,
    slow,
    off,
    preempted,
)
SCENARIOS = {function.__name__: function for function in _functions}
UNDER_TORCHRUN = {"sleeping": sleeping, "terminated": terminated}


def watched(name: str) -> RankSet:
    """The ranks that this rank's watchdog watches."""
    if name != "halves":
        return world()
    (half,) = [ranks for ranks in (rank_set((0, 3)), rank_set((1, VICTIM))) if ranks.is_member]
    return half


def run_rank(name: str, folder: Path) -> None:
    """The life of a rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with Watchdog(TIMEOUTS_S.get(name, TIMEOUT_S), folder, watched(name)) as watchdog:
        watchdog.iteration = 5
        (SCENARIOS | UNDER_TORCHRUN)[name](watchdog, rank)
    dist.destroy_process_group()


def fork(run: Callable[[], None], **environment: object) -> int:
    """Process id of a new process that runs this and ends with 0, or with 1 by an error."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ.update({name: str(value) for name, value in environment.items()})
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def codes_of(pids: list[int], name: str, folder: Path) -> list[int | None]:
    """Exit codes once all have ended: minus the signal's number, None for one that had to be killed."""
    codes: dict[int, int] = {}
    deadline, to_stop = time.monotonic() + END_S, name == "stopped"
    try:
        while len(codes) < len(pids) and time.monotonic() < deadline:
            if to_stop and (folder / "ready").exists():
                os.kill(pids[VICTIM], signal.SIGSTOP)
                to_stop = False
            for pid in set(pids) - codes.keys():
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if name == "stopped" and len(codes) == len(pids) - 1:
                break
            time.sleep(0.05)
    finally:
        for pid in set(pids) - codes.keys():
            os.kill(pid, signal.SIGKILL)  # works on a stopped process as well
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def launch(name: str, folder: Path) -> None:
    """Fork the ranks of a scenario and hold their store."""
    folder.mkdir(parents=True)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    holder = reserved_port()  # until the store listens
    port = holder.getsockname()[1]
    os.environ.update(
        WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    pids = [
        fork(partial(run_rank, name, folder), RANK=rank, LOCAL_RANK=rank) for rank in range(NUM_RANKS)
    ]  # before the store starts its threads
    _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    holder.close()
    (folder / "codes").write_text(json.dumps(codes_of(pids, name, folder)))


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    if "RANK" in os.environ:
        return run_rank(names[0], folder)
    launchers = [fork(partial(launch, name, folder / name)) for name in names]
    for pid in launchers:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
