"""Users' errors are shortened and reported once; the environment is checked before it is used."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from parallel.rank_set import agree
from parallel.runtime.environment import NUMBERS, TEXTS, check_environment, check_world
from parallel.runtime.refusal import LINE, VALUE, RefusalError, nearest, readable, short_repr
from tests.one_rank import ONE_RANK
from tests.processes import eventually
from tests.worlds import ROOT

WORLD = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def environment(monkeypatch):
    for name in (*NUMBERS, *TEXTS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# ---- words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000_000, list(range(1_000_000)), 10**5000, {"a": "\0" * 999}],
    ids=["text", "list", "number", "dict"],
)
def test_long_values_are_cut(value):
    assert len(short_repr(value)) <= VALUE and short_repr("tp2") == "'tp2'" and short_repr([1, 2]) == "[1, 2]"


def test_messages_are_cut_and_printable():
    text = readable("a" * 10**7 + "; remedy\nb\x1b[31m\udc80\0\n" + "c\n" * 10**5)
    assert text.split("\n")[0].endswith("; remedy") and len(text.split("\n")[0]) <= LINE
    assert "b\\x1b[31m\\udc80\\x00" in text and len(text) < 4000
    assert readable("two\nlines") == "two\nlines"


def test_the_nearest_name():
    assert nearest("temprature", ["tp", "temperature"]) == ', did you mean "temperature"?'
    assert nearest("GRPO", ["ppo", "grpo"]) == ', did you mean "grpo"?' and '"BC"' in nearest("bc", ["BC"])
    assert nearest("zzz", ["tp"]) == nearest("x" * 10**6, ["tp"]) == ""


# ---- environment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in NUMBERS for value in ("x", "-1", "1.5", "9" * 5000, "٢", "1 ")]
    + [("RANK", "200000"), ("MASTER_PORT", "0")],
)
def test_numbers_are_numbers(name, value, environment):
    environment.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}='.* must be a whole number from") as error:
        check_environment()
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("OMP_NUM_THREADS", ["1", "4,2"], ["0", "many", "-1"]),
        ("GRACE_S", ["30", "0.5"], ["0", "0.0", "soon", "-1", "1e3", "9" * 99]),
        (
            "CUDA_VISIBLE_DEVICES",
            ["0", "0,1", "-1", "NoDevFiles", "GPU-3fa2b1c0-aaaa,1", "MIG-aa/0/1"],
            ["all", "0;1", "cuda:0", "0,,1"],
        ),
        ("MASTER_ADDR", ["127.0.0.1", "node-1.cluster", "::1"], ["a b", "$(x)", "a" * 300]),
    ],
)
def test_texts_have_their_form(name, good, bad, environment):
    for value in ["", *good]:
        environment.setenv(name, value)
        check_environment()
    for value in bad:
        environment.setenv(name, value)
        with pytest.raises(ValueError, match=f"^{name}="):
            check_environment()


def test_a_world_is_described_whole_or_not_at_all(environment):
    check_world()
    for name, value in WORLD.items():
        environment.setenv(name, value)
    check_world()
    environment.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK=2 must be below WORLD_SIZE=2"):
        check_world()
    environment.delenv("RANK")
    environment.setenv("MASTER_PORT", "")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 without RANK, MASTER_PORT"):
        check_world()


# ---- ranks -----------------------------------------------------------------------------------------------


def test_alone_an_agreement_is_a_call():
    assert agree(lambda: 3, ONE_RANK) == 3

    def fail():
        raise ValueError("no")

    with pytest.raises(RefusalError, match="^no$"):
        agree(fail, ONE_RANK)


def catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler of SIGTERM; a zombie has none."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def ranks(script: str, tmp_path, *, count: int = 2, torchrun: bool = True) -> list[tuple[int, str, str]]:
    """(exit status, stderr, torchrun's error file) of each rank of a world of plain processes."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    base = {name: value for name, value in os.environ.items() if name not in NUMBERS} | {
        "PYTHONPATH": str(ROOT),
        "STORE": str(tmp_path / "store"),
    }
    running = []
    for rank in range(count):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error_{rank}.json"),
        }
        own |= {"TORCHELASTIC_RUN_ID": "test"} if torchrun else {}
        running.append(
            subprocess.Popen([sys.executable, file], env=base | own, stderr=subprocess.PIPE, text=True)
        )
    ended = []
    running[0].wait(timeout=60)
    assert eventually(
        lambda: all(process.poll() is not None or catches_sigterm(process.pid) for process in running)
    )
    for rank, process in enumerate(running):
        process.terminate()  # as torchrun does when one has ended
        text = process.communicate(timeout=60)[1]
        report = tmp_path / f"error_{rank}.json"
        ended.append(
            (
                process.returncode,
                text,
                json.loads(report.read_text())["message"]["message"] if report.exists() else "",
            )
        )
    return ended


SETTING = """
    from parallel.runtime.refusal import let_others_speak
    from verl_megatron import TrainerConfig
    TrainerConfig().rollout.temprature = 0
"""


def test_one_sentence_and_torchruns_report(tmp_path):
    ((code, said, report),) = ranks(SETTING, tmp_path, count=1)
    assert (
        code == 2
        and said.startswith("error: temprature is no setting of RolloutConfig, did you mean")
        and said.count("\n") == 1
    )
    assert said == f"error: {report}\n"


def test_without_torchrun_an_exception_stays_one(tmp_path):
    ((code, said, report),) = ranks(SETTING, tmp_path, count=1, torchrun=False)
    assert code == 1 and "Traceback" in said and not report


def test_errors_of_the_users_own_keep_their_traceback(tmp_path):
    script = """
        import verl_megatron
        verl_megatron.TrainerConfig
        raise ValueError("mine")
    """
    ((code, said, _),) = ranks(script, tmp_path, count=1)
    assert code == 1 and "Traceback" in said


def test_all_ranks_refuse_what_one_refuses(tmp_path):
    script = """
        import os
        import torch.distributed as dist
        from parallel.rank_set import agree, world
        from parallel.runtime.refusal import complain
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ["STORE"], size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        def check():
            if rank == 1:
                raise ValueError("run.seed=-1 is wrong")
        try:
            agree(check, world())
        except ValueError as error:
            complain(str(error), agreed=True)
    """
    (first, said, report), (second, silent, same) = ranks(script, tmp_path)
    assert first == second == 2 and not silent and report == same
    assert said == f"error: {report}\n" and report.startswith("run.seed=-1 is wrong (rank 1 on ")
