"""Weight files: headers, lengths, shapes and the index; folders that lack what their role needs."""

import json
import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation, Names
from tests.fuzz.job import Job, clear

INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
Tensors = dict[str, Any]  # by name


def mutations() -> list[Mutation]:
    found: list[Mutation] = [partial(bad_index, what=what, change=change) for what, change in INDICES.items()]
    found += [
        partial(bad_header, what=what, change=change) for what, change in HEADERS.items() for _ in range(2)
    ]
    found += [partial(bad_file, what=what, make=make) for what, make in FILES.items()]
    found += [partial(of_a_role, entry=entry) for entry in ROLES]
    return found + [cut] * 4 + [flipped] * 4


def _case(job: Job, rng: random.Random, what: str, expected: str, names: Names = ()) -> Case:
    role = rng.choice(("actor", "critic"))
    given = (str(job.model()), f"{role}.path") if expected == REFUSED else ()
    return Case(
        name=f"{role}: {what}",
        expected=expected,
        names=(given, *names) if given else names,
        act=job.dry_run(f"{role}.path={job.model()}"),
    )


# ---- the index -------------------------------------------------------------------------------------------


def _moved(to: str) -> Callable[[dict], Any]:
    def change(index: dict) -> dict:
        name = sorted(index["weight_map"])[3]
        return index | {"weight_map": index["weight_map"] | {name: to}}

    return change


def _without_one(index: dict) -> dict:
    return index | {
        "weight_map": {name: file for name, file in index["weight_map"].items() if "layers.1.mlp" not in name}
    }


INDICES: dict[str, Callable[[dict], Any]] = {
    "names no file": _moved("model-9.safetensors"),
    "leaves the folder": _moved("../toy/model/" + SHARD),
    "leaves the folder at the root": _moved("/etc/passwd"),
    "names the folder": _moved("."),
    "names the index": _moved(INDEX),
    "names a number": _moved(3),
    "names a list": _moved(["a"]),
    "names null": _moved(None),
    "names an empty text": _moved(""),
    "names a long file": _moved("n" * 300 + ".safetensors"),
    "names a NUL": _moved("a\0b"),
    "lacks tensors": _without_one,
    "is a list": lambda index: [index],
    "has no map": lambda index: {"metadata": {}},
    "has a list for a map": lambda index: {"weight_map": list(index["weight_map"])},
    "has an empty map": lambda index: {"weight_map": {}},
    "has null for a map": lambda index: {"weight_map": None},
    "is cut": lambda index: json.dumps(index)[:700],
    "is empty": lambda index: "",
    "is binary": lambda index: bytes(range(256)),
    "is deep": lambda index: "[" * 50_000 + "]" * 50_000,
}


def bad_index(job: Job, rng: random.Random, *, what: str, change: Callable[[dict], Any]) -> Case:
    index = json.loads((job.toy / "model" / INDEX).read_text())
    job.write(job.model() / INDEX, change(index))
    return _case(job, rng, f"the index {what}", REFUSED)


# ---- files -----------------------------------------------------------------------------------------------


