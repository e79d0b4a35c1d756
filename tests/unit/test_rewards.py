"""Reward functions, and the processes that run them when they misbehave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import all_ended, eventually, is_alive
from verl_megatron.rewards.functions import REWARDS, load_reward
from verl_megatron.rewards.pool import RewardPool

FUNCTIONS = """
import os, re, sys

def length(prompt, response, ground_truth, extra):
    score = len(response) + extra.get("bonus", 0)
    return {"score": score, "words": len(response.split()), "note": "text", "odd": float("nan")}

def modules(prompt, response, ground_truth, extra):
    heavy = [name for name in ("torch", "megatron", "vllm", "transformers", "numpy") if name in sys.modules]
    return {"score": len(heavy), "main_imported": hasattr(sys.modules["__main__"], "MARK")}

def misbehave(prompt, response, ground_truth, extra):
    if response == "raise":
        raise KeyError("gone")
    if response == "hang":
        re.match(r"(a+)+$", "a" * 50 + "b")  # keeps the GIL
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(7)
    return {
        "nan": float("nan"), "inf": float("inf"), "none": None,
        "text": "1.0", "no score": {"reward": 1.0}, "good": 1,
    }[response]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


def children_of(pid: int) -> set[int]:
    listed = subprocess.run(
        ["ps", "-ww", "--no-headers", "-o", "pid,args", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout.splitlines()
    return {int(line.split()[0]) for line in listed if "verl_megatron.rewards.worker" in line}


@pytest.mark.parametrize(
    ("name", "response", "truth", "score"),
    [
        ("match", " fig apple\n", "fig apple", 1),
        ("match", "fig  apple", "fig apple", 0),
        ("match", "7", 7, 1),
        ("last_number", "2 + 3 is 5.", "5", 1),
        ("last_number", "it is 5 or 6", "5", 0),
        ("last_number", "so 1,234.50", 1234.5, 1),
        ("last_number", "x = -.5", "#### -0.5", 1),
        ("last_number", "no idea", "5", 0),
        ("last_number", "so 1.5e3", "1500", 1),
        ("last_number", "so 1.5e3", "3", 0),
        ("last_number", "1e99999999999999999999", "99999999999999999999", 1),
        ("last_number", "12345678901234567891", "12345678901234567890", 0),
        ("last_number", "0.00001", 1e-05, 1),
        ("last_number", "-5", 1e-05, 0),
        ("match", "0.00001", 1e-05, 1),
        ("match", "100000000000000000000", 1e20, 1),
        ("match", "7", 7.0, 1),
    ],
)
def test_built_in_functions(name, response, truth, score):
    assert REWARDS[name]("", response, truth, {}) == score


def test_last_number_needs_a_number_to_compare_with():
    with pytest.raises(ValueError, match="has no number"):
        REWARDS["last_number"]("", "5", "five", {})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mtach", "choose match, exact, last_number"),
        ("{folder}/gone.py:f", "does not exist"),
        ("{path}:nothing", "no function 'nothing'"),
        ("{broken}:f", "division by zero"),
    ],
)
def test_wrong_specs_are_refused_by_name(functions, tmp_path, spec, said):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    spec = spec.format(folder=tmp_path, path=functions, broken=broken)
    with pytest.raises(ValueError, match=said) as error:
        load_reward(spec)
    assert spec in str(error.value)


def test_pool_refuses_a_wrong_spec_at_once_and_leaves_no_worker():
    before = children_of(os.getpid())
    with pytest.raises(ValueError, match="nothing"):
        RewardPool("nothing")
    assert children_of(os.getpid()) == before


