"""What a dense decoder is, read from a Hugging Face config.json and written back to one.

The translation is an explicit two-way table: each key of config.json is mapped, known to leave the mathematics alone, or
an error that names it. Nothing is dropped in silence.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

HEADS = {"lm": "ForCausalLM", "token": "ForTokenClassification", "sequence": "ForSequenceClassification"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a `model_type` implies beyond its config.json."""

    stem: str  # of the class names in transformers
    qkv_bias: bool = False
    qk_norm: bool = False
    absent: Mapping[str, Any]  # what transformers assumes for a key that config.json lacks, where families differ


FAMILIES = {
    "llama": Family(stem="Llama", absent={}),
    "mistral": Family(stem="Mistral", absent={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(stem="Qwen2", qkv_bias=True, absent={"num_key_value_heads": 32, "sliding_window": 4096}),
    "qwen3": Family(stem="Qwen3", qk_norm=True, absent={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """Positions divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's scaling of the low frequencies."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071); None: computed from `factor` as transformers does."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling = LinearRope | Llama3Rope | YarnRope
ROPE_TYPES = {rope.rope_type: rope for rope in (LinearRope, Llama3Rope, YarnRope)}
DEFAULT_ROPE_THETA = 10_000.0

# Hugging Face key: our field, its type, and what an absent key means (MISSING: it must be there).
TABLE: dict[str, tuple[str, type, Any]] = {
    "hidden_size": ("hidden_size", int, MISSING),
    "num_hidden_layers": ("num_layers", int, MISSING),
    "num_attention_heads": ("num_heads", int, MISSING),
    "num_key_value_heads": ("num_kv_heads", int, None),  # None: as many as heads
    "head_dim": ("head_dim", int, None),  # None: hidden_size / heads
    "intermediate_size": ("intermediate_size", int, MISSING),
    "vocab_size": ("vocab_size", int, MISSING),
    "tie_word_embeddings": ("tied", bool, False),
    "rms_norm_eps": ("norm_eps", float, MISSING),
    "max_position_embeddings": ("max_positions", int, MISSING),
    "initializer_range": ("initializer_range", float, 0.02),
}
# Keys that may only have the value which the models here compute with.
FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "other activations are not supported"),
    "attention_bias": (False, "a bias on o_proj cannot be expressed in Megatron-Core without one on every linear"),
    "mlp_bias": (False, "biases in the feed-forward layers are not supported"),
    "pretraining_tp": (1, "set it to 1: only the rounding of the original training depends on it"),
    "partial_rotary_factor": (1.0, "rotary embeddings over a part of the head are not supported"),
    "attention_dropout": (0.0, "training here uses no dropout: set it to 0"),
    "token_classification_bias": (True, "value heads without a bias are read from sequence-classification folders"),
}
READ_SEPARATELY = {"model_type", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
OF_THE_HEAD = {"architectures", "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout"}
# Keys that do not change what the trunk computes; carried over to a written config.json.
_LABELS = "dtype torch_dtype transformers_version name_or_path _name_or_path tokenizer_class prefix task_specific_params is_llama_config"
_TOOLS = "unsloth_fixed unsloth_version transformers.js_config"
_TOKENS = "bos_token_id eos_token_id pad_token_id sep_token_id"
_RUNNING = "use_cache attn_implementation _attn_implementation return_dict output_hidden_states output_attentions output_scores chunk_size_feed_forward"
_GENERATION = "max_length min_length max_new_tokens do_sample num_beams num_return_sequences temperature top_k top_p typical_p repetition_penalty length_penalty"
HARMLESS = {key for keys in (_LABELS, _TOOLS, _TOKENS, _RUNNING, _GENERATION) for key in keys.split(" ")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A dense decoder with RMS norms, rotary positions and a SiLU-gated feed-forward, as config.json describes it."""

    model_type: str  # a key of FAMILIES
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False  # the output layer is the embedding; holds for the language-model head only
    norm_eps: float
    rope_theta: float = DEFAULT_ROPE_THETA
    rope_scaling: RopeScaling | None = None
    max_positions: int
    initializer_range: float = 0.02

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.model_type].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.model_type].qk_norm

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, source: str = "config.json") -> "Architecture":
        """Translate the content of a config.json; `source` names it in errors.

        Raises:
            ValueError: a model type, key or value that is not understood and changes the mathematics, a missing key or a value
                of a wrong type. All that is wrong is listed in one message.
        """
        family = FAMILIES.get(config.get("model_type", ""))
        if family is None:
            raise ValueError(f"{source}: model_type={config.get('model_type')!r} is not supported; supported are {', '.join(FAMILIES)}")
        problems: list[str] = []
        values: dict[str, Any] = {}
        for key, (field, kind, absent) in TABLE.items():
            default = family.absent.get(key, absent)
            values[field] = _typed(key, config.get(key, default), kind, absent, problems)
        problems += _refusals(config)
        if not problems:
            _derive_heads(values, problems)
            values |= _read_rope(config, values["max_positions"], problems)
            problems += _sliding_window(config, family, values)
        if problems:
            raise ValueError(f"{source} describes a model that cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))
        return cls(model_type=config["model_type"], **values)

    def to_hf(self, *, head: str = "lm", carry: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The content of a config.json, which `from_hf` reads back to the same architecture.

        Rotary settings are written under `rope_theta` and `rope_scaling`, which transformers 4 and 5 both read.

        Args:
            head: "lm", "token" or "sequence"; the last two have one label.
            carry: an older config.json whose token ids, dtype and the like are kept.
        """
        family = FAMILIES[self.model_type]
        config: dict[str, Any] = {"architectures": [family.stem + HEADS[head]], "model_type": self.model_type}
        config |= {key: getattr(self, field) for key, (field, _, _) in TABLE.items()}
        config |= {"rope_theta": self.rope_theta, "rope_scaling": _write_rope(self.rope_scaling), "hidden_act": "silu", "attention_dropout": 0.0}
        if self.model_type == "mistral":
            config["sliding_window"] = None  # transformers takes an absent one for 4096
        if head != "lm":
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {key: value for key, value in (carry or {}).items() if key in HARMLESS} | config


def read_architecture(folder: str | Path) -> Architecture:
    """The architecture of a Hugging Face folder.

    Raises:
        ValueError: no such folder, no config.json, not JSON, or a model that `Architecture.from_hf` refuses.
    """
    return Architecture.from_hf(read_config(folder), source=str(Path(folder) / "config.json"))


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's config.json; ValueError if there is none."""
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise ValueError(f"model folder {path.parent} does not exist; give the path of a Hugging Face folder")
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a model folder needs the config.json of its Hugging Face model")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); copy it again from its source") from None


def _typed(key: str, value: Any, kind: type, absent: Any, problems: list[str]) -> Any:
    """`value` as `kind`; sizes and rates must be positive. None stands for what is derived later."""
    if value is MISSING:
        problems.append(f"{key} is missing; add it as the model's authors give it")
    elif value is None and absent is None:
        return None
    elif kind is bool and isinstance(value, bool):
        return value
    elif kind is not bool and not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and kind(value) == value > 0:
        return kind(value)
    else:
        problems.append(f"{key}={value!r} must be {'true or false' if kind is bool else f'a positive {kind.__name__}'}")
    return None


def _refusals(config: Mapping[str, Any]) -> list[str]:
    """Keys whose value is not what the models here compute with, and keys nobody knows."""
    problems = []
    for key, (value, reason) in FIXED.items():
        if config.get(key) is not None and config[key] != value:
            problems.append(f"{key}={config[key]!r} is not supported (only {value!r}): {reason}")
    known = TABLE.keys() | FIXED.keys() | READ_SEPARATELY | OF_THE_HEAD | HARMLESS
    for key, value in config.items():
        is_unset = value is None or value is False or value == {} or value == []
        if key not in known and not is_unset:
            problems.append(f"{key}={value!r} is not understood and may change the mathematics; remove it if it does not")
    return problems


def _derive_heads(values: dict[str, Any], problems: list[str]) -> None:
    heads, hidden = values["num_heads"], values["hidden_size"]
    values["num_kv_heads"] = values["num_kv_heads"] or heads
    if heads % values["num_kv_heads"]:
        problems.append(f"num_key_value_heads={values['num_kv_heads']} must divide num_attention_heads={heads}")
    if values["head_dim"] is None:
        if hidden % heads:
            problems.append(f"num_attention_heads={heads} must divide hidden_size={hidden}, or head_dim be given")
        values["head_dim"] = hidden // heads
    if values["head_dim"] % 2:
        problems.append(f"head_dim={values['head_dim']} must be even for rotary positions")


def _read_rope(config: Mapping[str, Any], max_positions: int, problems: list[str]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from transformers 5's `rope_parameters` or the older pair of keys."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        problems.append(f"rope_parameters={new!r} and rope_scaling={old!r} must be objects or null")
        return {}
    where = "rope_scaling" if old else "rope_parameters"
    given = {key: value for key, value in (old or new).items() if value is not None}
    if old and new and old != new:
        problems.append(f"rope_scaling={old!r} and rope_parameters={new!r} contradict each other; keep one of them")
    legacy_type = given.pop("type", "default")
    rope_type = given.pop("rope_type", legacy_type)
    inner, outer = given.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        problems.append(f"{where}.rope_theta={inner!r} and rope_theta={outer!r} contradict each other; keep one of them")
    theta = _typed("rope_theta", next((t for t in (inner, outer) if t is not None), DEFAULT_ROPE_THETA), float, MISSING, problems)
    if (partial := given.pop("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"{where}.partial_rotary_factor={partial!r} is not supported (only 1.0): {FIXED['partial_rotary_factor'][1]}")
    if rope_type == "default":
        problems += [f"{where}.{key}={value!r} is not understood with rope type 'default'; remove it if it has no effect" for key, value in given.items()]
        return {"rope_theta": theta, "rope_scaling": None}
    if rope_type not in ROPE_TYPES:
        problems.append(f"{where} has rope type {rope_type!r}, which is not supported; supported are default, {', '.join(ROPE_TYPES)}")
        return {}
    return {"rope_theta": theta, "rope_scaling": _read_scaling(ROPE_TYPES[rope_type], given, where, max_positions, problems)}


def _read_scaling(rope: type, given: dict[str, Any], where: str, max_positions: int, problems: list[str]) -> RopeScaling | None:
    known = {field.name: field for field in fields(rope)}
    problems += [f"{where}.{key}={given[key]!r} is not understood with rope type {rope.rope_type!r}" for key in given.keys() - known.keys()]
    if "original_max_position_embeddings" in known:
        given.setdefault("original_max_position_embeddings", max_positions)  # as transformers does
    found = len(problems)
    values = {}
    for name, field in known.items():
        kind = {"original_max_position_embeddings": int, "truncate": bool}.get(name, float)
        values[name] = _typed(f"{where}.{name}", given.get(name, field.default), kind, field.default, problems)
    return rope(**values) if len(problems) == found else None


def _write_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Only what differs from the defaults: older readers do not know every key."""
    if scaling is None:
        return None
    defaults = {field.name: field.default for field in fields(scaling)}
    return {"rope_type": scaling.rope_type} | {name: value for name, value in asdict(scaling).items() if value != defaults[name]}


def _sliding_window(config: Mapping[str, Any], family: Family, values: Mapping[str, Any]) -> list[str]:
    """Attention over a window is refused where a sequence could be longer than the window."""
    if other := set(map(str, config.get("layer_types") or ())) - {"full_attention"}:
        return [f"layer_types names {sorted(other)}; only full_attention is supported"]
    window = config.get("sliding_window", family.absent.get("sliding_window"))
    if family.stem.startswith("Qwen"):
        first = config.get("max_window_layers", 28)  # layers below it see everything
        if not config.get("use_sliding_window") or (isinstance(first, int) and first >= values["num_layers"]):
            return []
    if window is None or (isinstance(window, int) and window >= values["max_positions"]):
        return []
    longest = values["max_positions"]
    remedy = f"set sliding_window to null or max_position_embeddings to {window!r}, if no sequence is longer"
    return [f"sliding_window={window!r} is in use and shorter than max_position_embeddings={longest}, which is not supported; {remedy}"]
