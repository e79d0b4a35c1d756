"""`verl-megatron data check`: what it shows is what a run reads."""

import json
import re
from pathlib import Path

import pytest

from tests.characters import characters
from tests.tiny import tiny_architecture
from verl_megatron.commands import data
from verl_megatron.config import DataConfig, SFTDataConfig
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset

TOKENIZER = characters()
TURN = {"role": "assistant", "content": "ho"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a tokenizer and a configuration."""
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(tiny_architecture(vocab_size=128).to_hf()))
    return str(folder)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of_verl() -> list[dict]:
    sources = ["gsm8k", "math", "gsm8k", "gsm8k", "math"]
    return [
        {
            "data_source": source,
            "prompt": user("hi" if number in (0, 3) else "hello there" * number),
            "reward_model": {"ground_truth": f"truth {number}\x1b[31m"},
        }
        for number, source in enumerate(sources)
    ]


def test_it_shows_prompts_lengths_sources_duplicates_and_what_is_too_long(tmp_path, model, capsys):
    path = write(tmp_path / "train.jsonl", [row | {"level": 1} for row in rows_of_verl()])
    limit = "data.max_prompt_tokens=50"
    assert data.run(["check", path, "--model", model, limit, "data.overlong=drop"]) == 0
    text = capsys.readouterr().out
    config = DataConfig(train=path, max_prompt_tokens=50, overlong="drop")
    dataset = PromptDataset(path, TOKENIZER, config)
    assert (
        f"prompt ({len(dataset[0].prompt_token_ids)} tokens):\n{dataset[0].text}\nanswer: 'truth 0\\x1b[31m'"
        in text
    )
    for line in (
        f"{path}: JSON lines, prompts",
        "  data.answer_key: reward_model.ground_truth",
        "rows: 5, 4 kept",
        f"  too long ({limit}): 1",
        f"    {path}, line 5: 61 tokens",
        "  duplicates, kept: 1",
        f"    {path}, line 4, as {path}, line 1",
        "  gsm8k: 3 (75.0%)",
        f"---- {path}, line 2 ----",
    ):
        assert line in text.splitlines()
    assert "\x1b" not in text
    with pytest.raises(ValueError) as refused:
        data.run(["check", path, "--model", model, limit])
    with pytest.raises(ValueError) as of_a_run:
        PromptDataset(path, TOKENIZER, DataConfig(train=path, max_prompt_tokens=50))
    assert str(refused.value) == str(of_a_run.value)


def test_json_has_the_same_and_special_tokens_are_visible(tmp_path, model, capsys):
    path = write(tmp_path / "train.jsonl", [{"prompt": "ab", "answer": 3, "more": None}])
    assert data.run(["check", path, "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["rows"], found["kept"], found["refused"]) == ("prompts", 1, 1, "")
    assert found["files"] == [{"path": path, "format": "JSON lines"}]
    assert found["tokens"]["50%"] == 3
    assert found["examples"] == [
        {
            "row": f"{path}, line 1",
            "prompt": {"tokens": 3, "text": "<s>ab"},
            "answer": 3,
            "extra": {"more": None},
        }
    ]


@pytest.mark.parametrize(
    ("row", "kind", "shown"),
    [
        ({"prompt": "ab", "response": "cd"}, "sft", {"prompt": "<s>ab", "response": "cd</s>"}),
        ({"messages": [*user("hi"), TURN]}, "sft", {"prompt": "<user>hi<assistant>", "response": "ho</s>"}),
        (
            {"prompt": "ab", "chosen": "c", "rejected": "d"},
            "pairs",
            {"prompt": "<s>ab", "chosen": "c</s>", "rejected": "d</s>"},
        ),
        ({"messages": [*user("hi"), TURN], "solution": "5"}, "prompts", {"prompt": "<user>hi<assistant>"}),
    ],
)
def test_the_columns_say_what_rows_are_for(tmp_path, model, capsys, row, kind, shown):
    path = write(tmp_path / "rows.jsonl", [row])
    data.run(["check", path, "--model", model, "--json"])
    found = json.loads(capsys.readouterr().out)
    (example,) = found["examples"]
    assert found["kind"] == kind
    assert {name: example[name]["text"] for name in shown} == shown


def test_tokens_with_loss_are_those_of_assistant_turns(tmp_path, model, capsys):
    first = {"role": "assistant", "content": "hey"}
    path = write(tmp_path / "rows.jsonl", [{"messages": [*user("hi"), first, *user("so"), TURN]}])
    assert data.run(["check", path, "--model", model]) == 0
    shown = capsys.readouterr().out
    (whole,) = DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path))
    with_loss, tokens = sum(whole.is_target), len(whole.prompt_token_ids) + len(whole.response_token_ids)
    assert f"\ntokens with loss: {with_loss} of {tokens} (" in shown
    _, *parts = re.split(r"^((?:no )?loss) \((\d+) tokens\):$", shown, flags=re.MULTILINE)
    spans = list(zip(parts[::3], parts[1::3], parts[2::3]))
    assert [(name, text.strip()) for name, _, text in spans] == [
        ("no loss", "<user>hi<assistant>"),
        ("loss", "hey</s>"),
        ("no loss", "<user>so<assistant>"),
        ("loss", "ho</s>"),
    ]
    assert sum(int(count) for name, count, _ in spans if name == "loss") == with_loss
    data.run(["check", path, "--model", model, "data.imitated_turns=last"])
    shown = capsys.readouterr().out
    assert "\nno loss (" in shown and "hey" not in shown.partition("\nloss (")[2]


def test_without_a_model_there_are_rows_columns_and_characters(tmp_path, capsys):
    path = write(tmp_path / "train.jsonl", rows_of_verl())
    assert data.run(["check", path]) == 0
    text = capsys.readouterr().out
    assert "rows: 5\n" in text and "characters of a prompt: least 2," in text and "  math: 2 (40.0%)" in text
    assert "answer: 'truth 2" in text and "--model FOLDER shows" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{path}", "data.prompt_key=question"], "line 1: no key 'question' (data.prompt_key)"),
        (["{path}.gone"], "does not exist; name a .jsonl"),
        (["{path}", "--kind", "sft"], "no key 'response'"),
        (["{path}", "data.max_prompt_tokens=0"], "data.max_prompt_tokens=0 lies outside"),
        (["{path}", "data.promptkey=a"], "data.promptkey is no setting"),
        (["{path}", "data.train=other.jsonl"], "data.train is an argument of its own, FILE"),
        (["{path}", "data.validation=other.jsonl"], "data.validation is an argument of its own, FILE"),
        (["{path}", "actor.path=model"], "actor.path is an argument of its own, --model"),
        (["{path}", "rollout.max_tokens=5"], "is not read; leave it out"),
        (["{path}", "data=5"], "data=5 is no section with settings"),
        (["{path}", "--model", "{path}"], "--model '{path}': tokenizer folder"),
        (["{empty}"], "has no rows"),
        (["{path},{empty}"], "empty.jsonl has no rows; leave it out or copy it again"),
        (["{path}", "{empty}"], "several files are one argument, with commas"),
    ],
)
def test_bad_input_is_one_error(tmp_path, model, arguments, said):
    path = write(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "b"}])
    empty = write(tmp_path / "empty.jsonl", [])
    given = [argument.format(path=path, empty=empty) for argument in arguments]
    with pytest.raises(ValueError) as error:
        data.run(["check", *(given if "--model" in given else [*given, "--model", model])])
    assert said.format(path=path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", [5, [], [{"from": "human", "value": "hi"}]])
def test_without_a_model_too_prompts_that_a_run_refuses_are_refused(tmp_path, prompt):
    path = write(tmp_path / "train.jsonl", [{"prompt": prompt, "answer": "b"}])
    with pytest.raises(ValueError, match="line 1: a prompt must be a string or a non-empty list of messages"):
        data.run(["check", path])


IMAGE = {"type": "image", "image": "a.png"}
REFUSED = [  # rows that a run refuses for reasons that need no tokenizer
    ("prompts", {"prompt": "", "answer": "b"}, "the prompt is empty"),
    ("prompts", {"prompt": " \n", "answer": "b"}, "the prompt is empty"),
    (
        "prompts",
        {"prompt": [{"role": "user", "content": [IMAGE]}], "answer": "b"},
        "has the part {",
    ),
    ("prompts", {"prompt": [{"role": 5, "content": "a"}], "answer": "b"}, "message 1 has role 5"),
    ("sft", {"prompt": "a", "response": 5}, "'response' must be a string, got 5"),
    ("sft", {"prompt": "a", "response": None}, "'response' must be a string, got None"),
    ("sft", {"prompt": "a", "response": ""}, "the response is empty"),
    ("sft", {"prompt": [*user("a"), {"role": "assistant", "content": None}]}, "has content None"),
    ("pairs", {"chosen": "a", "rejected": "b"}, "no key 'prompt'"),
    ("pairs", {"prompt": 5, "chosen": "a", "rejected": "b"}, "'prompt': "),
    ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same response"),
]


@pytest.mark.parametrize(("kind", "row", "said"), REFUSED, ids=str)
def test_what_needs_no_tokenizer_is_checked_without_one_as_with_one(tmp_path, model, kind, row, said):
    path = write(tmp_path / "rows.jsonl", [row])
    for given in ([], ["--model", model]):
        with pytest.raises(ValueError) as refused:
            data.run(["check", path, "--kind", kind, *given])
        assert f"{path}, line 1: " in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.answer_key=prompt", "data.prompt_key and data.answer_key are both 'prompt'"),
        ("data.prompt_key=", "data.prompt_key is empty"),
        ("data.curriculum=nope", "data.curriculum='nope' is neither files nor a column"),
    ],
)
def test_keys_and_curriculum_are_checked_without_a_model(tmp_path, setting, said):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(ValueError, match=re.escape(said)):
        data.run(["check", path, setting])


def test_sources_and_columns_are_those_of_a_run(tmp_path, model, capsys):
    rows = [{"prompt": "a", "answer": "b", "data_source": source} for source in ({"x": 1}, ["y"], None, 5)]
    path = write(tmp_path / "rows.jsonl", [rows[0] | {"first": 1}, *rows[1:]])
    for given in ([], ["--model", model]):
        assert data.run(["check", path, "--json", *given]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["data_sources"] == {"{'x': 1}": 1, "['y']": 1, "5": 1, "(none)": 1}
        assert found["all_columns"] == ["prompt", "answer", "data_source", "first"]


def test_without_a_model_chats_of_all_kinds_are_read(tmp_path, capsys):
    first = {"role": "assistant", "content": "hey"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    rows = [
        {"messages": [*user("hi"), first, *user("so"), TURN]},
        {"messages": [*user("hi"), called, {"role": "tool", "content": "1"}, TURN]},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    assert data.run(["check", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["rows"]) == ("sft", 2) and found["characters"]["0%"] == 2
    pair = {"chosen": [*user("hi"), TURN], "rejected": [*user("hi"), first]}
    assert data.run(["check", write(tmp_path / "pairs.jsonl", [pair])]) == 0


def test_other_subcommands_and_help(capsys):
    assert data.run(["--help"]) == 0 and "usage: verl-megatron data check" in capsys.readouterr().out
    with pytest.raises(ValueError, match="data 'chekc' is no command"):
        data.run(["chekc"])