def test_pool_scores_equal_direct_calls(functions):
    function = load_reward(f"{functions}:length")
    with RewardPool(f"{functions}:length", workers=2) as pool:
        for iteration in range(2):
            samples = {
                sample_id: ("prompt", "word " * sample_id, None, {"bonus": iteration})
                for sample_id in range(20)
            }
            for sample_id, sample in samples.items():
                pool.submit(sample_id, *sample)
            rewards = pool.results()
            assert rewards.keys() == samples.keys()
            for sample_id, sample in samples.items():
                expected = function(*sample)
                assert rewards[sample_id].score == expected["score"]
                assert rewards[sample_id].metrics == {
                    "words": expected["words"]
                }  # what is no finite number is no metric
            assert pool.calls == 20 and 0 < pool.total_ms / pool.calls < 1000 and not pool.failures
        assert pool.results() == {}


def test_workers_import_neither_torch_nor_the_main_script(functions, tmp_path):
    script = tmp_path / "main.py"  # without the usual guard: importing it again would start a second pool
    script.write_text(
        f"import numpy\nMARK = 1\nfrom verl_megatron.rewards.pool import RewardPool\n"
        f"with RewardPool({functions + ':modules'!r}) as pool:\n"
        "    pool.submit(0, '', '', '')\n    reward = pool.results()[0]\n"
        "    print(reward.failure, reward.score, reward.metrics['main_imported'])\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.split() == ["None", "0.0", "0.0"], done.stderr


def test_every_failure_costs_its_sample_only(functions):
    kinds = {
        "raise": "exception",
        "hang": "timeout",
        "exit": "exception",
        "die": "worker died",
        "nan": "not finite",
        "inf": "not finite",
        "none": "wrong type",
        "text": "wrong type",
        "no score": "wrong type",
        "good": None,
    }
    with RewardPool(f"{functions}:misbehave", workers=2, timeout_s=5.0, failure_score=-1.0) as pool:
        for sample_id, response in enumerate(kinds):
            pool.submit(sample_id, "the prompt", response, None)
        started = time.monotonic()
        rewards = pool.results()
        assert time.monotonic() - started < 50
        workers = children_of(os.getpid())
        for sample_id, kind in enumerate(kinds.values()):
            assert rewards[sample_id].failure == kind
            assert rewards[sample_id].score == (1.0 if kind is None else -1.0)
        assert pool.failures == {
            "exception": 2,
            "timeout": 1,
            "worker died": 1,
            "not finite": 2,
            "wrong type": 3,
        }
        assert pool.examples["timeout"].response == "hang" and "within 5.0 s" in str(pool.examples["timeout"])
        assert "KeyError: 'gone'" in str(pool.examples["exception"]) and "'the prompt'" in str(
            pool.examples["exception"]
        )
        assert pool.examples["not finite"].sample_id == 4  # the first of its kind
        pool.submit(0, "", "good", None)  # killed workers were replaced
        assert pool.results()[0].score == 1.0 and not pool.failures
        assert len(workers) <= 2  # the hanging one was killed


def test_close_ends_workers_in_the_middle_of_a_call(functions):
    before = children_of(os.getpid())
    pool = RewardPool(f"{functions}:misbehave", workers=2, timeout_s=300)
    for sample_id in range(500):
        pool.submit(sample_id, "x" * 2000, "hang", None)  # more than a pipe holds
    assert eventually(lambda: len(children_of(os.getpid()) - before) == 2)
    workers = children_of(os.getpid()) - before
    pool.close()
    assert not any(map(is_alive, workers))


def test_workers_die_with_a_killed_parent(functions):
    root = str(Path(__file__).resolve().parents[2])
    script = (
        f"from verl_megatron.rewards.pool import RewardPool\n"
        f"pool = RewardPool({functions + ':misbehave'!r}, workers=2, timeout_s=300)\n"
        "for sample_id in range(2):\n    pool.submit(sample_id, '', 'hang', None)\n"
        "print('ready', flush=True)\npool.results()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout.readline() == "ready\n"
        assert eventually(lambda: len(children_of(parent.pid)) == 2)
        time.sleep(0.3)  # both calls run
        workers = children_of(parent.pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert all_ended(workers)


@pytest.mark.parametrize("settings", [{"workers": 0}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=f"reward.{next(iter(settings))}"):
        RewardPool("match", **settings)
