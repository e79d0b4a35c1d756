"""Chat messages: what a template makes of them, answers apart from prompts, templates that fail."""

import json
import time

import pytest

from tests.characters import LOOP, TEMPLATE, characters
from verl_megatron.config import DataConfig, SFTDataConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.chat import split_answer
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset

TOKENIZER = characters()
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def write(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_answers_are_cut_off_prompts_and_counted(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        *(
            {"prompt": turns, "answer": 1}
            for turns in ([USER], [USER, ANSWER], [USER, ANSWER, ANSWER], [USER, ANSWER, USER])
        ),
    )
    dataset = PromptDataset(path, TOKENIZER, DataConfig(train=path))
    assert [prompt.text for prompt in dataset] == ["<user>hi<assistant>"] * 3 + [
        "<user>hi<assistant>ho</s>\n<user>hi<assistant>"
    ]
    assert dataset.cut == 2 and dataset.notes == [
        f"{path}: 2 prompts ended in an assistant turn, which is an answer and was cut off"
    ]
    with pytest.raises(ValueError, match="end in an assistant turn"):
        TOKENIZER.encode_prompt([USER, ANSWER])
    with pytest.raises(ValueError, match="assistant turns only"):
        split_answer([ANSWER])


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": [USER], "response": "ho"}, {}),
        ({"prompt": [USER, ANSWER]}, {}),
        ({"prompt": [USER, ANSWER], "response": "ho"}, {}),
        ({"prompt": [USER, ANSWER], "response": None}, {}),
        ({"messages": [USER, ANSWER]}, {"prompt_key": "messages", "response_key": "messages"}),
        (
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
                    },
                    ANSWER,
                ]
            },
            {},
        ),
    ],
)
def test_the_assistant_turn_is_the_response_as_the_template_writes_it(tmp_path, row, keys):
    path = write(tmp_path / "a.jsonl", row)
    (row,) = DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path, **keys))
    assert row.prompt_token_ids == ids("<user>hi<assistant>")
    assert row.response_token_ids == [
        *ids("ho"),
        2,
    ]  # and not the line end that the template writes before the next turn


CONVERSATION = [USER, ANSWER, {"role": "user", "content": "yo"}, {"role": "assistant", "content": "he"}]


def test_every_assistant_turn_of_a_conversation_is_imitated(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": CONVERSATION})
    keys = {"prompt_key": "messages", "response_key": "messages"}
    (row,) = DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path, **keys))
    assert row.prompt_token_ids == ids("<user>hi<assistant>")
    between = ids("\n<user>yo<assistant>")
    assert row.response_token_ids == [*ids("ho"), 2, *between, *ids("he"), 2]
    assert row.is_target == [True] * 3 + [False] * len(between) + [True] * 3
    whole = TOKENIZER.hf.apply_chat_template(CONVERSATION)["input_ids"]
    assert row.prompt_token_ids + row.response_token_ids == whole[:-1]  # without the last line end

    batch = RolloutBatch.from_lists([0], [row.prompt_token_ids], [row.response_token_ids])
    batch.set_targets(0, row.is_target)
    told = [token for token, own in zip(batch.generated_ids[0].tolist(), batch.response_mask[0]) if own]
    assert told == [*ids("ho"), 2, *ids("he"), 2]

    (last,) = DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path, imitated_turns="last", **keys))
    assert last.is_target is None and last.response_token_ids == [*ids("he"), 2]
    assert last.prompt_token_ids == [*ids("<user>hi<assistant>ho"), 2, *between]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TEMPLATE.replace("</s>", "~"), "ends assistant turn 1 without a stop token"),
        (
            TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '..' }}"),
            "writes assistant turn 1 differently once other turns follow",
        ),
    ],
)
def test_turns_that_cannot_be_imitated_where_they_stand_are_refused(tmp_path, template, said):
    path = write(tmp_path / "a.jsonl", {"prompt": CONVERSATION})
    with pytest.raises(ValueError, match=f"{said}.*set data.imitated_turns=last"):
        DemonstrationDataset(path, characters(template), SFTDataConfig(train=path))
    assert DemonstrationDataset(path, characters(template), SFTDataConfig(train=path, imitated_turns="last"))


