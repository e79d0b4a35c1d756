"""Supervision of the worlds that have ranks on this host, together with the run's other hosts."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from parallel import device
from parallel.bridge import START
from parallel.runtime import leftovers, process, watchdog
from parallel.runtime import store as stores
from parallel.runtime.launch import PARENT
from parallel.runtime.seal import TOKEN
from parallel.sealed_store import ADDRESS
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.board import POLL_S, Board, BoardLostError
from verl_megatron.launch.hosts import Part, place_worlds
from verl_megatron.launch.lookout import Lookout
from verl_megatron.launch.node import LAUNCHER, Call
from verl_megatron.launch.ranks import prepare
from verl_megatron.model_specs import num_ranks

ENDING_S = 60.0  # for the other worlds, once the training world has ended well
LAST_WORDS_S = 5.0  # for ranks to say why they end, once the run has failed elsewhere
OTHERS_S = 20.0  # for the other hosts of a world to say that a rank of theirs was killed
DYING_S = 5.0  # for ranks whose launcher was killed
LEAVING_S = 15.0  # for the other hosts to read how the run has ended
LOOK_S = 1.0  # between two looks at which worlds training has given up
GRACE_S = 20.0  # for these to end by themselves, and write their ranks' stacks
# A rollout world has nothing to save; and torch would log that the store ends with the training world.
QUICK = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}
ENDED_ON_PURPOSE = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# Notes on the board
STATUS, ASKED, BRIDGE = "status", "asked to end", "bridge"


def supervise_here(module: str, arguments: Sequence[str], config: TrainerConfig, *, restarts: int) -> int:
    """Run all worlds on this host; arguments, result and errors as of `supervise`.

    Args:
        module: that each rank runs, with `arguments`.
        restarts: of the training world, from the newest checkpoint.
    """
    return supervise(Call.here(module, arguments, ranks=num_ranks(config), restarts=restarts), config)


def supervise(call: Call, config: TrainerConfig) -> int:
    """Run the parts of all worlds on this host until the run has ended, and return its exit status.

    Args:
        config: the devices of the run's settings.

    Raises:
        ValueError: the worlds do not fit the hosts, there is no token, or hosts do not come.
    """
    if parent := os.environ.pop(PARENT, ""):
        process.end_with(signal.SIGTERM, is_orphan=lambda: os.getppid() != int(parent))
    prepare()
    parts = place_worlds(
        config, world_size=call.nnodes * call.nproc_per_node, ranks_per_host=call.nproc_per_node
    )
    asked = _Signals()
    token = _token(call)
    board = _board(call, token, asked.check)
    try:
        with stores.reserved_port() as holder:  # for training, which listens later, and again after a restart
            bridge = _bridge(call, board, parts, holder.getsockname()[1], asked.check)
            environment = dict(os.environ) | {ADDRESS: bridge, TOKEN: token, PARENT: str(os.getpid())}
            environment[process.LAUNCH] = secrets.token_hex(8)
            own = [_World(part, call, environment) for part in parts if part.host == call.node_rank]
            return _Supervisor(call, board, own, asked, Lookout(bridge, token)).run()
    except BoardLostError as error:
        raise ValueError(
            f"host 0 does not answer at {call.endpoint[0]}:{call.endpoint[1]} ({error}); look at its output"
        ) from None


class _Signals:
    """Signals that this process has received."""

    def __init__(self):
        self.received: set[int] = set()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.received.add(number))

    def check(self) -> None:
        """Exit if one has come, before ranks have started."""
        if self.received:
            sys.exit(128 + min(self.received))


def _token(call: Call) -> str:
    if call.nnodes == 1:
        return secrets.token_hex(16)
    if token := os.environ.get(TOKEN):
        return token
    raise ValueError(
        f"{TOKEN} is not set: hosts know each other by this secret; the launchers of recipes/launch make "
        "one, else set the same long random text on each"
    )


def _board(call: Call, token: str, work: Callable[[], None]) -> Board:
    if call.nnodes == 1:
        return Board(dist.HashStore(), token)
    host, port = call.endpoint
    if not call.node_rank:
        stores.serve_apart(host, port, one_host=host in (stores.LOCAL, "localhost"))
    return Board.at(host, port, token, work)


def _bridge(call: Call, board: Board, parts: Sequence[Part], port: int, work: Callable[[], None]) -> str:
    """Return HOST:PORT where training's first rank listens for the other worlds.

    torchrun numbers ranks host by host in the order of the hosts' addresses.

    Args:
        port: that is free on this host.
        work: called again and again while other hosts are waited for.
    """
    if call.nnodes == 1:
        return f"{stores.LOCAL}:{port}"
    training = [part.host for part in parts if part.trains]
    address_of = {}
    if call.node_rank in training:
        board.write(f"address/{call.node_rank}", call.address)
    for host in training:
        address_of[host] = board.wait(f"address/{host}", f"host {host} has not come", work)
    first = min(training, key=lambda host: (address_of[host], host))
    if call.node_rank == first:
        board.write(BRIDGE, f"{call.address}:{port}")
    return board.wait(BRIDGE, f"host {first} has not come", work)


class _World:
    """The launcher of a world's ranks on this host."""

    def __init__(self, part: Part, call: Call, environment: dict[str, str]):
        self.part, self._call = part, call
        self.attempt, self.ended_at = 0, 0.0
        self._environment = environment | _gpus(part, call) | ({} if part.trains else QUICK)
        self._process: subprocess.Popen | None = None
        self.has_joined, self.given_up_at = False, 0.0  # training; by training
        self.was_silent = False  # all of training, so that it was ended

    def start(self, attempt: int) -> None:
        """Start the ranks, for the first time or again."""
        self.attempt, self.ended_at, self.has_joined, self.given_up_at = attempt, 0.0, False, 0.0
        self.was_silent = False
        # Signals reach this process alone, which decides what becomes of each world.
        environment = self._environment | {START: str(attempt)}
        self._process = subprocess.Popen(self._command(), env=environment, process_group=0)

    def _command(self) -> list[str]:
        part, call = self.part, self._call
        restarts = call.max_restarts if part.trains else 0
        launcher = ["--nnodes", str(len(part.hosts)), "--nproc-per-node", str(len(part.local))]
        launcher += [
            "--max-restarts",
            str(restarts),
            "--rdzv-id",
            f"{call.rdzv_id}-{part.name}-{self.attempt}",
        ]
        if part.is_alone:
            launcher += ["--local-addr", stores.LOCAL]
        else:
            launcher += ["--rdzv-endpoint", "{}:{}".format(*call.endpoint), "--rdzv-conf", "is_host=0"]
            launcher += ["--local-addr", call.address]
        command = [sys.executable, "-m", LAUNCHER, *launcher, "-m", call.module, *call.arguments]
        return [*command, "--role", part.name]

    def status(self) -> int | None:
        """Return the exit status as a shell gives it; None while ranks are at work."""
        status = self._process.poll() if self._process else None
        if status is None:
            return None
        self.ended_at = self.ended_at or time.monotonic()
        return status if status >= 0 else 128 - status

    def send(self, number: signal.Signals) -> None:
        if self._process:
            self._process.send_signal(number)

    def end(self, *, within_s: float) -> None:
        """Wait for the end, and end what has not ended then; ranks end with their launcher."""
        if not self._process:
            return
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            ranks = process.children(self._process.pid)
            self._process.kill()
            self._process.wait()
            process.await_end(ranks, within_s=DYING_S)


