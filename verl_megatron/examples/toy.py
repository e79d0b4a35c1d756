"""Writes a toy job: a small Llama in Hugging Face format, demonstrations, and verifiable prompts.

    python tools/make_toy.py OUT [--seed 1]

The task is to sort six of sixteen words: `sort lemon fig apple ... :` -> `apple fig lemon ...`.

The demonstrations (sft.jsonl) are of mixed quality, as collected ones are: 30% are correct, and the others
have the last two words swapped. A model that imitates them well is therefore correct in at most about 30% of
its samples, and its most likely answer is wrong. It can learn which answers are correct only from the
verified reward (`match`). No set of six words in val.jsonl occurs in train.jsonl or sft.jsonl, in any order.

    OUT/model        config.json, two safetensors shards with their index, random weights (2.0 M parameters),
                     the sentencepiece tokenizer (tokenizer.model, tokenizer.json) trained on the
                     demonstrations, with a chat template
    OUT/sft.jsonl    {"prompt", "response"}, demonstrations for `verl_megatron.sft`
    OUT/train.jsonl  {"prompt", "answer"}
    OUT/val.jsonl    {"prompt", "answer"}
    OUT/pairs.jsonl, OUT/val_pairs.jsonl
                     {"prompt", "chosen", "rejected"}, preferences for `verl_megatron.dpo` and
                     `verl_megatron.reward_model`: the correct answer over one in which two words are swapped,
                     or one is replaced
"""

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

WORDS = [
    "apple",
    "banana",
    "cherry",
    "damson",
    "elder",
    "fig",
    "grape",
    "hazel",
    "kiwi",
    "lemon",
    "mango",
    "nectar",
    "olive",
    "peach",
    "quince",
    "raisin",
]
ITEMS = 6
CORRECT_SHARE = 0.3  # of the demonstrations
ROWS = {"sft": 12_000, "train": 6_000, "val": 512, "pairs": 6_000, "val_pairs": 256}
SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 192,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
}
VOCAB_SIZE: int = SHAPE[
    "vocab_size"
]  # 3 special tokens, 256 bytes, letters and their merges up to whole words
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}assistant:{% endif %}"
)


def prompt_of(items: list[str]) -> str:
    """Return the prompt that asks for `items` in alphabetical order."""
    return f"sort {' '.join(items)} :"


def demonstration_of(items: list[str], rng: random.Random) -> str:
    """Return a demonstration: correct with probability CORRECT_SHARE, else the last two words are swapped."""
    answer = sorted(items)
    if rng.random() >= CORRECT_SHARE:
        answer[-2:] = reversed(answer[-2:])
    return " ".join(answer)


def question_of(items: list[str]) -> dict[str, str]:
    """Return a line of train.jsonl or val.jsonl."""
    return {"prompt": prompt_of(items), "answer": " ".join(sorted(items))}


def pair_of(items: list[str], rng: random.Random) -> dict[str, str]:
    """Return a line of pairs.jsonl: the correct answer, and one that is wrong in one of three ways."""
    right = sorted(items)
    wrong, kind = list(right), rng.randrange(3)
    if kind == 0:  # a word that was not asked for, or one twice
        place = rng.randrange(ITEMS)
        wrong[place] = rng.choice([word for word in WORDS if word != right[place]])
        wrong.sort()
    else:  # two words swapped: the last ones, as in demonstrations, or any
        one, other = (ITEMS - 2, ITEMS - 1) if kind == 1 else rng.sample(range(ITEMS), 2)
        wrong[one], wrong[other] = right[other], right[one]
    return {"prompt": prompt_of(items), "chosen": " ".join(right), "rejected": " ".join(wrong)}


