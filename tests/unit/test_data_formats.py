"""Parquet, Arrow, CSV and JSON lines give the same prompts; what is wrong in a file is refused by name."""

import csv
import datetime
import decimal
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.characters import characters
from verl_megatron.config import DataConfig, PairDataConfig, SFTDataConfig
from verl_megatron.data.formats import arrow_tables, item_store
from verl_megatron.data.formats.item_store import ItemStore
from verl_megatron.data.formats.sources import find_files, source_problem
from verl_megatron.data.pairs import PairDataset
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset

TOKENIZER = characters()
TEXTS = [
    {"prompt": f'say "{word}", then\n{word * 3}', "answer": f"{number}", "level": f"0{number}"}
    for number, word in enumerate(["fig", "null", "NA", "007", "1.50", "true", "a,b", " x "])
]
CHATS = [
    {
        "data_source": "openai/gsm8k" if number % 2 else "math",
        "prompt": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"what is {number} + 2?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
        "extra_info": {"index": number, "split": "train"},
    }
    for number in range(5)
]


def cells(row: dict) -> list[str]:
    return [value if isinstance(value, str) else json.dumps(value) for value in row.values()]


def write_csv(path: Path, rows: list[dict], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(rows[0])
        writer.writerows(map(cells, rows))


def write_arrow(path: Path, table: pa.Table, new=pa.ipc.new_file) -> None:
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write(path: Path, rows: list[dict]) -> Path:
    """Write rows in the format that the suffix says."""
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=3)
    elif path.suffix == ".arrow":
        write_arrow(path, table)
    elif path.suffix == ".stream":
        write_arrow(path, table, pa.ipc.new_stream)
    else:
        write_csv(path, rows, "," if path.suffix == ".csv" else "\t")
    return path


FORMATS = ["rows.jsonl", "rows.parquet", "rows.arrow", "rows.stream", "rows.csv", "rows.tsv"]


