"""config.json: keys removed, of another type, extreme or unknown; files that are no JSON object."""

import json
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from parallel.weights.architecture import TABLE
from parallel.weights.config_keys import FIXED, HARMLESS
from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.job import Job

ROLES = ("actor", "critic")
REQUIRED = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# What no size, rate or flag may be, as JSON holds it.
OF_ANOTHER_TYPE = ("text", "4", [], [4], {}, {"a": 1})
NO_NUMBER = (True, -1, 0, 1e300, float("nan"), float("inf"), -0.5, 10**30, 10**400)
NO_FLAG = (1, 0, 2.5, "true", "false")
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
OTHER_SIZES = (1, 2, 3, 5, 7, 64, 96, 1000, 10**6, 10**9, 10**15)
# Keys of other kinds of Hugging Face models, which change what is computed.
COMPUTED = {
    "is_causal": (False,),
    "use_bias": (True,),
    "logit_scale": (0.5, 16),
    "attn_logit_softcapping": (50.0,),
    "final_logit_softcapping": (30.0,),
    "embedding_multiplier": (2.0, 0),
    "residual_multiplier": (0.22,),
    "scale_embeddings": (False, True),
    "num_local_experts": (8,),
    "num_experts": (8,),
    "use_qk_norm": (True,),
    "is_encoder_decoder": (True,),
    "add_cross_attention": (True,),
    "quantization_config": ({"bits": 4},),
    "attn_implementation_kwargs": ({"window": 4},),
    "no_such_key": (0, 1, "x", [1], {"a": 1}, False, True),
    "clip_qkv": (8.0,),
    "alibi": (True,),
    "parallel_attn": (True,),
    "use_parallel_residual": (True,),
    "rotary_pct": (0.25,),
    "query_pre_attn_scalar": (224,),
    "pruned_heads": ({"1": [0]},),
    "auto_map": ({"AutoModelForCausalLM": "modeling_mine.Mine"},),
}
OTHER_FIXED = {
    "hidden_act": ("gelu", "relu", 3, [], True, "SiLU"),
    "attention_bias": (True, "no", 1, [1]),
    "mlp_bias": (True, "no", 1),
    "pretraining_tp": (2, "1", [1], True),
    "partial_rotary_factor": (0.5, "1", [1]),
    "attention_dropout": (0.1, "0", [0]),
}
ROPES = (
    *(
        3,
        "default",
        [],
        [1],
        {"rope_type": "nothing"},
        {"rope_type": ["default"]},
        {"rope_type": None, "factor": 2},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "two"},
    ),
    *(
        {"rope_type": "linear", "factor": -2.0},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]},
    ),
    *(
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "default", "factor": 2.0},
        {"rope_type": "yarn", "factor": {"a": 1}},
        {"rope_type": "default", "rope_theta": "big"},
    ),
    *(
        {"rope_type": "default", "rope_theta": -1},
        {"rope_type": "default", "rope_theta": float("nan")},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_type": "default"}},
    ),
)
WINDOWS = (
    ({"sliding_window": 8, "model_type": "mistral"}, "sliding_window"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({"layer_types": 3}, "layer_types"),
    ({"layer_types": "full_attention"}, "layer_types"),
)
TYPES = ("gpt2", "LLAMA", "llama4", "gemma2", "mixtral", "", None, 3, [], ["llama"], {}, True)
FINE = {
    "rms_norm_eps": (1e-5, 1e-6),
    "max_position_embeddings": (64, 4096, 131072),
    "initializer_range": (0.02, 0.5),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        None,
    ),
    "hidden_act": ("silu",),
    "architectures": (["LlamaForCausalLM"],),
    "pad_token_id": (0, None),
    "transformers_version": ("4.40.0", None),
    "name_or_path": ("x" * 300, "ü"),
}


def mutations() -> list[Mutation]:
    found: list[Mutation] = [partial(removed, key=key) for key in REQUIRED]
    for key, (_, kind, _) in TABLE.items():
        found += [
            partial(changed, key=key, value=value)
            for value in OF_ANOTHER_TYPE + (NO_FLAG if kind is bool else NO_NUMBER)
        ]
    found += [
        partial(changed, key=key, value=value)
        for table in (COMPUTED, OTHER_FIXED)
        for key, values in table.items()
        for value in values
    ]
    found += [
        partial(changed, key=key, value=value)
        for key in ("rope_scaling", "rope_parameters")
        for value in ROPES
    ]
    found += [partial(several, changes=changes, key=key) for changes, key in WINDOWS]
    found += [partial(changed, key="model_type", value=value) for value in TYPES]
    found += [partial(other_size, key=key, value=value) for key in SIZES for value in OTHER_SIZES]
    found += [partial(fine, key=key, value=value) for key, values in FINE.items() for value in values]
    found += [partial(harmless_key, key=key) for key in sorted(HARMLESS)]
    found += [partial(no_object, what=what, make=make) for what, make in NO_OBJECTS.items()]
    return found + [flipped] * 8


