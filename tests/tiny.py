"""Tiny Hugging Face models of each family, with random biases and norms so that mistakes show."""

from pathlib import Path

import torch

from parallel.weights.architecture import Architecture

SIZES = dict(
    vocab_size=150,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
)
ROPE = {
    "default": dict(rope_type="default", rope_theta=10_000.0),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=10_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "linear": dict(rope_type="linear", rope_theta=10_000.0, factor=2.0),
    "yarn": dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=64),
}
# name: (class stem in transformers, differences from SIZES)
FAMILIES = {
    "llama": ("Llama", dict(tie_word_embeddings=False)),
    "llama_tied_llama3": ("Llama", dict(tie_word_embeddings=True, rope="llama3", num_key_value_heads=2)),
    "llama_linear": ("Llama", dict(tie_word_embeddings=False, rope="linear")),
    "mistral": ("Mistral", dict(tie_word_embeddings=False, sliding_window=None, head_dim=16)),
    "mistral_tied": ("Mistral", dict(tie_word_embeddings=True, sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=False, num_key_value_heads=2)),
    "qwen2_tied_yarn": ("Qwen2", dict(tie_word_embeddings=True, rope="yarn")),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=False, head_dim=16)),
    "qwen3_tied": ("Qwen3", dict(tie_word_embeddings=True, head_dim=16)),
}

SHARP_VOCABULARY = 12  # few tokens, so that all that may be sampled can be enumerated

# Changes for models that vLLM serves on a CPU too, where the size of a head has to be 32, 64, ...;
# num_key_value_heads may stay below tp.
SERVED = {
    family: dict(
        hidden_size=64 if "head_dim" in differences else 128,
        num_attention_heads=4,
        num_key_value_heads=1 if number % 2 else 2,
        head_dim=32,
    )
    for number, (family, (_, differences)) in enumerate(FAMILIES.items())
}


def tiny_architecture(model_type: str = "llama", **changes) -> Architecture:
    """A shape for tests of the weight map, plans and folders, where only sizes count."""
    sizes = dict(hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=24)
    others = dict(vocab_size=90, norm_eps=1e-6, max_positions=64)
    return Architecture(model_type=model_type, **sizes | others | changes)


def make_hf(family: str, head: str = "ForCausalLM", *, seed: int = 0, **changes):
    """A float32 model; `head` may also be ForTokenClassification or ForSequenceClassification (one label)."""
    import transformers

    stem, differences = FAMILIES[family]
    settings = SIZES | differences | changes
    settings["rope_parameters"] = dict(ROPE[settings.pop("rope", "default")])
    if head != "ForCausalLM":
        settings["num_labels"] = 1
    config = getattr(transformers, f"{stem}Config")(
        **settings, initializer_range=0.08, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}{head}")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def write_hf(folder: Path, family: str, head: str = "ForCausalLM", **settings):
    """Save such a model as a folder and return it."""
    model = make_hf(family, head, **settings)
    model.save_pretrained(folder)
    return model


def write_sharp(folder: Path, *, head_dim: int) -> None:
    """Save a Llama of a small vocabulary with clear preferences: a small model's text is random otherwise."""
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, num_hidden_layers=2)
    model = make_hf("llama", seed=1, vocab_size=SHARP_VOCABULARY, **sizes)
    model.lm_head.weight.data.mul_(3)
    model.save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Save a tokenizer that turns "w3 w149" into [3, 149], over the vocabulary of the models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    names = [*special.values(), *(f"w{i}" for i in range(len(special), SIZES["vocab_size"]))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
