"""config.json files as their authors write them, both ways, and against transformers' own reading."""

import json

import pytest

from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rope import LinearRope, Llama3Rope, YarnRope

LLAMA2 = json.loads("""
{"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
 "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
 "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads":
 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
 "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version":
 "4.31.0.dev0", "use_cache": true, "vocab_size": 32000}
""")
LLAMA32 = json.loads("""
{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id":
 128000, "eos_token_id": [128001, 128008], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
 "initializer_range": 0.02, "intermediate_size": 8192, "mlp_bias": false, "max_position_embeddings":
 131072, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads":
 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "vocab_size": 128256, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
 "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
""")
MISTRAL = json.loads("""
{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size":
 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
 "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
 "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
 "vocab_size": 32768}
""")
QWEN25 = json.loads("""
{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "hidden_act":
 "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
 "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads":
 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "sliding_window": 32768, "tie_word_embeddings": true, "use_mrope": false, "use_sliding_window": false,
 "vocab_size": 151936}
""")
QWEN3 = json.loads("""
{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "dtype":
 "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
 "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type":
 "qwen3", "num_attention_heads": 16, "num_hidden_layers": 4, "num_key_value_heads": 8, "rms_norm_eps":
 1e-06, "sliding_window": null, "layer_types": ["full_attention", "full_attention", "full_attention",
 "full_attention"], "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
 "use_sliding_window": false, "tie_word_embeddings": true, "vocab_size": 151936}
""")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
FULL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4,
    "attention_factor": 1.2,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "mscale": 1.5,
    "mscale_all_dim": 0.5,
}
CONFIGS = {
    "llama2": LLAMA2,
    "llama32": LLAMA32,
    "llama_linear": LLAMA2 | {"rope_scaling": {"type": "linear", "factor": 2}},
    "mistral": MISTRAL,
    "qwen25": QWEN25,
    "qwen25_yarn": QWEN25 | {"rope_scaling": YARN},
    "qwen3": QWEN3,
    "qwen3_yarn": QWEN3 | {"rope_parameters": FULL_YARN},
}