def prompts_of(path: Path | str, **settings) -> list:
    return list(PromptDataset(path, TOKENIZER, DataConfig(train=path, **settings)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
def test_every_format_gives_the_same_prompts(tmp_path, rows, name):
    expected = prompts_of(write(tmp_path / "rows.jsonl", rows))
    assert [prompt.answer for prompt in expected[:2]] == (["0", "1"] if rows is TEXTS else ["2", "3"])
    assert prompts_of(write(tmp_path / name, rows)) == expected


def test_a_file_is_known_by_its_content(tmp_path):
    for name in ("rows.parquet", "rows.arrow", "rows.stream", "rows.jsonl"):
        other = write(tmp_path / name, TEXTS).rename(tmp_path / f"{name}.data")
        assert len(prompts_of(other)) == len(TEXTS)
    (tmp_path / "rows.csv").write_text('{"prompt": "a", "answer": "b"}\n')
    assert find_files(str(tmp_path / "rows.csv"))[0].kind == "JSON lines"


def test_folders_and_lists_are_read_in_order(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (10, 2, 1):
        write(folder / f"part-{number}.parquet", [TEXTS[number % 8]])
    (folder / "README.md").write_text("not data")
    (folder / ".part-3.parquet").write_text("not data")
    assert [Path(file.path).name for file in find_files(str(folder))] == [
        "part-1.parquet",
        "part-2.parquet",
        "part-10.parquet",
    ]
    whole = prompts_of(write(tmp_path / "whole.jsonl", [TEXTS[1], TEXTS[2], TEXTS[2], TEXTS[0]]))
    more = write(tmp_path / "more.csv", TEXTS[:1])
    config = DataConfig(train=[folder, more])
    assert config.train == f"{folder},{more}"
    dataset = PromptDataset(config.train, TOKENIZER, config)
    assert list(dataset) == whole
    assert [dataset.place(index) for index in (1, 3)] == [
        f"{folder}/part-2.parquet, row 1",
        f"{more}, line 2",
    ]


def test_a_folder_of_the_datasets_library_is_one_of_arrow_streams(tmp_path):
    """Its save_to_disk writes these files."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for number in range(2):
            path = tmp_path / split / f"data-0000{number}-of-00002.arrow"
            write(path.with_suffix(".stream"), CHATS[number::2]).rename(path)
        (tmp_path / split / "state.json").write_text("{}")
        (tmp_path / split / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "is a folder of several splits (test, train); name one of them" == source_problem(str(tmp_path))
    expected = prompts_of(write(tmp_path / "rows.jsonl", CHATS[0::2] + CHATS[1::2]))
    assert prompts_of(tmp_path / "train") == expected


# ---- columns -------------------------------------------------------------------------------------------


def test_verls_and_trls_columns_are_recognized_and_named_once(tmp_path):
    path = write(tmp_path / "verl.parquet", CHATS)
    dataset = PromptDataset(path, TOKENIZER, DataConfig(train=path))
    assert dataset.notes == [f"{path}: 'reward_model.ground_truth' is read as data.answer_key"]
    assert dataset[1].extra["extra_info"] == {"index": 1, "split": "train"}
    assert dataset[1].extra["data_source"] == "openai/gsm8k"
    turns = [{"messages": row["prompt"], "solution": row["reward_model"]["ground_truth"]} for row in CHATS]
    path = write(tmp_path / "trl.parquet", turns)
    other = PromptDataset(path, TOKENIZER, DataConfig(train=path))
    assert [prompt.prompt_token_ids for prompt in other] == [prompt.prompt_token_ids for prompt in dataset]
    assert [prompt.answer for prompt in other] == [prompt.answer for prompt in dataset]
    assert other.notes == [
        f"{path}: 'messages' is read as data.prompt_key, 'solution' is read as data.answer_key"
    ]


def test_verls_parquet_trls_messages_and_json_lines_are_the_same_token_for_token(tmp_path):
    """Questions as GSM8K has them, with Qwen's chat template; one of TRL's rows still has its answer."""
    turns = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    opened = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    qwen = characters("{% for m in messages %}" + turns + "{% endfor %}" + opened)
    trl = [{"messages": list(row["prompt"]), "answer": row["reward_model"]["ground_truth"]} for row in CHATS]
    trl[2]["messages"].append({"role": "assistant", "content": "4"})
    lines = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in CHATS]
    files = [("verl.parquet", CHATS), ("trl.parquet", trl), ("trl.jsonl", trl), ("rows.jsonl", lines)]
    found = []
    for name, rows in files:
        path = write(tmp_path / name, rows)
        data = PromptDataset(path, qwen, DataConfig(train=path))
        found.append([(one.text, one.prompt_token_ids, one.answer) for one in data])
    assert found == [found[0]] * 4 and len(found[0]) == 5
    assert found[0][0][0].endswith("<|im_start|>user\nwhat is 0 + 2?<|im_end|>\n<|im_start|>assistant\n")


def test_trls_demonstrations_and_pairs(tmp_path):
    turn = {"role": "assistant", "content": "four"}
    user = [{"role": "user", "content": "2 + 2?"}]
    same = [
        ({"messages": [*user, turn]}, "messages"),
        ({"prompt": user, "completion": [turn]}, "completion"),
        ({"prompt": user, "completion": "four"}, "completion"),
        ({"prompt": user, "response": "four"}, ""),
    ]
    found = []
    for number, (row, recognized) in enumerate(same):
        path = write(tmp_path / f"{number}.parquet", [row])
        dataset = DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path))
        found.append(dataset[0])
        noted = f"{path}: '{recognized}' is read as data.prompt_key"
        if recognized == "completion":
            noted = noted.replace("prompt_key", "response_key")
        assert dataset.notes == [noted] * bool(recognized)
    assert all(one == found[0] for one in found)
    rows = [{"prompt": user, "chosen": [turn], "rejected": [turn | {"content": "five"}]}]
    pairs = []
    for name in FORMATS:
        path = write(tmp_path / name, rows)
        pairs += PairDataset(path, TOKENIZER, PairDataConfig(train=path))
    assert pairs == pairs[:1] * len(FORMATS)


def test_dotted_keys_go_into_objects_unless_a_column_has_that_name(tmp_path):
    rows = [{"meta": {"question": {"text": "a"}, "truth": 5}, "meta.truth": 6}]
    path = write(tmp_path / "rows.parquet", rows)
    (prompt,) = prompts_of(path, prompt_key="meta.question.text", answer_key="meta.truth")
    assert (prompt.text, prompt.answer) == ("a", 6)
    with pytest.raises(
        ValueError, match=r"row 1: no key 'meta.question.words' \(data.prompt_key\); the row has"
    ):
        prompts_of(path, prompt_key="meta.question.words")


def test_values_of_other_types_become_those_of_json(tmp_path):
    rows = {
        "prompt": pa.array(["a", "b"]).dictionary_encode(),
        "answer": pa.array([float("nan"), 2.5]),
        "when": pa.array([datetime.datetime(2026, 1, 2), None]),
        "price": pa.array([decimal.Decimal("1.50"), None]),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        "image": pa.array([b"\xff", None]),
        "deep": pa.array([[{"x": [float("nan")]}], None]),
    }
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table(rows), path)
    dataset = PromptDataset(path, TOKENIZER, DataConfig(train=path))
    first, second = dataset
    assert (first.answer, second.answer) == (None, 2.5)
    assert first.extra == {
        "when": "2026-01-02T00:00:00",
        "price": "1.50",
        "map": {"k": 1},
        "deep": [{"x": [None]}],
    }
    assert dataset.notes == [f"{path}: columns of types that are not read: 'image' (binary)"]


# ---- files that are refused ----------------------------------------------------------------------------


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * keep)])


def nested(depth: int) -> pa.Array:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return pa.array([value])


def flipped(path: Path) -> None:
    """Change bytes of the data pages, where only decoding shows it."""
    content = bytearray(path.read_bytes())
    for at in range(40, 200):
        content[at] ^= 0x5A
    path.write_bytes(content)


TWICE = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["prompt", "prompt"])
INFINITE = pa.table({"prompt": ["a", "b"], "answer": [1.0, float("inf")]})
BAD = {
    "cut.parquet": (lambda path: cut(write(path, TEXTS), 0.5), "damaged Parquet file"),
    "cut.arrow": (lambda path: cut(write(path, TEXTS), 0.9), "damaged Arrow file"),
    "flipped.parquet": (lambda path: flipped(write(path, TEXTS)), "damaged Parquet file"),
    "text.parquet": (lambda path: path.write_text("prompt,answer\n"), "is named .parquet and does not begin"),
    "empty.parquet": (lambda path: path.write_bytes(b""), "is named .parquet and does not begin"),
    "magic.arrow": (lambda path: path.write_bytes(b"ARROW1\0\0" + bytes(50)), "damaged Arrow file"),
    "stream.data": (
        lambda path: path.write_bytes(b"\xff" * 4 + b"\x10\0\0\0" + bytes(8)),
        "damaged Arrow stream",
    ),
    "twice.parquet": (lambda path: parquet.write_table(TWICE, path), "'prompt' stands twice"),
    "null.parquet": (
        lambda path: write(path, [{"prompt": None, "answer": ""}]),
        "row 1: column 'prompt': a prompt must be a string",
    ),
    "number.parquet": (lambda path: write(path, [{"prompt": 3, "answer": ""}]), "got 3"),
    "bytes.parquet": (lambda path: write(path, [{"prompt": b"a", "answer": ""}]), "is of the type binary"),
    "infinite.parquet": (
        lambda path: parquet.write_table(INFINITE, path),
        "row 2, column 'answer': a number is inf",
    ),
    "deep.parquet": (
        lambda path: parquet.write_table(pa.table({"prompt": nested(70)}), path),
        "nested deeper",
    ),
    "huge.parquet": (
        lambda path: write(path, TEXTS[:2] + [{"prompt": "x" * (17 << 20)}]),
        "row 3: larger than 16",
    ),
    "none.parquet": (lambda path: parquet.write_table(pa.table({"prompt": []}), path), "it has no rows"),
    "latin.csv": (
        lambda path: path.write_bytes(b'prompt,answer\na,b\n"x\ncaf\xe9",b\n'),
        "line 4: byte 0xe9",
    ),
    "utf16.csv": (
        lambda path: path.write_bytes("prompt,answer\n".encode("utf-16")),
        "not CSV; save it as UTF-8",
    ),
    "twice.csv": (lambda path: path.write_text("prompt,answer,prompt\na,b,c\n"), "'prompt' twice"),
    "noname.csv": (
        lambda path: path.write_text("prompt,,answer\na,b,c\n"),
        "column 2 of the header has no name",
    ),
    "header.csv": (lambda path: path.write_text("a,b\nc,d\n"), "'b'; the first line of the file must name"),
    "nothing.csv": (lambda path: path.write_text(""), "no header"),
    "bare.csv": (lambda path: path.write_text("prompt,answer\n"), "it has no rows"),
    "wide.csv": (lambda path: path.write_text("prompt,answer\n\na,b,c\n"), "line 3: 3 cells, and the header"),
    "narrow.csv": (lambda path: path.write_text("prompt,answer\na\n"), "line 2: 1 cells"),
    "semicolons.csv": (lambda path: path.write_text("prompt;answer\na;b\n"), "separated by ';'"),
    "open.csv": (
        lambda path: path.write_text('prompt,answer\n"a,b\nc,d\n'),
        "line 2: a quote is never closed",
    ),
    "quote.csv": (lambda path: path.write_text('prompt,answer\n"a"x,b\n'), "line 2: no CSV"),
    "huge.csv": (lambda path: path.write_text("prompt,answer\n" + "x" * (17 << 20)), "longer than 16 MiB"),
    "python.csv": (
        lambda path: path.write_text("prompt,answer\n\"[{'role': 'user', 'content': 'a'}]\",b\n"),
        "column 'prompt' holds messages in Python's notation",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_short_error(tmp_path, name):
    make, said = BAD[name]
    path = tmp_path / name
    make(path)
    with pytest.raises(ValueError) as error:
        prompts_of(path)
    text = str(error.value)
    assert str(path) in text and said in text and len(text) < 700 and "\n" not in text


BAD_NAMES = {
    "empty": "is a folder without data files",
    "mixed": "is a folder of files that do not belong together (test.csv, train.csv)",
    "gone.jsonl": "does not exist; name a .jsonl, .parquet, .arrow or .csv file, or a folder of them",
    "good.csv,gone.csv": "gone.csv', which does not exist",
    "good.csv,,good.csv": "names '', which does not exist",
    "a\0b": "does not exist",
    "openai/gsm8k": "fetched with: hf download --repo-type dataset openai/gsm8k --local-dir DIR",
    "https://host/a.jsonl": "does not exist; data are files here: download it, and name the file",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_is_no_data_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.csv", TEXTS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    for split in ("train", "test"):
        write(tmp_path / "mixed" / f"{split}.csv", TEXTS)
    assert BAD_NAMES[name] in source_problem(name)
    with pytest.raises(ValueError, match="data file"):
        prompts_of(name)


def test_without_pyarrow_json_lines_and_csv_are_read_and_others_say_what_is_missing(tmp_path, monkeypatch):
    paths = [write(tmp_path / name, TEXTS) for name in FORMATS]
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for path in paths:
        if path.suffix in (".jsonl", ".csv", ".tsv"):
            assert len(prompts_of(path)) == len(TEXTS)
        else:
            assert "pip install 'pyarrow" in source_problem(str(path))


# ---- memory --------------------------------------------------------------------------------------------


def test_items_are_kept_in_memory_and_then_in_a_file(monkeypatch):
    monkeypatch.setattr(item_store, "IN_MEMORY", 1000)
    store, items = ItemStore(), [{"number": number, "text": "x" * (number % 50)} for number in range(300)]
    for item in items:
        store.append(item)
        assert store[-1] == item  # reading between writes
    assert list(store) == items and len(store) == 300 and store[10:290:7] == items[10:290:7]
    assert store[0] is not store[0]
    with pytest.raises(IndexError):
        store[300]


def test_a_table_is_converted_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "BATCH_ROWS", 2)
    for name in ("rows.parquet", "rows.arrow"):
        rows = list(find_files(str(write(tmp_path / name, TEXTS)))[0].rows())
        assert rows == list(enumerate(TEXTS, start=1))


def test_a_full_disk_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(item_store, "IN_MEMORY", 100)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: open("/dev/full", "w+b", buffering=0))
    with pytest.raises(ValueError, match="cannot be written .No space left on device.; set TMPDIR"):
        prompts_of(write(tmp_path / "rows.csv", TEXTS))
