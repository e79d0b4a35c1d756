"""`verl-megatron benchmark data` with a few hundred prompts: what it writes, reads and says."""

import csv
import subprocess
import sys

import pytest
from pyarrow import parquet

from tests.characters import characters
from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.benchmarks.data import counts_of, question, write_prompts


def test_the_rows_are_those_of_their_numbers(tmp_path):
    path = tmp_path / "prompts.parquet"
    write_prompts(path, 40)
    assert parquet.read_table(path).to_pylist() == [question(number) for number in range(40)]
    written = path.stat().st_mtime_ns
    write_prompts(path, 30)
    assert path.stat().st_mtime_ns == written, "enough are there"
    write_prompts(path, 50)
    assert parquet.read_metadata(path).num_rows == 50


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "1e6", "100000001", "ten"])
def test_numbers_of_prompts_are_checked(text):
    with pytest.raises(ValueError, match="no list of numbers from 1 to 100000000"):
        counts_of(text)


def test_reading_is_measured_in_a_process_of_its_own(tmp_path):
    characters().hf.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "verl_megatron", "benchmark", "data", str(tmp_path / "prompts")]
    command += ["--model", str(tmp_path / "model"), "--prompts", "300", "--format", "jsonl"]
    command += ["--csv", str(tmp_path / "rows.csv")]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment_of_ranks(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["prompts"] for row in rows] == ["300"] and "300" in ended.stdout
    contents = [question(number)["prompt"][0]["content"] for number in range(300)]
    assert int(rows[0]["tokens"]) == sum(len(f"<user>{content}<assistant>") for content in contents)
    assert 0 < float(rows[0]["read_s"]) < 60 and float(rows[0]["peak_mib"]) < 64
