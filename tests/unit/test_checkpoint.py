"""Which checkpoint is resumed, when one is complete and sound, which are deleted; a world of one rank."""

import math
import os
import pickle
import random
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.distributed.checkpoint import metadata

from parallel.checkpoint import folders as checkpoints
from parallel.checkpoint import random_state, resume
from parallel.checkpoint import training_state as checkpoint
from parallel.checkpoint.folders import MANIFEST, CheckpointError
from parallel.checkpoint.metadata import read_metadata
from tests.one_rank import ONE_RANK, OneRank, world_of_one
from tests.saved import save, steps_in


@pytest.fixture
def world():
    with world_of_one() as world:
        yield world


def test_complete_ones_come_newest_first(tmp_path):
    assert checkpoints.complete(tmp_path / "absent") == []
    for name in ("step_2", "step_10", "step_9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step_11").mkdir()  # no manifest
    for name in ("step_12.partial", "step_13.replaced", "step_14.damaged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    assert steps_in(tmp_path) == [10, 9, 2]


def test_what_is_saved_comes_back(tmp_path, world):
    (tmp_path / "step_1.partial").mkdir(parents=True)  # of a run that was killed
    path = save(tmp_path, 3, own={"tensor": torch.arange(6.0)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]  # nothing partial is left
    found, manifest = resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail)
    assert found == path and manifest["step"] == 3 and manifest["world_size"] == 1
    assert manifest["roles"] == {"actor": {"optimizer_step": 7}} and manifest["before"] == {"x": 0.1}
    assert torch.equal(resume.read_rank_state(path, 0)["tensor"], torch.arange(6.0))
    assert (
        set(manifest["files"]) == {"actor/weights", "rank_0.pt"}
        and manifest["files"]["actor/weights"]["bytes"] == 4096
    )


def test_what_a_killed_run_left_goes_and_nothing_else(tmp_path, world):
    path = save(tmp_path, 1)
    for name in ("step_3.partial", "step_4.replaced"):
        (tmp_path / name / "actor").mkdir(parents=True)
    (path / "rows_0.partial").write_text("half")
    others = ["step_backup.partial", "step_5.damaged", "notes.partial", "step_6.earlier", "my_step_3.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    assert resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail)[0] == path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["step_1", *others])
    assert not list(path.glob("*.partial"))


def test_a_run_that_was_killed_between_two_names_keeps_the_newer(tmp_path, world):
    """The old one had made room, the new one was whole, and had not got its name yet."""
    path = save(tmp_path, 2, own={"value": 1})
    os.replace(path, tmp_path / "step_2.replaced")
    os.replace(save(tmp_path / "new", 2, own={"value": 2}), tmp_path / "step_2.partial")
    (tmp_path / "new").rmdir()
    assert resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail)[0] == path and resume.read_rank_state(
        path, 0
    ) == {"value": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_2"]


def test_a_step_can_be_saved_again(tmp_path, world):
    for value in (1, 2):
        path = save(tmp_path, 1, own={"value": value})
    assert resume.read_rank_state(path, 0) == {"value": 2} and [
        entry.name for entry in tmp_path.iterdir()
    ] == ["step_1"]


def test_what_could_run_code_is_not_loaded(tmp_path, world):
    path = save(tmp_path, 1)
    torch.save({"rng": Harmful()}, path / "rank_0.pt")
    with pytest.raises(ValueError, match=r"rank_0.pt is refused: it is not what a run saves .*posix.mkdir"):
        resume.read_rank_state(path, 0)
    assert not Path("harmed").exists()


class OldPython(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


class Looked:
    """Pickled as a look at an attribute."""

    def __init__(self, *of: object):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def test_a_table_is_read_whichever_python_wrote_it_and_refused_if_it_could_run_code(tmp_path, world):
    path = tmp_path / ".metadata"
    entry = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([1]), [])
    for pickler in (pickle.Pickler, OldPython):
        with path.open("wb") as file:
            pickler(file).dump(metadata.Metadata({"weight": entry}, storage_data={}))
        assert (
            read_metadata(tmp_path).state_dict_metadata["weight"].properties.memory_format
            is torch.contiguous_format
        )
    for bad in (
        Harmful(),
        Looked(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__"),
        Looked(metadata.Metadata, "__init__"),
        "no table",
    ):
        path.write_bytes(pickle.dumps(bad))
        with pytest.raises(ValueError, match=r"\.metadata is not the table of a distributed checkpoint"):
            read_metadata(tmp_path)
    assert not Path("harmed").exists()


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


# ---- what is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rank_writes_a_file_a_thread_from_where_its_tensors_lie(tmp_path, world, monkeypatch, threads):
    monkeypatch.setattr(checkpoint, "writing_threads", lambda: threads)
    block, saved = torch.arange(10_000.0), {}
    tensors = {
        "a": block[:10].view(2, 5),
        "b": block[10:4000],
        "c": block[4000:],
        "d": block[9999],
        "f": block[:8].bfloat16()[2:],
        "g": block[:6].view(2, 3).t(),
    }

    def noted(what, file, save=torch.save):
        if isinstance(what, torch.Tensor):
            saved[what.data_ptr()] = what.untyped_storage().nbytes()
        save(what, file)

    monkeypatch.setattr(torch, "save", noted)
    torch.distributed.checkpoint.save(
        tensors, storage_writer=checkpoint._Writer(tmp_path / "actor", sync_files=False)
    )
    assert sorted(path.name for path in (tmp_path / "actor").glob("*.distcp")) == [
        f"__0_{i}.distcp" for i in range(threads)
    ]
    assert all(
        saved[tensor.data_ptr()] == tensor.nbytes for name, tensor in tensors.items() if name != "g"
    ), "copied, or more than the tensor is written"
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "actor")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_ranks_read_about_as_many_bytes_each():
    sizes = {
        "actor/__0_0": 900,
        "actor/__1_0": 1000,
        "actor/.metadata": 5,
        "critic/__0_0": 800,
        "critic/__1_0": 700,
        "rank_0": 3,
        "rank_1": 3,
    }
    shares = [checkpoints.share(sizes, SimpleNamespace(rank=rank, size=2)) for rank in range(2)]
    assert sorted(sum(shares, [])) == sorted(sizes)
    for share in shares:
        assert sum(sizes[name] for name in share) == pytest.approx(1700, abs=110)


# ---- what is added afterwards ----------------------------------------------------------------------------


def test_what_is_added_comes_back_and_is_replaced(tmp_path, world, monkeypatch):
    path = save(tmp_path, 1)
    assert (
        resume.read_attachment(path, "rows", ONE_RANK, say=pytest.fail) is None
        and resume.read_record(path, "recorded", ONE_RANK, say=pytest.fail) is None
    )
    for value in (1, 2):
        checkpoints.attach(path, "rows", {"value": value, "tensor": torch.arange(value)}, ONE_RANK)
        (part,), world_size = resume.read_attachment(path, "rows", ONE_RANK, say=pytest.fail)
        assert world_size == 1 and part["value"] == value and torch.equal(part["tensor"], torch.arange(value))
    checkpoints.write_record(path, "recorded", {"loss": 0.1 + 0.2, "norm": math.nan})
    assert resume.read_record(path, "recorded", ONE_RANK, say=pytest.fail)[
        "loss"
    ] == 0.1 + 0.2 and math.isnan(resume.read_record(path, "recorded", ONE_RANK, say=pytest.fail)["norm"])
    assert resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail)[0] == path  # it is no less sound
    second_of_two = OneRank()
    second_of_two.size, second_of_two.rank = 2, 1
    monkeypatch.setattr(resume, "_damage_among", lambda *_: None)  # which asks the other rank, too
    (part,), world_size = resume.read_attachment(path, "rows", second_of_two, say=pytest.fail)
    assert world_size == 1 and part["value"] == 2  # the rows of one rank, to be dealt out to two


def test_a_run_that_begins_anew_leaves_no_checkpoint_that_would_shadow_its_own(tmp_path, world):
    for step in (5, 90):
        save(tmp_path, step)
    assert [path.name for path in resume.put_aside_all(tmp_path, ONE_RANK, launch="a")] == [
        "step_90.earlier",
        "step_5.earlier",
    ]
    assert resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail) is None and sorted(
        path.name for path in tmp_path.iterdir()
    ) == ["begun_anew.json", "step_5.earlier", "step_90.earlier"]
    save(tmp_path, 10)
    assert (
        resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail)[1]["step"] == 10
        and resume.put_aside_all(tmp_path / "nothing", ONE_RANK, launch="a") == []
    )
    save(tmp_path, 5)
    assert [path.name for path in resume.put_aside_all(tmp_path, ONE_RANK, launch="a")] == [
        "step_10.earlier2",
        "step_5.earlier2",
    ] and (tmp_path / "step_5.earlier/manifest.json").exists()


