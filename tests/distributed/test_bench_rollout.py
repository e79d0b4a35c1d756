"""The benchmark of generation on two CPU replicas."""

import csv
import re

import pytest

from tests.tiny import write_hf
from tests.worlds import run_world


def test_both_ways_generate_as_many_tokens(tmp_path):
    write_hf(
        tmp_path / "model", "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2
    )  # heads of a size that vLLM knows on CPUs
    options = [
        "--hf",
        tmp_path / "model",
        "--rows",
        "6",
        "--prompt",
        "6",
        "--response",
        "8",
        "--repetitions",
        "1",
        "--mixed",
        "--csv",
        tmp_path / "rows.csv",
    ]
    output = run_world("tools/bench/rollout.py", 2, *options)
    with (tmp_path / "rows.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert (
        list(rows) == ["bare vLLM", "as a run"]
        and "2 replicas of tp1, 6 rows of 6 + 8 tokens, mixed" in output
    )
    assert (
        rows["bare vLLM"]["tokens"] == rows["as a run"]["tokens"]
        and 6 < int(rows["as a run"]["tokens"]) < 6 * 8
    )  # of unequal lengths
    assert all(float(row["seconds"]) > 0 and 0 <= float(row["apart"]) < 1 for row in rows.values())


def test_drafts_are_accepted_where_text_repeats(tmp_path):
    write_hf(tmp_path / "model", "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    lengths = ["--rows", 4, "--prompt", 70, "--response", 60, "--repetitions", 1]
    drafts = ["--speculative", "ngram", "--speculative-tokens", 3, "--repeat", 0.95]
    run = ["tools/bench/rollout.py", 2, "--hf", tmp_path / "model", *lengths, "--csv", tmp_path / "rows.csv"]
    output = run_world(*run, *drafts)
    found = re.search(
        r"(\S+)% of the samples' steps had a draft, of .* (\S+)% were accepted: (\S+) tokens", output
    )
    assert found, output
    share, accepted, length = map(float, found.groups())
    assert share > 60 and accepted > 60 and 2.5 < length < 4
    with (tmp_path / "rows.csv").open() as file:
        assert {row["speculative"] for row in csv.DictReader(file)} == {"ngram"}


def test_the_parts_of_a_step_are_all_of_it(tmp_path):
    write_hf(tmp_path / "model", "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    lengths = ["--rows", 8, "--prompt", 6, "--response", 64, "--repetitions", 1]
    output = run_world("tools/bench/rollout.py", 1, "--hf", tmp_path / "model", *lengths, "--profile")
    ways = re.findall(r"^(bare vLLM|as a run) +([-0-9. ]+)$", output, re.MULTILINE)
    assert [name for name, _ in ways] == ["bare vLLM", "as a run"]
    for _, row in ways:
        *parts, whole = map(float, row.split())
        assert len(parts) == 7 and min(parts) >= 0 and whole > 0
        assert sum(parts) == pytest.approx(whole, abs=0.05)
    assert "aten::" in output  # operators of the profiled steps
