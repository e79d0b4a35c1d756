"""Data sets that one rank of a host reads for the others; rows that are tokenized in chunks."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.characters import characters
from verl_megatron.config import DataConfig
from verl_megatron.data import row_reader, shared
from verl_megatron.data.prompts import PromptDataset
from verl_megatron.data.shared import OncePerHost

TOKENIZER = characters()


def write(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def mixed_rows(count: int) -> list[dict]:
    """Rows of strings and chats, of different lengths; every seventh ends in an answer."""
    rows = []
    for number in range(count):
        text = f"question {number} " + "x" * (number % 40)
        turns = [{"role": "user", "content": text}]
        turns += [{"role": "assistant", "content": "answer"}] * (number % 7 == 0)
        rows.append({"prompt": turns if number % 3 else text, "answer": number, "level": number % 5})
    return rows


@pytest.mark.parametrize("chunk_rows", [1, 7, 512])
def test_chunks_of_any_size_give_the_same_rows(tmp_path, monkeypatch, chunk_rows):
    path = write(tmp_path / "train.jsonl", mixed_rows(100))
    config = DataConfig(train=path, max_prompt_tokens=60, overlong="drop")
    monkeypatch.setattr(row_reader, "CHUNK_ROWS", 1)
    alone = PromptDataset(path, TOKENIZER, config)
    monkeypatch.setattr(row_reader, "CHUNK_ROWS", chunk_rows)
    data = PromptDataset(path, TOKENIZER, config)
    assert list(data) == list(alone) and data.lengths == alone.lengths and data.notes == alone.notes
    assert data.dropped_first == alone.dropped_first and 0 < data.dropped < 60 and data.cut
    assert data.digest == alone.digest
    assert [data.place(at) for at in range(len(data))] == [alone.place(at) for at in range(len(alone))]


def test_large_rows_make_small_chunks(tmp_path):
    rows = [(number, {"prompt": "x" * (row_reader.CHUNK_CHARACTERS // 2)}) for number in range(5)]
    assert [len(chunk) for chunk in row_reader._chunks(iter(rows), sha256())] == [2, 2, 1]


@pytest.mark.parametrize("bad", [0, 1, 511, 512, 700, 1023])
def test_the_first_wrong_row_is_named_wherever_it_stands(tmp_path, bad):
    rows = [{"prompt": f"question {number}", "answer": 1} for number in range(1030)]
    rows[bad] = {"prompt": " ", "answer": 1}
    path = write(tmp_path / "train.jsonl", [*rows, "no JSON"])
    with pytest.raises(ValueError, match=rf"train\.jsonl, line {bad + 1}: the prompt is empty"):
        PromptDataset(path, TOKENIZER, DataConfig(train=path))


def test_rows_before_a_broken_line_come_first(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b"}, "no JSON"])
    with pytest.raises(ValueError, match=r"line 2: no key 'answer'"):
        PromptDataset(path, TOKENIZER, DataConfig(train=path))


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks of one host, as threads."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(shared, "_number", itertools.repeat(0))
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:

        def run(work):
            worlds: list[Any] = [
                SimpleNamespace(global_rank=rank, store=lambda name: dist.PrefixStore(name, store))
                for rank in range(2)
            ]
            futures = [pool.submit(work, rank, OncePerHost(world)) for rank, world in enumerate(worlds)]
            return [future.result(30) for future in futures]

        yield run


@pytest.mark.parametrize("in_memory", [0, 1 << 20])
def test_the_second_rank_opens_what_the_first_has_read(tmp_path, monkeypatch, ranks, in_memory):
    monkeypatch.setattr("verl_megatron.data.formats.item_store.IN_MEMORY", in_memory)
    path = write(tmp_path / "train.jsonl", mixed_rows(50))
    readers = []

    def work(rank, once):
        def read():
            readers.append(rank)
            return PromptDataset(path, TOKENIZER, DataConfig(train=path))

        with once:
            return [once(read, TOKENIZER) for _ in range(2)]

    (first, _), (second, again) = ranks(work)
    assert readers == [0, 0]
    assert list(first) == list(second) == list(again) and first.lengths == second.lengths
    assert second[7] == first[7] and second.notes == first.notes and second.place(9) == first.place(9)
    assert second._tokenizer is TOKENIZER


def test_the_error_of_the_first_rank_is_the_error_of_all(tmp_path, ranks):
    path = write(tmp_path / "train.jsonl", ["no JSON"])

    def work(rank, once):
        with once, pytest.raises(ValueError) as error:
            once(lambda: PromptDataset(path, TOKENIZER, DataConfig(train=path)), TOKENIZER)
        return str(error.value)

    said = ranks(work)
    assert said[0] == said[1] and "line 1: not valid JSON" in said[0]


@pytest.mark.parametrize("why", ["the first rank leaves", "the process cannot be seen"])
def test_a_rank_that_gets_nothing_reads_by_itself(tmp_path, monkeypatch, ranks, why):
    path = write(tmp_path / "train.jsonl", mixed_rows(5))
    if why != "the first rank leaves":
        monkeypatch.setattr("os.getpid", lambda: 1 << 30)

    def work(rank, once):
        def read():
            return PromptDataset(path, TOKENIZER, DataConfig(train=path))

        with once:
            return None if rank == 0 and why == "the first rank leaves" else once(read, TOKENIZER)

    _, second = ranks(work)
    assert len(second) == 5
