"""Which checkpoint is the newest, what makes one complete, and which are refused; a world of one rank in this process."""

import json
import random

import numpy
import pytest
import torch
import torch.distributed as dist

from parallel import checkpoint, device

MANIFEST = {"layouts": {"actor": "tp2pp2"}, "models": {"actor": {"hidden_size": 64}}}


@pytest.fixture
def world(monkeypatch):
    """A world of one rank, if this process is in none."""
    joined = dist.is_initialized()
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(device._free_port())).items():
        monkeypatch.setenv(name, value)  # what initialize() would set is taken back afterwards
    device.initialize()
    assert dist.get_world_size() == 1
    yield
    if not joined:
        dist.destroy_process_group()


def test_newest_is_the_complete_one_of_the_highest_step(tmp_path):
    assert checkpoint.newest(tmp_path / "absent") is None
    for name in ("step_2", "step_10", "step_9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.MANIFEST).write_text("{}")
    (tmp_path / "step_11").mkdir()  # no manifest: killed while it was written
    (tmp_path / "step_12.partial").mkdir()
    (tmp_path / "step_12.partial" / checkpoint.MANIFEST).write_text("{}")  # killed before it got its name
    assert checkpoint.newest(tmp_path) == tmp_path / "step_10"


def test_state_comes_back(tmp_path, world):
    state = {"weights": [torch.arange(6.0).view(2, 3)], "scheduler": {"steps": 4, "style": "cosine"}, "kl": {"coef": 0.1}}
    path = checkpoint.save(tmp_path, step=3, state=state, manifest=MANIFEST)
    assert checkpoint.newest(tmp_path) == path
    assert [file.name for file in tmp_path.iterdir()] == ["step_3"]  # nothing partial is left
    step, found = checkpoint.load(path, MANIFEST)
    assert step == 3 and torch.equal(found["weights"][0], state["weights"][0])
    assert {name: found[name] for name in ("scheduler", "kl")} == {name: state[name] for name in ("scheduler", "kl")}


def test_a_step_can_be_saved_again(tmp_path, world):
    for value in (1, 2):
        path = checkpoint.save(tmp_path, step=1, state={"value": value}, manifest=MANIFEST)
    assert checkpoint.load(path, MANIFEST)[1] == {"value": 2}


def test_another_layout_model_or_number_of_ranks_is_refused(tmp_path, world):
    path = checkpoint.save(tmp_path, step=1, state={}, manifest=MANIFEST)
    with pytest.raises(ValueError, match=r"layouts=\{'actor': 'tp2pp2'\}, this run has \{'actor': 'tp4'\}; resume with the same, or set run.resume=false"):
        checkpoint.load(path, MANIFEST | {"layouts": {"actor": "tp4"}})
    with pytest.raises(ValueError, match="models="):
        checkpoint.load(path, MANIFEST | {"models": {"actor": {"hidden_size": 128}}})
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"world_size": 4}))
    with pytest.raises(ValueError, match="world_size=4, this run has 1"):
        checkpoint.load(path, MANIFEST)


def test_random_states_come_back(tmp_path, world):
    def draw():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    draw()
    path = checkpoint.save(tmp_path, step=1, state={"rng": checkpoint.rng_state()}, manifest={})
    expected = draw()
    assert draw() != expected
    checkpoint.set_rng_state(checkpoint.load(path, {})[1]["rng"])
    assert draw() == expected
