"""Published model shapes by name, as config.json contents: for plans and benchmarks without a folder."""

_LLAMA3 = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5,
    rope_theta=500_000.0, vocab_size=128_256, max_position_embeddings=8192, tie_word_embeddings=False,
    attention_bias=False, initializer_range=0.02, torch_dtype="bfloat16", num_key_value_heads=8,
)  # fmt: skip
_LLAMA31 = dict(
    max_position_embeddings=131_072,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)
_QWEN25 = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", rms_norm_eps=1e-6,
    rope_theta=1_000_000.0, vocab_size=152_064, max_position_embeddings=32_768, tie_word_embeddings=False,
    use_sliding_window=False, initializer_range=0.02, torch_dtype="bfloat16",
)  # fmt: skip

SHAPES: dict[str, dict] = {
    "llama3-1b": _LLAMA3
    | dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "llama3-8b": _LLAMA3
    | dict(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32),
    "llama3.1-8b": _LLAMA3
    | dict(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32)
    | _LLAMA31,
    "llama3-70b": _LLAMA3
    | dict(hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64),
    "llama3-405b": _LLAMA3
    | dict(hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126, num_attention_heads=128),
    "qwen2.5-1.5b": _QWEN25
    | dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _QWEN25
    | dict(
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "qwen2.5-32b": _QWEN25
    | dict(
        hidden_size=5120,
        intermediate_size=27_648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "qwen2.5-72b": _QWEN25
    | dict(
        hidden_size=8192,
        intermediate_size=29_568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def shape(name: str, *, layers: int = 0) -> dict:
    """Return the config.json of a published shape, optionally with another number of layers.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in SHAPES:
        raise ValueError(f"no built-in shape is named {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name] | (dict(num_hidden_layers=layers) if layers else {})