def _split(path: Path) -> tuple[dict, bytes]:
    """Header and data of a safetensors file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _joined(header: Any, data: bytes, *, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def _entry(change: Callable[[dict], Any]) -> Callable[[dict], Any]:
    """Change the entry of a tensor that is in the middle of the file."""

    def apply(header: dict) -> dict:
        name = "model.layers.0.mlp.up_proj.weight"
        return header | {name: change(dict(header[name]))}

    return apply


HEADERS: dict[str, Callable[[dict], Any]] = {
    "another shape": _entry(lambda entry: entry | {"shape": entry["shape"][::-1]}),
    "a shape of one number": _entry(lambda entry: entry | {"shape": [entry["shape"][0] * entry["shape"][1]]}),
    "a negative shape": _entry(lambda entry: entry | {"shape": [-1, 192]}),
    "a huge shape": _entry(lambda entry: entry | {"shape": [10**18, 10**18]}),
    "a text for a shape": _entry(lambda entry: entry | {"shape": "640"}),
    "integers": _entry(lambda entry: entry | {"dtype": "I32"}),
    "an unknown dtype": _entry(lambda entry: entry | {"dtype": "F7"}),
    "a number for a dtype": _entry(lambda entry: entry | {"dtype": 32}),
    "offsets that overlap": _entry(lambda entry: entry | {"data_offsets": [0, entry["data_offsets"][1]]}),
    "offsets beyond the end": _entry(
        lambda entry: entry | {"data_offsets": [entry["data_offsets"][0], 10**15]}
    ),
    "offsets in reverse": _entry(lambda entry: entry | {"data_offsets": entry["data_offsets"][::-1]}),
    "negative offsets": _entry(lambda entry: entry | {"data_offsets": [-8, 8]}),
    "texts for offsets": _entry(lambda entry: entry | {"data_offsets": ["0", "8"]}),
    "an entry that is a list": _entry(lambda entry: list(entry)),
    "an empty entry": _entry(lambda entry: {}),
    "another name": lambda header: {
        name.replace("layers.0.mlp.up", "layers.0.mlp.upper"): entry for name, entry in header.items()
    },
    "nothing": lambda header: {},
    "a list": lambda header: [header],
    "no JSON": lambda header: b"{" * 500,
    "null": lambda header: b"null" + b" " * 4,
    "no UTF-8": lambda header: b"\xff" * 64,
}


def bad_header(job: Job, rng: random.Random, *, what: str, change: Callable[[dict], Any]) -> Case:
    path = job.model() / SHARD
    header, data = _split(path)
    job.write(path, _joined(change(header), data))
    return _case(job, rng, f"the header holds {what}", REFUSED)


def cut(job: Job, rng: random.Random) -> Case:
    content = (job.toy / "model" / SHARD).read_bytes()
    at = rng.choice((0, 1, 7, 8, 9, rng.randrange(1000), rng.randrange(len(content)), len(content) - 1))
    job.write(job.model() / SHARD, content[:at])
    return _case(job, rng, f"{at} of {len(content)} bytes", REFUSED, (SHARD,))


def flipped(job: Job, rng: random.Random) -> Case:
    content = bytearray((job.toy / "model" / SHARD).read_bytes())
    at = rng.randrange(8) if rng.random() < 0.4 else rng.randrange(4000)
    content[at] ^= 1 << rng.randrange(8)
    job.write(job.model() / SHARD, bytes(content))
    return _case(job, rng, f"a bit of byte {at} is the other", REFUSED if at < 8 else EITHER)


FILES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a pickle": lambda path: path.write_bytes(
        b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03."
    ),
    "a Git LFS pointer": lambda path: path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4429224\n"
    ),
    "a huge length of header": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"),
}


def bad_file(job: Job, rng: random.Random, *, what: str, make: Callable[[Path], object]) -> Case:
    path = job.model() / SHARD
    clear(path)
    make(path)
    return _case(job, rng, f"a weight file is {what}", REFUSED, (SHARD,))


# ---- what a role needs -----------------------------------------------------------------------------------

SCORE, LM = "score.weight", "lm_head.weight"


def _loaded(job: Job) -> Tensors:
    from safetensors.torch import load_file

    files = sorted((job.toy / "model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def score_head(labels: int) -> Callable[[Tensors], Tensors]:
    """A score of so many labels in place of the language model's head."""

    def change(tensors: Tensors) -> Tensors:
        head = tensors[LM][:labels].clone()
        return {name: tensor for name, tensor in tensors.items() if name != LM} | {SCORE: head}

    return change


def vocabulary_of(count: int) -> Callable[[Tensors], Tensors]:
    """A vocabulary of another size."""
    return lambda tensors: {
        name: tensor[:count].clone() if tensor.shape[0] == 384 else tensor for name, tensor in tensors.items()
    }


def _without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def as_it_is(tensors: Tensors) -> Tensors:
    return tensors


def _cast(dtype: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        import torch

        return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}

    return change


