"""The benchmark of weight sync with a real vLLM and a tiny model on gloo: checks and figures, no times."""

import csv
import json

import pytest

from parallel.weights.shapes import shape
from tests.tiny import write_hf
from tests.worlds import run_world

SIZES = dict(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000
)
PHASES = {
    "to rollout: offload, copy to the host",
    "to rollout: vLLM's weights wake",
    "to rollout: verified reshard",
    "to rollout: offload, free the memory",
    "to rollout: KV cache wakes",
    "generate",
    "back: Megatron's weights restored",
    "back: vLLM sleeps",
    "back: offload, fetch from the host",
    "log-probs in training",
    "to rollout, in one go",
    "back to training, in one go",
}


def handed_over(folder, nproc, *options):
    """The output and the CSV's rows by kind and name."""
    common = ["--hf", folder, "--repetitions", 2, "--tokens", 8, "--prompts", 4, "--csv", folder / "rows.csv"]
    output = run_world("tools/bench/weight_sync.py", nproc, *common, *options)
    with (folder / "rows.csv").open() as file:
        rows = {(row["kind"], row["name"]): row for row in csv.DictReader(file)}
    for (kind, name), row in rows.items():
        assert name.split(":")[0] in output, name
        assert kind != "check" or row["value"] == "yes"
    assert (
        sum(kind == "check" for kind, _ in rows) == 5
        and "\nyes vLLM's weights are" in output
        and "\nNO" not in output
    )
    assert f"digest of all tokens: {rows['digest', 'all tokens']['value']}" in output
    return output, rows


@pytest.mark.long
def test_the_ways_are_measured_and_the_tokens_the_same_in_every_mode_and_layout(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape("qwen2.5-7b") | SIZES))
    output, swapped = handed_over(
        tmp_path,
        4,
        "--layers",
        4,
        "--train",
        "tp2pp2",
        "--rollout",
        4,
        "--mode",
        "swap",
        "--offload",
        "all",
        "--verify",
        "all",
    )
    assert (
        "same bits after each of 5 ways back" in output
        and {name for kind, name in swapped if kind == "phase"} == PHASES
    )
    assert all(
        0 < float(row["p10"]) <= float(row["value"]) <= float(row["p90"])
        for (kind, _), row in swapped.items()
        if kind == "phase"
    )
    assert all(
        row["mode"] == "swap"
        and row["train"] == "tp2pp2"
        and row["rollout"] == "tp4"
        and row["layers"] == "4"
        for row in swapped.values()
    )
    _, kept = handed_over(
        tmp_path, 2, "--layers", 4, "--train", "tp2", "--rollout", 2, "--mode", "keep", "--no-optimizer"
    )
    assert kept["digest", "all tokens"]["value"] == swapped["digest", "all tokens"]["value"]

    def gib(rows, name):
        return float(rows["plan", name]["value"])

    assert gib(swapped, "weights that vLLM has of its own") < 0.2 * gib(
        swapped, "weights that training keeps"
    )  # some of the repeated key-value heads
    assert gib(swapped, "received on the way to rollout") > 0 and gib(swapped, "received on the way back") > 0
    # Of float32 weights: gradients of the same size, and the weights with both moments.
    assert gib(swapped, "gradient buffers") >= 0.99 * gib(swapped, "weights that training keeps")
    assert gib(swapped, "what the optimizer keeps") >= 2.99 * gib(swapped, "weights that training keeps")
    assert gib(kept, "weights that vLLM has of its own") > 0.99 * gib(kept, "weights that training keeps")
    assert gib(kept, "received on the way to rollout") == 0 and ("plan", "gradient buffers") not in kept
    assert 0 < float(kept["memory", "back in training: the process's peak"]["value"]) < 8


@pytest.mark.long
def test_virtual_stages_and_replicas_swap_a_folders_weights(tmp_path):
    """Each stage holds two chunks, twice; vLLM is two replicas. Their weights are the folder's."""
    write_hf(tmp_path, "qwen2", num_hidden_layers=4, **SIZES)
    output, swapped = handed_over(
        tmp_path,
        4,
        "--load",
        "--train",
        "pp2vpp2",
        "--rollout",
        2,
        "--mode",
        "swap",
        "--offload",
        "grads",
        "--verify",
        "all",
    )
    assert "same bits after each of 5 ways back" in output and ("build", "weights read") in swapped
    assert all(row["train"] == "pp2vpp2dp2" and row["rollout"] == "tp2dp2" for row in swapped.values())
    assert float(swapped["plan", "received on the way back"]["value"]) > 0
