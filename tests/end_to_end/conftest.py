"""One toy job for all tests here, and the run that several of them look at."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.launch import Ended, start
from tests.end_to_end.measured import ADAPTIVE
from verl_megatron.examples.toy import make_toy

TRAIN = "verl_megatron.train"
REWARDS = '''
import math
import time


def letters(prompt, response, answer, extra):
    """Something that random answers differ in: the share of bytes above the middle."""
    return {"score": sum(byte > 127 for byte in response.encode()) / 32, "length": len(response)}


def tenth(prompt, response, answer, extra):
    return len(response) / 10


def broken(prompt, response, answer, extra):
    raise RuntimeError("this reward is broken")


def bad(prompt, response, answer, extra):
    if extra["kind"] == "raises":
        raise RuntimeError("this reward is broken")
    if extra["kind"] == "hangs":
        time.sleep(60)
    return math.nan if extra["kind"] == "nan" else 1.0
'''


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """Folder with model/, train.jsonl, val.jsonl, sft.jsonl and rewards.py."""
    folder = tmp_path_factory.mktemp("toy")
    make_toy(folder)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def settings_of(toy: Path, output_dir: Path, *more: str, reward: str = "letters") -> list[str]:
    """A tiny PPO run on the toy job."""
    common = [
        *("--config-path", "../recipes", "--config-name", "ppo_toy_cpu"),
        f"run.output_dir={output_dir}",
        *(
            f"data.train={toy}/train.jsonl",
            f"data.validation={toy}/val.jsonl",
            "data.validation_samples=8",
            "data.prompts_per_iteration=16",
        ),
        *(f"actor.path={toy}/model", f"reward.function={toy}/rewards.py:{reward}"),
    ]
    return common + list(more)


def adaptive_settings(toy: Path, output_dir: Path) -> list[str]:
    """Actor TP2 x PP2, critic PP2 x DP2, vLLM TP2 x 2; everything that a checkpoint holds changes."""
    return settings_of(
        toy, output_dir, "run.iterations=4", "run.save_interval=2", "rollout.max_tokens=6", *ADAPTIVE
    )


@dataclass(kw_only=True)
class Finished:
    """A finished run: where its files are and how the command ended."""

    output_dir: Path
    ended: Ended


@pytest.fixture(scope="session")
def whole_run(toy, tmp_path_factory) -> Finished:
    """Four iterations under torchrun without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    started = start(4, TRAIN, *adaptive_settings(toy, folder / "run"), folder=folder)
    ended = started.wait(timeout_s=300)
    assert not ended.code, ended.text
    return Finished(output_dir=folder / "run", ended=ended)
