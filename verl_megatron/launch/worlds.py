"""Start of a training world and its rollout world on this host."""

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
from verl_megatron.model_specs import num_training_ranks, rollout_devices

FROM_TERMINAL_S = 0.5  # in which a Ctrl-C reaches both worlds without this process
ENDING_S = 60.0  # for the rollout world, once the training world has ended well
POLL_S = 0.05
# A rollout world has nothing to save; and torch would log that the store ends with the training world.
QUICK = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}
ENDED_ON_PURPOSE = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def start_worlds(module: str, arguments: Sequence[str], config: TrainerConfig, *, restarts: int) -> NoReturn:
    """Run the training and the rollout world of this host, and exit when the training world has ended.

    Each has the launcher of `start`. A rollout world that was killed or got stuck is started again. If it
    ends by an error of its own, the training world is ended, too.

    Args:
        restarts: of the training world, from the newest checkpoint.

    Raises:
        ValueError: this host has too few GPUs for both.
    """
    prepare()
    common = dict(os.environ) | new_address() | {PARENT: str(os.getpid())}
    num_training, num_rollout = num_training_ranks(config), len(rollout_devices(config))
    worlds = _Worlds(
        training=(
            launcher_command(module, [*arguments, "--role", "train"], ranks=num_training, restarts=restarts),
            common | _gpus(0, num_training),
        ),
        rollout=(
            launcher_command(module, [*arguments, "--role", "rollout"], ranks=num_rollout, restarts=0),
            common | _gpus(num_training, num_rollout) | QUICK,
        ),
    )
    status = worlds.run()
    sys.exit(status if status >= 0 else 128 - status)


def _gpus(first: int, count: int) -> dict[str, str]:
    """Return the variable that gives a world its GPUs; empty without GPUs.

    Raises:
        ValueError: this host has too few.
    """
    if not device.is_gpu():
        return {}
    named = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    gpus = named or [str(gpu) for gpu in range(device.visible_gpus())]
    if len(gpus) < first + count:
        raise ValueError(
            f"rollout.devices: ranks to {first + count - 1} need {first + count} GPUs, and this host has "
            f"{len(gpus)}; name lower ranks, or start each world on a host of its own with --role"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + count])}


class _Worlds:
    """Both worlds, each with its command and environment."""

    def __init__(self, *, training: tuple[list[str], dict], rollout: tuple[list[str], dict]):
        self._rollout_command = rollout
        self._training = subprocess.Popen(training[0], env=training[1])
        self._rollout = self._start_rollout()
        self._interrupted_at = 0.0

    def _start_rollout(self) -> subprocess.Popen:
        command, environment = self._rollout_command
        # Ctrl-C reaches training alone, and this process
        return subprocess.Popen(command, env=environment, process_group=0)

    def run(self) -> int:
        """Return the status with which to exit, once both have ended."""
        signal.signal(signal.SIGTERM, lambda *_: self._training.terminate())  # it saves, and ends the other
        signal.signal(signal.SIGINT, self._interrupt)
        while self._training.poll() is None:
            time.sleep(POLL_S)
            if self._interrupted_at:
                self._end_interrupted()
            elif (status := self._rollout.poll()) and self._training.poll() is None:
                if not _is_fault(status):
                    return self._end_training(status)
                print(f"the rollout world ended with {_shown(status)} and is started again", flush=True)
                self._rollout = self._start_rollout()
        return self._end_rollout(self._training.returncode)

    def _interrupt(self, *_: object) -> None:
        self._interrupted_at = self._interrupted_at or time.monotonic()

    def _end_interrupted(self) -> None:
        self._rollout.kill()  # its ranks end with it
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

    def _end_rollout(self, status: int) -> int:
        try:
            self._rollout.wait(ENDING_S if status == 0 else 0)
        except subprocess.TimeoutExpired:
            self._rollout.send_signal(signal.SIGTERM if status == 0 else signal.SIGKILL)
            self._rollout.wait()
        return status


def _is_fault(status: int) -> bool:
    """Whether a world ended by something that may not happen again: a signal, or a rank without progress."""
    status = int(_shown(status))
    return status not in ENDED_ON_PURPOSE and (status > 128 or status == watchdog.EXIT_STATUS)


def _shown(status: int) -> str:
    return str(status if status >= 0 else 128 - status)
