"""A small real tokenizer of one id a character, for tests that count them."""

import tokenizers
import torch  # noqa: F401  (transformers looks for it when it is imported)
from transformers import PreTrainedTokenizerFast

from verl_megatron.data.tokenizer import Tokenizer

LOOP = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>\n{% endif %}{% endfor %}"
)
TEMPLATE = LOOP + "{% if add_generation_prompt %}<assistant>{% endif %}"


def characters(chat_template: str = TEMPLATE) -> Tokenizer:
    """One id a character, its code point; 1 begins, 2 ends, 0 is unknown."""
    vocabulary = {chr(code): code for code in (10, *range(32, 127))} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    built.decoder = tokenizers.decoders.Fuse()
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=built, chat_template=chat_template, **special))
