"""Files spoiled at random (with a fixed seed): each is read, or refused by file and line, soon."""

import json
import pickle
import random
import re
import time
from collections import Counter

from tests.characters import characters
from verl_megatron.config import DataConfig, SFTDataConfig
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset

TRIALS = 400
TOKENIZER = characters()
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
ROWS = (
    {"prompt": "2+3", "answer": 5, "response": "5", "level": [1, {"a": None}]},
    {"prompt": [{"role": "system", "content": "be brief"}, USER], "answer": "ho", "response": "ho"},
    {"prompt": [USER, ANSWER, USER, ANSWER], "answer": {"a": [1.5, True]}},
)
WORDS = [
    "",
    " ",
    "\0",
    "\ud800",
    "</s>",
    "<s>",
    "\u4e2d\U0001f600",
    "x" * 3_000_000,
    "{{ 1/0 }}",
    "\r\n",
    "assistant",
    "tool",
]
VALUES = [
    *WORDS,
    None,
    True,
    0,
    -1.5,
    10**400,
    [],
    {},
    [[]],
    [USER] * 300,
    [ANSWER],
    {"role": "user"},
    [{"type": "text", "text": "hi"}],
    [None],
]
BYTES = [
    b"\0",
    b"\n",
    b"\r",
    b'"',
    b"{",
    b"}",
    b"[" * 2000,
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"\xef\xbb\xbf",
    b"9" * 5000,
    b"PAR1",
]


def spoiled(value, rng: random.Random):
    """`value` with something in it replaced, added, removed or doubled."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(VALUES)
    value = value.copy()
    at = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    match rng.randrange(5):
        case 0:
            del value[at]
        case 1 if isinstance(value, dict):
            value[rng.choice(WORDS)] = rng.choice(VALUES)
        case 1:
            value.insert(at, rng.choice(VALUES))
        case _:
            value[at] = spoiled(value[at], rng)
    return value


def written(rng: random.Random) -> bytes:
    """A file of a sound row and a spoiled one, or of sound rows with spoiled bytes."""
    sound = [json.dumps(rng.choice(ROWS)).encode() for _ in range(2)]
    if rng.random() < 0.6:
        return b"\n".join([sound[0], json.dumps(spoiled(rng.choice(ROWS), rng)).encode()])
    content = b"\n".join(sound)
    for _ in range(rng.randrange(1, 4)):
        at, length = rng.randrange(len(content) + 1), rng.choice((0, 0, 1, 5))
        content = content[:at] + rng.choice(BYTES) + content[at + length :]
    return content


def test_spoiled_files_are_read_or_refused_by_line(tmp_path):
    rng, path, counts = random.Random(7), tmp_path / "rows.jsonl", Counter()
    refusal = re.compile(rf"{re.escape(str(path))}(, line [12345]: | )")
    for trial in range(TRIALS):
        path.write_bytes(written(rng))
        kind, config = rng.choice(((PromptDataset, DataConfig), (DemonstrationDataset, SFTDataConfig)))
        started = time.monotonic()
        try:
            rows = kind(str(path), TOKENIZER, config(train=str(path)), vocab_size=127)
        except ValueError as error:
            assert refusal.search(str(error)) and len(str(error)) < 1000, f"trial {trial}: {error}"
            counts["refused"] += 1
        else:
            assert pickle.loads(pickle.dumps(list(rows))) == list(rows)
            json.dumps([getattr(row, "answer", None) for row in rows], ensure_ascii=False).encode()
            counts["accepted"] += 1
        assert time.monotonic() - started < 60, f"trial {trial}"
    assert sum(counts.values()) == TRIALS and min(counts["accepted"], counts["refused"]) > TRIALS // 10, (
        counts
    )
