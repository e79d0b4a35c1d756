"""The reshard benchmark on four ranks and a tiny model: that it measures what it says; no time decides."""

import csv
import importlib.util
import json

import torch

from parallel.weights.shapes import shape
from tests.worlds import run_world

SIZES = dict(
    hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, vocab_size=1000
)
WINDOW_BYTES = 2**20 // 10
LINKS = ["point to point, both ways", "on-card copy"]
REFIT = "Megatron-Core's refit, into Megatron's layout"
OURS = [
    "keep",
    "keep, verified (all)",
    "keep, by messages",
    "share, to rollout",
    "swap, to rollout",
    "swap, back to training",
]


def measured(folder, *options) -> tuple[dict[str, dict], str]:
    """The rows of the CSV by name, ours without "ours, ", numbers as numbers; and what the run printed."""
    (folder / "config.json").write_text(json.dumps(shape("qwen2.5-7b") | SIZES))
    small = ["--layers", 4, "--window-mib", WINDOW_BYTES / 2**20, "--link-mib", 1, "--gather-mib", 0, 1]
    output = run_world(
        "tools/bench/reshard.py",
        4,
        "--hf",
        folder,
        *small,
        *options,
        "--csv",
        folder / "rows.csv",
        "--png",
        folder / "rows.png",
    )
    rows = {}
    for row in csv.DictReader((folder / "rows.csv").open()):
        assert (
            row["name"] in output
            and row["layers"] == "4"
            and row["bitwise"] == ("" if row["kind"] in ("floor", "link") else "yes")
        ), output
        name = "gather" if row["kind"] == "gather" else row["name"].removeprefix("ours, ")
        rows[name] = {
            key: float(value) if key.endswith(("_ms", "_bytes", "_share", "per_s")) else value
            for key, value in row.items()
        }
        assert 0 < rows[name]["p10_ms"] <= rows[name]["median_ms"] <= rows[name]["p90_ms"]
    return rows, output


def test_every_row_is_measured_and_equal_bit_by_bit(tmp_path):
    rows, output = measured(tmp_path, "--train", "tp2pp2", "--rollout", "tp4", "--verify", "all")
    on_gpus = torch.cuda.is_available()
    refitted = [REFIT] if on_gpus and importlib.util.find_spec("megatron.core.resharding") else []
    assert list(rows) == [
        "floor of any plan",
        *LINKS,
        *refitted,
        "gather",
        *(name for name in OURS if on_gpus or name != "keep, by messages"),
    ], output
    assert output.count("slices verified at both ends") == (5 if on_gpus else 4) and (
        "refit is left out" in output
    ) == (not refitted)
    assert all((row["train"], row["rollout"]) == ("tp2pp2", "tp4") for row in rows.values())
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")

    received = {name: row["received_bytes"] for name, row in rows.items()}
    second = {name: row["second_copy_bytes"] for name, row in rows.items()}
    floor = received["floor of any plan"]
    assert (
        0
        < floor
        <= received["keep"]
        == received["keep, verified (all)"]
        == received["share, to rollout"]
        < received["gather"]
    )
    assert (
        0 < received["swap, to rollout"] <= received["keep"]
        and 0 < received["swap, back to training"] < received["gather"]
    )
    assert rows["floor of any plan"]["floor_share"] == 1 and all(
        rows[name]["floor_share"] > 0 for name in OURS if name in rows
    )
    assert (
        second["keep"]
        == second["keep, verified (all)"]
        == second["gather"]
        > second["share, to rollout"]
        >= second["swap, to rollout"]
        == second["swap, back to training"]
    )
    assert (
        second["swap, to rollout"] < 0.1 * second["keep"]
    )  # what cannot be permuted within so small a window
    assert all(received[name] > 0 and second[name] > 0 for name in refitted)
    if not on_gpus:  # there the allocator's peaks are added, and peers need no staging
        assert all(0 < rows[name]["peak_extra_bytes"] <= WINDOW_BYTES for name in OURS if name in rows)


def test_equal_layouts_and_a_choice_of_modes(tmp_path):
    """Nothing travels, whatever lies right stays, and no link is needed for a floor."""
    rows, _ = measured(
        tmp_path, "--train", "tp2", "--rollout", "tp2", "--modes", "swap", "--verify", "none", "--no-megatron"
    )
    assert list(rows) == ["floor of any plan", *LINKS, "gather", "swap, to rollout", "swap, back to training"]
    assert all(
        rows[name]["received_bytes"] == 0
        for name in ("floor of any plan", "swap, to rollout", "swap, back to training")
    )
    assert (
        rows["gather"]["received_bytes"] > 0
        and rows["gather"]["second_copy_bytes"] > rows["swap, to rollout"]["second_copy_bytes"] == 0
    )
