"""Conversion between Hugging Face folders and distributed checkpoints: bits, refusals, reruns."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from parallel.checkpoint.metadata import read_metadata
from parallel.convert.compare import describe
from parallel.convert.hugging_face import HuggingFace
from parallel.convert.journal import NAME, Journal
from parallel.convert.megatron_checkpoint import MegatronCheckpoint
from parallel.convert.to_hugging_face import CheckpointArguments
from parallel.convert.workers import Budget
from parallel.weights.files import CheckpointFolder
from parallel.weights.writing import carry_files
from tests.converted import SMALL, assert_same, difference, rewrite, tensors_of, to_hf, to_mcore
from tests.tiny import FAMILIES, write_hf


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize(
    ("family", "head"),
    [(family, "ForCausalLM") for family in FAMILIES]
    + [("llama_tied_llama3", "ForTokenClassification"), ("mistral", "ForSequenceClassification")],
)
def test_there_and_back_keeps_every_bit(tmp_path, family, head, spec):
    write_hf(tmp_path / "hf", family, head)
    to_mcore(tmp_path / "hf", tmp_path / "mcore", spec=spec)
    to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_same(tmp_path / "hf", tmp_path / "back")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads(
        (tmp_path / "back" / "config.json").read_text()
    )
    assert not difference(tmp_path / "hf", tmp_path / "mcore") and not difference(
        tmp_path / "mcore", tmp_path / "back"
    )


def test_several_files_dtypes_tokenizer_and_transformers(converted, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    to_hf(converted / "mcore", tmp_path / "fp32", dtype=torch.float32)
    assert len(list((tmp_path / "fp32").glob("model-*.safetensors"))) > 2 and not list(
        tmp_path.glob("*.partial")
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32").state_dict()
    for name, tensor in tensors_of(converted / "hf").items():
        assert torch.equal(loaded[name], tensor.float()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "fp32")("w3 w149")["input_ids"] == [3, 149]
    assert difference(converted / "hf", tmp_path / "fp32")[0].startswith(
        "model.embed_tokens.weight is torch.bfloat16"
    )


def test_numbers_beyond_the_dtype_are_refused(converted, tmp_path):
    carry_files(converted / "hf", tmp_path / "hf")
    name, weights = "model.norm.weight", tensors_of(converted / "hf")
    save_file(weights | {name: torch.full_like(weights[name], 1e6)}, tmp_path / "hf" / "model.safetensors")
    to_mcore(tmp_path / "hf", tmp_path / "mcore")
    with pytest.raises(ValueError, match=f"{name} in .* beyond torch.float16; choose another --dtype"):
        to_hf(tmp_path / "mcore", tmp_path / "half", dtype=torch.float16)
    to_hf(tmp_path / "mcore", tmp_path / "single", dtype=torch.float32)
    assert tensors_of(tmp_path / "single")[name].eq(torch.tensor(1e6).bfloat16()).all()


def test_torch_reads_every_chunk_and_padding_is_zero(converted):
    """The files are read as torch.distributed.checkpoint does it, chunk by chunk with torch.load."""
    folder = converted / "mcore" / "release"
    table = read_metadata(folder)
    embedding = torch.full(table.state_dict_metadata["embedding.word_embeddings.weight"].size, torch.nan)
    for index, info in table.storage_data.items():
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            (folder.parent / "one").write_bytes(file.read(info.length))
        content = torch.load(folder.parent / "one", weights_only=True)
        if index.fqn == "embedding.word_embeddings.weight":
            embedding[index.offset[0] : index.offset[0] + len(content)] = content.float()
    (folder.parent / "one").unlink()
    words = tensors_of(converted / "hf")["model.embed_tokens.weight"].float()
    assert torch.equal(embedding[: len(words)], words) and not embedding[len(words) :].any()


def test_a_critic_from_a_language_models_template(converted, tmp_path):
    write_hf(tmp_path / "critic", "qwen3", "ForTokenClassification")
    to_mcore(tmp_path / "critic", tmp_path / "mcore")
    to_hf(tmp_path / "mcore", tmp_path / "back", template=converted / "hf")
    assert_same(tmp_path / "critic", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [
        "Qwen3ForTokenClassification"
    ]


def test_processes_and_one_process_write_the_same(converted, tmp_path):
    to_mcore(converted / "hf", tmp_path / "mcore", budget=Budget(SMALL.slab_bytes, workers=2))
    for path in (converted / "mcore" / "release").glob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "mcore" / "release" / path.name).read_bytes()


def test_verify_names_a_flipped_element(converted, tmp_path, mcore):
    weight = tensors_of(converted / "hf")["model.layers.1.mlp.up_proj.weight"]
    row = weight[7].view(torch.uint8).numpy().tobytes()
    for path in sorted((mcore / "release").glob("*.distcp")):
        data = bytearray(path.read_bytes())
        if (at := data.find(row)) >= 0:
            data[at] ^= 1
            path.write_bytes(data)
    (line,) = difference(converted / "hf", mcore)
    assert line.startswith("model.layers.1.mlp.up_proj.weight differs, first in row 7")


def test_missing_truncated_and_garbled_files_are_named(mcore, tmp_path):
    path = mcore / "release" / "__0_2.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"__0_2.distcp is truncated: it has \d+ bytes"):
        to_hf(mcore, tmp_path / "back")
    path.write_bytes(bytes(len(data)))
    with pytest.raises(ValueError, match=r"__0_2.distcp has no tensor at bytes 0-"):
        to_hf(mcore, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    path.unlink()
    with pytest.raises(ValueError, match=r"__0_2.distcp does not exist and .metadata names it"):
        MegatronCheckpoint(mcore)


def copy_key(old, new):
    """Let another key name the same chunks."""

    def change(table):
        table.state_dict_metadata[new] = table.state_dict_metadata[old]
        table.storage_data |= {
            type(index)(new, index.offset): info
            for index, info in table.storage_data.items()
            if index.fqn == old
        }

    return change


def test_unknown_keys_are_refused_by_name_and_training_state_is_left_out(converted, mcore, tmp_path):
    rewrite(
        mcore,
        copy_key("decoder.final_layernorm.weight", "optimizer.state.exp_avg.decoder.final_layernorm.weight"),
    )
    assert len(to_hf(mcore, tmp_path / "noted").training_keys) == 1
    rewrite(mcore, copy_key("decoder.final_layernorm.weight", "decoder.surprise.weight"))
    with pytest.raises(ValueError, match=r"does not have: decoder.surprise.weight; .*--skip-extra"):
        to_hf(mcore, tmp_path / "back")
    assert to_hf(mcore, tmp_path / "back", skip_extra=True).extra_keys == ["decoder.surprise.weight"]
    assert_same(converted / "hf", tmp_path / "back")


def add_object(key):
    return lambda table: table.state_dict_metadata.update({key: BytesStorageMetadata()})


def test_objects_of_modules_are_passed_over_and_others_are_refused(mcore):
    """`_extra_state` as ShardedObject.unique_key names it: stacked, of a layer, of experts; common state."""
    keys = (
        "self_attention.core_attention._extra_state/shard_3_4",
        "3.mlp.linear_fc2._extra_state/shard_0_1",
        "mlp.experts._extra_state/shard_0.7_4.8",
    )
    for key in keys:
        rewrite(mcore, add_object(f"decoder.layers.{key}"))
    rewrite(mcore, add_object("common_state/shard_0_1"))
    assert MegatronCheckpoint(mcore).extra_keys == []
    rewrite(mcore, add_object("decoder.surprise_extra_state/shard_0_1"))
    with pytest.raises(ValueError, match="does not have: decoder.surprise_extra_state/shard_0_1; "):
        MegatronCheckpoint(mcore)


def test_missing_keys_chunks_and_configurations_are_refused(mcore, tmp_path):
    rewrite(
        mcore, lambda table: table.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    )
    with pytest.raises(
        ValueError, match=r"decoder.layers.mlp.linear_fc2.weight in .* has \d+ of the model's \d+ elements"
    ):
        MegatronCheckpoint(mcore)
    rewrite(mcore, lambda table: table.state_dict_metadata.pop("decoder.layers.mlp.linear_fc2.weight"))
    with pytest.raises(ValueError, match="decoder.layers.mlp.linear_fc2.weight in .* has 0 of"):
        MegatronCheckpoint(mcore)
    shutil.rmtree(mcore / "hf")
    with pytest.raises(ValueError, match="--template"):
        MegatronCheckpoint(mcore)
    write_hf(tmp_path / "other", "qwen3", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"is \[4, 64\] and .* describes \[2, 64\]"):
        MegatronCheckpoint(mcore, tmp_path / "other")


def test_a_hole_beside_an_overlap_is_found(mcore):
    """The number of elements is right."""
    key = "decoder.layers.mlp.linear_fc2.weight"

    def change(table):
        part = next(
            part
            for part in table.state_dict_metadata[key].chunks
            if part.offsets[0] == 1 and part.offsets[1] > 0
        )
        moved = torch.Size((1, part.offsets[1] - 1, 0))
        index = next(
            index for index in table.storage_data if index.fqn == key and index.offset == part.offsets
        )
        table.storage_data[type(index)(key, moved)] = table.storage_data.pop(index)
        part.offsets = moved

    rewrite(mcore, change)
    with pytest.raises(ValueError, match=f"chunks of {key} in .* overlap or leave rows of layer 1 open"):
        MegatronCheckpoint(mcore)


@pytest.mark.parametrize("content", [b"\xff\n", b"[1]\n", b"{]\n", b"[" * 100_000 + b"\n"])
def test_a_journal_that_is_none_is_named(converted, tmp_path, content):
    (tmp_path / "mcore.partial").mkdir()
    (tmp_path / "mcore.partial" / NAME).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{NAME} is not what a conversion writes .*remove the folder"):
        to_mcore(converted / "hf", tmp_path / "mcore")


def test_mixed_dtypes_quantised_weights_and_used_targets_are_refused(converted, tmp_path):
    carry_files(converted / "hf", tmp_path / "mixed")
    weights = tensors_of(converted / "hf")
    name = "model.layers.2.self_attn.k_proj.weight"
    save_file(weights | {name: weights[name].float()}, tmp_path / "mixed" / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=f"{name} in .* is torch.float32 and model.layers.0.self_attn.q_proj.weight is torch.bfloat16",
    ):
        to_mcore(tmp_path / "mixed", tmp_path / "mcore")
    save_file(weights | {name: weights[name].to(torch.int8)}, tmp_path / "mixed" / "model.safetensors")
    with pytest.raises(ValueError, match=f"quantised .*: {name} is I8"):
        to_mcore(tmp_path / "mixed", tmp_path / "mcore")
    with pytest.raises(ValueError, match="exists already"):
        to_mcore(converted / "hf", converted / "mcore")
    with pytest.raises(ValueError, match="raise it"):
        to_mcore(converted / "hf", tmp_path / "mcore", budget=Budget(slab_bytes=16, workers=1))


def test_a_tied_model_with_another_head_is_refused(tmp_path):
    write_hf(tmp_path / "hf", "llama_tied_llama3")
    weights = tensors_of(tmp_path / "hf")
    for head, is_right in (
        (weights["model.embed_tokens.weight"].clone(), True),
        (weights["model.embed_tokens.weight"] * 2, False),
    ):
        save_file(weights | {"lm_head.weight": head}, tmp_path / "hf" / "model.safetensors")
        if is_right:
            HuggingFace(tmp_path / "hf")
        else:
            with pytest.raises(ValueError, match="holds an lm_head.weight that is not the embedding"):
                to_mcore(tmp_path / "hf", tmp_path / "mcore")


def test_the_beginning_of_another_conversion_is_refused(tmp_path):
    with Journal(tmp_path, {"what": 1})._file:
        pass
    with pytest.raises(ValueError, match="beginning of another conversion"):
        Journal(tmp_path, {"what": 2})


def test_a_journal_forgets_files_that_changed_and_lines_that_were_cut(tmp_path):
    journal = Journal(tmp_path, {})
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
        journal.add({"name": name, "bytes": 1, "sha256": hashlib.sha256(name.encode()).hexdigest()})
    with pytest.raises(ValueError, match="another process"):
        Journal(tmp_path, {})
    journal._file.close()
    (tmp_path / "b").write_text("x")
    with (tmp_path / NAME).open("a") as file:
        file.write('{"name": "d"')
    journal = Journal(tmp_path, {})
    assert list(journal.finished) == ["a", "c"]
    journal.add({"name": "b", "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()})
    journal._file.close()
    assert list(Journal(tmp_path, {}).finished) == ["a", "c", "b"]


def test_what_a_folder_holds_is_described(converted):
    text = describe(CheckpointArguments(converted / "mcore"))
    assert (
        "qwen3, lm head, 4 layers" in text
        and "decoder.layers.mlp.linear_fc1.weight" in text
        and "[4, 192, 64]" in text
    )
    assert "model.layers.0.mlp.up_proj.weight" in describe(CheckpointArguments(converted / "hf"))
    with CheckpointFolder(converted / "hf") as folder:
        assert f"in {len(folder.names)} Hugging Face tensors of bfloat16" in text


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_config_says_the_dtype_of_the_tensors_under_each_key(converted, tmp_path, dtype):
    """Also of a template of another dtype, as a Megatron-LM checkpoint may have."""
    shutil.copytree(converted / "hf", tmp_path / "template")
    path = tmp_path / "template/config.json"
    both = {"dtype": "float16", "torch_dtype": "float64"}
    path.write_text(json.dumps(json.loads(path.read_text()) | both))
    to_hf(converted / "mcore", tmp_path / "back", template=tmp_path / "template", dtype=dtype)
    config = json.loads((tmp_path / "back/config.json").read_text())
    name = "bfloat16" if dtype is None else "float32"
    assert config["dtype"] == config["torch_dtype"] == name
    assert {str(tensor.dtype) for tensor in tensors_of(tmp_path / "back").values()} == {f"torch.{name}"}
