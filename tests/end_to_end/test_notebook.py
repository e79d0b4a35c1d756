"""The Python interface in a notebook's kernel: a running event loop, another stdout, no program file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import serving
from tests.worlds import ROOT

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

SEVERAL_RANKS = """
import io, sys

def fileno():
    raise io.UnsupportedOperation("fileno")  # as in some hosted notebooks

sys.stdout.fileno = sys.stderr.fileno = fileno

from verl_megatron import RLTrainer, get_trainer_config

config = get_trainer_config(tp_size=2)
config.data.train = "{toy}/train.jsonl"
RLTrainer(config, actor_model="{toy}/model")
"""
A_RUN = """
bonus = 0.25
score = lambda prompt, response, truth, extra: bonus + len(response) / 100
checkpoints = {{"save_interval": 1, "async_save": True, "save_dir": "{folder}/run"}}
config = get_trainer_config(checkpoint_config=checkpoints)
config.data.train, config.data.max_prompt_tokens = "{toy}/train.jsonl", 32
config.data.prompts_per_iteration, config.rollout.max_tokens, config.run.iterations = 8, 6, 1
metrics = RLTrainer(config, actor_model="{url}", reward_function=score, trust_remote_code=False).train()
metrics["reward/mean"] > bonus, metrics["reward/failed"]
"""
IT_GOES_ON = """
config.run.iterations = 2
RLTrainer(config, reward_function=score).train()["reward/mean"] > bonus
"""
VLLM_ALONE = """
from verl_megatron.rollout.sampling import Sampling
from verl_megatron.utils.vllm_wrapper import VLLMActor
len(VLLMActor("{url}").generate_text(["sort 3 1"], Sampling(max_tokens=4)))
"""


class Kernel:
    """A running kernel."""

    def __init__(self, client):
        self.client = client

    def run(self, cell: str) -> tuple[str, str]:
        """Return what a cell printed, and its value or error."""
        printed, value = [], ""

        def take(message):
            nonlocal value
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "execute_result":
                value = content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                value = f"{content['ename']}: {content['evalue']}"

        self.client.execute_interactive(cell, timeout=300, output_hook=take)
        return "".join(printed), value


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel whose files lie in a folder."""
    places = {name: str(folder) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "VERL_MEGATRON_CACHE")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **places, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment = {name: text for name, text in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    manager = jupyter_client.KernelManager()
    manager.start_kernel(env=environment, cwd=str(folder))
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=300)
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.timeout(1500)
def test_runs_in_a_notebook(toy, tmp_path):
    with serving(toy / "model") as served, kernel(tmp_path) as notebook:
        said, error = notebook.run(SEVERAL_RANKS.format(toy=toy))
        assert error.startswith(
            "RefusalError: actor.layout=tp2pp1dp1 and critic.layout=tp2pp1dp1: 2 ranks"
        ), said
        assert "torchrun --nproc_per_node 2 SCRIPT.py" in error
        said, value = notebook.run(A_RUN.format(toy=toy, url=served.url, folder=tmp_path))
        assert value == "(True, 0.0)", said + value
        assert "step 1/1" in said and not served.repeated()
        said, value = notebook.run(IT_GOES_ON)
        assert value == "True" and "step 2/2" in said and "step 1/2" not in said, said + value
        assert "reward.function" not in said, "the same function counts as the same setting"
        said, value = notebook.run(VLLM_ALONE.format(url=served.url))
        assert value == "1", said + value
    assert (tmp_path / "run" / "actor" / "config.json").exists()
