"""Preference pairs from JSON lines, in the forms that data sets have."""

import json

import pytest

from tests.characters import characters
from verl_megatron.config import PairDataConfig
from verl_megatron.data.pairs import PairDataset

TOKENIZER = characters()
END = TOKENIZER.hf.eos_token
ASKED = [{"role": "user", "content": "hi"}]


def answer(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def read(tmp_path, *rows: dict, **settings) -> PairDataset:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairDataset(path, TOKENIZER, PairDataConfig(train=str(path), **settings))


def test_strings(tmp_path):
    (pair,) = read(tmp_path, {"prompt": "2+3", "chosen": "5", "rejected": "66"})
    (prompt, chosen), (same, rejected) = pair.samples()
    assert prompt == same == [1, *map(ord, "2+3")]
    assert chosen[:-1] == [ord("5")] and rejected[:-1] == [ord("6")] * 2 and chosen[-1] == rejected[-1]


def test_messages_in_all_forms_are_the_same_pair(tmp_path):
    """Strings after a chat, assistant turns, whole conversations, and the question as a string."""
    pairs = read(
        tmp_path,
        {"prompt": ASKED, "chosen": "ho", "rejected": "no"},
        {"prompt": ASKED, "chosen": answer("ho"), "rejected": answer("no")},
        {"chosen": ASKED + answer("ho"), "rejected": ASKED + answer("no")},
        {"prompt": "hi", "chosen": ASKED + answer("ho"), "rejected": ASKED + answer("no")},
    )
    assert len(pairs) == 4 and all(pair == pairs[0] for pair in pairs)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "no key 'rejected' (data.rejected_key)"),
        ({"chosen": "b", "rejected": "c"}, "no key 'prompt' (data.prompt_key)"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same response"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "'chosen' (data.chosen_key) must be a string, or"),
        ({"prompt": "a", "chosen": "b", "rejected": "b" + END}, "'rejected' are the same response"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected': the response is empty"),
        ({"prompt": "a", "chosen": " " + END, "rejected": "c"}, "'chosen': the response is empty"),
        ({"prompt": ASKED, "chosen": "b", "rejected": answer("")}, "'rejected': the assistant turn is empty"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "'prompt': the prompt is empty"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "'prompt': a prompt must be a string or"),
        ({"prompt": "a", "chosen": answer("b"), "rejected": "c"}, "'chosen' is a message, and 'prompt' is"),
        ({"prompt": ASKED, "chosen": answer("b") * 2, "rejected": answer("c")}, "end in one assistant turn"),
        ({"prompt": "a", "chosen": ["x", *answer("b")], "rejected": "c"}, "end in one assistant turn"),
        ({"prompt": "a", "chosen": [{"role": "user"}, *answer("b")], "rejected": "c"}, "before 'chosen' has"),
        ({"chosen": [{}, *answer("b")], "rejected": [{}, *answer("c")]}, "'chosen': a prompt must be"),
        ({"chosen": ASKED + answer("b"), "rejected": ASKED * 2 + answer("c")}, "answer different prompts"),
        ({"prompt": "you", "chosen": ASKED + answer("b"), "rejected": ASKED + answer("c")}, "is not|are not"),
        ({"prompt": ASKED + answer("b"), "chosen": "c", "rejected": "d"}, "ends in an assistant turn"),
        ({"prompt": "a", "chosen": "b" * 99, "rejected": "c"}, "more than data.max_tokens=64"),
    ],
)
def test_a_bad_pair_is_refused_with_its_line(tmp_path, row, words):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ValueError) as error:
        read(tmp_path, good, row, max_tokens=64)
    assert ", line 2: " in str(error.value)
    assert any(part in str(error.value) for part in words.split("|")), error.value


@pytest.mark.parametrize(
    ("settings", "both"),
    [
        ({"chosen_key": "rejected"}, "data.chosen_key and data.rejected_key are both 'rejected'"),
        ({"rejected_key": "prompt"}, "data.prompt_key and data.rejected_key are both 'prompt'"),
        ({"prompt_key": "chosen"}, "data.prompt_key and data.chosen_key are both 'chosen'"),
    ],
)
def test_two_settings_of_one_key_are_refused(tmp_path, settings, both):
    with pytest.raises(ValueError, match=both):
        read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, **settings)


def test_the_longer_response_counts(tmp_path):
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * (12 - n)} for n in (6, 1, 11)]
    pairs = read(tmp_path, *rows, max_tokens=10, overlong="drop")
    assert len(pairs) == 1 and pairs.dropped == 2
