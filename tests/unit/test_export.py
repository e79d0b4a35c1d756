"""An export onto a disk that fails; tests/distributed/test_reshard.py compares the files."""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from parallel import rank_set
from parallel.checkpoint.folders import CheckpointError
from parallel.export import ShardedModel, _whole, export_folder
from parallel.weights.architecture import read_architecture
from tests.one_rank import world_of_one
from tests.tiny import write_hf
from verl_megatron.roles.engine import Engine


@pytest.fixture
def world():
    with world_of_one() as world:
        yield world


def export(model: Path, folder: Path, **options) -> None:
    weights = load_file(model / "model.safetensors")
    export_folder(
        ShardedModel(
            arch=read_architecture(model),
            dtype=next(iter(weights.values())).dtype,
            tensors={(0, name): tensor for name, tensor in weights.items()},
            shards={0: [_whole(name, tuple(tensor.shape)) for name, tensor in weights.items()]},
        ),
        folder,
        template_folder=model,
        ranks=rank_set.world(),
        **options,
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ""])
def test_an_export_that_cannot_be_written_is_one_error(tmp_path, world, name):
    write_hf(tmp_path / "hf", "qwen3")
    path = tmp_path / "actor" / name
    if name:
        (path / "in the way").mkdir(parents=True)
    else:
        path.write_text("in the way")
    with pytest.raises(
        CheckpointError, match=rf"the model was not exported to {tmp_path}/actor; make room .* \(rank 0\)"
    ):
        export(tmp_path / "hf", tmp_path / "actor")
    shutil.rmtree(path) if name else path.unlink()
    export(tmp_path / "hf", tmp_path / "actor")
    assert (
        load_file(tmp_path / "actor/model.safetensors").keys()
        == load_file(tmp_path / "hf/model.safetensors").keys()
    )


@pytest.mark.parametrize("fails_at", range(1, 30))
def test_an_export_that_ends_early_leaves_nothing_to_load(tmp_path, world, monkeypatch, fails_at):
    """Over an earlier one of the same files: each moment at which a file gets its name."""
    write_hf(tmp_path / "hf", "qwen3")
    options, named = {"max_file_bytes": 20_000}, []
    export(tmp_path / "hf", tmp_path / "actor", **options)
    assert len(list((tmp_path / "actor").glob("model-*"))) > 2

    def name_it(source, target, *, replace=os.replace):
        named.append(Path(target).name)
        if len(named) == fails_at:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("parallel.weights.writing.os.replace", name_it)
    try:
        export(tmp_path / "hf", tmp_path / "actor", **options)
    except KeyboardInterrupt:
        assert not (tmp_path / "actor/config.json").exists()
    else:
        assert named[-1] == "config.json" and len(named) < fails_at


def test_an_export_leaves_no_file_of_a_killed_one(tmp_path, world):
    write_hf(tmp_path / "hf", "qwen3")
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/.model-00001-of-00002.safetensors.12.partial").touch()
    export(tmp_path / "hf", tmp_path / "actor")
    assert {path.name for path in (tmp_path / "actor").iterdir()} == {
        path.name for path in (tmp_path / "hf").iterdir()
    }


def test_names_in_a_configuration_are_copied_whatever_their_letters(tmp_path, world):
    write_hf(tmp_path / "hf", "qwen3")
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"_name_or_path": "\u00e9\ud800"}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    export(tmp_path / "hf", tmp_path / "actor")
    assert json.loads((tmp_path / "actor/config.json").read_text()) == config


@pytest.mark.parametrize("said", [{"torch_dtype": "float32"}, {"dtype": "float32", "torch_dtype": "float32"}])
def test_an_engine_says_one_dtype(tmp_path, monkeypatch, said):
    """Whichever keys its template has for it."""
    write_hf(tmp_path, "qwen3")
    path, written = tmp_path / "config.json", {}
    config = {name: value for name, value in json.loads(path.read_text()).items() if "dtype" not in name}
    path.write_text(json.dumps(config | said))
    monkeypatch.setattr("verl_megatron.roles.engine.export_folder", lambda *_, **given: written.update(given))
    engine = Mock(arch=read_architecture(tmp_path), head="lm", compute=Mock(dtype=torch.bfloat16), tensors={})
    Engine.export(engine, tmp_path / "actor", template=str(tmp_path))
    found = {name: value for name, value in written["config"].items() if "dtype" in name}
    assert found == dict.fromkeys(said, "bfloat16")
