"""An export onto a disk that fails; tests/distributed/test_reshard.py compares the files."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from parallel import rank_set
from parallel.checkpoint.folders import CheckpointError
from parallel.export import ShardedModel, _whole, export_folder
from parallel.weights.architecture import read_architecture
from tests.one_rank import world_of_one
from tests.tiny import write_hf


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
