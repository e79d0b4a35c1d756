"""The tokenizer's four operations against sentencepiece and transformers themselves."""

import json
import os
import shutil

import pytest
import sentencepiece
import torch  # noqa: F401  (transformers looks for it when it is imported)

from verl_megatron.data.token_ids import token_ids
from verl_megatron.data.tokenizer import load_tokenizer
from verl_megatron.examples.toy import make_rows, write_tokenizer

MESSAGES = [{"role": "user", "content": "sort fig apple :"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, [f"{row['prompt']} {row['response']}" for row in make_rows(1)["sft"][:2000]])
    return path


def test_ids_equal_sentencepiece(folder):
    tokenizer, truth = (
        load_tokenizer(folder),
        sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")),
    )
    for text in ("sort fig apple kiwi :", "an unseen WORD, 12 é", "line\nbreak"):
        assert tokenizer.encode_prompt(text) == [truth.bos_id()] + truth.encode(text)
        assert tokenizer.encode_response(text) == truth.encode(text) + [truth.eos_id()]
        assert tokenizer.decode(tokenizer.encode_response(text)) == text
    assert len(tokenizer) == truth.vocab_size() and tokenizer.eos_token_id == truth.eos_id()


def test_prompt_and_response_join_as_one_text(folder):
    tokenizer = load_tokenizer(folder)
    joined = tokenizer.encode_prompt("sort fig apple : apple fig") + [tokenizer.eos_token_id]
    assert tokenizer.encode_prompt("sort fig apple :") + tokenizer.encode_response("apple fig") == joined


def test_messages_go_through_the_chat_template(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.prompt_text(MESSAGES) == "<s>user: sort fig apple :\nassistant:"
    ids = tokenizer.encode_prompt(MESSAGES)
    assert ids == tokenizer.hf.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.hf.bos_token_id) == 1


def test_a_chats_response_follows_its_prompt_as_in_one_text(folder):
    tokenizer = load_tokenizer(folder)
    before, behind = tokenizer.demonstration_text(MESSAGES, "apple fig")
    assert before + behind == "<s>user: sort fig apple :\nassistant: apple fig\n</s>"
    ids, response_ids = tokenizer.encode_chat(before, behind)
    assert ids == tokenizer.encode_prompt(MESSAGES) and response_ids[-1] == tokenizer.eos_token_id
    assert ids + response_ids == tokenizer.hf.encode(before + behind, add_special_tokens=False)


def test_text_that_is_none_is_refused(folder):
    tokenizer = load_tokenizer(folder)
    for encode in (tokenizer.encode_prompt, tokenizer.encode_response):
        with pytest.raises(ValueError, match=r"cannot encode 'x\\ud800'"):
            encode("x\ud800")


def test_a_tokenizer_that_ends_every_text_does_not_end_prompts(folder):
    tokenizer = load_tokenizer(folder)
    expected = tokenizer.encode_prompt("sort fig")
    tokenizer.hf.add_bos_token = tokenizer.hf.add_eos_token = True
    tokenizer.hf.update_post_processor()
    assert tokenizer.hf.encode("sort fig") == expected + [tokenizer.eos_token_id]
    assert tokenizer.encode_prompt("sort fig") == expected


def test_messages_without_a_template_are_refused(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer.model"):
        shutil.copy(folder / name, tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_prompt(MESSAGES)
    tokenizer.hf.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        tokenizer.encode_response("fig")


@pytest.mark.parametrize("prompt", [7, None, [], ["fig"], [{"role": "user"}]])
def test_what_is_no_prompt_is_refused(folder, prompt):
    with pytest.raises(ValueError, match="a string or a non-empty list of messages"):
        load_tokenizer(folder).encode_prompt(prompt)


def test_folders_without_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "gone")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "chat_template.jinja", "added_tokens.json", "merges.txt"]
)
def test_a_pipe_is_refused_and_not_waited_for(folder, tmp_path, name):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(ValueError, match=rf"{name} is no regular file; copy"):
        load_tokenizer(copy)


def test_texts_are_encoded_as_by_the_tokenizer_itself(folder, tmp_path):
    """Truncation and padding of its file do not count, and a class with an encoding of its own keeps it."""
    texts = ["sort fig apple kiwi :", "a", "an unseen WORD, 12 é</s> x"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    written["truncation"] = dict(direction="Right", max_length=4, strategy="LongestFirst", stride=0)
    written["padding"] = dict(strategy="BatchLongest", direction="Right", pad_to_multiple_of=None)
    written["padding"] |= dict(pad_id=0, pad_type_id=0, pad_token="<unk>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    for special in (True, False):
        expected = [load_tokenizer(folder).hf.encode(text, add_special_tokens=special) for text in texts]
        for place in (folder, tmp_path):
            assert token_ids(load_tokenizer(place).hf, texts, add_special_tokens=special) == expected
    hf = load_tokenizer(folder).hf
    hf.split_special_tokens = True
    split = token_ids(hf, texts, add_special_tokens=False)
    assert split == hf(texts, add_special_tokens=False)["input_ids"] != expected
    own = type("Own", (type(hf),), {"_encode_plus": lambda self, text, **_: {"input_ids": [[7]] * len(text)}})
    hf.__class__ = own
    assert token_ids(hf, texts, add_special_tokens=False) == [[7]] * 3
