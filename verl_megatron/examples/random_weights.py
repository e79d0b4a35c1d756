"""Writes a model of a published shape with random weights, and prompts for it, to measure speed.

python tools/make_random.py OUT --shape llama3-8b [--layers 32] [--prompt-tokens 64-4096] [--rows 4096]

Nothing is downloaded.

OUT/model         config.json, bfloat16 weights in several safetensors files with their index, tokenizer of
                  the toy job; with --response-tokens N, responses end after N tokens on average
OUT/train.jsonl   prompts of exactly --prompt-tokens tokens, or of equally frequent lengths in that range
OUT/reward.py     `score`: share of vowels in the response, so that samples differ
"""

import argparse
import json
import random
import shutil
from math import exp, log, prod, sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file

from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import hf_shapes
from parallel.weights.shapes import SHAPES, shape
from parallel.weights.writing import write_index
from verl_megatron.examples.toy import make_rows, seed_of, write_tokenizer

FILE_BYTES = 4 * 2**30
# limits of the prompts, which take minutes, and of the model
MOST_TOKENS, MOST_ROWS, MOST_LAYERS = 1_000_000, 1_000_000, 1000
ENDING = 40  # tokens that end responses, the last of the vocabulary
REWARD = '''def score(prompt, response, ground_truth, extra):
    """Share of vowels."""
    return sum(response.count(vowel) for vowel in "aeiou") / max(len(response), 1)
'''


def check_room(folder: Path, config: dict) -> None:
    """Raise ValueError if the weights do not fit in `folder`, where they replace those of an earlier call."""
    needed = torch.bfloat16.itemsize * sum(
        map(prod, hf_shapes(Architecture.from_hf(config, source=str(folder))).values())
    )
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free + sum(
        file.stat().st_size for file in folder.glob("*.safetensors")
    )
    if free < needed:
        raise ValueError(
            f"{folder} has {free:,} bytes free and the random weights need {needed:,}; name another OUT (in "
            "recipes SCRATCH) or fewer --layers"
        )


def ending_factor(arch: Architecture, mean_tokens: int) -> float:
    """Return by what to multiply the rows of `ENDING` output tokens, so that they end responses.

    The final norm leaves vectors of unit root mean square. Logits are therefore normal with the deviation
    s = initializer_range * sqrt(hidden_size), and exp(f x) has the mean exp(f^2 s^2 / 2). Of V tokens, n
    whose rows are multiplied by f together have the probability n / V * exp((f^2 - 1) s^2 / 2), which has to
    be 1 / mean_tokens.

    Raises:
        ValueError: no factor makes responses so long, as all tokens are equally likely by then.
    """
    variance = arch.initializer_range**2 * arch.hidden_size
    square = 1 + 2 * log(arch.vocab_size / (ENDING * mean_tokens)) / variance
    if square < 0:
        longest = int(arch.vocab_size / ENDING * exp(variance / 2))
        raise ValueError(
            f"--response-tokens {mean_tokens} is too long for this shape; give at most {longest}"
        )
    return sqrt(square)


def write_weights(folder: Path, *, seed: int, response_tokens: int = 0) -> None:
    """Write normally distributed weights in files of about FILE_BYTES; norms are ones.

    Args:
        response_tokens: of responses on average; the ending tokens are named in generation_config.json.
            0: they end by chance alone.
    """
    arch = read_architecture(folder)
    head = "model.embed_tokens.weight" if arch.tied else "lm_head.weight"
    factors = {head: ending_factor(arch, response_tokens)} if response_tokens else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    room, total = FILE_BYTES, 0
    for name, size in hf_shapes(arch).items():
        nbytes = torch.bfloat16.itemsize * prod(size)
        if nbytes > room and files[-1]:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = size
        room -= nbytes
        total += nbytes
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, shapes in zip(names, files):
        tensors = {}
        for name, size in shapes.items():
            tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
            if name.endswith("norm.weight"):
                tensor.fill_(1)
            else:
                tensor.normal_(0, arch.initializer_range, generator=generator)
            if name in factors:
                tensor[-ENDING:] *= factors[name]
            tensors[name] = tensor.cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    write_index(folder, {name: file for file, shapes in zip(names, files) for name in shapes}, total)
    generation = folder / "generation_config.json"
    generation.unlink(missing_ok=True)
    if response_tokens:
        ids = list(range(arch.vocab_size - ENDING, arch.vocab_size))
        generation.write_text(json.dumps({"eos_token_id": ids, "do_sample": True}))


