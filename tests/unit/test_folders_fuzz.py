"""Random mutations of sound model folders: refused by name, or computing as transformers does."""

import json
import math
import random
import struct
import time

import pytest
import torch
import transformers

from parallel.layout import Layout
from parallel.weights.architecture import Architecture
from parallel.weights.config_keys import FIXED, HARMLESS, LENGTHS, OF_THE_HEAD
from parallel.weights.files import INDEX, CheckpointFolder
from parallel.weights.loading import load_parameters
from parallel.weights.rules import hf_shapes, megatron_parameters
from tests.tiny import FAMILIES, make_hf
from tests.unit.test_files import ARCH, random_tensors, write_folder
from verl_megatron.checks.folders import check_reading
from verl_megatron.models.rope import rope_frequencies

HANGS_S = 60.0  # of this thread alone; what is sound takes milliseconds
LEAVES = [
    *(None, True, False, 0, 1, -1, 2, 3, 64, 4096, 10**6, 10**9, 10**30, -(10**400), 10**400),
    *(
        0.0,
        1.0,
        -0.5,
        0.1,
        1.5,
        64.0,
        1e-30,
        1e300,
        "",
        "64",
        "silu",
        "gelu",
        "full_attention",
        "x" * 10**5,
        "\ud800",
        "\x00",
    ),
    *(
        [],
        [0],
        [[]],
        [None] * 4,
        ["full_attention"] * 4,
        ["sliding_attention"] * 4,
        [0] * 10**5,
        {},
        {"a": 1},
        {"0": "LABEL_0"},
    ),
]
ROPES = [
    *(
        {"rope_type": kind}
        for kind in ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "", "x", 1, None, [], {})
    ),
    *({"type": kind, "factor": 2.0} for kind in ("linear", "yarn", "dynamic", "su")),
    *(
        {"rope_type": "yarn", "factor": 4.0, name: value}
        for name in ("beta_fast", "beta_slow", "mscale", "truncate", "attention_factor")
        for value in (0, -1.0, 1e300, "1", None)
    ),
    *({"rope_type": "yarn", "factor": value} for value in (0, 0.5, 1, 2, 1e300, "2", True, None)),
    *(
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": value}
        for value in (0, 1, 64, 64.0, 10**30, "64")
    ),
    *(
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": 4.0}
        for low in (1.0, 4.0, 5.0, 0.0, "1")
    ),
    *(
        {"rope_type": "default", "rope_theta": value}
        for value in (1e4, 10_000, 0, 1, -5.0, "1e4", True, 1e300, None)
    ),
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
]
UNKNOWN = (
    "logit_scale",
    "final_logit_softcapping",
    "use_qk_norm",
    "attn_bias",
    "num_experts",
    "hidden_dropout_prob",
    "",
    "a\nb",
    "é",
    "k" * 5000,
)


def mutations(count: int, seed: int):
    """(config.json, what was changed in it), each with one or two keys otherwise, gone or new."""
    draw = random.Random(seed)
    sound = {
        name: make_hf(name).config.to_diff_dict() | {"model_type": FAMILIES[name][0].lower()}
        for name in FAMILIES
    }
    for _ in range(count):
        config = json.loads(json.dumps(sound[draw.choice(sorted(sound))]))
        changed = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            key = draw.choice(
                [
                    *config,
                    *config,
                    *config,
                    *FIXED,
                    *LENGTHS,
                    *sorted(OF_THE_HEAD),
                    *UNKNOWN,
                    *sorted(HARMLESS)[::7],
                    "rope_scaling",
                    "rope_theta",
                ]
            )
            if key in ("rope_parameters", "rope_scaling") and draw.random() < 0.8:
                config[key] = draw.choice(ROPES)
            elif key in config and draw.random() < 0.15:
                del config[key]
            else:
                config[key] = draw.choice(LEAVES)
            changed.append(key)
        yield config, changed


def outcome(function, *args):
    """The result, or the message of a ValueError; nothing else may be raised, and it may not all but hang."""
    started = time.thread_time()
    try:
        result = function(*args), ""
    except ValueError as error:
        assert len(str(error)) < 3000, "long values are cut"
        result = None, str(error)
    assert time.thread_time() - started < HANGS_S, f"{function.__name__} takes {HANGS_S} s and more"
    return result


def test_a_changed_config_is_refused_by_name_or_read_as_transformers_reads_it(tmp_path):
    counts = {"refused": 0, "as transformers": 0, "not read by transformers": 0}
    for number, (config, changed) in enumerate(mutations(400, seed=15)):
        arch, refusal = outcome(Architecture.from_hf, config)
        if arch is None:
            names = [key if key.isprintable() and len(key) <= 60 else repr(key)[:20] for key in changed]
            assert (
                any(name in refusal for name in names) or "head_dim" in refusal or "sliding_window" in refusal
            ), (changed, refusal)
            counts["refused"] += 1
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        _, said = outcome(check_reading, str(folder), arch)
        counts["not read by transformers" if said else "as transformers"] += 1
        if not said:
            compare(arch, transformers.AutoConfig.from_pretrained(folder), changed)
    assert min(counts.values()) > 3, counts


