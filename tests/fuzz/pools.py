"""Reward functions that do harm when they are called, in the pool of workers that a run has."""

import random
import sys
from functools import partial
from pathlib import Path

from tests.fuzz.case import ACCEPTED, REFUSED, Case, Mutation
from tests.fuzz.job import Job

TIMEOUT_S = 8.0
LONGEST_TEXT = 200_000  # characters: what a worker prints is shown up to a limit
HEAD = "import math, os, random, signal, sys, time\n"
DEF = "def score(prompt, response, ground_truth, extra):\n    if response == 'good':\n        return 1.0\n"
# What a call does that must cost its sample, and no other.
HARMFUL = (
    *(
        "sys.exit(0)",
        "sys.exit('text')",
        "os._exit(0)",
        "os._exit(3)",
        "os.abort()",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(9)",
    ),
    *(
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(9)",
        "os.killpg(os.getpgid(os.getppid()), signal.SIGTERM); time.sleep(9)",
        "while True: pass",
        "time.sleep(99)",
    ),
    *(
        "raise ValueError('x' * 50_000_000)",
        "raise KeyboardInterrupt",
        "raise SystemExit",
        "raise GeneratorExit",
        "raise MemoryError",
        "return bytearray(1 << 42)",
        "score(prompt, response, ground_truth, extra)",
    ),
    *(
        "return math.nan",
        "return math.inf",
        "return 1e300",
        "return -1e39",
        "return 10**400",
        "return None",
        "return '1.0'",
        "return []",
        "return [1.0]",
        "return {}",
        "return {'reward': 1.0}",
    ),
    *(
        "return {'score': None}",
        "return {'score': math.nan}",
        "return {'score': [1]}",
        "return 1j",
        "return score",
        "return object()",
        "return {1: 2}",
        "return (x for x in [1])",
        "return (1.0, 'a')",
    ),
    *(
        "import asyncio; return asyncio.sleep(0)",
        "import ctypes; ctypes.string_at(0)",
        "class E(Exception):\n        def __str__(self): raise self\n    raise E",
        "return type('F', (), {'__float__': lambda self: 1 / 0})()",
    ),
    *(
        "return type('F', (), {'__float__': lambda self: os._exit(0)})()",
        "sys.setrecursionlimit(10**9); f = lambda: f(); f()",
        "signal.alarm(1); time.sleep(9)",
        "import threading; threading.main_thread()._stop(); os._exit(1)",
    ),
)
# What a call does beside giving 0.5, which it may.
ODD = (
    *(
        "print('x' * 5_000_000)",
        "sys.stderr.write('x' * 5_000_000)",
        "os.write(1, b'x' * 5_000_000)",
        "os.fork() or time.sleep(300)",
        "import subprocess; subprocess.Popen(['sleep', '300'])",
    ),
    *(
        "os.chdir('/')",
        "os.close(1)",
        "sys.stdout = None",
        "random.seed(0)",
        "os.environ.clear()",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "import gc; gc.disable()",
        "import atexit; atexit.register(time.sleep, 99)",
    ),
    *(
        "sys.settrace(None)",
        "import threading; threading.Thread(target=time.sleep, args=(99,)).start()",
        "prompt = None",
        "extra.clear()",
        "del globals()['math']",
    ),
)
GOOD_SAMPLES = 3


def mutations() -> list[Mutation]:
    return [partial(called, does=does, expected=REFUSED, returns="") for does in HARMFUL] + [
        partial(called, does=does, expected=ACCEPTED, returns="    return 0.5\n") for does in ODD
    ]


def called(job: Job, rng: random.Random, *, does: str, expected: str, returns: str) -> Case:
    file = job.write("mine.py", f"{HEAD}{DEF}    {does}\n{returns}")
    return Case(
        name=does,
        longest=LONGEST_TEXT,
        expected=expected,
        act=partial(score_samples, file, workers=rng.choice((1, 2)), at=rng.randrange(GOOD_SAMPLES)),
    )


def score_samples(file: Path, *, workers: int, at: int) -> None:
    """Score good samples and one of the other kind; if that fails, say so and end with 2, as a run ends."""
    from verl_megatron.rewards.pool import RewardPool

    with RewardPool(f"{file}:score", workers=workers, timeout_s=TIMEOUT_S) as pool:
        for sample_id in range(GOOD_SAMPLES + 1):
            pool.submit(sample_id, "prompt", "bad" if sample_id == at else "good", "truth", {})
        rewards = pool.results()
        pool.submit(0, "prompt", "good", "truth", {})
        again = pool.results()[0]
        shown = [str(example) for example in pool.examples.values()]
    good = [reward for sample_id, reward in rewards.items() if sample_id != at] + [again]
    if any(reward.failure or reward.score != 1.0 for reward in good):
        sys.exit(f"samples beside the bad one have {good}")
    if rewards[at].failure:
        print(f"error: {rewards[at].failure}", *shown, file=sys.stderr)
        sys.exit(2)
    print(f"score {rewards[at].score}")
