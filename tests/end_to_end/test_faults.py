"""Faults of users and machines: bad inputs are refused at once and by name, and nothing is left."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import start
from tests.worlds import ROOT


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_a_shard(model):
    (model / "model-00002-of-00002.safetensors").unlink()


def truncated(model):
    os.truncate(model / "model-00001-of-00002.safetensors", 100_000)


def index_of_more(model):
    path = model / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    edit_json(
        path,
        weight_map=weight_map | {"model.layers.7.mlp.up_proj.weight": "model-00001-of-00002.safetensors"},
    )


def unknown_rope(model):
    edit_json(model / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 10_000.0})


def larger_vocabulary(model):
    edit_json(model / "config.json", vocab_size=512)


def smaller_model(model):
    """Fewer rows in the embedding than the tokenizer has tokens."""
    for path in model.glob("*.safetensors"):
        save_file(
            {
                name: tensor[:256] if tensor.size(0) == 384 else tensor
                for name, tensor in load_file(path).items()
            },
            path,
            metadata={"format": "pt"},
        )
    edit_json(model / "config.json", vocab_size=256)


def without_tokenizer(model):
    for path in model.glob("tokenizer*"):
        path.unlink()


# What is done to the model folder, and what the message has to say.
BROKEN_MODELS = {
    without_a_shard: ["lacks weight files", "model-00002-of-00002.safetensors", "copy them again"],
    truncated: ["model-00001-of-00002.safetensors", "truncated", "copy it again"],
    index_of_more: ["names tensors", "model.layers.7.mlp.up_proj.weight", "copy the folder again"],
    unknown_rope: ["rope_parameters", "'spiral'", "supported are"],
    larger_vocabulary: ["model.embed_tokens.weight", "vocab_size=512", "384 rows"],
    smaller_model: ["tokenizer in", "vocab_size=256", "use the model's own tokenizer"],
    without_tokenizer: ["has no tokenizer", "copy the model's tokenizer files"],
}
# Ranks, settings ({} is a folder for the case) and what the message has to say.
BAD_SETTINGS = {
    "long prompts": (
        1,
        ["data.max_prompt_tokens=4"],
        ["train.jsonl, line 1", "data.max_prompt_tokens=4", "data.overlong=drop"],
    ),
    "only long prompts": (
        1,
        ["data.max_prompt_tokens=4", "data.overlong=drop"],
        ["nothing to read", "data.max_prompt_tokens=4; raise it"],
    ),
    "empty data": (1, ["data.train={}/empty.jsonl"], ["empty.jsonl", "no rows"]),
    "no validation file": (
        1,
        ["data.validation={}/absent.jsonl"],
        ["data.validation=", "does not exist", "name a .jsonl, .parquet"],
    ),
    "no model": (1, ["actor.path={}/absent"], ["absent does not exist", "give the path"]),
    "no critic": (1, ["critic.path={}/absent"], ["absent does not exist", "give the path"]),
    "no reward": (1, ["reward.function=matches"], ["reward.function='matches'", "choose"]),
    "too few ranks": (1, ["actor.layout=tp2pp2"], ["tp2pp2", "4 ranks are needed", "torchrun"]),
    "heads": (4, ["actor.layout=tp4"], ["tp=4", "6 attention heads", "divide"]),
    "layers": (
        4,
        ["actor.layout=pp4", "actor.stage_layers=[1,1,1,2]"],
        ["actor", "4 layers", "stage_layers"],
    ),
    "rollout": (4, ["rollout.tp=3"], ["rollout.tp=3", "generate, 4", "choose"]),
    "mini-batches": (1, ["algorithm.num_mini_batches=3"], ["algorithm.num_mini_batches=3", "16", "choose"]),
    "unknown setting": (1, ["rollout.tpp=2"], ["rollout.tpp", '"tp"']),
    "wrong type": (1, ["actor.lr=fast"], ["actor.lr='fast'", "give a value like"]),
    "no value": (2, ["run.iterations"], ["'run.iterations' has no value", "SECTION.SETTING=VALUE"]),
    "no end of a list": (1, ["rollout.stop=[a"], ["'rollout.stop=[a' cannot be read", "lists are [A,B]"]),
    "no recipe": (
        2,
        ["--config-path", "../recipes", "--config-name=absent"],
        ["has no recipe 'absent'", "it has dpo_toy_cpu, grpo_70b"],
    ),
    "another seed on rank 1": (
        2,
        ["run.seed=${oc.env:RANK}"],
        ["run.seed=1 is 0 on rank 0", "start all ranks with the same settings", "(rank 1 on "],
    ),
    "two at once": (
        1,
        ["run.seed=-1", "algorithm.kl_in=los"],
        ["run.seed=-1", "algorithm.kl_in='los'", "choose one of"],
    ),
}
ALONE = ["actor.layout=tp1", "critic.layout=tp1", "rollout.tp=1", "data.overlong=error"]


@pytest.fixture(scope="module")
def refusals(toy, tmp_path_factory) -> dict[str, dict]:
    """How each bad input ended."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "empty.jsonl").write_text("\n")
    common, cases = settings_of(toy, folder / "run") + ALONE, {}
    for break_it in BROKEN_MODELS:
        model = folder / break_it.__name__
        shutil.copytree(toy / "model", model)
        break_it(model)
        cases[break_it.__name__] = (1, [*common, f"actor.path={model}"])
    for name, (nproc, settings, _) in BAD_SETTINGS.items():
        own = [setting.replace("{}", str(folder)) for setting in settings]
        recipe = 0 if "--config-path" not in own else 4  # the options of the common recipe
        cases[name] = (nproc, common[recipe:] + own)
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/end_to_end/refusals_worker.py"), str(folder / "cases.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-8000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("name", "nproc", "words"),
    [(f.__name__, 1, words) for f, words in BROKEN_MODELS.items()]
    + [(name, nproc, words) for name, (nproc, _, words) in BAD_SETTINGS.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused(refusals, name, nproc, words):
    found = refusals[name]
    assert found["codes"][0] == 2 and set(found["codes"]) <= {2, -15} and len(found["codes"]) == nproc, (
        found
    )  # -15: torchrun was faster than the rank
    assert sum(line.startswith("error:") for line in found["text"].splitlines()) == 1, found["text"]
    message = found["text"][found["text"].index("error:") :]
    assert all(word in message for word in words), f"{words}\n{message}"
    assert "Traceback" not in found["text"] and "vllm was imported" not in found["text"], found["text"]


@pytest.mark.parametrize("validation", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_reward_that_always_fails(toy, tmp_path, validation):
    """Nothing can be learnt from it: the run ends where that is known, without a checkpoint or an export."""
    job = [
        "rollout.tp=1",
        "actor.layout=dp2",
        "critic.layout=dp2",
        "rollout.max_tokens=4",
        *([] if validation else ["data.validation="]),
    ]
    ended = start(2, TRAIN, *settings_of(toy, tmp_path / "run", *job, reward="broken"), folder=tmp_path).wait(
        timeout_s=400
    )
    assert ended.code != 0 and len(ended.error_lines) == 1, ended.text
    samples = 8 if validation else 16
    assert all(
        words in ended.error_lines[0]
        for words in (
            f"failed on all {samples} samples",
            "mend the function",
            "RuntimeError: this reward is broken",
        )
    ), ended.text
    assert "_check_scores" not in ended.text and not (tmp_path / "run/actor").exists(), (
        ended.text
    )  # the traceback there is torchrun's own


def test_a_refusal_under_torchrun(toy, tmp_path):
    """The message comes once, from either rank, and no rank goes on."""
    started = start(2, TRAIN, *settings_of(toy, tmp_path / "run", "rollout.tp=3"), folder=tmp_path)
    ended = started.wait(timeout_s=300)
    assert ended.code != 0 and len(ended.error_lines) == 1, ended.text
    codes = re.findall(r"exitcode  : (-?\d+)", ended.stderr)
    assert len(codes) == 2 and "2" in codes and set(codes) <= {"2", "-15"}, (
        ended.text
    )  # -15: torchrun was faster than the other rank
    assert not started.leftovers()
