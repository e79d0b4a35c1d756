"""Checks of weight values: tied tensors that differ, and numbers that are not finite."""

import pytest
import torch

from parallel.weights.files import CheckpointFolder
from parallel.weights.rules import hf_shapes
from parallel.weights.values import check_tied, not_finite
from tests.tiny import tiny_architecture
from tests.unit.test_files import random_tensors, write_folder


def test_a_tied_model_with_another_head_is_refused(tmp_path):
    arch = tiny_architecture(tied=True)
    tensors = random_tensors(arch)
    embedding = tensors["model.embed_tokens.weight"]
    for number, head in enumerate(
        (embedding.clone(), embedding + 1e-6, embedding[:89].clone(), embedding.bfloat16(), torch.tensor(1.0))
    ):
        folder = CheckpointFolder(
            write_folder(tmp_path / str(number), tensors | {"lm_head.weight": head}, arch=arch)
        )
        folder.check_shapes(hf_shapes(arch))
        if number == 0:
            check_tied(folder)
        else:
            with pytest.raises(
                ValueError,
                match=r"model-00001-of-00002\.safetensors holds an lm_head\.weight that is not the embedding"
                ".*set tie_word_embeddings to false",
            ):
                check_tied(folder)


@pytest.mark.parametrize(("stored", "value", "beyond"), [
    (torch.float32, torch.nan, "float32"), (torch.bfloat16, torch.inf, "bfloat16"),
    (torch.float16, -torch.inf, "float16"), (torch.float64, 1e39, "float32"),
    (torch.float32, 3.4e38, "bfloat16"), (torch.bfloat16, 1e5, "float16"),
])  # fmt: skip
def test_numbers_that_are_none_are_named_with_their_tensor_and_file(tmp_path, stored, value, beyond):
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors().items()}
    name, held_as = "model.layers.1.mlp.down_proj.weight", [torch.float32, getattr(torch, beyond)]
    folder = CheckpointFolder(write_folder(tmp_path / "good", tensors))
    assert list(not_finite(folder, folder.names, held_as)) == []
    tensors[name][3, 5] = value
    folder = CheckpointFolder(write_folder(tmp_path / "bad", tensors))
    problem, *others = not_finite(folder, sorted(folder.names), held_as)
    assert not others and problem.startswith(
        f"{name} in {folder.file(name)} holds NaN, an infinity or a number beyond {beyond};"
    )
