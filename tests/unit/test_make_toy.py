"""The toy job as its users see it: files that transformers loads, rows that keep the docstring's promises."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_megatron.data.formats.json_lines import read_rows
from verl_megatron.examples.toy import CORRECT_SHARE, ITEMS, WORDS, demonstration_of, make_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("toy")
    subprocess.run(
        [sys.executable, ROOT / "tools/make_toy.py", out], check=True, capture_output=True, timeout=60
    )
    return out


def test_the_same_folder_is_written_twice_alike(toy):
    def files():
        return {path.name: path.read_bytes() for path in (toy / "model").glob("token*")}

    before = files()
    subprocess.run([sys.executable, ROOT / "tools/make_toy.py", toy], check=True, capture_output=True)
    assert files() == before


def words_of(row: dict) -> list[str]:
    assert row["prompt"].startswith("sort ") and row["prompt"].endswith(" :")
    return row["prompt"].split()[1:-1]


def test_model_is_a_llama_folder_in_two_shards(toy):
    folder = toy / "model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {name: safe_open(folder / name, "pt") for name in set(index["weight_map"].values())}
    assert len(shards) == 2
    for tensor, name in index["weight_map"].items():
        assert shards[name].get_slice(tensor).get_shape()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "llama"
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6
    config = model.config
    assert (
        config.num_hidden_layers % 2 == config.num_attention_heads % 2 == config.num_key_value_heads % 2 == 0
    )  # tp2, pp2
    assert model.generation_config.eos_token_id == config.eos_token_id
    tokens = torch.tensor([[config.bos_token_id, 5, 6]])
    assert torch.isfinite(model(tokens).logits).all()


def test_tokenizer_gives_each_word_one_token(toy):
    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(toy / "model").config.vocab_size
    assert (toy / "model" / "tokenizer.model").is_file() and tokenizer.chat_template
    row = read_rows(toy / "train.jsonl")[0]
    assert len(tokenizer.encode(row["prompt"])) == ITEMS + 3  # <s>, sort, :
    assert len(tokenizer.encode(" ".join(WORDS), add_special_tokens=False)) == len(WORDS)


def test_answers_are_verifiable_and_validation_is_held_out(toy):
    rows = {name: read_rows(toy / f"{name}.jsonl") for name in ("train", "val", "sft")}
    for row in rows["train"] + rows["val"]:
        items = words_of(row)
        assert len(set(items)) == ITEMS and set(items) <= set(WORDS)
        assert row["answer"] == " ".join(sorted(items))
    seen = {frozenset(words_of(row)) for row in rows["train"] + rows["sft"]}
    assert not seen & {frozenset(words_of(row)) for row in rows["val"]}


def test_demonstrations_are_right_as_often_as_promised(toy):
    rows = read_rows(toy / "sft.jsonl")
    right = 0
    for row in rows:
        truth, said = sorted(words_of(row)), row["response"].split()
        right += said == truth
        assert said in (truth, truth[:-2] + [truth[-1], truth[-2]])
    assert right / len(rows) == pytest.approx(CORRECT_SHARE, abs=0.02)  # 4 standard deviations are 0.017


def test_pairs_prefer_the_right_answer_on_the_same_held_out_words(toy):
    seen = {frozenset(words_of(row)) for row in read_rows(toy / "pairs.jsonl")}
    for row in read_rows(toy / "pairs.jsonl") + read_rows(toy / "val_pairs.jsonl"):
        assert row["chosen"].split() == sorted(words_of(row)) != row["rejected"].split()
        assert len(row["rejected"].split()) == ITEMS and set(row["rejected"].split()) <= set(WORDS)
    held_out = {frozenset(words_of(row)) for row in read_rows(toy / "val_pairs.jsonl")}
    assert held_out <= {frozenset(words_of(row)) for row in read_rows(toy / "val.jsonl")}
    assert not seen & held_out


def test_rows_follow_the_seed():
    assert make_rows(1) == make_rows(1)
    assert make_rows(1)["val"] != make_rows(2)["val"]
    assert demonstration_of(WORDS[:ITEMS], random.Random(3)) == demonstration_of(
        WORDS[:ITEMS], random.Random(3)
    )


def test_files_of_others_are_not_overwritten(tmp_path):
    def written(*options: str) -> str:
        command = [sys.executable, ROOT / "tools/make_toy.py", tmp_path, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == (2 if done.stderr else 0)
        return done.stderr

    (tmp_path / "val.jsonl").write_text('{"prompt": "mine", "answer": "x"}\n')
    refused = (
        f"error: {tmp_path}/val.jsonl is not of a toy job and would be overwritten; name another folder\n"
    )
    assert written() == refused and [path.name for path in tmp_path.iterdir()] == ["val.jsonl"]
    (tmp_path / "val.jsonl").unlink()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"hidden_size": 4096}')
    assert f"{tmp_path}/model/config.json is not of a toy job" in written()
    (tmp_path / "model/config.json").unlink()
    assert written() == written("--seed", "3") == ""
