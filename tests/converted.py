"""Conversion between Hugging Face folders and distributed checkpoints, in parts of tensors."""

import pickle

import torch
from safetensors.torch import load_file, save_file

from parallel.checkpoint.metadata import read_metadata
from parallel.convert import to_hugging_face, to_megatron
from parallel.convert.compare import differences
from parallel.convert.to_hugging_face import CheckpointArguments
from parallel.convert.workers import Budget
from tests.tiny import write_hf, write_tokenizer

SMALL = Budget(slab_bytes=3000, workers=1)  # parts of most tensors
FILE_BYTES = 100_000


def to_mcore(source, target, **options):
    to_megatron.convert(source, target, **{"spec": "te", "budget": SMALL, "file_bytes": FILE_BYTES} | options)


def to_hf(source, target, *, template=None, skip_extra=False, dtype=None, **options):
    return to_hugging_face.convert(
        CheckpointArguments(source, template, skip_extra),
        target,
        **{"dtype": dtype, "budget": SMALL, "file_bytes": FILE_BYTES} | options,
    )


def difference(a, b):
    return differences(CheckpointArguments(a), CheckpointArguments(b), SMALL)


def tensors_of(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(folder, other):
    one, two = tensors_of(folder), tensors_of(other)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]), name


def make_model(folder):
    """Write a bfloat16 model with a tokenizer, and its converted folder."""
    write_hf(folder / "hf", "qwen3")
    weights = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "hf" / "model.safetensors").items()
    }
    save_file(weights, folder / "hf" / "model.safetensors")
    write_tokenizer(folder / "hf")
    to_mcore(folder / "hf", folder / "mcore")
    return folder


def rewrite(mcore, change):
    """Change the table of a checkpoint's tensors."""
    path = mcore / "release" / ".metadata"
    table = read_metadata(path.parent)
    change(table)
    path.write_bytes(pickle.dumps(table))
