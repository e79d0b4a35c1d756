"""Benchmarks of the converter and the loader on a tiny shape: results agree; no time decides."""

import csv
import json
import os
import subprocess
import sys

from parallel.weights.shapes import shape
from tests.worlds import ROOT

SIZES = dict(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def tool(name, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, f"tools/bench/{name}", *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )


def rows_of(folder, name, *arguments, returncode=0):
    (folder / "config.json").write_text(json.dumps(shape("qwen2.5-7b") | SIZES))
    done = tool(
        name,
        folder / "bench",
        "--hf",
        folder,
        "--layers",
        2,
        "--repetitions",
        1,
        "--csv",
        folder / "rows.csv",
        *arguments,
    )
    assert done.returncode == returncode, done.stderr
    with (folder / "rows.csv").open() as file:
        return done.stdout, {row["name"]: row for row in csv.DictReader(file)}


def test_conversions_are_measured_beside_cp_and_an_exceeded_cap_is_an_error(tmp_path):
    output, rows = rows_of(
        tmp_path, "convert.py", "--settle-s", 0, "--workers", 2, "--memory-gib", 0.02, returncode=1
    )
    assert "of 0.02 GiB" in output  # Python alone takes more
    assert (
        list(rows) == ["cp", "cp, 2 at a time", "hf-to-mcore", "mcore-to-hf", "verify"]
        and "the round trip is bit-identical" in output
    )
    assert all(
        float(row["median_s"]) > 0 and row["layers"] == "2" and row["bytes"] == rows["cp"]["bytes"]
        for row in rows.values()
    )
    assert float(rows["cp"]["of_cp"]) == 1
    for name in ("hf-to-mcore", "mcore-to-hf", "verify"):
        assert 50 < float(rows[name]["peak_pss_mib"]) <= float(rows[name]["peak_rss_mib"]) < 4096
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["hf"]


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    refused = tool("convert.py", tmp_path, "--shape", "llama3-405b", "--layers", 1000)
    assert (
        refused.returncode == 2
        and "GB free and --layers 1000 needs" in refused.stderr
        and not list(tmp_path.rglob("*.safetensors"))
    )


def test_slices_are_loaded_beside_from_pretrained(tmp_path):
    output, rows = rows_of(tmp_path, "load.py", "--tp", 2, "--rank", 1)
    assert (
        list(rows) == ["byte ranges", "from_pretrained and slicing"] and "the same bits either way" in output
    )
    assert all(
        float(row["median_s"]) > 0 and 0 < float(row["peak_own_mib"]) <= float(row["peak_rss_mib"])
        for row in rows.values()
    )
    total = int(rows["byte ranges"]["bytes"]) / 2**20
    assert (
        0.5 * total <= float(rows["byte ranges"]["needed_mib"]) < 0.6 * total
    )  # half of it, the norms, and padding of the vocabulary
