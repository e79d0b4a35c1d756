"""What vLLM sees of a model's folder: the checked files and no others, whatever else lies there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel.runtime import leftovers
from tests.tiny import write_hf, write_tokenizer
from verl_megatron.rollout.vllm_folder import ModelView

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_templates"}
SMALL = {"config.json", "generation_config.json", *TOKENIZER}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=["single", "sharded"])
def model(request, tmp_path_factory) -> tuple[Path, set[str]]:
    """A folder with files that vLLM would prefer or stumble over, and the names of its weights' files."""
    folder = tmp_path_factory.mktemp("models") / "[a] model"
    shape = write_hf(folder, "mistral", num_hidden_layers=1)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "chat_templates").mkdir()
    weights = {"model.safetensors"}
    if request.param == "sharded":
        (folder / "model.safetensors").unlink()
        shape.save_pretrained(folder, max_shard_size="50KB")
        weights = {*json.loads((folder / INDEX).read_text())["weight_map"].values(), INDEX}
        assert len(weights) > 2
    for name in ("old_model", "tokenizer.1", "vocab"):
        save_file({"model.norm.weight": torch.zeros(64)}, folder / f"{name}.safetensors")
    (folder / "consolidated.safetensors").symlink_to("nowhere")
    (folder / "old.safetensors").mkdir()
    mistral = {"dim": 8, "n_layers": 2, "n_heads": 2, "vocab_size": 9, "norm_eps": 1e-5, "hidden_dim": 8}
    (folder / "params.json").write_text(json.dumps(mistral))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    (folder / "modules.json").write_text("[]")
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "pytorch_model.bin").touch()
    return folder, weights


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_vllm_sees_the_checked_files_only(model, monkeypatch):
    folder, weights = model
    monkeypatch.chdir(folder.parent)
    view, without = ModelView(folder.name, weights=True), ModelView(folder.name, weights=False)
    monkeypatch.chdir("/")
    assert names_in(view.path) == SMALL | weights and names_in(without.path) == SMALL
    assert all(path.samefile(folder / path.name) for path in view.path.iterdir())
    assert (view.options["load_format"], without.options["load_format"]) == ("safetensors", "dummy")
    for each in (view, without):
        each.remove()
        assert not each.path.exists() and names_in(folder) > weights
        assert each.options["served_model_name"] == folder.name


def test_vllm_takes_the_checked_configuration(model, monkeypatch):
    """And it names compiled models by the folder's path, which is the same in the next run."""
    config = pytest.importorskip("vllm.config")
    folder, _ = model
    hashes = set()
    for _ in range(2):
        view = ModelView(str(folder), weights=True)
        with view.starting():
            options = {name: value for name, value in view.options.items() if name != "load_format"}
            found = config.ModelConfig(**options, dtype="float32")
            hashes.add(found.compute_hash())
        assert found.hf_config.num_hidden_layers == 1 and found.max_model_len == 256
        assert found.runner_type == "generate" and found.quantization is None
        assert (found.model, found.served_model_name) == (str(view.path), str(folder))
        view.remove()
    found.model = str(folder)
    assert hashes == {found.compute_hash()}


def test_a_start_that_fails_leaves_no_links(model):
    pytest.importorskip("vllm.config")
    view = ModelView(str(model[0]), weights=True)
    with pytest.raises(KeyError), view.starting():
        raise KeyError
    assert not view.path.exists()


def test_broken_weights_and_a_full_disk_are_named(model, tmp_path, monkeypatch):
    folder, weights = model
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True)
    broken = copy / min(weights)
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{broken.name} is truncated"):
        ModelView(str(copy), weights=True)
    monkeypatch.setattr(leftovers, "process_folder", lambda: tmp_path / "none")
    with pytest.raises(ValueError, match=r"none cannot take links .* \(No such file .*TMPDIR"):
        ModelView(str(folder), weights=True)
