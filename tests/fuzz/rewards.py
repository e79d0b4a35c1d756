"""Reward functions by name: no such file or function, and files that do harm when imported."""

import os
import random
from functools import partial

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.job import Job

SPECS = (
    "mtach",
    "Match",
    "match,last_number",
    "[match,last_number",
    "[]",
    "[match,match:2]",
    "[match,[last_number]]",
    "[match:0,last_number:0]",
    "[match:nan]",
    "[match:-inf,last_number]",
    "[match,,last_number]",
    "[match:1e7]",
    "[match,{file}:nothing:0.5]",
    "{file}",
    "{file}:",
    ":score",
    "{file}:nothing",
    "{file}:Score",
    "{file}:score:score",
    "{file}:os",
    "{file}:CONSTANT",
    "{folder}:score",
)
MORE_SPECS = (
    "{folder}/none.py:score",
    "{file}.txt:score",
    "/dev/null:score",
    "/dev/zero:score",
    "{pipe}:score",
    "os.system",
    "os:system",
    "http://example.invalid/r.py:score",
    "{binary}:score",
    "ü",
    "x" * 5000,
)
DEF = "def score(prompt, response, ground_truth, extra):\n    return 1.0\n"
# Files that cannot be imported.
BROKEN = {
    "a syntax error": "def score(:\n",
    "an open bracket": "x = [1,\n",
    "a null byte": "x = 1\0\n",
    "a wrong indentation": "def score(a):\nreturn 1\n",
    "an exception": "raise RuntimeError('no')\n",
    "a huge exception": "raise RuntimeError('no' * 10_000_000)\n",
    "an exception that cannot be shown": "class E(Exception):\n    def __str__(self): raise self\nraise E\n",
    "an import of nothing": "import no_such_package_at_all\n",
    "sys.exit(0)": "import sys; sys.exit(0)\n",
    "sys.exit(3)": "import sys; sys.exit(3)\n",
    "os._exit(0)": "import os; os._exit(0)\n",
    "a KeyboardInterrupt": "raise KeyboardInterrupt\n",
    "a signal to itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
    "an abort": "import os; os.abort()\n",
    "a segmentation fault": "import ctypes; ctypes.string_at(0)\n",
    "endless recursion": "def f(): f()\nf()\n",
    "much memory": "x = bytearray(1 << 40)\n",
    "an endless loop": "while True: pass\n",
    "an endless sleep": "import time; time.sleep(10_000)\n",
    "standard input": "import sys\nif not sys.stdin.readline(): raise EOFError('nothing to read')\n",
}
# Files that do more than they should when they are imported, and can be.
ODD = {
    "argparse": "import argparse; argparse.ArgumentParser().parse_args()\n",  # of no arguments there
    "a torch default": "import torch; torch.set_default_dtype(torch.float64)\n",
    "print": "print('hello')\n",
    "much print": "print('hello ' * 1_000_000)\n",
    "another folder": "import os; os.chdir('/')\n",
    "closed output": "import os; os.close(1); os.close(2)\n",
    "another standard output": "import sys; sys.stdout = None\n",
    "signals": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    "a thread": "import threading, time; threading.Thread(target=time.sleep, args=(30,), "
    "daemon=False).start()\n",
    "a child": "import subprocess; subprocess.Popen(['sleep', '300'])\n",
    "a fork": "import os, time\nif not os.fork():\n    time.sleep(300)\n",
    "a detached fork": "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(300)\n",
    "an exit handler": "import atexit, time; atexit.register(time.sleep, 300)\n",
    "a changed environment": "import os; os.environ.clear()\n",
    "its parent": "import os, signal; os.kill(os.getppid(), signal.SIGTERM)\n",
    "its group": "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.killpg(0, "
    "signal.SIGTERM)\n",
}
FINE = {
    "a function": DEF,
    "a lambda": "score = lambda p, r, g, e: 1.0\n",
    "a partial": "import functools\ndef f(a, p, r, g, e): return a\nscore = functools.partial(f, 1.0)\n",
    "an object": "class Score:\n    def __call__(self, prompt, response, ground_truth, extra): "
    "return 1.0\nscore = Score()\n",
    "defaults": "def score(prompt, response, ground_truth=None, extra=None, more=3): return 1.0\n",
    "any arguments": "def score(*arguments): return 1.0\n",
    "verl's names": "def score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n",
    "some names": "def score(ground_truth, *, response): return 1.0\n",
    "lists": "def score(completions, **columns): return [1.0]\n",
    "a byte-order mark": "\ufeff" + DEF,
    "non-ASCII": "# ü\n" + DEF,
    "another module": "import json, re, math\n" + DEF,
}
WRONG_ARGUMENTS = {
    "another name": "def score(response, truth): return 1.0\n",
    "two names in other places": "def score(response, prompt, a, b): return 1.0\n",
    "none": "def score(): return 1.0\n",
    "async": "async def score(prompt, response, ground_truth, extra): return 1.0\n",
    "a generator": "def score(prompt, response, ground_truth, extra): yield 1.0\n",
    "a class": "class score: pass\n",
}


