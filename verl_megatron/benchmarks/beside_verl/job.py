"""The job that both programs run: a model with random weights, prompts, lengths and steps."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.weights.architecture import read_architecture
from verl_megatron.benchmarks.data import write_parquet
from verl_megatron.benchmarks.scaling.runs import environment, make_prompts
from verl_megatron.data.formats.json_lines import read_rows
from verl_megatron.data.tokenizer import load_tokenizer
from verl_megatron.examples.random_weights import REWARD

# Gives verl, which reads chats, the tokens of a prompt that is a text. What has to come first depends on the
# tokenizer.
BEGINNINGS = ("{{ bos_token }}", "{{ bos_token }} ", "", " ")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAKE_RANDOM = "verl_megatron.examples.random_weights"  # module
VERL_REWARD = '''def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    """Share of vowels, as in reward.py."""
    return sum(solution_str.count(vowel) for vowel in "aeiou") / max(len(solution_str), 1)
'''


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both programs do in an iteration; all responses have the same length.

    Args:
        folder: absolute; holds model, prompts, rewards and both programs' output.
        samples: of each prompt.
        steps: optimizer steps of an iteration.
        tokens: most of a micro-batch, in log-probs and updates.
    """

    folder: Path
    algorithm: str  # grpo or ppo
    gpus: int
    tp: int
    rollout_tp: int
    prompts: int
    samples: int
    steps: int
    prompt_tokens: int
    response_tokens: int
    tokens: int
    iterations: int
    gpu_memory_utilization: float

    @property
    def rows(self) -> int:
        """Return the samples of an iteration."""
        return self.prompts * self.samples

    def check(self) -> None:
        """Raise ValueError if one of the programs could not run this job."""
        for option, size in (("--tp", self.tp), ("--rollout-tp", self.rollout_tp)):
            if self.gpus % size:
                raise ValueError(f"{option} {size} does not divide --gpus {self.gpus}; choose a divisor")
        dp = self.gpus // self.tp
        if self.prompts % (self.steps * dp):
            raise ValueError(
                f"--prompts {self.prompts} cannot be divided into {self.steps} steps on {dp} data-parallel "
                f"ranks; choose a multiple of {self.steps * dp}"
            )
        if self.tokens < self.prompt_tokens + self.response_tokens:
            raise ValueError(
                f"--tokens {self.tokens} is less than a sample of {self.prompt_tokens} + "
                f"{self.response_tokens} tokens; give at least that many"
            )
        if self.iterations < 3:
            raise ValueError(f"--iterations {self.iterations}: the first two do not count; give at least 3")


def write_job(job: Job, *, shape: str, layers: int, hf: Path | None) -> dict[str, Any]:
    """Write model, prompts and rewards for both, unless an earlier call has written the same.

    Args:
        hf: a model to use; None: one of `shape` with random weights.

    Returns:
        What model and prompts are made of.

    Raises:
        ValueError: no such model, not enough disk space, or unreasonable sizes.
    """
    made_of: dict[str, Any] = {
        "model": [shape, layers] if hf is None else str(hf.resolve()),
        "rows": 2 * job.prompts,
        "prompt_tokens": job.prompt_tokens,
    }
    mark, model = job.folder / "job.json", job.folder / "model"
    if mark.is_file() and json.loads(mark.read_text()) == made_of:
        return made_of
    mark.unlink(missing_ok=True)
    if model.is_symlink():
        model.unlink()
    if hf is None:
        _make_random(job, shape, layers)
    else:
        read_architecture(str(hf))
        job.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(model, ignore_errors=True)
        model.symlink_to(hf.resolve())
        prompts = job.folder / "train.jsonl"
        make_prompts(prompts, str(hf), rows=2 * job.prompts, tokens=job.prompt_tokens, seed=1)
        (job.folder / "reward.py").write_text(REWARD)
    _write_for_verl(job.folder)
    mark.write_text(json.dumps(made_of))
    return made_of


def _make_random(job: Job, shape: str, layers: int) -> None:
    """Write model, prompts and reward in a process of its own, which leaves no memory of the GPU in use.

    Raises:
        ValueError: not enough disk space, or unreasonable sizes.
    """
    sizes = {"--layers": layers, "--rows": 2 * job.prompts, "--prompt-tokens": job.prompt_tokens}
    options = [f"{option}={value}" for option, value in sizes.items()]
    command = [sys.executable, "-m", MAKE_RANDOM, str(job.folder), f"--shape={shape}", *options]
    done = subprocess.run(command, env=environment(0), stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(done.stderr.rpartition("error: ")[2].strip())


def _write_for_verl(folder: Path) -> None:
    """Write what verl reads: the same model with a chat template, a table of chats, and the reward."""
    model, theirs = folder / "model", folder / "verl_model"
    shutil.rmtree(theirs, ignore_errors=True)
    theirs.mkdir()
    rewritten = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
    for file in model.iterdir():
        if file.name not in rewritten:
            (theirs / file.name).symlink_to(file)
    prompts = [row["prompt"] for row in read_rows(folder / "train.jsonl")]
    settings = json.loads((model / rewritten[0]).read_text())
    template = _template(load_tokenizer(str(model)).hf, prompts[:16])
    (theirs / rewritten[0]).write_text(json.dumps(settings | {"chat_template": template}))
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    write_parquet(folder / "verl_train.parquet", iter(rows))
    (folder / "verl_reward.py").write_text(VERL_REWARD)


def _template(tokenizer: Any, prompts: Sequence[str]) -> str:
    """Return the chat template under which most prompts have the tokens that they have as texts."""

    def same(beginning: str) -> int:
        begin = beginning.replace("{{ bos_token }}", tokenizer.bos_token or "")
        return sum(
            tokenizer(begin + prompt, add_special_tokens=False)["input_ids"] == tokenizer(prompt)["input_ids"]
            for prompt in prompts
        )

    return max(BEGINNINGS, key=same) + TEMPLATE
