"""The architecture of a dense decoder, read from a Hugging Face config.json and written back to one.

The translation is an explicit two-way table. Each key of config.json is mapped, or known not to change the
mathematics with its value (`config_keys.py`), or refused by name. No key is silently ignored.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from parallel.weights.config_keys import HARMLESS, class_names, lengths, refusals, typed
from parallel.weights.json_files import is_count, read_object
from parallel.weights.rope import DEFAULT_ROPE_THETA, RopeScaling, YarnRope, read_rope, write_rope

HEADS = {"lm": "ForCausalLM", "token": "ForTokenClassification", "sequence": "ForSequenceClassification"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The properties that a `model_type` implies beyond its config.json."""

    stem: str  # of the class names in transformers
    qkv_bias: bool = False
    qk_norm: bool = False
    absent: Mapping[str, Any]  # transformers' defaults for absent keys, where families differ
    never_null: frozenset[str] = frozenset()  # optional keys whose null transformers cannot read
    whole_heads: bool = False  # the number of heads divides the hidden size even if head_dim is given


FAMILIES = {
    "llama": Family(stem="Llama", absent={}, whole_heads=True),
    "mistral": Family(
        stem="Mistral",
        absent={"num_key_value_heads": 8, "sliding_window": 4096},
        never_null=frozenset({"num_key_value_heads"}),
    ),
    "qwen2": Family(
        stem="Qwen2",
        qkv_bias=True,
        absent={"num_key_value_heads": 32, "sliding_window": 4096},
        never_null=frozenset({"head_dim"}),
    ),
    "qwen3": Family(
        stem="Qwen3",
        qk_norm=True,
        absent={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        never_null=frozenset({"head_dim"}),
    ),
}


# Hugging Face key: the field here, its type, and the value of an absent key (MISSING: the key is required).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A dense decoder with RMS norms, rotary positions and a SiLU-gated feed-forward."""

    model_type: str  # a key of FAMILIES
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False  # the output layer is the embedding; for the language-model head only
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

    @property
    def served_positions(self) -> int:
        """The longest sequence that vLLM serves: its rotary table may be shorter than max_positions."""
        scaling = self.rope_scaling
        if not isinstance(scaling, YarnRope):
            return self.max_positions
        return min(self.max_positions, int(scaling.original_max_position_embeddings * scaling.factor))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, source: str = "config.json") -> "Architecture":
        """Translate the content of a config.json; `source` names it in errors.

        Raises:
            ValueError: a model type, key or value is unknown and may change the mathematics, a key is
                missing, or a value has the wrong type. One message lists all problems.
        """
        model_type = config.get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise ValueError(
                f"{source}: model_type={short_repr(model_type)} is not supported; supported are"
                f" {', '.join(FAMILIES)}"
            )
        problems: list[str] = []
        values: dict[str, Any] = {}
        for key, (field, kind, absent) in TABLE.items():
            value = config.get(key, family.absent.get(key, absent))
            may_be_null = absent is None and not (key in config and key in family.never_null)
            values[field] = typed(key, value, kind, problems, may_be_null=may_be_null)
        typed("num_labels", config.get("num_labels"), int, problems, may_be_null=True)
        problems += refusals(config, set(TABLE)) + class_names(config, family.stem)
        if not problems:
            _derive_heads(values, family, problems)
            values |= read_rope(config, values["max_positions"], problems)
            problems += _sliding_window(config, family, values) + lengths(config, values["max_positions"])
        if problems:
            raise ValueError(
                f"{source} describes a model that cannot be built:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )
        return cls(model_type=config["model_type"], **values)

    def to_hf(self, *, head: str = "lm", carry: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of a config.json, which `from_hf` translates back to the same architecture.

        Rotary settings are written as `rope_theta` and `rope_scaling`, which transformers 4 and 5 both read.

        Args:
            head: "lm", "token" or "sequence"; the last two have one label.
            carry: an older config.json whose token ids, dtype and similar keys are copied.
        """
        family = FAMILIES[self.model_type]
        config: dict[str, Any] = {"architectures": [family.stem + HEADS[head]], "model_type": self.model_type}
        config |= {key: getattr(self, field) for key, (field, _, _) in TABLE.items()}
        config |= {
            "rope_theta": self.rope_theta,
            "rope_scaling": write_rope(self.rope_scaling),
            "hidden_act": "silu",
            "attention_dropout": 0.0,
        }
        if self.model_type == "mistral":
            config["sliding_window"] = None  # transformers assumes 4096 if it is absent
        if head != "lm":
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config = {key: value for key, value in (carry or {}).items() if key in HARMLESS} | config
        if head == "sequence" and _is_end(config, config.get("pad_token_id")):
            config["pad_token_id"] = None  # else transformers scores the token before the end of the response
        return config


def _is_end(config: Mapping[str, Any], token_id: Any) -> bool:
    """Return whether a token ends responses, by a config.json with one end-of-sequence id or several."""
    ends = config.get("eos_token_id")
    return token_id is not None and token_id in (ends if isinstance(ends, list) else [ends])


def read_architecture(folder: str | Path) -> Architecture:
    """Return the architecture of a Hugging Face folder.

    Raises:
        ValueError: no such folder, no config.json, not JSON, or a model that `Architecture.from_hf` refuses.
    """
    return Architecture.from_hf(read_config(folder), source=str(Path(folder) / "config.json"))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's config.json; ValueError if there is none."""
    path = Path(folder) / "config.json"
    try:
        if path.parent.is_file():
            raise ValueError(f"model folder {path.parent} is a file; give the path of a Hugging Face folder")
        if not path.parent.is_dir():
            raise ValueError(
                f"model folder {path.parent} does not exist; give the path of a Hugging Face folder"
            )
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist; a model folder needs the config.json of its Hugging Face model"
            )
    except OSError as error:  # a path that is too long, or a parent folder without permission
        raise ValueError(
            f"model folder {short_repr(str(folder))} cannot be read ({error.strerror}); give the path of a "
            "Hugging Face folder"
        ) from None
    return read_object(path)


def _derive_heads(values: dict[str, Any], family: Family, problems: list[str]) -> None:
    heads, hidden = values["num_heads"], values["hidden_size"]
    values["num_kv_heads"] = values["num_kv_heads"] or heads
    if heads % values["num_kv_heads"]:
        problems.append(
            f"num_key_value_heads={values['num_kv_heads']} must divide num_attention_heads={heads}"
        )
    if hidden % heads and (values["head_dim"] is None or family.whole_heads):
        problems.append(
            f"num_attention_heads={heads} must divide hidden_size={hidden}"
            + ", or head_dim be given" * (not family.whole_heads)
        )
    values["head_dim"] = values["head_dim"] or max(hidden // heads, 1)
    if values["head_dim"] % 2:
        problems.append(f"head_dim={values['head_dim']} must be even for rotary positions")


def _sliding_window(config: Mapping[str, Any], family: Family, values: Mapping[str, Any]) -> list[str]:
    """Return problems: sliding-window attention where a sequence could be longer than the window."""
    if problems := _window_types(config, values["num_layers"]):
        return problems
    window = config.get("sliding_window", family.absent.get("sliding_window"))
    if family.stem.startswith("Qwen"):
        first = config.get("max_window_layers", 28)  # layers below it use full attention
        if not config.get("use_sliding_window") or first >= values["num_layers"]:
            return []
    longest = values["max_positions"]
    if window is None or window >= longest:
        return []
    remedy = f"set sliding_window to null or max_position_embeddings to {window!r}, if no sequence is longer"
    return [
        f"sliding_window={short_repr(window)} is in use and shorter than max_position_embeddings={longest}, "
        f"which is not supported; {remedy}"
    ]


def _window_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return problems: sliding-window keys with values of a wrong type, and unsupported layer types."""
    problems = []
    for key, is_right, wanted in (
        (
            "sliding_window",
            lambda value: value is None or (is_count(value) and value > 0),
            "a positive whole number or null",
        ),
        ("use_sliding_window", lambda value: isinstance(value, bool), "true or false"),
        ("max_window_layers", is_count, "a whole number"),
    ):
        if key in config and not is_right(config[key]):
            problems.append(f"{key}={short_repr(config[key])} must be {wanted}")
    types = config.get("layer_types")
    if types is None:
        return problems
    if not isinstance(types, list):
        problems.append(f"layer_types={short_repr(types)} must be a list or null")
    elif other := [kind for kind in types if kind != "full_attention"]:
        problems.append(f"layer_types names {short_repr(other[0])}; only full_attention is supported")
    elif len(types) != num_layers:
        problems.append(
            f"layer_types has {len(types)} entries, one for each of num_hidden_layers={num_layers} is needed"
        )
    return problems
