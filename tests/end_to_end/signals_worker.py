"""Kills and stops whatever belongs to a run, as recipes and torchrun start it, and looks at what is left.

    python -m tests.end_to_end.signals_worker FOLDER --kills 50 --stops 6 [--seed 1]

A kill (SIGKILL) hits a rank, the launcher, all processes or a reward worker at a random moment. The same
command is started again each time and has to learn what an undisturbed run learns, bitwise. A stop (SIGSTOP)
hits each rank in turn under the recipes' launcher, torchrun, and torchrun with the store in a rank; it has to
be named within run.stall_timeout_s + 5 s. No process, shared memory or temporary file may be left. Exits with
1 and names what is wrong.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from tests.end_to_end.measured import learned_in_attempts
from tests.worlds import ROOT
from verl_megatron.examples.toy import make_toy

NUM_RANKS = 2
STALL_S = 6
RECIPE = f"source {ROOT}/recipes/launch/local.sh\nworld 1 {NUM_RANKS}\nstart verl_megatron.train " + '"$@"\n'
TARGETS = ("rank 0", "rank 1", "launcher", "all", "reward worker")
MARK = "SIGNALS_WORKER"
SETTINGS = [
    *(
        "run.save_interval=1",
        "data.prompts_per_iteration=16",
        "rollout.max_tokens=6",
        "rollout.tp=2",
        "actor.layout=tp2",
        "critic.layout=pp2",
    ),
    *(
        "algorithm.num_mini_batches=2",
        "algorithm.kl_coef=0.1",
        "algorithm.kl_ctrl_target=0.01",
        "algorithm.kl_ctrl_horizon=64",
        "run.async_save=true",
    ),
]


@dataclass(kw_only=True)
class Running:
    """A run and what belongs to it."""

    folder: Path
    process: subprocess.Popen
    mark: str
    started: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        return (self.folder / "output").read_text()

    def processes(self) -> dict[int, str]:
        """Command lines, by process id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_mine = f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes()
                if is_mine and (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
            except OSError:
                continue  # it has just ended
        return found

    def rank(self, number: int) -> int | None:
        """The launcher's child with that RANK."""
        for pid in self.processes():
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if (
                    parent == self.process.pid
                    and f"\0RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
                ):
                    return pid
            except OSError:
                continue
        return None

    def targets(self, name: str) -> list[int]:
        if name.startswith("rank"):
            return [pid for pid in [self.rank(int(name.split()[1]))] if pid]
        if name == "reward worker":
            return [pid for pid, command in self.processes().items() if "rewards.worker" in command]
        return [self.process.pid] if name == "launcher" else list(self.processes())

    def wait_for(self, pattern: str, *, within_s: float) -> float:
        """Seconds until the output has the pattern or the run has ended.

        Raises:
            AssertionError: neither within the time.
        """
        begin = time.monotonic()
        while not re.search(pattern, self.text) and self.process.poll() is None:
            assert time.monotonic() < begin + within_s, (
                f"no {pattern!r} within {within_s} s:\n{self.text[-6000:]}"
            )
            time.sleep(0.02)
        return time.monotonic() - begin

    def leftovers(self) -> list[str]:
        """Processes that are still there some seconds after the end."""
        deadline = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"still running: {command}" for command in left.values()]


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell ignores in what it runs in the background