def write_prompts(path: Path, tokenizer, *, rows: int, lengths: range, seed: int) -> None:
    """Write random words, cut so that each prompt has exactly as many tokens as one of `lengths`."""
    rng, words = (
        random.Random(seed),
        [word for row in make_rows(seed)["train"][:200] for word in row["prompt"].split()],
    )
    with path.open("w") as file:
        for _ in range(rows):
            ids: list[int] = []
            tokens = rng.choice(lengths) if len(lengths) > 1 else lengths[0]
            while len(ids) < tokens:
                text = " ".join(rng.choice(words) for _ in range(tokens))
                ids = tokenizer(text)["input_ids"][:tokens]
                text = tokenizer.decode(ids, skip_special_tokens=True)
                while len(tokenizer(text)["input_ids"]) > tokens:
                    text = text[:-1]
            file.write(json.dumps({"prompt": text, "answer": ""}) + "\n")


def prompt_lengths(text: str) -> range:
    """Return the lengths of `--prompt-tokens`: N, or A-B.

    Raises:
        ValueError: `text` is neither, or a length is unreasonable.
    """
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high <= MOST_TOKENS:
        raise ValueError(
            f"--prompt-tokens {short_repr(text)} is no number of tokens from 1 to {MOST_TOKENS:,}, and no "
            "range of these; write 512 or 64-4096"
        )
    return range(low, high + 1)


def make_random(given: argparse.Namespace) -> None:
    """Write the whole job to `given.out`.

    Raises:
        ValueError: unreasonable sizes, or not enough disk space; nothing is written.
    """
    lengths = prompt_lengths(given.prompt_tokens)
    for option, value, low, high in (
        ("--rows", given.rows, 1, MOST_ROWS),
        ("--layers", given.layers, 0, MOST_LAYERS),
        ("--response-tokens", given.response_tokens, 0, MOST_TOKENS),
    ):
        if not low <= value <= high:
            raise ValueError(f"{option} {value} must be from {low} to {high}; choose another")
    folder, config = given.out / "model", shape(given.shape, layers=given.layers)
    check_room(folder, config)
    if given.response_tokens:
        ending_factor(Architecture.from_hf(config, source=given.shape), given.response_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer = write_tokenizer(folder, [f"{row['prompt']} {row['response']}" for row in make_rows(1)["sft"]])
    write_weights(folder, seed=given.seed, response_tokens=given.response_tokens)
    write_prompts(given.out / "train.jsonl", tokenizer, rows=given.rows, lengths=lengths, seed=given.seed)
    (given.out / "reward.py").write_text(REWARD)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--shape", default="llama3-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=0, help="another number of layers than published")
    parser.add_argument(
        "--prompt-tokens", default="512", help="of a prompt: N, or A-B for lengths in between"
    )
    parser.add_argument(
        "--response-tokens",
        type=int,
        default=0,
        help="mean length of responses, which then end at tokens of their own; 0: they end by chance alone",
    )
    parser.add_argument("--rows", type=int, default=1024, help="prompts to write")
    parser.add_argument("--seed", type=seed_of, default=1)
    given = parser.parse_args(arguments)
    try:
        make_random(given)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:
        parser.exit(2, f"error: {given.out} cannot be written ({error.strerror}); name a folder that can\n")
    print(f"random {given.shape} and its prompts are in {given.out}")


if __name__ == "__main__":
    main()
