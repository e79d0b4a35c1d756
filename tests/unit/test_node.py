"""The launcher of recipes on one host: a dry run of the module decides whether its ranks begin."""

import os
import subprocess
import sys

import pytest

from tests.worlds import environment_of_ranks

MODULE = """
import os, sys
from parallel import gate

if "--dry-run" in sys.argv:
    print("a plan for", os.environ["WORLD_SIZE"], "ranks")
    print("some library warns", file=sys.stderr)
    print("error: no room for x=1", file=sys.stderr)
    if os.environ["STATUS"] == "killed":
        os.kill(os.getpid(), 9)
    sys.exit(int(os.environ["STATUS"]))
gate.pass_through()
print("rank", os.environ["RANK"], "has", *sys.argv[1:])
"""


@pytest.mark.parametrize(("said", "status"), [("2", 2), ("3", 0), ("killed", 137)])
def test_ranks_begin_if_a_dry_run_refuses_nothing_but_want_of_room(said, status, tmp_path):
    (tmp_path / "asked.py").write_text(MODULE)
    environment = environment_of_ranks() | {"STATUS": said}
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    launch = ["verl_megatron.launch.node", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", "--check"]
    command = [sys.executable, "-m", *launch, "-m", "asked", "x=1"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    begun = sorted(ended.stdout.splitlines())
    assert (ended.returncode, begun) == (status, [] if status else ["rank 0 has x=1", "rank 1 has x=1"]), (
        ended
    )
    assert "no room" not in ended.stderr if not status else ended.stderr.endswith("error: no room for x=1\n")
