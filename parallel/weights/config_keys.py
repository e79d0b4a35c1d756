"""The keys of config.json, with the values for which results here equal transformers'.

A key is in `HARMLESS` (any value), in `FIXED` (these values only) or read by `architecture.py`; any other key
is refused unless it is null. A key belongs in `HARMLESS` only if no value of it changes logits and the
rollout's sampling does not read it.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from parallel.runtime.refusal import short_repr
from parallel.weights.json_files import is_count, shown_key

NO_CODE = "folders with model code of their own are not supported"
DECODER = "these models are decoders alone"
FULL = "attention over a part of the sequence is not supported"
# Key: the allowed values and the reason. Types are compared, too: JSON's 0 is not false.
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "other activations are not supported"),
    "attention_bias": (
        (False,),
        "a bias on o_proj cannot be expressed in Megatron-Core without one on every linear",
    ),
    "mlp_bias": ((False,), "biases in the feed-forward layers are not supported"),
    "pretraining_tp": ((1, None), "set it to 1: only the rounding of the original training depends on it"),
    "partial_rotary_factor": ((1.0, 1, None), "rotary embeddings over a part of the head are not supported"),
    "attention_dropout": ((0.0, 0, None), "training here uses no dropout: set it to 0"),
    "hidden_dropout": ((0.0, 0, None), "training here uses no dropout: set it to 0"),
    "token_classification_bias": (
        (True,),
        "value heads without a bias are read from sequence-classification folders",
    ),
    "is_causal": ((True,), "attention here is causal"),
    "is_decoder": ((False, True), DECODER),
    "is_encoder_decoder": ((False,), DECODER),
    "add_cross_attention": ((False, None), DECODER),
    "tie_encoder_decoder": ((False, None), DECODER),
    "cross_attention_hidden_size": ((None,), DECODER),
    "pruned_heads": (({}, None), "models with pruned heads are not supported"),
    "per_layer_config": (({}, None), "all layers are alike here"),
    "auto_map": (({}, None), NO_CODE),
    "quantization_config": ((None,), "quantised weights are not supported; convert them to bfloat16"),
    "use_mrope": ((False, None), "positions in several dimensions are not supported"),
    "rope_interleaved": (
        (False, None),
        "only rotary embeddings that pair the halves of a head are supported",
    ),
    "dual_chunk_attention_config": ((None,), FULL),
    "attention_chunk_size": ((None,), FULL),
    "torchscript": ((False, None), "leave it out"),
    "use_bfloat16": ((False, None), "leave it out; engine.dtype says what is computed in"),
}
# Old and alternative names of max_position_embeddings, by which vLLM limits the length of its sequences.
LENGTHS = (
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "model_max_length",
    "seq_length",
    "seq_len",
    "n_positions",
    "max_target_positions",
)
READ_SEPARATELY = {
    *("model_type", "architectures", "rope_theta", "rope_scaling", "rope_parameters"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", *LENGTHS),
}
OF_THE_HEAD = {"id2label", "label2id", "num_labels", "problem_type", "classifier_dropout"}
_LABELS = """dtype torch_dtype transformers_version name_or_path _name_or_path tokenizer_class prefix \
task_specific_params
    finetuning_task is_llama_config _commit_hash _from_model_config"""
_TOOLS = "unsloth_fixed unsloth_version transformers.js_config"
_TOKENS = """bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id
    decoder_start_token_id"""
_RUNNING = """use_cache attn_implementation _attn_implementation _attn_implementation_autoset \
_attn_implementation_internal
    _flash_attn_2_enabled return_dict output_hidden_states output_attentions output_scores \
chunk_size_feed_forward
    gradient_checkpointing tf_legacy_loss tie_last_hidden_states"""
_GENERATION = """max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups \
diversity_penalty
    num_return_sequences temperature top_k top_p typical_p repetition_penalty length_penalty \
no_repeat_ngram_size
    encoder_no_repeat_ngram_size encoder_repetition_penalty bad_words_ids return_dict_in_generate \
forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens \
begin_suppress_tokens
    epsilon_cutoff eta_cutoff num_assistant_tokens num_assistant_tokens_schedule \
assistant_confidence_threshold
    assistant_lookbehind target_lookbehind"""
# The keys that an exported config.json copies from an older one.
HARMLESS = {key for keys in (_LABELS, _TOOLS, _TOKENS, _RUNNING, _GENERATION) for key in keys.split()}


# Far above the sizes of any model: without them a mistyped size fills the memory or costs an hour before an
# error appears.
LARGEST = {
    "hidden_size": 2**18,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**10,
    "num_key_value_heads": 2**10,
    "head_dim": 2**10,
    "intermediate_size": 2**20,
    "vocab_size": 2**22,
    "max_position_embeddings": 2**24,
    "num_labels": 2**20,  # transformers makes a name for each
    "rms_norm_eps": 1.0,
    "initializer_range": 1.0,
    "rope_theta": 1e15,
    "factor": 2.0**10,
}


def typed(key: str, value: Any, kind: type, problems: list[str], *, may_be_null: bool = False) -> Any:
    """Return `value` as `kind`, or None if it is derived later or invalid (appended to `problems`).

    Sizes and rates must be positive and within `LARGEST`. A size (`kind` int) must be an int: 64.0 is
    refused.
    """
    most = LARGEST.get(key.rpartition(".")[2], math.inf)
    types, wanted = {
        bool: ((bool,), "true or false"),
        int: ((int,), "a positive whole number"),
        float: ((int, float), "a positive number"),
    }[kind]
    if value is MISSING:
        problems.append(f"{key} is missing; add it as the model's authors give it")
    elif may_be_null and value is None:
        return None
    elif type(value) not in types or (kind is not bool and not 0 < value < math.inf):
        problems.append(f"{key}={short_repr(value)} must be {wanted}")
    elif kind is not bool and value > most:
        problems.append(f"{key}={short_repr(value)} is larger than any model's (at most {most:g})")
    else:
        return kind(value)
    return None


def refusals(config: Mapping[str, Any], sizes: set[str]) -> list[str]:
    """Return problems: keys with a value that is not supported, and unknown keys.

    Args:
        sizes: keys that are read elsewhere.
    """
    problems = []
    for key, (values, reason) in FIXED.items():
        if key in config and not any(_same(config[key], value) for value in values):
            allowed = " or ".join(map(repr, values))
            problems.append(f"{key}={short_repr(config[key])} is not supported (only {allowed}): {reason}")
    known = sizes | FIXED.keys() | READ_SEPARATELY | OF_THE_HEAD | HARMLESS
    problems += [
        f"{shown_key(key)}={short_repr(value)} is not understood and may change the mathematics; remove it "
        "if it does not"
        for key, value in config.items()
        if key not in known and value is not None
    ]
    return problems


def lengths(config: Mapping[str, Any], max_positions: int) -> list[str]:
    """Return problems: alternative names of max_position_embeddings with values that vLLM cannot use.

    Such a value is not an integer, or would limit vLLM to shorter sequences.
    """
    return [
        f"{key}={short_repr(value)} is no whole number from max_position_embeddings={max_positions} on, and "
        "vLLM limits rows by it; set it to null"
        for key in LENGTHS
        if (value := config.get(key)) is not None and not (is_count(value) and value >= max_positions)
    ]


def class_names(config: Mapping[str, Any], stem: str) -> list[str]:
    """Return problems: classes in `architectures` that may compute something else than the family's own."""
    names = config.get("architectures")
    known = {
        stem + suffix
        for suffix in ("ForCausalLM", "ForTokenClassification", "ForSequenceClassification", "Model")
    }
    if stem == "Llama":
        known.add("LLaMAForCausalLM")  # the spelling of the first folders
    if names is None or (
        isinstance(names, list) and all(isinstance(name, str) and name in known for name in names)
    ):
        return []
    return [
        f"architectures={short_repr(names)} must be a list of {', '.join(sorted(known))}; others may compute"
        " something else"
    ]


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and value == allowed