def test_reads_what_the_authors_wrote():
    llama = Architecture.from_hf(LLAMA32)
    assert (llama.num_layers, llama.num_heads, llama.num_kv_heads, llama.head_dim, llama.tied) == (
        16,
        32,
        8,
        64,
        True,
    )
    assert llama.rope_theta == 500000.0 and (llama.qkv_bias, llama.qk_norm) == (False, False)
    assert llama.rope_scaling == Llama3Rope(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert Architecture.from_hf(CONFIGS["llama_linear"]).rope_scaling == LinearRope(factor=2.0)
    qwen2 = Architecture.from_hf(CONFIGS["qwen25_yarn"])
    assert qwen2.head_dim == 64 and (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert qwen2.rope_scaling == YarnRope(factor=4.0, original_max_position_embeddings=32768)
    qwen3 = Architecture.from_hf(CONFIGS["qwen3_yarn"])
    assert (
        qwen3.head_dim == 128 and (qwen3.qkv_bias, qwen3.qk_norm) == (False, True) and qwen3.rope_theta == 5e5
    )
    full = {key: value for key, value in FULL_YARN.items() if key not in {"rope_type", "rope_theta"}}
    assert qwen3.rope_scaling == YarnRope(original_max_position_embeddings=40960, **full)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("head", ["lm", "token", "sequence"])
def test_round_trip_through_json(name, head):
    arch = Architecture.from_hf(CONFIGS[name])
    written = arch.to_hf(head=head, carry=CONFIGS[name])
    assert Architecture.from_hf(json.loads(json.dumps(written))) == arch
    assert written["architectures"][0].endswith(
        {"lm": "ForCausalLM", "token": "ForTokenClassification", "sequence": "ForSequenceClassification"}[
            head
        ]
    )
    carried = {"torch_dtype", "dtype", "bos_token_id", "eos_token_id", "use_cache"} & CONFIGS[name].keys()
    assert all(written[key] == CONFIGS[name][key] for key in carried)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_the_written_config_as_the_original(name):
    """transformers is the judge of both: what it takes from them is the same, rotary settings included."""
    from transformers import AutoConfig

    def read(config):
        return AutoConfig.for_model(**config).to_dict()

    original, written = (
        read(CONFIGS[name]),
        read(Architecture.from_hf(CONFIGS[name]).to_hf(carry=CONFIGS[name])),
    )
    rope, written_rope = original.pop("rope_parameters"), written.pop("rope_parameters")
    rope.pop("type", None)  # the older spelling of rope_type, kept by transformers beside it
    assert written_rope == rope
    ignored = {
        "sliding_window",
        "max_window_layers",
        "use_mrope",
        "pretraining_tp",
        "head_dim",
        "_name_or_path",
    }
    assert {k: v for k, v in written.items() if k not in ignored} == {
        k: v for k, v in original.items() if k not in ignored
    }
    assert written.get("head_dim") in (
        None,
        original.get("head_dim"),
        written["hidden_size"] // written["num_attention_heads"],
    )


REFUSED = [
    (LLAMA32, {"model_type": "gemma3"}, "model_type='gemma3'"),
    (LLAMA32, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (LLAMA32, {"attention_bias": True}, "attention_bias=True"),
    (LLAMA32, {"mlp_bias": True}, "mlp_bias=True"),
    (LLAMA2, {"pretraining_tp": 2}, "pretraining_tp=2"),
    (LLAMA2, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    (LLAMA2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (LLAMA2, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    (LLAMA2, {"logits_scaling": 8.0}, "logits_scaling=8.0"),
    (LLAMA2, {"logit_cap": 0}, "logit_cap=0"),
    (LLAMA2, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
    (LLAMA2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    (LLAMA2, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
    (LLAMA2, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        LLAMA2,
        {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}},
        "rope_scaling.finetuned=True",
    ),
    (LLAMA2, {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2'"),
    (LLAMA2, {"rope_scaling": [1]}, r"rope_scaling=\[1\]"),
    (
        QWEN3,
        {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        "rope_parameters.mrope_section",
    ),
    (
        QWEN3,
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor=0.25",
    ),
    (QWEN3, {"rope_scaling": YARN}, "contradict"),
    (QWEN3, {"rope_theta": 1e4}, "contradict"),
    (MISTRAL, {"sliding_window": 4096}, "sliding_window=4096"),
    (QWEN25, {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window=4096"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
    (LLAMA2, {"hidden_size": "4096"}, "hidden_size='4096'"),
    (LLAMA2, {"hidden_size": 4096.5}, "hidden_size=4096.5"),
    (LLAMA2, {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    (LLAMA2, {"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
    (LLAMA2, {"rms_norm_eps": None}, "rms_norm_eps=None"),
    (LLAMA2, {"num_key_value_heads": 5}, "num_key_value_heads=5"),
    (LLAMA2, {"num_attention_heads": 33, "num_key_value_heads": 33}, "num_attention_heads=33"),
    (
        LLAMA2,
        {"num_attention_heads": 33, "num_key_value_heads": 33, "head_dim": 64},
        "num_attention_heads=33",
    ),
    (LLAMA2, {"is_causal": False}, "is_causal=False"),
    (LLAMA2, {"is_causal": None}, "is_causal=None"),  # as false, says transformers
    (LLAMA2, {"hidden_act": None}, "hidden_act=None"),
    (LLAMA2, {"attention_bias": 0}, "attention_bias=0"),
    (LLAMA2, {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
    (LLAMA2, {"max_sequence_length": 2048}, "max_sequence_length=2048"),
    (LLAMA2, {"architectures": ["LlamaForRewardModel"]}, "LlamaForRewardModel"),
    (LLAMA2, {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list"),
    (LLAMA2, {"model_type": ["llama"]}, r"model_type=\['llama'\]"),
    (LLAMA2, {"hidden_size": 4096.0}, "hidden_size=4096.0 must be a positive whole number"),
    (LLAMA2, {"hidden_size": True}, "hidden_size=True"),
    (LLAMA2, {"num_labels": 10**9}, "num_labels=1000000000 is larger than any model's"),
    (LLAMA2, {"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 is larger than any model's"),
    (LLAMA2, {"max_position_embeddings": 10**300}, "max_position_embeddings=1000.*is larger"),
    (LLAMA2, {"rms_norm_eps": 10**400}, "rms_norm_eps=1000.*is larger"),
    (LLAMA2, {"rope_theta": 1}, "rope_theta=1"),
    (LLAMA2, {"rope_scaling": {"rope_type": ["yarn"]}}, "rope type"),
    (
        LLAMA2,
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        "rope_scaling.type='yarn' contradict",
    ),
    (LLAMA2, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5 must be at least 1"),
    (
        LLAMA32,
        {"rope_scaling": LLAMA32["rope_scaling"] | {"low_freq_factor": 4.0}},
        "low_freq_factor=4.0 must be below",
    ),
    (LLAMA2, {"rope_scaling": YARN | {"original_max_position_embeddings": 2**24}}, "more than any model's"),
    (MISTRAL, {"num_key_value_heads": None}, "num_key_value_heads=None"),
    (QWEN3, {"head_dim": None}, "head_dim=None"),
    (QWEN25, {"use_sliding_window": 1}, "use_sliding_window=1"),
    (QWEN25, {"max_window_layers": "21"}, "max_window_layers='21'"),
    (QWEN3, {"layer_types": 4}, "layer_types=4"),
    (QWEN3, {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
]


@pytest.mark.parametrize(("config", "change", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refuses_by_name(config, change, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf(config | change)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_names_a_missing_key_and_the_file(key):
    with pytest.raises(ValueError, match=rf"some/config\.json(.|\n)*{key} is missing"):
        Architecture.from_hf({k: v for k, v in LLAMA2.items() if k != key}, source="some/config.json")


def test_lists_everything_that_is_wrong():
    with pytest.raises(ValueError) as error:
        Architecture.from_hf(LLAMA2 | {"hidden_act": "relu", "mup": 3, "vocab_size": -1})
    assert all(text in str(error.value) for text in ("hidden_act='relu'", "mup=3", "vocab_size=-1"))


def test_windows_that_no_sequence_reaches_are_accepted():
    assert Architecture.from_hf(MISTRAL | {"sliding_window": 32768}).max_positions == 32768
    assert (
        Architecture.from_hf(
            QWEN25 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 24}
        ).num_layers
        == 24
    )
    with pytest.raises(
        ValueError, match="sliding_window=4096"
    ):  # what transformers assumes if the key is absent
        Architecture.from_hf({k: v for k, v in MISTRAL.items() if k != "sliding_window"})


def test_only_null_is_unset():
    assert Architecture.from_hf(LLAMA2 | {"some_feature": None, "pruned_heads": {}}) == Architecture.from_hf(
        LLAMA2
    )
    for value in (False, 0, "", [], {}):
        with pytest.raises(ValueError, match="some_feature=.* is not understood"):
            Architecture.from_hf(LLAMA2 | {"some_feature": value})


def test_what_transformers_4_wrote_in_full_is_accepted():
    """A config.json with every key of the base class, as older versions saved it."""
    old = json.loads("""
    {"return_dict": true, "output_hidden_states": false, "output_attentions": false, "torchscript": false,
     "use_bfloat16": false, "tf_legacy_loss": false, "pruned_heads": {}, "chunk_size_feed_forward": 0,
     "is_encoder_decoder": false, "is_decoder": false, "cross_attention_hidden_size": null,
     "add_cross_attention": false, "tie_encoder_decoder": false, "max_length": 20, "min_length": 0,
     "do_sample": false, "early_stopping": false, "num_beams": 1, "num_beam_groups": 1,
     "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
     "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
     "encoder_no_repeat_ngram_size": 0, "bad_words_ids": null, "num_return_sequences": 1, "output_scores":
     false, "return_dict_in_generate": false, "forced_bos_token_id": null, "forced_eos_token_id": null,
     "remove_invalid_values": false, "exponential_decay_length_penalty": null, "suppress_tokens": null,
     "begin_suppress_tokens": null, "finetuning_task": null, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
     "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "tokenizer_class": null, "prefix": null, "pad_token_id":
     null, "sep_token_id": null, "decoder_start_token_id": null, "task_specific_params": null,
     "problem_type": null, "_attn_implementation_autoset": true, "rope_interleaved": false, "use_mrope":
     false, "max_sequence_length": 4096}
    """)
    assert Architecture.from_hf(LLAMA2 | old) == Architecture.from_hf(LLAMA2)


def test_absent_keys_mean_what_transformers_means():
    old = {
        k: v
        for k, v in LLAMA2.items()
        if k not in {"num_key_value_heads", "rope_scaling", "initializer_range", "tie_word_embeddings"}
    }
    assert Architecture.from_hf(old) == Architecture.from_hf(LLAMA2)
    assert Architecture.from_hf({k: v for k, v in QWEN3.items() if k != "head_dim"}).head_dim == 128


def test_reading_a_folder(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ValueError, match=r"config\.json is not a JSON object"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2))
    assert read_architecture(tmp_path) == Architecture.from_hf(LLAMA2)
    with pytest.raises(ValueError, match=r"config\.json is a file"):
        read_architecture(tmp_path / "config.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_architecture("x" * 5000)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model_type": "llama", "hidden_size": NaN}', "its hidden_size is NaN"),
        (b'{"model_type": "llama", "rms_norm_eps": -Infinity}', "its rms_norm_eps is -Infinity"),
        (b'{"model_type": "llama", "model_type": "qwen2"}', "it gives model_type twice"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"model_type": "ll\xe4ma"}', "utf-8"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "digits"),
        (b'[["model_type", "llama"]]', "it holds \\["),
        (b"", "Expecting value"),
    ],
    ids=["nan", "infinity", "twins", "deep", "latin", "huge", "list", "empty"],
)
def test_what_is_no_json_object_is_named(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"config\.json is not a JSON object \(.*{words}"):
        read_architecture(tmp_path)


def test_long_values_are_cut():
    with pytest.raises(ValueError) as error:
        Architecture.from_hf(
            LLAMA2
            | {"hidden_act": "x" * 10**6, "k" * 10**6: 1, "hidden_size": [0] * 10**6, "mlp_bias": 10**4000}
        )
    assert len(str(error.value)) < 2000


def test_positions_that_a_rollout_can_use():
    """vLLM makes a table of the angles of YaRN's positions, whatever max_position_embeddings says."""
    assert Architecture.from_hf(LLAMA2).served_positions == 4096
    assert Architecture.from_hf(CONFIGS["qwen25_yarn"]).served_positions == 32768
    short = YARN | {"factor": 2.5, "original_max_position_embeddings": 1024}
    assert Architecture.from_hf(LLAMA2 | {"rope_scaling": short}).served_positions == 2560


@pytest.mark.parametrize("ends", [7, [5, 7]])
def test_a_reward_model_is_not_padded_with_the_end_of_a_response(ends):
    """transformers scores the last token that is no padding."""
    arch, carry = Architecture.from_hf(CONFIGS["llama2"]), {"eos_token_id": ends, "pad_token_id": 7}
    assert arch.to_hf(head="sequence", carry=carry)["pad_token_id"] is None
    assert arch.to_hf(head="sequence", carry=carry | {"pad_token_id": 3})["pad_token_id"] == 3
    assert arch.to_hf(carry=carry)["pad_token_id"] == 7
