"""Reading and writing folders with real safetensors files, and every way in which a folder can be broken."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel.layout import Layout
from parallel.weights import loading
from parallel.weights.files import CheckpointFolder
from parallel.weights.loading import load_parameters
from parallel.weights.rules import hf_shapes, megatron_parameters
from parallel.weights.shard import Block
from parallel.weights.writing import carry_files, write_index, write_safetensors
from tests.tiny import tiny_architecture

ARCH = tiny_architecture("qwen2")


def random_tensors(arch=ARCH, head="lm", dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in hf_shapes(arch, head).items()
    }


def write_folder(folder, tensors, *, arch=ARCH, files=2):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(arch.to_hf()))
    names = sorted(tensors)
    file_of = {
        name: f"model-{i * files // len(names) + 1:05d}-of-{files:05d}.safetensors"
        for i, name in enumerate(names)
    }
    if files == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    for file in set(file_of.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in names if file_of[name] == file})
    write_index(folder, file_of, sum(t.nbytes for t in tensors.values()))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", random_tensors())


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("files", [1, 3])
def test_reads_rectangles(tmp_path, files):
    tensors = random_tensors()
    with CheckpointFolder(write_folder(tmp_path / "model", tensors, files=files)) as folder:
        assert folder.names == set(tensors)
        assert {name: folder.shape(name) for name in tensors} == hf_shapes(ARCH)
        assert folder.dtype("model.norm.weight") == "F32"
        for name, tensor in tensors.items():
            matrix = tensor.view(len(tensor), -1)
            rows, cols = (len(matrix) // 3, len(matrix)), (matrix.shape[1] // 4, matrix.shape[1])
            assert torch.equal(
                folder.read(Block(name, rows, cols, row=5), torch.float32), matrix[slice(*rows), slice(*cols)]
            )
            assert torch.equal(
                folder.read(Block(name, (0, 1), (0, 1)), torch.bfloat16), matrix[:1, :1].bfloat16()
            )
        folder.check_shapes(hf_shapes(ARCH))


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["lm", "token"])
def test_load_parameters(tmp_path, stored, head, readers, monkeypatch):
    """Each rank's parameters against the whole tensors; padding rows of the vocabulary become zero."""
    monkeypatch.setattr(loading, "PIECE_BYTES", 256)  # 4 rows
    tensors = random_tensors(head=head, dtype=stored)
    folder = CheckpointFolder(write_folder(tmp_path / "model", tensors))
    layout = Layout(tp=2, pp=2, ranks=(0, 1, 2, 3))
    for rank in layout.ranks:
        parameters = megatron_parameters(ARCH, layout, rank, spec="local", head=head)
        held = {(p.chunk, p.name): torch.full(p.shape, torch.nan, requires_grad=True) for p in parameters}
        assert load_parameters(folder, parameters, held, readers=readers) == []
        for p in parameters:
            expected = torch.zeros(p.shape).view(p.shape[0], -1)
            for b in p.blocks:
                part = (
                    tensors[b.tensor].float().view(len(tensors[b.tensor]), -1)[slice(*b.rows), slice(*b.cols)]
                )
                expected[b.row : b.row + len(part), b.col : b.col + part.shape[1]] = part
            assert torch.equal(held[p.chunk, p.name], expected.view(p.shape)), p.name
    embedding = next(p for p in megatron_parameters(ARCH, layout, 1, spec="local") if "embedding" in p.name)
    held = torch.ones(embedding.shape)
    load_parameters(folder, [embedding], {(0, embedding.name): held})
    assert torch.equal(held[:26], tensors["model.embed_tokens.weight"][64:].float()) and not held[26:].any()


def test_a_value_head_that_the_folder_lacks_stays_as_it_was(folder):
    parameters = megatron_parameters(ARCH, Layout(), 0, spec="te", head="token")
    held = {(p.chunk, p.name): torch.full(p.shape, 7.0) for p in parameters}
    opened = CheckpointFolder(folder)
    opened.check_shapes(hf_shapes(ARCH, "token"), optional={"score.weight", "score.bias"})
    assert load_parameters(opened, parameters, held) == ["output_layer.weight", "output_layer.bias"]
    assert (held[0, "output_layer.weight"] == 7).all() and not (
        held[0, "decoder.final_layernorm.weight"] == 7
    ).all()


def test_a_tied_copy_is_loaded_from_the_embedding(tmp_path):
    arch = tiny_architecture(vocab_size=64, tied=True)
    tensors = random_tensors(arch)
    folder = CheckpointFolder(write_folder(tmp_path / "model", tensors, arch=arch, files=1))
    parameters = [
        p for p in megatron_parameters(arch, Layout(pp=2, ranks=(0, 1)), 1, spec="te") if not p.owner
    ]
    held = torch.empty(64, 16)
    load_parameters(folder, parameters, {(0, "output_layer.weight"): held})
    assert torch.equal(held, tensors["model.embed_tokens.weight"])


