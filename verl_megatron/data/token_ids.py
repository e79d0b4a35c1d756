"""Token ids of many texts at once."""

from collections.abc import Sequence
from typing import Any

from parallel.runtime.refusal import short_repr


def token_ids(hf: Any, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Return the token ids that the tokenizer `hf` gives each text, neither cut nor padded.

    Raises:
        ValueError: it cannot encode one of them.
    """
    try:
        if (backend := _backend(hf)) is not None:
            found = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [one.ids for one in found]
        return hf(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
    except Exception as error:  # transformers, tokenizers and sentencepiece raise various types
        said = type(error).__name__
        raise ValueError(
            f"the tokenizer cannot encode {short_repr(texts[0])} ({said}); remove what is no text"
        ) from None


def _backend(hf: Any) -> Any:
    """Return the object of the tokenizers library inside `hf`, ready to encode; None if there is more to it.

    Called directly, it leaves out the places of tokens in the text, a fifth of the time.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(hf, PreTrainedTokenizerFast):
        return None
    own = (getattr(type(hf), name) for name in ("__call__", "_encode_plus"))
    usual = (getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus"))
    backend = hf.backend_tokenizer
    if any(one is not other for one, other in zip(own, usual)) or not hasattr(backend, "encode_batch_fast"):
        return None
    if backend.truncation is not None:  # as tokenizer.json may say
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != hf.split_special_tokens:  # another thread may be encoding
        backend.encode_special_tokens = hf.split_special_tokens
    return backend
