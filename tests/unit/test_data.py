"""Rows of JSON-lines files as prompts and demonstrations, and the order of drawing."""

import json
from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
import yaml

from tests.characters import characters
from verl_megatron.checks.overrides import structured
from verl_megatron.config import DataConfig, SFTDataConfig, TrainerConfig
from verl_megatron.data.formats.json_lines import read_rows
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.order.mixture import BLOCK, order_of, places_of
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset
from verl_megatron.launch.command_line import settings_of
from verl_megatron.manifest import _is_cursor

TOKENIZER = characters()


def write(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_prompts_carry_ids_text_answer_and_the_other_keys(tmp_path):
    path = write(
        tmp_path / "train.jsonl",
        [
            {"prompt": "2+3", "answer": 5, "level": 1},
            "",
            {"prompt": [{"role": "user", "content": "hi"}], "answer": "ho"},
        ],
    )
    dataset = PromptDataset(path, TOKENIZER, DataConfig(train=path))
    assert len(dataset) == 2 and dataset.dropped == 0
    first, second = dataset
    assert (first.prompt_token_ids, first.text, first.answer, first.extra) == (
        [1] + ids("2+3"),
        "2+3",
        5,
        {"level": 1},
    )
    assert (second.prompt_token_ids, second.text, second.answer, second.extra) == (
        ids("<user>hi<assistant>"),
        "<user>hi<assistant>",
        "ho",
        {},
    )


def test_keys_can_be_named_and_the_answer_left_out(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"q": "a", "prompt": "b"}])
    (prompt,) = PromptDataset(path, TOKENIZER, DataConfig(train=path, prompt_key="q", answer_key=""))
    assert (prompt.text, prompt.answer, prompt.extra) == ("a", None, {"prompt": "b"})


def test_of_several_wrong_rows_the_first_is_named(tmp_path):
    """However far they are apart: rows are tokenized in chunks, of which several are under way."""
    path = tmp_path / "train.jsonl"
    for wrong in ([3, 4], [0, 512, 1024, 1536], [700, 1400], [1999]):
        prompts = ["a b c d e" if row in wrong else "a" for row in range(2000)]
        path.write_text("".join(json.dumps({"prompt": prompt, "answer": "a"}) + "\n" for prompt in prompts))
        with pytest.raises(ValueError, match=rf"train.jsonl, line {wrong[0] + 1}: "):
            PromptDataset(str(path), TOKENIZER, DataConfig(train=str(path), max_prompt_tokens=2))


def test_overlong_prompts_are_an_error_or_dropped_and_counted(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"prompt": "x" * n, "answer": ""} for n in (3, 9, 4, 12)])
    with pytest.raises(
        ValueError,
        match=r"line 2: 10 tokens, more than data.max_prompt_tokens=5; raise the limit or set "
        r"data.overlong=drop",
    ):
        PromptDataset(path, TOKENIZER, DataConfig(train=path, max_prompt_tokens=5))
    dataset = PromptDataset(path, TOKENIZER, DataConfig(train=path, max_prompt_tokens=5, overlong="drop"))
    assert [prompt.text for prompt in dataset] == ["xxx", "xxxx"] and dataset.dropped == 2
    with pytest.raises(ValueError, match="all 4 rows are longer than data.max_prompt_tokens=2; raise it"):
        PromptDataset(path, TOKENIZER, DataConfig(train=path, max_prompt_tokens=2, overlong="drop"))
    first = PromptDataset(
        path, TOKENIZER, DataConfig(train=path, max_prompt_tokens=2, overlong="drop"), max_rows=3
    )
    assert len(first) == 0 and first.notes == [
        f"{path}: 3 rows longer than data.max_prompt_tokens=2 left out (data.overlong=drop)"
    ]
    with pytest.raises(ValueError, match="data.overlong='cut'"):
        PromptDataset(path, TOKENIZER, DataConfig(train=path, overlong="cut"))


