"""Start recipes and launchers as users do, with a `python` on the path that only records its call."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from parallel.runtime.seal import TOKEN
from tests.worlds import OF_A_WORLD, ROOT

LAUNCH = Path("recipes/launch")
RECORDER = """#!/usr/bin/env bash
printf -v call '%s\\x1f' "WORLD_SIZE=$WORLD_SIZE" "LOCAL_WORLD_SIZE=$LOCAL_WORLD_SIZE" "$@"
echo "$call" >>"$RECORD" # at once: calls of several nodes do not mix
[[ -z ${FAIL:-} || $* != *$FAIL* ]] || { echo "error: asked to fail" >&2; exit ${FAIL_STATUS:-1}; }
"""
# What belongs to a world around the tests.
AROUND = {
    "LOCAL_RANK",
    "NNODES",
    "GPUS",
    "NODE_RANK",
    "MASTER_ADDR",
    "MODEL",
    "DATA",
    "CRITIC",
    "CRITIC_MODEL",
    "SSH",
    "LOGS",
    TOKEN,
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of python: the world it was told, and its arguments."""

    world_size: str
    local_world_size: str
    arguments: tuple[str, ...]

    @property
    def starts_ranks(self) -> bool:
        return self.arguments[:2] == ("-m", "verl_megatron.launch.node")


@dataclass(frozen=True, kw_only=True)
class Said:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    calls: list[Call]


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would change a launcher, and with the Python that runs the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    left_out = {*AROUND, *OF_A_WORLD}
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"PATH": path} | more


def say(*command: str | Path, folder: Path, told: str = "", **more: str) -> Said:
    """Run `command` in the repository's root with `more` in its environment; `folder` gets the stand-in.

    Args:
        told: standard input, which stays open behind it.
    """
    stand_in, record = folder / "bin/python", folder / "record"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(RECORDER)
    stand_in.chmod(0o755)
    record.write_text("")
    path = {
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "RECORD": str(record),
        "VERL_MEGATRON_VENV": str(folder),
    }
    stdin, writer = os.pipe()  # stays open: recipes/launch/node.sh ends with it
    os.write(writer, told.encode())
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment(**path | more),
        stdin=stdin,
        text=True,
        capture_output=True,
        timeout=60,
    )
    os.close(stdin), os.close(writer)
    calls = []
    for line in record.read_text().splitlines():
        world, local, *arguments = line.removesuffix("\x1f").split("\x1f")
        calls.append(
            Call(
                world_size=world.partition("=")[2],
                local_world_size=local.partition("=")[2],
                arguments=tuple(arguments),
            )
        )
    return Said(code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr, calls=calls)


def say_recipe(script: str, *settings: str, folder: Path, **more: str) -> Said:
    """Run recipes/SCRIPT.sh, as `say` does."""
    return say("bash", f"recipes/{script}.sh", *settings, folder=folder, **more)


def say_hostfile(*arguments: str | Path, folder: Path, **more: str) -> Said:
    """Run recipes/launch/hostfile.sh with these arguments, as `say` does."""
    return say("bash", LAUNCH / "hostfile.sh", *arguments, folder=folder, **more)


def hostfile(path: Path, *, nodes: int, slots: int) -> Path:
    path.write_text("".join(f"worker-{node} slots={slots}\n" for node in range(nodes)))
    return path


def operator(nodes: int, gpus: int, node: int = 0) -> dict[str, str]:
    """Environment of a pod as Kubeflow's training operator 1.7 sets it (pytorch/envvar.go)."""
    job = {
        "MASTER_ADDR": "llama3-70b-ppo-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(nodes * gpus),
        "RANK": str(node),
    }
    return job | {"PET_NPROC_PER_NODE": str(gpus), "PET_NODE_RANK": str(node), "PET_NNODES": str(nodes)}