def test_damaged_additions_are_not_used(tmp_path, world):
    path, said = save(tmp_path, 1), []
    checkpoints.attach(path, "rows", {"value": 1}, ONE_RANK)
    os.truncate(path / "rows_0.pt", 10)
    assert resume.read_attachment(path, "rows", ONE_RANK, say=said.append) is None
    assert len(said) == 1 and "rows_0.pt has 10 bytes" in said[0]
    (path / "recorded.json").write_text('{"loss": ')
    assert resume.read_record(path, "recorded", ONE_RANK, say=said.append) is None
    assert "recorded of" in said[1] and "recorded.json cannot be read" in said[1]


def test_what_cannot_be_added_is_said(tmp_path, world):
    path = save(tmp_path, 1)
    (path / "rows_0.partial").mkdir()
    with pytest.raises(CheckpointError, match=rf"rows were not added to {path}: .*\(rank 0\)"):
        checkpoints.attach(path, "rows", {"value": 1}, ONE_RANK)
    assert resume.newest_sound(tmp_path, ONE_RANK, say=pytest.fail)[0] == path


# ---- how many stay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [
        (0, 0, [6, 5, 4, 3, 2, 1]),
        (1, 0, [6]),
        (2, 0, [6, 5]),
        (2, 1, [6, 5, 2]),
        (1, 2, [6, 4, 2]),
        (1, 3, [6, 4, 2, 1]),
        (9, 0, [6, 5, 4, 3, 2, 1]),
    ],
)
def test_old_ones_go(tmp_path, world, keep_last, keep_best, left):
    for step, accuracy in enumerate([0.3, 0.9, None, 0.5, 0.1, 0.2], start=1):
        save(tmp_path, step, accuracy=accuracy)
    checkpoints.remove_old(tmp_path, ONE_RANK, step=6, keep_last=keep_last, keep_best=keep_best)
    assert steps_in(tmp_path) == left and len(list(tmp_path.iterdir())) == len(left)


def test_later_ones_do_not_count(tmp_path, world):
    """Of a run that went further before this one began at an earlier step."""
    for step in (2, 3, 8):
        save(tmp_path, step)
    checkpoints.remove_old(tmp_path, ONE_RANK, step=3, keep_last=1, keep_best=0)
    assert steps_in(tmp_path) == [8, 3]


# ---- random states ---------------------------------------------------------------------------------------


def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_random_states_come_back(tmp_path, world):
    draw()
    path = save(tmp_path, 1, own={"rng": random_state.rng_state()})
    expected = draw()
    assert draw() != expected
    random_state.set_rng_state(resume.read_rank_state(path, 0)["rng"])
    assert draw() == expected


def test_random_states_begin_anew_from_seed_and_step(world):
    from parallel.groups import ProcessGroups
    from parallel.layout import Layout

    groups, drawn = ProcessGroups(Layout(), world), []
    for seed, step in ((1, 5), (1, 5), (2, 5), (1, 6)):
        random_state.seed_anew(groups, seed=seed, step=step)
        drawn.append(draw())
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
