"""`benchmark verl`: the same job for both programs, medians of their metrics, and what it refuses."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from verl_megatron.benchmarks.beside_verl import runs
from verl_megatron.benchmarks.beside_verl.command import config_of, job_of, main, plan_of, ways_of
from verl_megatron.benchmarks.beside_verl.job import write_job
from verl_megatron.benchmarks.beside_verl.record import Record
from verl_megatron.benchmarks.beside_verl.report import planned, table
from verl_megatron.benchmarks.beside_verl.runs import (
    OUR_PHASES,
    VERL_PHASES,
    Measured,
    RunFailedError,
    measured,
    version_of_verl,
)
from verl_megatron.benchmarks.beside_verl.settings import our_settings, verl_settings
from verl_megatron.benchmarks.options.verl import parser
from verl_megatron.data.formats.json_lines import read_rows
from verl_megatron.data.tokenizer import load_tokenizer
from verl_megatron.examples import toy

SMALL = "--prompts 8 --samples 2 --steps 2 --prompt-tokens 16 --response-tokens 8 --tokens 256".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy.make_toy(folder)
    return folder / "model"


def given(*words, out="outputs/beside_verl"):
    return parser().parse_args([*SMALL, "--out", str(out), *words])


def test_both_programs_read_the_same_tokens(model, tmp_path):
    job = job_of(given("--hf", str(model), out=tmp_path / "job"))
    write_job(job, shape="llama3-8b", layers=0, hf=model)
    ours = load_tokenizer(str(job.folder / "model"))
    theirs = AutoTokenizer.from_pretrained(job.folder / "verl_model")
    rows = pyarrow.parquet.read_table(job.folder / "verl_train.parquet").to_pylist()
    chats = [row["prompt"] for row in rows]
    prompts = [row["prompt"] for row in read_rows(job.folder / "train.jsonl")]
    assert len(prompts) == len(chats) == 2 * job.prompts
    for prompt, chat in zip(prompts, chats):
        found = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert found == ours.encode_prompt(prompt)
    scores: dict = {}
    for file, name in (("reward.py", "score"), ("verl_reward.py", "compute_score")):
        exec((job.folder / file).read_text(), scores)
        assert scores[name]("", "abce", "", {}) == 0.5
    mark = (job.folder / "job.json").stat().st_mtime_ns
    write_job(job, shape="llama3-8b", layers=0, hf=model)
    assert (job.folder / "job.json").stat().st_mtime_ns == mark, "nothing to write again"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_settings_of_both_describe_one_job(model, tmp_path, algorithm):
    options = given("--gpus", "2", "--tp", "2", "--algorithm", algorithm, out=tmp_path / "job")
    job = job_of(options)
    ours, theirs = our_settings(job, "ours", []), verl_settings(job)
    actor = "actor_rollout_ref.actor"
    for own, other in (
        ("data.prompts_per_iteration", "data.train_batch_size"),
        ("data.samples_per_prompt", "actor_rollout_ref.rollout.n"),
        ("engine.tokens_per_micro_batch", f"{actor}.ppo_max_token_len_per_gpu"),
        ("rollout.max_tokens", "data.max_response_length"),
        ("rollout.tp", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("run.iterations", "trainer.total_training_steps"),
    ):
        assert ours[own] == theirs[other], own
    assert theirs[f"{actor}.ppo_mini_batch_size"] * ours["algorithm.num_mini_batches"] == job.prompts
    if algorithm == "ppo":
        assert theirs["+critic.ppo_infer_max_token_len_per_gpu"] == ours["engine.tokens_per_micro_batch"]
    assert ("critic.layout" in ours) == ("critic.optim.lr" in theirs) == (algorithm == "ppo")


def test_ways_take_the_place_of_settings(model, tmp_path):
    options = given("--ours", "engine.lr=1e-5", "--way", "small", "engine.tokens_per_micro_batch=64")
    assert ways_of(options) == {
        "ours": ["engine.lr=1e-5"],
        "small": ["engine.lr=1e-5", "engine.tokens_per_micro_batch=64"],
    }
    job = job_of(given("--hf", str(model), out=tmp_path / "job"))
    write_job(job, shape="llama3-8b", layers=0, hf=model)
    settings = ["engine.tokens_per_micro_batch=64", "engine.shared_prompts=false"]
    run = plan_of(job, "small", config_of(job, "small", settings))
    assert run.config.engine.tokens_per_micro_batch == 64 and run.samples == 16


def test_medians_leave_out_the_first_two_iterations():
    rows = [{"gen": 9.0, "reward": 9.0, "update_actor": 9.0, "iteration": 30.0}] * 2
    rows += [{"gen": gen, "reward": 0.5, "update_actor": 2.0, "iteration": 5.0} for gen in (1.0, 2.0, 7.0)]
    verl = measured("verl", rows, VERL_PHASES, [10.0, 12.0], problem="verl ended with 1")
    assert verl.problem == "verl ended with 1", "after the iterations that count"
    assert verl.seconds["rollout"] == 2.5 and verl.seconds["actor update"] == 2.0
    assert verl.seconds["iteration"] == 5.0 and verl.memory_gib == 12.0
    with pytest.raises(RunFailedError, match="2 iterations, of which the first two"):
        measured("verl", rows[:2], VERL_PHASES, [])
    with pytest.raises(RunFailedError, match="verl ended with 1"):
        measured("verl", rows[:2], VERL_PHASES, [], problem="verl ended with 1")
    job = job_of(given())
    ours = measured(
        "ours", [{"rollout": 1.0, "reshard": 0.25, "return": 0.25, "iteration": 2.0}] * 3, OUR_PHASES, []
    )
    lines = [verl, ours, planned("ours", {"rollout": 1.5, "reshard": 0.1})]
    text = table(job, lines, device="GPU")
    assert "| ours | 0.50 | 1.00 | 0.00 | 2.00 | 2.50 | – |" in text and "values" not in text
    assert "| plan of ours | 0.10 | 1.50 | 0.00 | 1.60 | 3.12 | – |" in text
    assert "| verl | 0.00 | 2.50 | 2.00 | 5.00 | 1.00 | 12.0 |" in text


def test_metrics_of_a_run_of_ours_are_read(model, tmp_path, monkeypatch):
    """From a command that writes metrics where the run would."""
    job = job_of(given("--hf", str(model), out=tmp_path))
    row = {
        "step": 1,
        "time/rollout_s": 1.0,
        "time/reshard_s": 0.5,
        "train/step_time_ms": 2000.0,
        "memory/a_mb": 2048,
    }
    text, metrics = 3 * (json.dumps(row) + "\n"), tmp_path / "ours/metrics.jsonl"
    code = f"print('said'); open({str(metrics)!r}, 'w').write({text!r})"
    monkeypatch.setattr(runs.Recipe, "command", lambda *_: [sys.executable, "-c", code])
    found = runs.run_ours(job, "ours", [], limit_s=60)
    assert found.seconds["rollout"] == 1.0 and found.seconds["iteration"] == 2.0 and found.memory_gib == 2.0
    assert (tmp_path / "ours/log.txt").read_text() == "said\n"


def test_a_run_that_fails_or_takes_too_long_is_told_and_leaves_nothing(tmp_path):
    log = tmp_path / "way" / "log.txt"
    many = f"seq {runs.ERROR_CHARACTERS}"
    said = runs._run(["bash", "-c", f"echo a KeyError; {many}; echo the end; exit 3"], os.environ, log, 60)
    assert "way ended with 3; " in said and "log.txt ends with:\na KeyError\n" in said
    assert said.endswith("the end\n") and len(said) < runs.ERROR_CHARACTERS + 200
    begin = time.monotonic()
    said = runs._run(["bash", "-c", "echo $$; sleep 300 & sleep 300"], os.environ, log, 5)
    assert said.startswith("way took longer than --limit 5 s")
    assert time.monotonic() - begin < 30
    assert not runs._processes_of(int(log.read_text()))


def test_a_call_that_was_cut_short_goes_on(tmp_path):
    job, line = job_of(given(out=tmp_path)), Measured(name="ours", seconds={"iteration": 2.0}, memory_gib=1.5)
    of: dict = {"made_of": {"model": ["llama3-8b", 12]}, "settings": ["engine.lr=1e-5"]}
    record = Record(job, "ours", **of)
    assert record.read() is None
    record.folder.mkdir(parents=True)
    record.write(line)
    assert Record(job, "ours", **of).read() == line
    assert Record(job, "ours", **of | {"settings": []}).read() is None, "other settings"
    assert Record(job, "ours", **of | {"made_of": {"model": ["llama3-8b", 6]}}).read() is None, (
        "another model"
    )
    assert Record(replace(job, prompts=16), "ours", **of).read() is None


@pytest.mark.parametrize(("missing", "is_kept"), [(0, True), (1, False)])
def test_a_run_that_failed_before_its_last_iteration_runs_again(tmp_path, missing, is_kept):
    job = job_of(given(out=tmp_path))
    rows = [{"iteration": 2.0}] * (job.iterations - missing)
    record = Record(job, "ours", made_of={}, settings=[])
    record.folder.mkdir(parents=True)
    record.write(measured("ours", rows, OUR_PHASES, [], problem="ours ended with 1"))
    assert (record.read() is not None) == is_kept


def test_what_the_model_is_made_of_is_told_again(model, tmp_path):
    arguments = {"shape": "llama3-8b", "layers": 12, "hf": model}
    job = job_of(given(out=tmp_path))
    made_of = write_job(job, **arguments)
    assert made_of["model"] == str(model.resolve()) and write_job(job, **arguments) == made_of


def test_a_python_without_verl_is_refused():
    with pytest.raises(ValueError, match="has no verl; install"):
        version_of_verl(sys.executable)
    with pytest.raises(ValueError, match="cannot be run"):
        version_of_verl("/no/such/python")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "3"], "--tp 3 does not divide --gpus 1"),
        (["--iterations", "2"], "--iterations 2: the first two do not count"),
        (["--way", "a/b"], "--way a/b is no free name"),
        (["--way", "verl"], "--way verl is no free name"),
        (["--hf", "no/such/folder"], "no/such/folder"),
        (["--way", "wrong", "engine.no_such=1"], "wrong: engine.no_such is no setting"),
        (["--ours", "engine.lr=-1"], "lr"),
    ],
)
def test_refusals(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--only", "ours", "--out", str(tmp_path / "out"), *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("error:") == 1
    assert not (tmp_path / "out/model").exists(), "before the model is written"


def test_sizes_that_do_not_fit_each_other_are_refused():
    job = job_of(given())
    with pytest.raises(ValueError, match="choose a multiple of 4"):
        replace(job, prompts=6, gpus=2).check()
    with pytest.raises(ValueError, match="--tokens 16 is less than a sample"):
        replace(job, tokens=16).check()