def test_missing_pieces_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        CheckpointFolder(tmp_path / "nowhere")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match="lacks weight files that its index names: model-00002-of-00002.safetensors"
    ):
        CheckpointFolder(folder)
    shard.symlink_to("../gone")  # as in the cache of a hub
    with pytest.raises(ValueError, match=r"00002\.safetensors \(a link to \.\./gone, which does not exist\)"):
        CheckpointFolder(folder)
    shard.rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors \(a link to \.\./gone, which does not"):
        CheckpointFolder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json$"
    ):
        CheckpointFolder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"found pytorch_model\.bin: save the model with transformers as"):
        CheckpointFolder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        CheckpointFolder(folder)


def test_a_truncated_file_is_named_with_its_sizes(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    for size in (len(whole) - 1, len(whole) - 1000):
        shard.write_bytes(whole[:size])
        with pytest.raises(
            ValueError,
            match=f"{shard.name} is truncated or garbled: .* {len(whole)} bytes and the file has {size}",
        ):
            CheckpointFolder(folder)
    for size in (0, 5, 8, 100):
        shard.write_bytes(whole[:size])
        with pytest.raises(
            ValueError, match=f"{shard.name} is truncated or no safetensors file: .* the file has {size}"
        ):
            CheckpointFolder(folder)
    shard.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match=f"describes {len(whole)} bytes and the file has {len(whole) + 1}"):
        CheckpointFolder(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b'["a"]',
        b"[" * 100_000,
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": []}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, Infinity]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F4711", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        b' "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_garbled_header_is_named(folder, header):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=f"{shard.name} is garbled"):
        CheckpointFolder(folder)
    shard.write_text("<html>not found</html>" * 10)
    with pytest.raises(ValueError, match=f"{shard.name} is truncated or no safetensors file"):
        CheckpointFolder(folder)


def test_an_index_that_does_not_fit_its_files(folder):
    index = folder / "model.safetensors.index.json"
    edit_json(
        index,
        lambda content: content["weight_map"].update(
            {"model.ghost.weight": "model-00001-of-00002.safetensors"}
        ),
    )
    with pytest.raises(
        ValueError,
        match=r"names tensors that their files do not hold: model\.ghost\.weight in model-00001-of-00002\.",
    ):
        CheckpointFolder(folder)
    for content in ('{"metadata": {}}', "[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": {}}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"index\.json is not (an index|a JSON object)"):
            CheckpointFolder(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/a.safetensors",
        "..\\a.safetensors",
        "weights.bin",
        "a\n.safetensors",
        "",
    ],
)
def test_an_index_names_only_safetensors_files_of_its_folder(folder, name):
    edit_json(
        folder / "model.safetensors.index.json",
        lambda content: content["weight_map"].update({"model.norm.weight": name}),
    )
    with pytest.raises(ValueError, match="only safetensors files of its own folder are read"):
        CheckpointFolder(folder)


def test_files_may_be_symbolic_links(folder, tmp_path):
    """As in the cache of Hugging Face's hub."""
    for path in list(folder.iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert CheckpointFolder(folder).names == set(hf_shapes(ARCH))


def test_a_tensor_that_the_index_leaves_out_or_two_files_hold(folder):
    index = folder / "model.safetensors.index.json"
    edit_json(index, lambda content: content["weight_map"].pop("model.norm.weight"))
    with pytest.raises(
        ValueError, match=r"leaves out tensors that its files hold.*: model\.norm\.weight in model-00002"
    ):
        CheckpointFolder(folder)
    edit_json(
        index,
        lambda content: content["weight_map"].update(
            {"model.norm.weight": "model-00003-of-00003.safetensors"}
        ),
    )
    write_safetensors(folder / "model-00003-of-00003.safetensors", {"model.norm.weight": torch.zeros(16)})
    with pytest.raises(ValueError, match=r"names another file for them: model\.norm\.weight in model-00002"):
        CheckpointFolder(folder)


def test_shapes_that_do_not_fit_the_config(tmp_path):
    """One message: a vocabulary above the embedding, a missing, a wrong and an unknown tensor."""
    tensors = random_tensors()
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24, 17)
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(24, 16)
    folder = CheckpointFolder(write_folder(tmp_path / "model", tensors))
    with pytest.raises(ValueError) as error:
        folder.check_shapes(hf_shapes(tiny_architecture("qwen2", vocab_size=100)))
    text = str(error.value)
    assert "model.embed_tokens.weight is [90, 16] and config.json describes [100, 16] (vocab_size=100" in text
    assert "lm_head.weight is [90, 16]" in text and "missing: model.layers.1.self_attn.k_proj.bias" in text
    assert "model.layers.0.mlp.up_proj.weight is [24, 17] and config.json describes [24, 16]" in text
    assert "unknown: model.layers.7.mlp.up_proj.weight" in text
    with pytest.raises(ValueError, match=r"missing: .*, score\.weight"):
        folder.check_shapes(hf_shapes(ARCH, "sequence"))