def test_a_prompt_of_megabytes_is_too_long_before_it_is_tokenized(tmp_path, monkeypatch):
    path = write(tmp_path / "train.jsonl", [{"prompt": "x" * 10_000_000, "answer": ""}])
    monkeypatch.setattr(TOKENIZER, "_ids", lambda *_, **__: pytest.fail("it is tokenized"))
    with pytest.raises(
        ValueError, match=r"line 1: at least \d{6,7} tokens, more than data.max_prompt_tokens=1024"
    ):
        PromptDataset(path, TOKENIZER, DataConfig(train=path))


def test_tokens_beyond_the_models_vocabulary_are_refused(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"prompt": "ab", "answer": "", "response": "z"}])
    assert len(PromptDataset(path, TOKENIZER, DataConfig(train=path), vocab_size=ord("c"))) == 1
    for kind, config in ((PromptDataset, DataConfig), (DemonstrationDataset, SFTDataConfig)):
        with pytest.raises(
            ValueError, match="line 1: the tokenizer in .* gives token .* vocab_size=98; use the model's own"
        ):
            kind(path, TOKENIZER, config(train=path), vocab_size=ord("b"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"prompt_key": ""}, "prompt_key is empty"),
        ({"answer_key": "prompt"}, "both 'prompt'"),
        ({"answer_key": "a.b"}, "no key 'a.b'"),
    ],
)
def test_keys_that_name_no_prompt_or_answer_are_refused(tmp_path, keys, said):
    path = write(tmp_path / "train.jsonl", [{"prompt": "a", "answer": ""}])
    with pytest.raises(ValueError, match=said):
        PromptDataset(path, TOKENIZER, DataConfig(train=path, **keys))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "it has no rows"),
        (["", "  "], "it has no rows"),
        ([{"prompt": "a", "answer": ""}, "{'prompt'"], "line 2: not valid JSON"),
        ([["a"]], "is a JSON array, not JSON lines; write one object a line"),
        (["3"], "line 1: expected a JSON object, got int"),
        (
            [{"question": "a", "answer": ""}],
            r"line 1: no key 'prompt' \(data.prompt_key\); the row has 'question', 'answer'",
        ),
        ([{"prompt": "a"}], "line 1: no key 'answer'"),
        ([{"prompt": 3, "answer": ""}], "line 1: a prompt must be a string"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, rows, said):
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=said) as error:
        PromptDataset(path, TOKENIZER, DataConfig(train=path))
    assert path in str(error.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gone.jsonl does not exist"):
        read_rows(tmp_path / "gone.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 1: not valid JSON"):
        read_rows(tmp_path / "latin.jsonl")


def test_demonstrations_end_in_eos_and_obey_the_limit(tmp_path):
    path = write(
        tmp_path / "sft.jsonl", [{"prompt": "ab", "response": "cd"}, {"prompt": "ab", "response": "cdefg"}]
    )
    first, second = DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path))
    assert (first.prompt_token_ids, first.response_token_ids) == ([1] + ids("ab"), ids("cd") + [2])
    assert second.response_token_ids == ids("cdefg") + [2]
    with pytest.raises(ValueError, match="line 2: 9 tokens, more than data.max_tokens=8"):
        DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path, max_tokens=8))
    assert (
        DemonstrationDataset(
            path, TOKENIZER, SFTDataConfig(train=path, max_tokens=8, overlong="drop")
        ).dropped
        == 1
    )
    path = write(tmp_path / "bad.jsonl", [{"prompt": "ab", "response": 5}])
    with pytest.raises(ValueError, match="line 1: 'response' must be a string, got 5"):
        DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path))