def test_a_response_ends_in_one_token_that_stops_generation(tmp_path):
    """What ends the turn, if generation stops there; else the end-of-sequence token behind it."""
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": [USER, ANSWER]},
        {"prompt": "hi", "response": "ho"},
        {"prompt": "hi", "response": "ho</s>"},
    )
    other = characters(TEMPLATE.replace("</s>", "~"))
    by_eos = DemonstrationDataset(path, other, SFTDataConfig(train=path))
    assert [row.response_token_ids for row in by_eos] == [
        [*ids("ho~\n"), 2],
        [*ids("ho"), 2],
        [*ids("ho"), 2],
    ]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ord("~")]}))
    other = characters(TEMPLATE.replace("</s>", "~"))
    other.hf.name_or_path = str(tmp_path)
    by_turn = DemonstrationDataset(path, other, SFTDataConfig(train=path))
    assert [row.response_token_ids for row in by_turn] == [ids("ho~"), [*ids("ho"), 2], [*ids("ho"), 2]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": [USER, ANSWER], "response": "hu"}, "another response; remove one"),
        ({"prompt": [USER, ANSWER, ANSWER]}, "2 assistant turns; join them"),
        ({"prompt": [ANSWER]}, "assistant turns only"),
        ({"prompt": [USER]}, "no key 'response'"),
        ({"prompt": "hi"}, "no key 'response'"),
        ({"prompt": "hi", "response": None}, "must be a string, got None"),
        ({"prompt": "hi", "response": [ANSWER]}, "must be a string"),
        ({"prompt": "hi", "response": ""}, "the response is empty"),
        ({"prompt": "hi", "response": " \n"}, "the response is empty"),
        ({"prompt": "hi", "response": "</s>"}, "the response is empty"),
        ({"prompt": "hi", "response": "a</s>b"}, "'</s>', which ends generation, before 'b'"),
        ({"prompt": [USER], "response": "\t"}, "the response is empty"),
        ({"prompt": [USER, ANSWER | {"content": ""}]}, "the assistant turn is empty"),
        ({"prompt": [], "response": "ho"}, "must be messages that end in a user turn"),
        ({"prompt": 5, "response": "ho"}, "a prompt must be"),
        ({"prompt": "", "response": "ho"}, "the prompt is empty"),
    ],
)
def test_bad_demonstrations_are_refused(tmp_path, row, said):
    path = write(tmp_path / "a.jsonl", {"prompt": "hi", "response": "ho"}, row)
    with pytest.raises(ValueError, match="line 2: ") as error:
        DemonstrationDataset(path, TOKENIZER, SFTDataConfig(train=path))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        ("<s></s>", "special or unknown tokens only"),
        ("\u4e2d", "special or unknown tokens only"),
        ([{"role": "user"}], "message 1 is {'role': 'user'}"),
        ([{"content": "hi"}], "role and content"),
        ([USER, "hi"], "a non-empty list of messages"),
        ([{"role": None, "content": "hi"}], "message 1 has role None"),
        (
            [{"role": "human", "content": "hi"}],
            "message 1 has role 'human', which the chat template does not know; use system, user, assistant",
        ),
        ([USER, {"role": "user", "content": None}], "message 2 has content None"),
        ([{"role": "user", "content": 7}], "content 7"),
        ([{"role": "user", "content": {"text": "hi"}}], "content {'text': 'hi'}"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "the part {'image_url': 'x', 'type': 'image_url'}",
        ),
        ([USER | {"tool_calls": [{"name": "f"}]}], "tool_calls, which the chat template does not read"),
        ([USER | {"content": "x" * 10**6, "role": "y" * 10**6}], "message 1 has role 'yyy"),
    ],
)
def test_bad_prompts_are_refused_in_a_short_line(tmp_path, prompt, said):
    path = write(tmp_path / "a.jsonl", {"prompt": prompt, "answer": ""})
    with pytest.raises(ValueError, match="line 1: ") as error:
        PromptDataset(path, TOKENIZER, DataConfig(train=path))
    assert said in str(error.value) and len(str(error.value)) < 600


def test_labels_and_empty_keys_beside_a_message_change_nothing(tmp_path):
    row = {"prompt": [USER | {"name": "Ada", "id": 7, "tool_calls": None, "images": []}], "answer": ""}
    path = write(tmp_path / "a.jsonl", row)
    assert PromptDataset(path, TOKENIZER, DataConfig(train=path))[0].text == "<user>hi<assistant>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.of.this }}", "UndefinedError"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ messages[0].__class__.__mro__ }}", "does not take these messages"),
        ("{% if false %}hi{% endif %}", "writes nothing"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves out message 1 (role 'system')",
        ),
        ("{{ 'a' * 10 ** 10 }}", "takes more than 1 GiB"),
        ("{{ 'a'.center(10 ** 10) }}", "takes more than 1 GiB"),
        ("{{ 'a' * 10 ** 20 }}", "takes more than 1 GiB"),
    ],
)
def test_templates_that_fail_are_said(tmp_path, template, said):
    path = write(
        tmp_path / "a.jsonl", {"prompt": [{"role": "system", "content": "be brief"}, USER], "answer": ""}
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match="line 1: the chat template") as error:
        PromptDataset(path, characters(template), DataConfig(train=path))
    assert said in str(error.value) and len(str(error.value)) < 700
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 7 ** (10 ** 10) }}",
    ],
)
def test_templates_that_never_end_are_ended(monkeypatch, template):
    monkeypatch.setattr("verl_megatron.data.chat.RENDER_S", 0.2)
    with pytest.raises(ValueError, match="took more than 0.2 s"):
        characters(template).encode_prompt([USER])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            LOOP + "{% if add_generation_prompt %}<assistant><think>{% endif %}",
            "so that the answer does not continue the prompt",
        ),
        (
            LOOP.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else 'hm' }}"),
            "changes the answer",
        ),
    ],
)
def test_templates_that_write_answers_otherwise_are_refused(template, said):
    with pytest.raises(ValueError, match=said):
        characters(template).demonstration_text([USER], "ho")