def compare(arch: Architecture, config, changed) -> None:
    """What decides the logits, against the model that transformers would build."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ours = (
        arch.num_layers,
        arch.num_heads,
        arch.num_kv_heads,
        arch.head_dim,
        arch.tied,
        arch.norm_eps,
        arch.vocab_size,
    )
    theirs = (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.tie_word_embeddings,
        config.rms_norm_eps,
        config.vocab_size,
    )
    assert ours == theirs, changed
    assert (
        config.hidden_act == "silu"
        and not getattr(config, "attention_bias", False)
        and not getattr(config, "mlp_bias", False)
    ), changed
    assert getattr(config, "is_causal", True) and not config.is_encoder_decoder, changed
    if (
        {"hidden_size", "num_attention_heads", "head_dim"} & set(changed)
        or "rope" in "".join(changed)
        or "max_position_embeddings" in changed
    ):
        stem = type(config).__name__.removesuffix("Config")
        module = getattr(
            __import__(
                f"transformers.models.{config.model_type}.modeling_{config.model_type}", fromlist=["_"]
            ),
            f"{stem}RotaryEmbedding",
        )
        rotary = module(config)
        frequencies, factor = rope_frequencies(arch)
        torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=0, atol=0)
        assert math.isclose(factor, rotary.attention_scaling), changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("fuzz") / "model", random_tensors())


def open_and_load(folder) -> dict:
    """All of a folder's parameters, as an engine reads them."""
    parameters = megatron_parameters(ARCH, Layout(), 0, spec="te")
    tensors = {(p.chunk, p.name): torch.full(p.shape, torch.nan) for p in parameters}
    with CheckpointFolder(folder) as files:
        files.check_shapes(hf_shapes(ARCH))
        load_parameters(files, parameters, tensors)
    return tensors


def try_file(path, content: bytes, folder, sound) -> int:
    """1 if `folder` with `content` for a file is refused by name; what is accepted reads as before."""
    kept = path.read_bytes()
    path.write_bytes(content)
    try:
        loaded, refusal = outcome(open_and_load, folder)
    finally:
        path.write_bytes(kept)
    if loaded is None:
        assert path.name in refusal or str(folder) in refusal, refusal
        return 1
    assert all(torch.equal(tensor, sound[name]) for name, tensor in loaded.items())
    return 0


def test_a_changed_index_is_refused_or_reads_the_same(folder):
    draw, sound, refused = random.Random(16), open_and_load(folder), 0
    path = folder / INDEX
    for _ in range(100):
        content = json.loads(path.read_text())
        table = content["weight_map"]
        key = draw.choice(sorted(table))
        other = draw.choice(
            [
                *LEAVES[:25],
                "../a.safetensors",
                "/dev/null",
                "config.json",
                ".",
                "model-00001-of-00002.safetensors",
            ]
        )
        change = draw.choice(("file", "name", "gone", "map", "metadata", "cut"))
        if change == "file":
            table[key] = other
        elif change == "name":
            table[draw.choice(UNKNOWN)] = table.pop(key)
        elif change == "gone":
            del table[key]
        elif change == "metadata":
            content["metadata"] = other
        elif change == "map":
            content["weight_map"] = other
        text = json.dumps(content).encode()
        refused += try_file(
            path, text[: draw.randrange(len(text))] if change == "cut" else text, folder, sound
        )
    assert 70 < refused < 100, refused


def test_a_changed_header_is_refused_or_reads_the_same(folder):
    draw, sound, refused = random.Random(17), open_and_load(folder), 0
    path = folder / "model-00001-of-00002.safetensors"
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    for _ in range(200):
        header = json.loads(whole[8 : 8 + size])
        key = draw.choice(sorted(header.keys() - {"__metadata__"}))
        change = draw.choice(
            ("dtype", "shape", "offsets", "entry", "metadata", "gone", "bytes", "cut", "none")
        )
        if change == "dtype":
            header[key]["dtype"] = draw.choice(
                ["F16", "F64", "I32", "U32", "F8_E4M3", "BOOL", "X", *LEAVES[:20]]
            )
        elif change == "shape":
            header[key]["shape"] = draw.choice(
                [[], [0], [-1], [2**63], [1.5], header[key]["shape"][::-1] + [1], *LEAVES]
            )
        elif change == "offsets":
            header[key]["data_offsets"] = draw.choice(
                [[0, 0], [0], [4, 0], [0, 2**64], [0.0, 4.0], [-4, 4], *LEAVES]
            )
        elif change == "entry":
            header[key] = draw.choice(LEAVES)
        elif change == "metadata":
            header["__metadata__"] = draw.choice(LEAVES)
        elif change == "gone":
            del header[key]
        text = json.dumps(header).encode()
        if change == "bytes":
            text = bytearray(text)
            text[draw.randrange(len(text))] = draw.randrange(256)
        content = struct.pack("<Q", len(text)) + bytes(text) + whole[8 + size :]
        if change == "cut":
            content = content[: draw.randrange(len(content))]
        refused += try_file(path, content, folder, sound)
    assert 150 < refused < 200, refused
