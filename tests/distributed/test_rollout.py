"""vLLM alone and as one, two or four replicas of a world of four ranks: the same samples everywhere."""

import shutil

from parallel.convert import to_hugging_face, to_megatron
from parallel.convert.to_hugging_face import CheckpointArguments
from parallel.convert.workers import Budget
from tests.tiny import write_hf
from tests.worlds import run_world


def write_tokenizer(folder, vocab_size):
    """One word per token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def convert_there_and_back(source, target):
    """From a Hugging Face folder to Megatron-Core's and back, in several files."""
    sizes = dict(budget=Budget(slab_bytes=3000, workers=1), file_bytes=100_000)
    to_megatron.convert(source, target.with_name("mcore"), spec="te", **sizes)
    to_hugging_face.convert(CheckpointArguments(target.with_name("mcore")), target, dtype=None, **sizes)
    assert len(list(target.glob("*.safetensors"))) > 1


def test_rollout(tmp_path):
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=2)
    write_hf(tmp_path / "a", "llama", seed=1, **sizes)
    write_hf(tmp_path / "b", "llama", seed=2, **sizes)
    write_hf(tmp_path / "tied", "qwen3_tied", seed=3, **sizes)
    write_tokenizer(tmp_path / "b", 150)
    convert_there_and_back(tmp_path / "a", tmp_path / "converted")
    for stray in ("a/old_model.safetensors", "converted/consolidated.safetensors"):  # vLLM would prefer them
        shutil.copy(tmp_path / "b/model.safetensors", tmp_path / stray)
    for nproc in (1, 4):
        assert "all rollout checks passed" in run_world(
            "tests/distributed/rollout_worker.py", nproc, tmp_path, timeout=550
        )


def test_ranks_of_a_replica_go_on_with_the_same_turn():
    """The owner's answer is everybody's, and so is what is wrong with it; nobody waits."""
    said = run_world("tests/distributed/turns_worker.py", 2)
    assert "[7, 7, 7, 51, 51, 7, 7]" in said
    assert said.count("continue_turn failed on sample 0: ") == 3, said