def _gpus(part: Part, call: Call) -> dict[str, str]:
    """Return the variable that gives a part its GPUs; empty without GPUs, and where it has them all.

    Raises:
        ValueError: this host has too few.
    """
    if not device.is_gpu() or len(part.local) == call.nproc_per_node:
        return {}
    named = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    gpus = named or [str(gpu) for gpu in range(device.visible_gpus())]
    if len(gpus) < part.local.stop:
        raise ValueError(
            f"the {part.name} world needs {part.local.stop} GPUs on this host, which has {len(gpus)}; name "
            "fewer ranks (devices, GPUS), or start the run on several hosts"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[place] for place in part.local)}


class _Supervisor:
    """Starts the worlds of this host, and sees to it that all end together."""

    def __init__(self, call: Call, board: Board, worlds: Sequence[_World], asked: _Signals, lookout: Lookout):
        self._call, self._board, self._worlds, self._asked = call, board, worlds, asked
        self._lookout, self._looked_at = lookout, 0.0
        self._num_asked = self._num_told = 0  # SIGTERMs that came here, and those that training was sent

    def run(self) -> int:
        """Return the status with which all hosts exit."""
        try:
            for world in self._worlds:
                world.start(self._next_attempt(world.part.name))
            while (status := self._board.read(STATUS)) is None:
                self._hear()
                for world in self._worlds:
                    self._look_at(world)
                self._look_out()
                time.sleep(POLL_S)
            self._end(int(status))
            return int(status)
        finally:
            for world in self._worlds:
                world.end(within_s=0)
            leftovers.sweep(Path(tempfile.gettempdir()))  # launchers that were killed could not

    def _hear(self) -> None:
        """Act on signals, to this process or to that of another host: training saves and ends."""
        training = [world for world in self._worlds if world.part.trains]
        if signal.SIGINT in self._asked.received:
            self._asked.received.clear()
            for world in training:
                world.send(signal.SIGINT)
            if not training:
                self._board.write(STATUS, str(process.INTERRUPTED))
        if signal.SIGTERM in self._asked.received:
            self._asked.received.discard(signal.SIGTERM)
            self._num_asked += 1  # the first ones of several hosts are the same; a second ends at once
            self._board.write(f"{ASKED}/{self._num_asked}", "")
        while self._board.read(f"{ASKED}/{self._num_told + 1}") is not None:
            self._num_told += 1
            for world in training:
                world.send(signal.SIGTERM)

    def _look_at(self, world: _World) -> None:
        """Note how a world has ended, or start it again."""
        name, status = world.part.name, world.status()
        if (attempt := self._next_attempt(name, world.attempt)) > world.attempt:
            world.end(within_s=0)
            return world.start(attempt)
        if status is None:
            return
        if world.part.trains and world.was_silent and world.attempt < self._call.max_restarts:
            self._board.write(f"{name}/{world.attempt + 1}", str(self._call.node_rank))
        elif world.part.trains:
            if status or world.part.host == world.part.hosts[0]:
                self._board.write(STATUS, str(status))
        elif _is_fault(status):
            if self._board.write(f"{name}/{world.attempt + 1}", str(self._call.node_rank)):
                print(f"the {name} world ended with {status} and is started again", flush=True)
                self._lookout.tell_end(name, world.attempt, f"the {name} world has ended")
        elif status and (world.part.is_alone or time.monotonic() > world.ended_at + OTHERS_S):
            self._board.write(STATUS, str(status))

    def _look_out(self) -> None:
        """End worlds that start again: those given up by training that do not end, and a silent training."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        for world in self._worlds:
            if world.status() is not None:
                continue
            if world.part.trains:
                if silent_s := self._lookout.silence_of_training():
                    print(
                        f"the training world gave no sign of life for {silent_s:.0f} s (stopped, or out of "
                        "reach) and is ended",
                        flush=True,
                    )
                    world.was_silent = True
                    world.send(signal.SIGKILL)  # its ranks end with it
                continue
            seen = self._lookout.look(world.part.name, world.attempt)
            world.has_joined |= seen.has_joined
            if seen.was_given_up:
                world.given_up_at = world.given_up_at or now
                if now > world.given_up_at + GRACE_S:
                    world.send(signal.SIGKILL)  # its ranks end with it
            elif seen.has_joined:
                world.given_up_at = 0.0  # it has joined again by itself

    def _next_attempt(self, name: str, attempt: int = 0) -> int:
        """Return which start of a world is due."""
        while self._board.read(f"{name}/{attempt + 1}") is not None:
            attempt += 1
        return attempt

    def _end(self, status: int) -> None:
        """End this host's worlds after the run; host 0, which serves the board, leaves last."""
        begin = time.monotonic()
        for world in self._worlds:
            ends_by_itself = world.has_joined and not world.given_up_at and not status
            within_s = ENDING_S if ends_by_itself else LAST_WORDS_S
            is_over = status and not world.part.trains
            world.end(within_s=0 if is_over else max(0.0, begin + within_s - time.monotonic()))
        end = time.monotonic() + LEAVING_S
        with suppress(BoardLostError):  # all is done
            self._board.write(f"left/{self._call.node_rank}", "")
            while not self._call.node_rank and time.monotonic() < end and not self._have_all_left():
                time.sleep(POLL_S)

    def _have_all_left(self) -> bool:
        return all(self._board.read(f"left/{host}") is not None for host in range(self._call.nnodes))


def _is_fault(status: int) -> bool:
    """Whether a world ended by something that may not happen again: a signal, or a rank without progress."""
    return status not in ENDED_ON_PURPOSE and (status > 128 or status == watchdog.EXIT_STATUS)
