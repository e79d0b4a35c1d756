"""Start of a training world, its rollout worlds and its scoring worlds on this host."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from parallel import device
from parallel.bridge import new_address
from parallel.runtime import watchdog
from parallel.runtime.launch import PARENT
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.ranks import launcher_command, prepare
from verl_megatron.model_specs import ServingWorld, num_training_ranks, serving_worlds

FROM_TERMINAL_S = 0.5  # in which a Ctrl-C reaches both worlds without this process
ENDING_S = 60.0  # for the rollout worlds, once the training world has ended well
POLL_S = 0.05
# A rollout world has nothing to save; and torch would log that the store ends with the training world.
QUICK = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}
ENDED_ON_PURPOSE = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def start_worlds(module: str, arguments: Sequence[str], config: TrainerConfig, *, restarts: int) -> NoReturn:
    """Run the training and the rollout worlds of this host, and exit when the training world has ended.

    Each has the launcher of `start`. A rollout world that was killed or got stuck is started again. If one
    ends by an error of its own, the training world is ended, too.

    Args:
        restarts: of the training world, from the newest checkpoint.

    Raises:
        ValueError: this host has too few GPUs for all.
    """
    prepare()
    common = dict(os.environ) | new_address() | {PARENT: str(os.getpid())}
    training = tuple(range(num_training_ranks(config)))
    command = launcher_command(
        module, [*arguments, "--role", "train"], ranks=len(training), restarts=restarts
    )
    rollouts = [_Rollout(each, module, arguments, common) for each in serving_worlds(config)]
    worlds = _Worlds(training=(command, common | _gpus(training)), rollouts=rollouts)
    status = worlds.run()
    sys.exit(status if status >= 0 else 128 - status)


def _gpus(ranks: Sequence[int]) -> dict[str, str]:
    """Return the variable that gives a world its GPUs; empty without GPUs.

    Args:
        ranks: of the run.

    Raises:
        ValueError: this host has too few.
    """
    if not device.is_gpu():
        return {}
    named = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    gpus = named or [str(gpu) for gpu in range(device.visible_gpus())]
    if len(gpus) <= ranks[-1]:
        raise ValueError(
            f"the devices of worlds: ranks to {ranks[-1]} need {ranks[-1] + 1} GPUs, and this host has "
            f"{len(gpus)}; name lower ranks, or start each world on a host of its own with --role"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank] for rank in ranks)}


class _Rollout:
    """A rollout world, started again after a fault."""

    def __init__(
        self, served_by: ServingWorld, module: str, arguments: Sequence[str], environment: dict[str, str]
    ):
        self.name = served_by.name
        self._command = launcher_command(
            module, [*arguments, "--role", self.name], ranks=len(served_by.ranks), restarts=0
        )
        self._environment = environment | _gpus(served_by.ranks) | QUICK
        self.process: subprocess.Popen

    def start(self) -> None:
        # Ctrl-C reaches training alone, and this process
        self.process = subprocess.Popen(self._command, env=self._environment, process_group=0)

    def end(self, *, within_s: float) -> None:
        """Wait for its end, and end it if it does not come."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM if within_s else signal.SIGKILL)
            self.process.wait()


class _Worlds:
    """The training world, with its command and environment, and the rollout worlds."""

    def __init__(self, *, training: tuple[list[str], dict], rollouts: Sequence[_Rollout]):
        self._rollouts = rollouts
        self._training = subprocess.Popen(training[0], env=training[1])
        for rollout in rollouts:
            rollout.start()
        self._interrupted_at = 0.0

    def run(self) -> int:
        """Return the status with which to exit, once all have ended."""
        signal.signal(signal.SIGTERM, lambda *_: self._training.terminate())  # it saves, and ends the others
        signal.signal(signal.SIGINT, self._interrupt)
        while self._training.poll() is None:
            time.sleep(POLL_S)
            if self._interrupted_at:
                self._end_interrupted()
                continue
            for rollout in self._rollouts:
                if not (status := rollout.process.poll()) or self._training.poll() is not None:
                    continue
                if not _is_fault(status):
                    status = self._end_training(status)
                    self._end_rollouts(within_s=0)
                    return status
                print(
                    f"the {rollout.name} world ended with {_shown(status)} and is started again", flush=True
                )
                rollout.start()
        status = self._training.returncode
        self._end_rollouts(within_s=0 if status else ENDING_S)
        return status

    def _interrupt(self, *_: object) -> None:
        self._interrupted_at = self._interrupted_at or time.monotonic()

    def _end_interrupted(self) -> None:
        for rollout in self._rollouts:
            rollout.process.kill()  # its ranks end with it
        if time.monotonic() > self._interrupted_at + FROM_TERMINAL_S:
            self._training.send_signal(signal.SIGINT)
            self._training.wait()

    def _end_training(self, status: int) -> int:
        try:
            return self._training.wait(1.0) or status
        except subprocess.TimeoutExpired:
            self._training.kill()
            self._training.wait()
            return status

    def _end_rollouts(self, *, within_s: float) -> None:
        end = time.monotonic() + within_s
        for rollout in self._rollouts:
            rollout.end(within_s=max(0.0, end - time.monotonic()))


def _is_fault(status: int) -> bool:
    """Whether a world ended by something that may not happen again: a signal, or a rank without progress."""
    status = int(_shown(status))
    return status not in ENDED_ON_PURPOSE and (status > 128 or status == watchdog.EXIT_STATUS)


def _shown(status: int) -> str:
    return str(status if status >= 0 else 128 - status)
