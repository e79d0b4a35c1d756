"""The benchmark of an engine on two CPU ranks."""

import csv

from tests.tiny import write_hf
from tests.worlds import run_world


def test_passes_and_steps_are_timed_and_counted(tmp_path):
    write_hf(tmp_path / "model", "llama")
    options = [
        "--hf",
        tmp_path / "model",
        "--layout",
        "tp2sp",
        "--rows",
        "4",
        "--prompt",
        "6",
        "--response",
        "5",
        "--repetitions",
        "2",
        "--baseline",
    ]
    output = run_world(
        "tools/bench/engine.py",
        2,
        *options,
        "--csv",
        tmp_path / "rows.csv",
        "--set",
        "recompute=full",
        "tokens_per_micro_batch=22",
    )
    with (tmp_path / "rows.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["log-probs", "step", "step, plain"] and "of product" in output
    work = {name: float(row["seconds"]) * float(row["tflops"]) for name, row in rows.items()}
    assert all(float(row["seconds"]) > 0 for row in rows.values())
    assert abs(work["step"] / work["log-probs"] - 3) < 1e-6  # a backward pass counts twice
    assert work["step, plain"] > work["step"]  # whole logits are more