def test_each_epoch_is_another_permutation(tmp_path):
    cursor = PromptCursor(num_prompts=10, seed=1)
    epochs = [cursor.draw(10) for _ in range(5)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert epochs[0] != PromptCursor(num_prompts=10, seed=2).draw(10)
    assert PromptCursor(num_prompts=3, seed=1, shuffle=False).draw(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("sizes", [[1] * 45, [7] * 6 + [3], [45], [0, 20, 25]])
def test_drawing_in_pieces_is_drawing_at_once(sizes):
    cursor = PromptCursor(num_prompts=10, seed=3)
    pieces = [row for size in sizes for row in cursor.draw(size)]
    assert pieces == PromptCursor(num_prompts=10, seed=3).draw(45)
    assert set(Counter(pieces[:40]).values()) == {4}


@pytest.mark.parametrize("drawn", [0, 4, 10, 13, 20])
def test_a_loaded_cursor_goes_on_exactly(drawn):
    cursor = PromptCursor(num_prompts=10, seed=5)
    cursor.draw(drawn)
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = PromptCursor(num_prompts=10, seed=5)
    resumed.load_state_dict(state)
    assert resumed.draw(25) == cursor.draw(25)
    assert all(type(value) is int for value in state.values())


@pytest.mark.parametrize("other", [{"num_prompts": 11}, {"seed": 6}, {"shuffle": False}])
def test_a_cursor_of_other_data_is_refused(other):
    state = PromptCursor(num_prompts=10, seed=5).state_dict()
    with pytest.raises(ValueError, match=next(iter(other))):
        PromptCursor(**{"num_prompts": 10, "seed": 5, **other}).load_state_dict(state)


# ---- several files by weight -------------------------------------------------------------------------------

SHARES = [(0.5, 40), (2, 300), (0.1, 7), (1, 553), (0.4, 100)]  # weights and items of five sources


ROWS = [{"prompt": f"{i}", "answer": "7", "extra": {"of": ["a", None, i]}} for i in range(600)]
CHANGES = {
    "prompt": lambda rows: rows[5].update(prompt="other"),
    "answer": lambda rows: rows[599].update(answer="8"),
    "inside another key": lambda rows: rows[0]["extra"]["of"].insert(1, 2.5),
    "order": lambda rows: rows.reverse(),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_as_many_other_rows_are_refused(tmp_path, changed):
    """Which a file may have got at the same path; a state without digest is of an older version."""
    rows = json.loads(json.dumps(ROWS))
    CHANGES[changed](rows)

    def cursor(rows):
        path = write(tmp_path / "rows.jsonl", rows)
        return PromptDataset(path, TOKENIZER, DataConfig(train=path)).cursor(seed=1)

    state = json.loads(json.dumps(cursor(ROWS).state_dict()))
    assert _is_cursor(state)
    cursor(ROWS).load_state_dict(state)
    with pytest.raises(
        ValueError, match="the saved data position is of other rows.*resume with the same data"
    ):
        cursor(rows).load_state_dict(state)
    del state["data"]
    cursor(rows).load_state_dict(state)


def sources_of(drawn: list[int]) -> list[int]:
    """How many were drawn of each source of SHARES."""
    ends = list(accumulate(count for _, count in SHARES))
    counts = Counter(bisect_right(ends, item) for item in drawn)
    return [counts[source] for source in range(len(SHARES))]


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_draw_each_source_by_its_weight_and_its_items_equally_often(shuffle):
    cursor = PromptCursor(num_prompts=1000, seed=1, shuffle=shuffle, shares=SHARES)
    drawn = cursor.draw(10_000)
    assert sources_of(drawn) == [1250, 5000, 250, 2500, 1000] == [10 * places for places in places_of(SHARES)]
    times, first = Counter(drawn), 0
    for _, count in SHARES:
        of_source = [times[item] for item in range(first, first + count)]
        assert max(of_source) - min(of_source) <= 1
        first += count
    if shuffle:
        assert drawn[:1000] != drawn[1000:2000] and drawn[:1000] != sorted(drawn[:1000])
        assert sources_of(drawn[:BLOCK]) == sources_of(drawn[1000 : 1000 + BLOCK])
    else:
        assert all(abs(got - 100 * share) <= 2 for got, share in zip(sources_of(drawn[:100]), WANTED))


WANTED = [weight / 4 for weight, _ in SHARES]


def test_five_sources_have_their_shares_in_any_part_of_a_long_epoch():
    """Within 1 % of all prompts, from 1,000 prompts on, wherever the part begins."""
    shares = [(weight, 20 * count) for weight, count in SHARES]
    ends = list(accumulate(count for _, count in shares))
    drawn = PromptCursor(num_prompts=20_000, seed=1, shares=shares).draw(20_000)
    for begin in range(0, 19_000, 333):
        counts = Counter(bisect_right(ends, item) for item in drawn[begin : begin + 1000])
        assert all(abs(counts[source] / 1000 - share) < 0.01 for source, share in enumerate(WANTED))


@pytest.mark.parametrize("drawn", [0, 7, 1000, 2345])
def test_a_cursor_over_several_sources_goes_on_exactly(drawn):
    cursor = PromptCursor(num_prompts=1000, seed=5, shares=SHARES)
    cursor.draw(drawn)
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = PromptCursor(num_prompts=1000, seed=5, shares=SHARES)
    resumed.load_state_dict(state)
    assert resumed.draw(2500) == cursor.draw(2500)
    assert _is_cursor(state) and not _is_cursor(state | {"mixture": -1}) and not _is_cursor(state | {"x": 1})
    for other in ([], [(1, 1000)], [*SHARES[:4], (0.5, 100)]):
        with pytest.raises(ValueError, match="other weights in data.train"):
            PromptCursor(num_prompts=1000, seed=5, shares=other).load_state_dict(state)


@pytest.mark.parametrize("weight", [1e308, 5e-324])
def test_weights_may_be_huge_or_tiny_together(weight):
    assert places_of([(weight, 30), (weight, 10)]) == [20, 20]


def test_an_order_without_shuffling_alternates():
    assert list(order_of([(1, 2), (1, 2)], seed=0, epoch=0, shuffle=False)) == [0, 2, 1, 3]
    assert list(order_of([(3, 2), (1, 2)], seed=0, epoch=1, shuffle=False)) == [1, 0, 3, 1]


def test_files_have_weights(tmp_path):
    for name, count in (("a", 3), ("b", 5)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}", "answer": ""} for n in range(count)])
    given = f"[{tmp_path}/a.jsonl:0.75,{tmp_path}/b.jsonl:0.25]"
    config = structured(settings_of([f"data.train={given}"])[1], TrainerConfig).data
    assert config.train == given[1:-1]
    dataset = PromptDataset(config.train, TOKENIZER, config)
    assert dataset.shares == [(0.75, 3), (0.25, 5)]
    cursor = PromptCursor(num_prompts=len(dataset), seed=1, shares=dataset.shares)
    drawn = Counter(dataset[index].text[0] for index in cursor.draw(800))
    assert drawn == {"a": 600, "b": 200}
    assert PromptDataset(config.train, TOKENIZER, config, max_rows=2).shares == [(0.75, 2), (0.25, 2)]


@pytest.mark.parametrize(
    "written",
    [
        "[a.jsonl:0.75,b.jsonl:0.25]",
        "[a.jsonl: 0.75, b.jsonl: 0.25]",
        "{a.jsonl: 0.75, b.jsonl: 0.25}",
        [("a.jsonl", 0.75), (Path("b.jsonl"), 0.25)],
    ],
)
def test_weights_are_the_same_in_every_notation(written):
    config = DataConfig(train=yaml.safe_load(written) if isinstance(written, str) else written)
    assert config.train == "a.jsonl:0.75,b.jsonl:0.25"


@pytest.mark.parametrize("value", [[1], [["a", 0.5]], {"a": "b"}, [{"a": True}]])
def test_data_of_a_wrong_type_are_one_problem(value):
    with pytest.raises(ValueError) as error:
        structured({"data": {"train": value}}, TrainerConfig)
    assert "\n" not in str(error.value) and "give a value like train.jsonl" in str(error.value)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((":0.5", ""), "b.jsonl' no weight, and others have one; give all of them one, or none"),
        ((":0", ":1"), "a.jsonl' the weight 0; give a number above 0"),
        ((":nan", ":1"), "the weight nan"),
        ((":-1", ":1"), "the weight -1"),
        ((":1e-9", ":1"), "weight 1e-09 of data.train is less than one prompt in an epoch of 2"),
        ((":x", ":1"), "a.jsonl:x' no weight"),
    ],
)
def test_wrong_weights_are_refused(tmp_path, weights, said):
    paths = [write(tmp_path / f"{name}.jsonl", [{"prompt": "a", "answer": ""}]) for name in "ab"]
    train = ",".join(path + weight for path, weight in zip(paths, weights))
    with pytest.raises(ValueError) as error:
        PromptDataset(train, TOKENIZER, DataConfig(train=train))
    assert said in str(error.value)
