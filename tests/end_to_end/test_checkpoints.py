"""Checkpoints of whole runs: another layout, damage, a full disk.

Resuming under the same layout is tested in test_ppo.py.
"""

import json
import os
import re
import shutil

import pytest

from parallel.runtime.run_lock import identity
from tests.end_to_end.conftest import TRAIN, adaptive_settings, settings_of
from tests.end_to_end.launch import run, start
from verl_megatron.observe.tracking import read_metrics


def test_another_layout_goes_on_from_the_last_sound_checkpoint(whole_run, toy, tmp_path):
    """Saved on four ranks with distributed optimizers, resumed on two without; the newest is damaged."""
    folder = tmp_path / "run/checkpoint"
    shutil.copytree(whole_run.output_dir / "checkpoint", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step_2", "step_4"]
    damaged = next((folder / "step_4/actor").glob("*.distcp"))
    os.truncate(damaged, damaged.stat().st_size - 1)
    layouts = [
        "actor.layout=pp2",
        "critic.layout=tp2",
        "rollout.tp=2",
        "engine.distributed_optimizer=false",
        "run.keep_last_k=1",
        "run.export=false",
        "run.resume=verify",
    ]
    ended = run(2, TRAIN, *adaptive_settings(toy, tmp_path / "run"), *layouts, folder=tmp_path)

    assert ended.stdout.count("is damaged and not used") == 1 and f"{damaged} has" in ended.stdout, ended.text
    assert re.search(
        r"settings changed since .*/step_2: actor.layout: \"tp2pp2\" -> \"pp2\", .*run.resume: "
        r"\"newest\" -> \"verify\"",
        ended.stdout,
    ), ended.text
    assert re.search(
        r"resuming after iteration 2 from .*/step_2, of layouts .* random states start from "
        r"run.seed and the step, with the samples",
        ended.stdout,
    ), ended.text
    assert re.search(
        r"run.resume=verify: iteration 3, repeated on the samples of that time, gives all \d\d recorded "
        r"numbers",
        ended.stdout,
    ), ended.text
    assert sorted(path.name for path in folder.iterdir()) == ["step_4", "step_4.damaged"]
    expected = {row["step"]: row for row in read_metrics(whole_run.output_dir)}
    found = {row["step"]: row for row in read_metrics(tmp_path / "run")}
    assert list(found) == [3, 4]
    for key in (
        "policy/loss",
        "policy/entropy",
        "policy/grad_norm",
        "critic/loss",
        "critic/grad_norm",
        "kl/coef",
        "kl/ref",
        "reward/mean",
    ):
        assert found[3][key] == pytest.approx(expected[3][key], rel=1e-3, abs=1e-5), key


def test_the_manifest_tells_the_run(whole_run):
    manifest = json.loads((whole_run.output_dir / "checkpoint/step_4/manifest.json").read_text())
    assert manifest["step"] == 4 and manifest["world_size"] == 4
    assert manifest["layouts"] == {
        "actor": "tp2pp2 on ranks [0, 1, 2, 3]",
        "critic": "pp2dp2 on ranks [0, 1, 2, 3]",
    }
    assert (
        manifest["settings"]["algorithm"]["kl_ctrl_target"] == 0.01
        and manifest["models"]["actor"]["hidden_size"]
    )
    assert {"verl-megatron", "torch", "megatron-core"} <= manifest["versions"].keys()
    assert manifest["validation"]["step"] == 4 and 0 <= manifest["validation"]["validation/accuracy"] <= 1
    assert {"actor/.metadata", "critic/.metadata", "rank_0.pt", "rank_3.pt"} <= manifest["files"].keys()
    assert all(len(file["sha256"]) == 64 for file in manifest["files"].values())


SMALL = [
    "run.iterations=1",
    "run.save_interval=1",
    "data.validation=",
    "rollout.max_tokens=4",
    "actor.layout=tp2",
    "critic.layout=tp2",
    "rollout.tp=2",
]


def refused(toy, tmp_path) -> str:
    """The one line that a run says of its output folder before it builds anything."""
    ended = start(2, TRAIN, *settings_of(toy, tmp_path / "run", *SMALL), folder=tmp_path).wait(timeout_s=300)
    assert ended.code != 0 and len(ended.error_lines) == 1, ended.text
    assert "command_line.py" not in ended.stderr and "built in" not in ended.stdout, ended.text
    return ended.error_lines[0]


def test_a_file_in_the_place_of_the_checkpoints_is_refused(toy, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").write_text("a file where the folder should be")
    assert f"{tmp_path}/run/checkpoint is no folder" in refused(toy, tmp_path)


def test_a_folder_in_which_a_run_is_at_work_is_refused(toy, tmp_path):
    """This process stands for the run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.lock").write_text(json.dumps(identity()))
    assert re.search(
        rf"is in use by another run: process {os.getpid()} on .*, since .*; wait for it",
        refused(toy, tmp_path),
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