def test_tensors_that_nothing_uses_are_accepted(tmp_path):
    arch = tiny_architecture(tied=True)
    unused = {
        "lm_head.weight": torch.zeros(90, 16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    folder = CheckpointFolder(write_folder(tmp_path / "model", random_tensors(arch) | unused, arch=arch))
    folder.check_shapes(hf_shapes(arch))
    folder.check_shapes(hf_shapes(arch, "sequence"), optional={"score.weight"})


@pytest.mark.parametrize("readers", [1, 3])
def test_loading_refuses_what_is_not_there(tmp_path, readers):
    tensors = random_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:9].clone()
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].to(
        torch.float8_e4m3fn
    )
    del tensors["lm_head.weight"]
    folder = CheckpointFolder(write_folder(tmp_path / "model", tensors))
    parameters = {p.name: p for p in megatron_parameters(ARCH, Layout(), 0, spec="te")}

    def load(name):
        held = {(0, name): torch.zeros(parameters[name].shape)}
        load_parameters(folder, [parameters[name]], held, readers=readers)

    with pytest.raises(
        ValueError, match=r"lacks tensors of the model that its config\.json describes: lm_head\.weight"
    ):
        load("output_layer.weight")
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight in .* has shape \[9\], too small for rows 0-16"
    ):
        load("decoder.final_layernorm.weight")
    with pytest.raises(ValueError, match="dtype F8_E4M3; quantised weights are not supported"):
        load("decoder.layers.0.mlp.linear_fc2.weight")


def test_reading_touches_only_the_bytes_asked_for(tmp_path):
    """Resident memory grows by the parts that are read, not by the 64 MiB of the whole."""
    (tmp_path / "config.json").write_text(json.dumps(ARCH.to_hf()))
    write_safetensors(tmp_path / "model.safetensors", {"big": torch.ones(16384, 1024)})

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    folder, before = CheckpointFolder(tmp_path), resident_bytes()
    assert folder.read(Block("big", (4096, 5120), (0, 1024)), torch.bfloat16).sum() > 0  # 4 MiB
    assert resident_bytes() - before < 16 * 2**20
    assert folder.read(Block("big", (0, 16384), (0, 1024)), torch.bfloat16).sum() > 0
    assert resident_bytes() - before > 48 * 2**20  # so the measurement would have shown it


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model.safetensors"
    shared = torch.arange(6.0)
    write_safetensors(path, {"a": shared.view(2, 3).t(), "b": torch.ones(2)})
    assert torch.equal(load_file(path)["a"], shared.view(2, 3).t())
    with pytest.raises(RuntimeError):
        write_safetensors(path, {"a": shared, "b": shared})  # two names for one storage
    assert set(load_file(path)) == {"a", "b"} and [file.name for file in tmp_path.iterdir()] == [
        "model.safetensors"
    ]


def test_carry_files(folder, tmp_path):
    kept = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "merges.txt",
        "vocab.json",
    ]
    for name in [*kept, "pytorch_model.bin", "training_args.bin", "README.md", "modeling_custom.py"]:
        (folder / name).write_text(name)
    carry_files(folder, tmp_path / "out" / "actor")
    assert {file.name for file in (tmp_path / "out" / "actor").iterdir()} == {*kept, "config.json"}
    assert (tmp_path / "out" / "actor" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert json.loads((tmp_path / "out" / "actor" / "config.json").read_text()) == ARCH.to_hf()
    carry_files(folder, tmp_path / "critic", config=ARCH.to_hf(head="token"))
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"] == [
        "Qwen2ForTokenClassification"
    ]
    carry_files(folder, folder)
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"


def test_a_folder_written_here_is_read_by_transformers(tmp_path):
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    for head, auto in (
        ("lm", AutoModelForCausalLM),
        ("token", AutoModelForTokenClassification),
        ("sequence", AutoModelForSequenceClassification),
    ):
        tensors = random_tensors(head=head)
        folder = write_folder(tmp_path / head, tensors)
        carry_files(folder, folder, config=ARCH.to_hf(head=head, carry={"dtype": "float32"}))
        model, info = auto.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())
        shutil.rmtree(folder)