def make_rows(seed: int) -> dict[str, list[dict[str, str]]]:
    """Return the lines of each file; val.jsonl and val_pairs.jsonl have word sets of their own."""
    rng = random.Random(seed)
    held_out: dict[frozenset[str], list[str]] = {}
    while len(held_out) < ROWS["val"]:
        items = rng.sample(WORDS, ITEMS)
        held_out.setdefault(frozenset(items), items)

    def draw(count: int) -> list[list[str]]:
        rows: list[list[str]] = []
        while len(rows) < count:
            items = rng.sample(WORDS, ITEMS)
            if frozenset(items) not in held_out:
                rows.append(items)
        return rows

    return {
        "sft": [
            {"prompt": prompt_of(items), "response": demonstration_of(items, rng)}
            for items in draw(ROWS["sft"])
        ],
        "train": [question_of(items) for items in draw(ROWS["train"])],
        "val": [question_of(items) for items in held_out.values()],
        "pairs": [pair_of(items, rng) for items in draw(ROWS["pairs"])],
        "val_pairs": [pair_of(items, rng) for items in list(held_out.values())[: ROWS["val_pairs"]]],
    }


def write_tokenizer(folder: Path, texts: list[str]):
    """Train a sentencepiece tokenizer, write it in Llama's format, and return it loaded by transformers."""
    import sentencepiece
    from transformers import AutoTokenizer

    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": VOCAB_SIZE,
        "byte_fallback": True,
        "num_threads": 1,
        "minloglevel": 2,
    }
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}  # as in Llama
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **settings)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": 1048576,
    }
    settings |= {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "tokenizer.json").unlink(missing_ok=True)  # of an earlier call, which would be read
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.save_pretrained(folder)  # adds tokenizer.json, so that loading needs no conversion
    return tokenizer


def write_model(folder: Path, *, seed: int) -> None:
    """Write a randomly initialised Llama in two safetensors shards."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        **SHAPE,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.04,  # learns in fewer steps than with 0.02 at this width
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=2, do_sample=True, temperature=1.0
    )
    logging.disable_progress_bar()
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=int(num_bytes * 0.6))


def make_toy(out: Path, *, seed: int = 1) -> None:
    """Write the whole job to `out`, over an earlier one.

    Raises:
        ValueError: files there are not of a toy job, and would be overwritten.
    """
    if others := [path for path in _overwritten(out) if not _is_toy(path)]:
        raise ValueError(f"{others[0]} is not of a toy job and would be overwritten; name another folder")
    folder = out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    rows = make_rows(seed)
    for name, content in rows.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    write_tokenizer(folder, [f"{row['prompt']} {row['response']}" for row in rows["sft"]])
    write_model(folder, seed=seed)


def _overwritten(out: Path) -> list[Path]:
    """Return what exists of the job's files and is not empty; of a model its config.json or its weights."""
    files = [out / f"{name}.jsonl" for name in ROWS] + [out / "model/config.json"]
    if not files[-1].exists():
        files += sorted((out / "model").glob("*.safetensors"))
    return [path for path in files if path.exists() and not (path.is_file() and path.stat().st_size == 0)]


def _is_toy(path: Path) -> bool:
    """Whether a file is one that a toy job has, with any seed."""
    try:
        with path.open() as file:
            first = json.loads(file.read() if path.suffix == ".json" else file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(first, dict):
        return False
    if path.name == "config.json":
        return {name: first.get(name) for name in SHAPE} == SHAPE
    return str(first.get("prompt", "")).startswith("sort ")


def seed_of(text: str) -> int:
    """Argument type: a valid value of run.seed."""
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and int(text) < 2**32):
        raise argparse.ArgumentTypeError(
            f"{text[:200]!r} is not accepted; write a whole number from 0 to {2**32 - 1}"
        )
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=seed_of, default=1, help="of the data and the initial weights")
    arguments = parser.parse_args()
    try:
        make_toy(arguments.out, seed=arguments.seed)
    except OSError as error:
        reason = error.strerror or error
        parser.exit(2, f"error: {arguments.out} cannot be written ({reason}); name a folder that can\n")
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"toy model and data are in {arguments.out}")


if __name__ == "__main__":
    main()
