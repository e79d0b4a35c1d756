"""The commands of docs/first-run.md, as they stand there, with a tiny Qwen and a few rows of arithmetic."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from tests.characters import characters
from tests.documents import FENCE
from tests.tiny import SERVED, write_hf
from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.observe.tracking import read_metrics

pytestmark = pytest.mark.timeout(1800)  # a fixture runs all commands
MODEL = "Qwen2.5-0.5B-Instruct"
PAGE = (ROOT / "docs/first-run.md").read_text()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What makes the run small enough for a test; everything else is the page's recipe.
SMALL = """
run: {output_dir: outputs/mine, iterations: 1, save_interval: 1}
data: {train: gsm8k.parquet, validation: gsm8k-test.parquet, max_prompt_tokens: 512, prompts_per_iteration: 4}
rollout: {max_tokens: 6}
"""


def write_job(folder: Path) -> None:
    """Write the model folder and the two files that the page names."""
    model = write_hf(folder / MODEL, "qwen2", **SERVED["qwen2"] | {"max_position_embeddings": 2048})
    characters(CHATML).hf.save_pretrained(folder / MODEL)
    assert model.config.vocab_size >= 127
    for name, count in (("gsm8k", 8), ("gsm8k-test", 3)):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
                "extra_info": {"split": "train", "index": i},
            }
            for i in range(count)
        ]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def commands() -> list[list[str]]:
    """The page's commands, without those that install."""
    blocks = [block for language, block in FENCE.findall(PAGE) if not language]
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.split() for line in lines if line.startswith("verl-megatron ")]


def recipe() -> str:
    """The page's recipe with smaller numbers."""
    (block,) = [block for language, block in FENCE.findall(PAGE) if language == "yaml"]
    small = {line.partition(":")[0]: line for line in SMALL.strip().splitlines()}
    return "".join(small.get(line.partition(":")[0], line) + "\n" for line in block.strip().splitlines())


def ended_of(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "verl_megatron", *command[1:]],
        cwd=folder,
        env=environment_of_ranks(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def say(command: list[str], folder: Path) -> str:
    """What a command prints; libraries must have nothing to say beside it."""
    ended = ended_of(command, folder)
    assert ended.returncode == 0 and not ended.stderr, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder, and what each command printed, by its first two words."""
    folder = tmp_path_factory.mktemp("first_run")
    write_job(folder)
    (folder / "mine.yaml").write_text(recipe())
    asked = [command for command in commands() if "doctor" not in command]
    return folder, {" ".join(command[1:]): say(command, folder) for command in asked}


def test_the_data_are_shown_as_the_model_sees_them(said):
    _, printed = said
    shown = next(text for command, text in printed.items() if command.startswith("data check"))
    assert "<|im_start|>user" in shown and "openai/gsm8k" in shown
    assert "Whatis0+0?" in shown.replace(" ", "")  # this tokenizer's decoder leaves spaces out


def test_the_plan_and_the_run_are_those_of_the_recipe(said):
    folder, printed = said
    assert "dry run: 1 rank on one host\n" in printed["train --config mine.yaml --dry-run"]
    metrics = [row for row in read_metrics(folder / "outputs/mine") if row["step"] == 1]
    assert metrics and metrics[0]["reward/mean"] >= 0 and metrics[0]["reward/failed"] == 0
    report = (folder / "outputs/mine/report.html").read_text()
    assert "What is" in report and "reward" in report


def test_the_model_is_asked_and_a_checkpoint_exported(said):
    folder, printed = said
    scored = next(text for command, text in printed.items() if command.startswith("evaluate"))
    assert "prompts 3, samples 3" in scored and "score " in scored
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and rows[1]["answer"] == "2" and rows[1]["prompt"].startswith("<|im_start|>user")
    say(["", "export", "outputs/mine", "--dtype", "fp32", "--out", "again"], folder)
    own, again = weights_of(folder / "outputs/mine/actor"), weights_of(folder / "again/actor")
    assert own.keys() == again.keys() and all(own[key].equal(again[key]) for key in own)
    missing = ended_of(["", "export", "outputs/mine", "--step", "7"], folder)
    assert missing.returncode == 2 and "--step 7" in missing.stderr and "checkpoints 1" in missing.stderr
