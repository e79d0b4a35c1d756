"""The reshard benchmark on four gloo processes and a tiny model: that it measures what it says; no time decides."""

import csv
import json

from parallel.weights.shapes import shape
from tests.worlds import run_world

SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, vocab_size=1000)


def test_every_row_is_measured_and_equal_bit_by_bit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape("qwen2.5-7b") | SIZES))
    options = ["--hf", tmp_path, "--layers", 4, "--train", "tp2pp2", "--rollout", "tp4", "--window-mib", 0.1, "--link-mib", 1, "--gather-mib", 0, 1]
    output = run_world("tools/bench_reshard.py", 4, *options, "--csv", tmp_path / "rows.csv", "--png", tmp_path / "rows.png")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["kind"] for row in rows] == ["floor", "link", "link", "gather", *["ours"] * 5], output
    assert all(row["name"] in output and row["layers"] == "4" and row["train"] == "tp2pp2" and row["rollout"] == "tp4" for row in rows)
    assert all(0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"]) for row in rows)
    by_kind = {row["kind"]: row for row in rows}
    assert "slices proved at both ends" in output and by_kind["ours"]["bitwise"] == by_kind["gather"]["bitwise"] == "yes"
    assert 0 < int(by_kind["floor"]["received_bytes"]) <= int(by_kind["ours"]["received_bytes"]) < int(by_kind["gather"]["received_bytes"])
    assert 0 < int(by_kind["ours"]["peak_extra_bytes"]) <= 0.1 * 2**20 and float(by_kind["floor"]["floor_share"]) == 1
    assert "re-enactment" in by_kind["gather"]["name"] and "refit is left out" in output
    assert (tmp_path / "rows.png").stat().st_size > 5000
