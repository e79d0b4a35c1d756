"""The record of a run: settings as a recipe, an entry for each start, and no secrets."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from parallel.runtime import endings
from tests.one_rank import ONE_RANK
from verl_megatron.checks.output_folder import output_problems
from verl_megatron.checks.overrides import structured
from verl_megatron.config import SCHEMAS, RunConfig, SFTConfig, TrainerConfig
from verl_megatron.lifecycle.record import RunRecord, git_state, read_starts
from verl_megatron.lifecycle.secrets import MASK, is_secret, masked_arguments, masked_value


def config_in(folder, **run) -> TrainerConfig:
    config = TrainerConfig()
    config.run.output_dir = folder
    for name, value in run.items():
        setattr(config.run, name, value)
    config.data.train, config.actor.path, config.reward.function = "train.jsonl", "model", "match"
    return config


def record(config, *, step: int = 0) -> RunRecord:
    return RunRecord(config, ONE_RANK, step=lambda: step)


# ---- secrets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["hf_token", "wandb.api_key", "reward.password", "--hf-token", "AWS_SECRET_ACCESS_KEY", "key", "a.key"],
)
def test_names_of_secrets(name):
    assert is_secret(name) and is_secret(name.upper())


def test_no_setting_is_taken_for_a_secret():
    for schema in SCHEMAS.values():
        config = schema()
        for section in vars(config):
            assert not [name for name in vars(getattr(config, section)) if is_secret(f"{section}.{name}")]


def test_command_lines_keep_everything_but_secrets():
    given = [
        *("python", "-m", "verl_megatron.train", "data.prompt_key=question", "rollout.max_tokens=512"),
        *("reward.api_key=abc", "--hf-token", "abc", "--password=abc", "x=hf_abcdefghijklmnopqrst"),
        *("actor.path=https://me:abc@host/model?X-Signature=abc&part=1", "--token", "--dry-run"),
    ]
    masked = masked_arguments(given)
    assert masked[:5] == given[:5] and not [word for word in masked if "abc" in word]
    assert masked[5:] == [
        *(f"reward.api_key={MASK}", "--hf-token", MASK, f"--password={MASK}", f"x={MASK}"),
        *(f"actor.path=https://{MASK}@host/model?X-Signature={MASK}&part=1", "--token", "--dry-run"),
    ]


def test_values_keep_their_types():
    settings = {"reward": {"token": "abc", "tokens": 3, "secret": "", "list": ["sk-abcdefghijklmnop", 1]}}
    assert masked_value("", settings) == {
        "reward": {"token": MASK, "tokens": 3, "secret": "", "list": [MASK, 1]}
    }


# ---- files -------------------------------------------------------------------------------------------------


def test_the_settings_are_a_recipe_of_the_same_run(tmp_path):
    config = config_in(tmp_path, iterations=7)
    config.rollout.stop, config.engine.adam_betas = ["\n", "ä: #"], [0.9, 0.95]
    with record(config):
        assert read_starts(tmp_path)[0]["exit"] is None
    text = (tmp_path / "config.yaml").read_text()
    assert structured(yaml.safe_load(text), TrainerConfig) == config
    (start,) = read_starts(tmp_path)
    assert start["exit"] == {"reason": "done", "text": "all 7 iterations", "rank": 0, "step": 0}
    assert start["started"] <= start["ended"] and start["kind"] == "TrainerConfig"
    assert start["layouts"].keys() >= {"actor", "critic"} and start["world_size"] == 1
    assert start["hosts"][0]["ranks"] == [0] and {"torch", "python"} <= start["versions"].keys()
    assert (
        start["command"].startswith(os.path.basename(sys.orig_argv[0]))
        or sys.orig_argv[0] in start["command"]
    )
    assert "PATH" not in json.dumps(start) and start["git"]["commit"]


def test_a_resumption_appends_what_changed(tmp_path):
    with record(config_in(tmp_path, iterations=7)):
        pass
    starts = json.loads((tmp_path / "run.json").read_text())
    starts[0]["versions"] |= {"torch": "1.0", "gone": "2"}
    (tmp_path / "run.json").write_text(json.dumps(starts))
    again = config_in(tmp_path, iterations=9)
    again.actor.lr = 3e-6
    with record(again, step=9) as second:
        second.resumed(7)
    with record(again) as third:
        third.stopped = "SIGTERM: saved after iteration 8"
    starts = read_starts(tmp_path)
    assert [start["number"] for start in starts] == [1, 2, 3]
    assert starts[1]["settings_changed"] == {"run.iterations": [7, 9], "actor.lr": [1e-6, 3e-6]}
    assert starts[1]["versions_changed"]["torch"][0] == "1.0"
    assert starts[1]["versions_changed"]["gone"] == ["2", None]
    assert (starts[1]["resumed_from"], starts[1]["exit"]["step"]) == (7, 9)
    assert starts[2]["settings_changed"] == starts[2]["versions_changed"] == {}
    assert starts[2]["exit"]["reason"] == "stopped"
    text = (tmp_path / "config.yaml").read_text()
    assert yaml.safe_load(text)["run"]["iterations"] == 9
    assert "actor.lr: 1e-06 -> 3e-06" in text and text.count("# start 2") == 2


def test_an_error_and_its_place_are_the_end(tmp_path):
    with pytest.raises(RuntimeError), record(config_in(tmp_path), step=3):
        error = RuntimeError("out of memory")
        endings.locate(error, phase="actor_update", iteration=4)
        raise error
    found = read_starts(tmp_path)[0]["exit"]
    assert found == {
        "reason": "error",
        "text": "RuntimeError: out of memory",
        "rank": 0,
        "step": 3,
        "phase": "actor_update",
        "iteration": 4,
    }


def test_ctrl_c_in_a_program_is_no_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), record(config_in(tmp_path), step=3):
        raise KeyboardInterrupt
    found = read_starts(tmp_path)[0]["exit"]
    assert (found["reason"], found["step"]) == ("interrupted", 3) and found["text"].startswith("Ctrl-C; ")


def test_what_ends_a_process_without_teardown_is_the_end(tmp_path):
    with record(config_in(tmp_path)):
        endings.tell("stuck", "rank 1 made no progress")
    assert read_starts(tmp_path)[0]["exit"]["reason"] == "stuck"  # said first
    endings.tell("stuck", "nobody listens any more")


def test_a_killed_start_is_known_by_the_next(tmp_path):
    if not (child := os.fork()):
        record(config_in(tmp_path)).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [start["exit"] for start in read_starts(tmp_path)] == [None]
    with record(config_in(tmp_path)):
        pass
    first, second = read_starts(tmp_path)
    assert first["exit"]["reason"] == "killed" and first["ended"] is None and second["number"] == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"number": "1"}]', "[" * 100_000, "\0"])
def test_a_damaged_file_is_put_aside(tmp_path, capsys, text):
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "config.yaml").write_text("# Settings of start 1\n: [")
    with record(config_in(tmp_path)):
        pass
    assert "it is now" in capsys.readouterr().out and (tmp_path / "run.json.damaged").read_text() == text
    assert len(read_starts(tmp_path)) == 1


def test_a_record_that_cannot_be_written_is_refused_at_the_start_and_costs_nothing_later(tmp_path):
    (tmp_path / "config.yaml.new").mkdir()
    with (
        pytest.raises((ValueError, OSError), match=r"does not take what the run writes|directory"),
        record(config_in(tmp_path)),
    ):
        pass
    (tmp_path / "config.yaml.new").rmdir()
    with record(config_in(tmp_path)):
        (tmp_path / "run.json").unlink()


def test_another_rank_can_say_the_end_while_the_first_holds_the_lock(tmp_path, monkeypatch):
    import fcntl

    from verl_megatron.lifecycle import record as module

    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    with record(config_in(tmp_path)) as running:
        handle = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        began = time.monotonic()
        running._end("error", "said without the lock")
        assert time.monotonic() - began < 20
        os.close(handle)
    assert read_starts(tmp_path)[0]["exit"]["text"] == "said without the lock"


def test_a_recipe_of_the_users_own_is_not_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("run:\n  seed: 3\n")
    (problem,) = output_problems(RunConfig(output_dir=str(tmp_path)), [], {})
    assert "config.yaml is not of a run" in problem and "move it away or name another folder" in problem
    (tmp_path / "config.yaml").unlink()
    config = SFTConfig()
    config.run.output_dir, config.data.train, config.actor.path = str(tmp_path), "a.jsonl", "model"
    with record(config):
        pass
    assert output_problems(RunConfig(output_dir=str(tmp_path)), [], {}) == []


def test_git_state_says_what_is_changed(tmp_path):
    assert git_state(tmp_path) is None

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    git("init", "-q", "-b", "trunk")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    found = git_state(tmp_path)
    assert (found["branch"], found["dirty"], found["changed"], len(found["commit"])) == (
        "trunk",
        False,
        [],
        40,
    )
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path)["changed"] == ["file"]
