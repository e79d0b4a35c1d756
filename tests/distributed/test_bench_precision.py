"""The benchmark of dtypes on two CPU ranks: float32 and bfloat16, and what a CPU cannot compute in."""

import csv
import json

import pytest

from tests.tiny import write_hf, write_tokenizer
from tests.worlds import run_world

PROGRAM = "verl_megatron/benchmarks/precision.py"


@pytest.mark.parametrize(
    ("head", "of_model", "layout"),
    [("lm", "ForCausalLM", "tp2"), ("sequence", "ForSequenceClassification", "tp1")],
)
def test_differences_are_from_the_first_dtype(tmp_path, head, of_model, layout):
    """Of all ranks: with tp1 each has its own samples, with tp2 both have all of them."""
    write_hf(tmp_path / "model", "llama", of_model)
    write_tokenizer(tmp_path / "model")
    lines = [json.dumps({"prompt": f"w{i} w9 ", "response": "w5 w7 w11"}) for i in range(3, 10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    files = ["--hf", tmp_path / "model", "--data", tmp_path / "rows.jsonl", "--csv", tmp_path / "out.csv"]
    dtypes = ["--dtypes", "float32", "bfloat16", "float32", "--head", head, "--layout", layout]
    output = run_world(PROGRAM, 2, *files, *dtypes, "--rows", "6", "--repetitions", "1")
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16", "float32"] and "CPU ranks" in output
    same, rounded, again = (tuple(map(float, map(row.get, ("gap_mean", "gap_max", "kl")))) for row in rows)
    assert same == again == (0, 0, 0)
    assert 1e-5 < rounded[0] < rounded[1] < 0.5 and (rounded[2] > 0) == (head == "lm")


def test_fp8_without_such_a_gpu_is_one_error(tmp_path):
    write_hf(tmp_path / "model", "llama")
    with pytest.raises(AssertionError) as error:
        run_world(PROGRAM, 2, "--hf", tmp_path / "model")
    assert str(error.value).count("reference.dtype=fp8 needs transformer-engine and GPUs") == 1