def _case(
    job: Job,
    rng: random.Random,
    config: dict[str, Any] | str | bytes,
    what: str,
    expected: str,
    key: str = "",
) -> Case:
    """A model folder with this config.json as the actor's or the critic's."""
    role = rng.choice(ROLES)
    job.write(job.model() / "config.json", config)
    names = (
        ()
        if expected != REFUSED
        else (("config.json", f"{role}.path", f"{role}.layout", str(job.model())), *((key,) if key else ()))
    )
    return Case(
        name=f"{role}: {what}"[:160],
        expected=expected,
        names=names,
        act=job.dry_run(f"{role}.path={job.model()}"),
    )


def _config(job: Job) -> dict[str, Any]:
    return json.loads((job.toy / "model/config.json").read_text())


def removed(job: Job, rng: random.Random, *, key: str) -> Case:
    config = {name: value for name, value in _config(job).items() if name != key}
    # Without num_key_value_heads there are as many as heads, and the weights are of fewer.
    return _case(job, rng, config, f"{key} is missing", REFUSED, "" if key == "num_key_value_heads" else key)


def changed(job: Job, rng: random.Random, *, key: str, value: Any) -> Case:
    config = _config(job)
    if key == "rope_scaling":
        del config["rope_parameters"]
    absent = key.startswith("rope") and value in ([], {})
    return _case(
        job,
        rng,
        config | {key: value},
        f"{key}={repr(value)[:60]}",
        EITHER if absent else REFUSED,
        "rope" if key.startswith("rope") else key,
    )


def several(job: Job, rng: random.Random, *, changes: dict[str, Any], key: str) -> Case:
    return _case(job, rng, _config(job) | changes, str(changes), REFUSED, key)


def other_size(job: Job, rng: random.Random, *, key: str, value: int) -> Case:
    """A size that a model may have, and that its weights have not."""
    config = _config(job)
    expected = EITHER if config[key] == value else REFUSED
    return _case(job, rng, config | {key: value}, f"{key}={value}", expected)


def fine(job: Job, rng: random.Random, *, key: str, value: Any) -> Case:
    return _case(job, rng, _config(job) | {key: value}, f"{key}={value!r}", ACCEPTED)


def harmless_key(job: Job, rng: random.Random, *, key: str) -> Case:
    value = rng.choice((None, 3, "text", True, [1], {"a": 1}))
    return _case(job, rng, _config(job) | {key: value}, f"{key}={value!r}", EITHER)


# ---- no JSON object --------------------------------------------------------------------------------------

NO_OBJECTS: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: f"[{text}]",
    "pairs": lambda text: '[["model_type", "llama"]]',
    "a text": lambda text: '"llama"',
    "a number": lambda text: "3",
    "null": lambda text: "null",
    "UTF-16": lambda text: text.encode("utf-16"),
    "binary": lambda text: bytes(range(256)) * 4,
    "YAML": lambda text: "model_type: llama\nhidden_size: 192\n",
    "deep": lambda text: '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a long number": lambda text: '{"hidden_size": ' + "9" * 10_000 + "}",
    "comments": lambda text: "// of mine\n" + text,
    "an object twice": lambda text: text + text,
}


def no_object(job: Job, rng: random.Random, *, what: str, make: Callable[[str], str | bytes]) -> Case:
    case = _case(
        job,
        rng,
        make((job.toy / "model/config.json").read_text()),
        f"config.json is {what}",
        REFUSED,
        "config.json",
    )
    if rng.random() < 0.2:  # in its place something that is no file
        path = job.model() / "config.json"
        path.unlink()
        rng.choice((os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.name)))(path)
        case.name = "config.json is no file"
    return case


def flipped(job: Job, rng: random.Random) -> Case:
    content = bytearray((job.toy / "model/config.json").read_bytes())
    at = rng.randrange(len(content))
    content[at] = rng.randrange(256)
    return _case(job, rng, bytes(content), f"byte {at} is {content[at]}", EITHER)


assert FIXED.keys() >= OTHER_FIXED.keys()
