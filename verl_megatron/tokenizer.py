"""Text to token ids and back, thin over Hugging Face tokenizers; only local files are read and no remote code runs."""

from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")

Messages = list[dict[str, str]]  # chat messages: {"role": ..., "content": ...}


class Tokenizer:
    """A Hugging Face tokenizer (`hf`) with the four operations training needs."""

    def __init__(self, hf):
        self.hf = hf

    def __len__(self) -> int:
        """Number of token ids, added tokens included."""
        return len(self.hf)

    @property
    def eos_token_id(self) -> int:
        """Token that ends a response.

        Raises:
            ValueError: the tokenizer has none.
        """
        if self.hf.eos_token_id is None:
            raise ValueError(f"the tokenizer in {self.hf.name_or_path} has no end-of-sequence token; name one as eos_token in its tokenizer_config.json")
        return self.hf.eos_token_id

    def prompt_text(self, prompt: str | Messages) -> str:
        """What the model reads: a string as it is, chat messages through the chat template with the generation prompt.

        Raises:
            ValueError: neither a string nor messages, or messages without a chat template.
        """
        if isinstance(prompt, str):
            return prompt
        if not (isinstance(prompt, list) and prompt and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)):
            raise ValueError(f"a prompt must be a string or a non-empty list of messages with role and content, got {prompt!r}")
        if not self.hf.chat_template:
            raise ValueError(f"the tokenizer in {self.hf.name_or_path} has no chat template for a list of messages; add chat_template.jinja or give prompts as strings")
        return self.hf.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)

    def encode_prompt(self, prompt: str | Messages) -> list[int]:
        """Token ids of a prompt. Strings get the special tokens the tokenizer puts in front; a chat template writes its own."""
        text = self.prompt_text(prompt)
        ids = self.hf.encode(text, add_special_tokens=isinstance(prompt, str))
        while len(ids) > 1 and ids[-1] == self.hf.eos_token_id:  # some tokenizers end every text; a prompt has to go on
            ids.pop()
        return ids

    def encode_response(self, response: str) -> list[int]:
        """Token ids of a response, ended by the end-of-sequence token."""
        return self.hf.encode(response, add_special_tokens=False) + [self.eos_token_id]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.hf.decode(ids, skip_special_tokens=True)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, the fast one where there is one.

    Raises:
        ValueError: no such folder, or no tokenizer in it.
    """
    from transformers import AutoTokenizer  # seconds to import: only who needs a tokenizer pays

    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"tokenizer folder {folder} does not exist; give a local Hugging Face folder")
    # Without this check transformers may build an empty tokenizer from config.json alone.
    if not has_tokenizer(folder):
        raise ValueError(f"folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the model's tokenizer files into it")
    return Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
