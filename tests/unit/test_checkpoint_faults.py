"""Damaged checkpoints, those of other models, and disks that do not take one; a world of one rank."""

import json
import os
from pathlib import Path

import pytest
import torch

from parallel.checkpoint import resume
from parallel.checkpoint import training_state as checkpoint
from parallel.checkpoint.folders import MANIFEST, CheckpointError, attach
from tests.one_rank import ONE_RANK, world_of_one
from tests.saved import MODELS, save


@pytest.fixture
def world():
    with world_of_one() as world:
        yield world


# ---- damage ----------------------------------------------------------------------------------------------


def truncate(path: Path) -> str:
    os.truncate(path / "actor/weights", 1000)
    return "actor/weights has 1000 bytes of 4096"


def flip_a_bit(path: Path) -> str:
    content = bytearray((path / "actor/weights").read_bytes())
    content[2000] ^= 1
    (path / "actor/weights").write_bytes(content)
    return "actor/weights is not what was written: its SHA-256 differs"


def remove(path: Path) -> str:
    (path / "rank_0.pt").unlink()
    return "rank_0.pt is missing"


def spoil_manifest(path: Path) -> str:
    (path / MANIFEST).write_text('{"step": 2, "files"')
    return f"{MANIFEST} cannot be read"


def older_format(path: Path) -> str:
    (path / MANIFEST).write_text('{"step": 2}')
    return "written by another version"


@pytest.mark.parametrize("harm", [truncate, flip_a_bit, remove, spoil_manifest, older_format])
def test_a_damaged_one_gives_way_to_the_one_before(tmp_path, world, harm):
    first, second, said = save(tmp_path, 1), save(tmp_path, 2), []
    why = harm(second)
    found, manifest = resume.newest_sound(tmp_path, ONE_RANK, say=said.append)
    assert found == first and manifest["step"] == 1
    assert (
        len(said) == 1
        and said[0].startswith(f"warning: checkpoint {second} is damaged and not used: ")
        and why in said[0]
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_1", "step_2.damaged"]
    harm(first)
    with pytest.raises(
        CheckpointError,
        match="no checkpoint in .* can be used; step_1: .*; copy the files again, or set run.resume=never",
    ):
        resume.newest_sound(tmp_path, ONE_RANK, say=said.append)
    assert first.exists()  # the only one stays where it is


def test_what_was_put_aside_before_stays(tmp_path, world):
    save(tmp_path, 1)
    for value in (1, 2):
        harm = save(tmp_path, 2, own={"value": value})
        truncate(harm)
        resume.newest_sound(tmp_path, ONE_RANK, say=lambda _: None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step_1",
        "step_2.damaged",
        "step_2.damaged2",
    ]


def test_a_checkpoint_from_before_digests_is_refused_by_its_format(tmp_path, world):
    path = save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(
        json.dumps({name: value for name, value in manifest.items() if name not in ("format", "sha256")})
    )
    with pytest.raises(
        CheckpointError,
        match="step_1: manifest.json tells no format and no digest, this version reads format 2: it "
        "was written by another version; copy",
    ):
        resume.newest_sound(tmp_path, ONE_RANK, say=lambda _: None)


def test_no_checkpoint_is_no_error(tmp_path, world):
    assert resume.newest_sound(tmp_path / "absent", ONE_RANK, say=pytest.fail) is None


def test_other_models_are_refused_by_name(tmp_path, world):
    path = save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    resume.refuse_other_models(path, manifest, MODELS)
    with pytest.raises(
        CheckpointError,
        match=r"holds an actor with hidden_size=64, this run's has hidden_size=128; set actor.path",
    ):
        resume.refuse_other_models(
            path, manifest, MODELS | {"actor": {"hidden_size": 128, "rope_theta": 1e4}}
        )
    with pytest.raises(
        CheckpointError, match="holds actor, critic, this run trains actor; choose the same algorithm"
    ):
        resume.refuse_other_models(path, manifest, {"actor": MODELS["actor"]})


# ---- failing to save -------------------------------------------------------------------------------------


def shared_file_full(scratch: Path) -> None:
    (scratch / "actor").mkdir()
    (scratch / "actor/__0_1.distcp").symlink_to(
        "/dev/full"
    )  # Linux' full disk to try things on; of a thread that is not the first
    state = {"weight": torch.zeros(1000), "bias": torch.zeros(900)}
    torch.distributed.checkpoint.save(
        state, storage_writer=checkpoint._Writer(scratch / "actor", sync_files=False)
    )


def own_file_full(scratch: Path) -> None:
    (scratch / "rank_0.pt").symlink_to("/dev/full")


@pytest.mark.parametrize("write", [shared_file_full, own_file_full])
def test_a_full_disk_leaves_what_is_there(tmp_path, world, monkeypatch, write):
    monkeypatch.setattr(checkpoint, "writing_threads", lambda: 2)
    save(tmp_path, 1)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint of step 2 was not written to .*earlier ones are untouched; make room.*No "
        r"space left on device.* \(rank 0\)",
    ):
        save(tmp_path, 2, own={"tensor": torch.zeros(10_000)}, write=write)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]
    assert resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail)[1]["step"] == 1


def test_a_disk_that_fills_up_inside_a_tensor_is_named(tmp_path, world, small_files):
    """Behind what torch has written by then."""
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 was not written .*File too large"):
        save(tmp_path, 2, own={"tensor": torch.zeros(100_000)})
    with pytest.raises(CheckpointError, match=r"extra were not added to .*File too large"):
        attach(tmp_path / "step_1", "extra", {"tensor": torch.zeros(100_000)}, ONE_RANK)


def test_a_folder_that_cannot_be_made_is_named(tmp_path, world):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        CheckpointError, match=f"was not written to {tmp_path}/file/checkpoint.*Not a directory"
    ):
        save(tmp_path / "file/checkpoint", 1)