ONE_LABEL = {
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}
VALUE = {
    "architectures": ["LlamaForTokenClassification"],
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}
# Folder, its role, tensors, config, what has to come of it and what it must be told by.
ROLES = (
    ("a language model", "reward", as_it_is, {}, REFUSED, ("reward.path", ("score", "head"))),
    (
        "a score model whose file has no score",
        "reward",
        _without("lm_head"),
        ONE_LABEL,
        REFUSED,
        (("score", "head"),),
    ),
    ("a score model", "reward", score_head(1), ONE_LABEL, ACCEPTED, ()),
    (
        "a score model of three labels",
        "reward",
        score_head(3),
        ONE_LABEL | {"id2label": {"0": "a", "1": "b", "2": "c"}},
        REFUSED,
        (("score", "label"),),
    ),
    (
        "a score model of another vocabulary",
        "reward",
        lambda tensors: vocabulary_of(320)(score_head(1)(tensors)),
        ONE_LABEL | {"vocab_size": 320},
        REFUSED,
        (("vocab", "token"),),
    ),
    (
        "of another vocabulary",
        "critic",
        vocabulary_of(320),
        {"vocab_size": 320},
        REFUSED,
        (("vocab", "token"),),
    ),
    (
        "of another vocabulary",
        "actor",
        vocabulary_of(320),
        {"vocab_size": 320},
        REFUSED,
        (("vocab", "token"),),
    ),
    ("without layers", "actor", _without("layers"), {}, REFUSED, ("layers",)),
    ("without layers", "critic", _without("layers"), {}, REFUSED, ("layers",)),
    ("without an embedding", "actor", _without("embed"), {}, REFUSED, ("embed",)),
    ("without a head", "actor", _without("lm_head"), {}, REFUSED, ("lm_head",)),
    ("a score model", "actor", score_head(1), ONE_LABEL, REFUSED, (("lm_head", "head"),)),
    ("a score model", "critic", score_head(1), ONE_LABEL, EITHER, ()),
    ("a language model", "critic", as_it_is, {}, EITHER, (("head", "score", "critic"),)),
    (
        "tied, with another head",
        "actor",
        as_it_is,
        {"tie_word_embeddings": True},
        REFUSED,
        (("lm_head", "tie"),),
    ),
    ("tied, without a head", "actor", _without("lm_head"), {"tie_word_embeddings": True}, ACCEPTED, ()),
    (
        "with a tensor that nothing reads",
        "actor",
        lambda tensors: tensors | {"model.extra.weight": tensors[LM].clone()},
        {},
        REFUSED,
        ("extra",),
    ),
    (
        "with biases that config.json denies",
        "actor",
        lambda tensors: (
            tensors | {f"model.layers.{i}.self_attn.q_proj.bias": tensors[LM][0].clone() for i in range(4)}
        ),
        {},
        REFUSED,
        ("bias",),
    ),
    ("in bfloat16", "actor", _cast("bfloat16"), {}, ACCEPTED, ()),
    ("in float16", "critic", _cast("float16"), {}, ACCEPTED, ()),
    ("in int8", "actor", _cast("int8"), {}, REFUSED, (("int8", "I8"),)),
    ("in one file", "actor", as_it_is, {}, ACCEPTED, ()),
)


def make_folder(job: Job, spoil: Callable[[Tensors], Tensors], config: dict[str, Any]) -> Path:
    """A model folder with changed tensors, all in one file, and these changes of config.json."""
    from safetensors.torch import save

    model = job.model()
    for path in (INDEX, SHARD, SHARD.replace("00001-", "00002-")):
        clear(model / path)
    job.write(model / "model.safetensors", save(spoil(_loaded(job)), metadata={"format": "pt"}))
    job.write(model / "config.json", json.loads((job.toy / "model/config.json").read_text()) | config)
    return model


def of_a_role(job: Job, rng: random.Random, *, entry: tuple) -> Case:
    """A role whose folder has other tensors: `entry` is one of ROLES."""
    what, role, spoil, config, expected, names = entry
    given = [f"{role}.path={make_folder(job, spoil, config)}"]
    given += ["reward.function="] if role == "reward" else []
    return Case(name=f"{role}: {what}", expected=expected, names=names, act=job.dry_run(*given))