def start(folder: Path, toy: Path, *settings: str, launcher: str = "recipe", **environment: str) -> Running:
    """A run in `folder`/run with temporary files in `folder`/tmp, under `launcher` (recipe or torchrun)."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.sh").write_text(RECIPE)
    ranks = ["bash", str(folder / "recipe.sh")]
    if launcher == "torchrun":
        ranks = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={NUM_RANKS}",
            "-m",
            "verl_megatron.train",
        ]
    job = [
        "--config-path",
        str(ROOT / "recipes"),
        "--config-name",
        "ppo_toy_cpu",
        f"actor.path={toy}/model",
        f"data.train={toy}/train.jsonl",
        "data.validation=",
    ]
    mark = uuid.uuid4().hex
    known = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    told = known | {
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "tmp"),
        MARK: mark,
    }
    told |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VERL_MEGATRON_VENV": str(Path(sys.executable).parents[1]),
    }
    told |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"} | environment
    with (folder / "output").open("w") as output:
        command = [*ranks, *job, *SETTINGS, f"run.output_dir={folder}/run", *settings]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=told,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )
    return Running(folder=folder, process=process, mark=mark)


def strike(running: Running, name: str) -> bool:
    """SIGKILL to what the name stands for; False where there is none."""
    struck = running.targets(name) if running.process.poll() is None else []
    for pid in struck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(struck)


def await_moment(running: Running, name: str, draw: random.Random) -> None:
    """A random moment of imports, building or iterations; a reward worker is struck while it is idle."""
    if name == "reward worker":
        running.wait_for(r"step \d+", within_s=120)
    elif draw.random() < 0.7:
        running.wait_for("KV cache", within_s=120)
    while not running.targets(name) and running.process.poll() is None:
        time.sleep(0.01)  # ranks start seconds after the launcher
    end = time.monotonic() + (0 if name == "reward worker" else draw.uniform(0, 4))
    while time.monotonic() < end and running.process.poll() is None:
        time.sleep(0.01)


def kills(folder: Path, toy: Path, *, count: int, seed: int) -> list[str]:
    """What is wrong after so many kills."""
    draw, struck, problems, last = random.Random(seed), Counter(), [], f"run.iterations={3 * count + 4}"
    whole = start(folder / "whole", toy, last)
    assert whole.process.wait(3600) == 0, whole.text[-6000:]
    while struck.total() < count:
        running = start(folder / "broken", toy, last)
        name = draw.choice(TARGETS)
        await_moment(running, name, draw)
        struck[name] += strike(running, name)
        if name == "reward worker":  # another takes its place, and the run goes on
            running.wait_for(rf"(?s)(step \d+/.*){{{running.text.count('step ') + 2}}}", within_s=60)
            struck["all"] += strike(running, "all")
        try:
            status = running.process.wait(60)
        except subprocess.TimeoutExpired:
            problems.append(f"goes on after {name}: {running.text[-2000:]}")
            strike(running, "all")
            status = running.process.wait(60)
        problems += running.leftovers()
        if status == 0:  # at its end before it was struck
            break
    running = start(folder / "broken", toy, last)
    status = running.process.wait(3600)
    problems += [f"the last attempt ended with {status}: {running.text[-3000:]}"] if status else []
    print(f"{struck.total()} kills: {dict(struck)}", flush=True)
    return (
        problems
        + apart(folder / "whole/run", folder / "broken/run")
        + running.leftovers()
        + names_left(folder / "whole")
        + names_left(folder / "broken")
    )


def apart(whole: Path, broken: Path) -> list[str]:
    """In what two runs differ."""
    expected, found = learned_in_attempts(whole), learned_in_attempts(broken)
    problems = [
        f"other metrics of step {one['step']}" for one, other in zip(expected, found) if one != other
    ] + ["other steps"] * (len(expected) != len(found))
    return problems + [
        f"other weights of the {role}"
        for role in ("actor", "critic")
        if not same_weights(whole / role, broken / role)
    ]


def stops(folder: Path, toy: Path, *, count: int, seed: int) -> list[str]:
    """What is wrong after so many stops: each rank under each launcher, in turn."""
    draw, problems = random.Random(seed), []
    cases = [("recipe", {}), ("torchrun", {}), ("torchrun", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]
    for i in range(count):
        (launcher, environment), rank = cases[i // NUM_RANKS % len(cases)], i % NUM_RANKS
        running = start(
            folder / f"stop_{i}",
            toy,
            f"run.stall_timeout_s={STALL_S}",
            "run.iterations=1000",
            launcher=launcher,
            **environment,
        )
        running.wait_for("step 1/", within_s=120)
        time.sleep(draw.uniform(0, 2))
        victim = running.rank(rank)
        os.kill(victim, signal.SIGSTOP)
        took_s = running.wait_for(rf"rank {rank} made no progress", within_s=STALL_S + 30)
        print(f"rank {rank} under {launcher} {environment or ''} was named after {took_s:.1f} s", flush=True)
        problems += [f"rank {rank} was named after {took_s:.1f} s"] * (took_s > STALL_S + 5)
        problems += [f"not named:\n{running.text[-3000:]}"] * (
            f"rank {rank} made no progress" not in running.text
        )
        deadline = time.monotonic() + 40
        while running.rank(1 - rank) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):  # torchrun does it after its --shutdown-timeout
            os.kill(victim, signal.SIGKILL)
        status = running.process.wait(60)
        problems += [f"the recipe ended with {status}"] * (launcher == "recipe" and status != 75)
        problems += running.leftovers()
        again = start(folder / f"stop_{i}", toy, "run.iterations=1", "run.resume=never")
        problems += [f"the next run failed:\n{again.text[-3000:]}"] * (again.process.wait(300) != 0)
        problems += names_left(folder / f"stop_{i}")
    return problems


def names_left(folder: Path) -> list[str]:
    """Temporary files of these runs and shared memory of no living process, two minutes after the end.

    Ranks that a test beside this one has killed leave names as well, which their next attempt takes away.
    """
    deadline = time.monotonic() + 120  # such an attempt has made its imports by then
    while (shared := unmapped()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"left behind: {path}" for path in (*(folder / "tmp").iterdir(), *shared)]


def unmapped() -> list[Path]:
    """Shared memory of runs that no living process has mapped."""
    found, used = {}, mapped()
    for path in Path("/dev/shm").iterdir():
        if "vmeg-" in path.name or path.name.startswith(("psm_", "sem.mp-")):
            with contextlib.suppress(FileNotFoundError):  # it has just been taken away
                found[path] = path.stat().st_ino
    return [path for path, inode in found.items() if inode not in used]


def mapped() -> set[int]:
    """Inodes of the shared memory that living processes have mapped; a semaphore's is named otherwise."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended
            found |= {int(line.split()[4]) for line in path.read_text().splitlines() if "/dev/shm/" in line}
    return found


def same_weights(one: Path, other: Path) -> bool:
    whole, again = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return whole.keys() == again.keys() and all(whole[name].equal(again[name]) for name in whole)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_toy(options.folder / "toy")
    problems = []
    if options.kills:
        problems += kills(options.folder, options.folder / "toy", count=options.kills, seed=options.seed)
    if options.stops:
        problems += stops(options.folder, options.folder / "toy", count=options.stops, seed=options.seed)
    print("; ".join(problems) or "as an undisturbed run; nothing is left over")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