PLANS = {
    "[match:0.8,last_number:0.2]": ACCEPTED,
    "[FILE:score,match : -1]": ACCEPTED,
    "[match:0,last_number]": ACCEPTED,
    "[exact,format:0.1,regex:0.1,json:0]": ACCEPTED,
    "[code,format:0.1]": EITHER,
    "http://127.0.0.1:9/score": REFUSED,
    "[http://127.0.0.1:9/score:0.5,match]": REFUSED,
    "http://:80/score": REFUSED,
    "http://a@127.0.0.1/score": REFUSED,
    "https://127.0.0.1:99999/score": REFUSED,
    "http://": REFUSED,
    "http://ä/b": REFUSED,
    "code reward.code_timeout_s=100": REFUSED,
    "[match,length:0.1]": REFUSED,
    "length reward.target_length=5": REFUSED,
    "[match,Format]": REFUSED,
    "[{match:0.5},last_number]": ACCEPTED,
    "{default:[match,FILE:score:0.1]}": ACCEPTED,
    "{a b/c:last_number,default:match:2}": ACCEPTED,
    "{1:match,true:match,default:match}": ACCEPTED,
    "[]": REFUSED,
    "{}": REFUSED,
    "{gsm8k:match}": REFUSED,
    "{default:[]}": REFUSED,
    "{default:{a:match}}": REFUSED,
    "{match:0.8,last_number:0.2}": REFUSED,
    "{default:null}": REFUSED,
    "[match,null]": REFUSED,
    "[match,3]": REFUSED,
    "[match,match]": REFUSED,
    "[match:nan]": REFUSED,
    "[[[[[match]]]]]": REFUSED,
    "[FILE:gone,match]": REFUSED,
    "[FILE:gone:0.5]": REFUSED,
}


def mutations() -> list[Mutation]:
    found: list[Mutation] = [partial(spec, text=text) for text in SPECS + MORE_SPECS]
    found += [partial(plan, text=text, expected=expected) for text, expected in PLANS.items()]
    tables = ((BROKEN, "", REFUSED), (ODD, DEF, EITHER), (FINE, "", ACCEPTED), (WRONG_ARGUMENTS, "", EITHER))
    for table, after, expected in tables:
        found += [
            partial(of_a_file, what=what, text=text + after, expected=expected)
            for what, text in table.items()
        ]
    return found


def spec(job: Job, rng: random.Random, *, text: str) -> Case:
    file = job.write("mine.py", "import os\nCONSTANT = 3\n" + DEF)
    job.write("mine.py.txt", DEF)
    job.write("binary.py", bytes(range(256)))
    os.mkfifo(job.folder / "pipe.py")
    given = text.format(
        file=file, folder=job.folder, pipe=job.folder / "pipe.py", binary=job.folder / "binary.py"
    )
    return Case(
        name=f"reward.function={text[:60]!r}",
        expected=REFUSED,
        names=("reward.function",),
        act=job.dry_run(f"reward.function='{given}'"),
    )


def plan(job: Job, rng: random.Random, *, text: str, expected: str) -> Case:
    """Several functions in Hydra's own lists and mappings; `FILE` is a good reward file."""
    given = text.replace("FILE", str(job.write("mine.py", DEF)))
    return Case(
        name=f"reward.function={text[:60]}",
        expected=expected,
        names=("reward.function",) if expected == REFUSED else (),
        act=job.dry_run(f"reward.function={given}"),
    )


def of_a_file(job: Job, rng: random.Random, *, what: str, text: str, expected: str) -> Case:
    if expected == REFUSED and rng.random() < 0.5:
        text = DEF + text
    file = job.write("mine.py", text)
    names = ("reward.function",) if expected == REFUSED else ()
    return Case(
        name=f"a file with {what}",
        longest=200_000,
        expected=expected,
        names=names,
        act=job.dry_run(f"reward.function={file}:score"),
    )
