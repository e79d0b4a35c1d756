"""Built-in rewards that look at the text of a response."""

import json

import pytest

from verl_megatron.checks.settings import check_config
from verl_megatron.config import RewardConfig, TrainerConfig
from verl_megatron.rewards.checks import check_reward, columns_problem
from verl_megatron.rewards.functions import REWARDS, load_reward, options_of
from verl_megatron.rewards.pool import RewardPool

R1 = "<think>\na\nb\n</think>\n<answer> 5 </answer>"
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0}, "next": {"$ref": "#"}},
    "required": ["age"],
}


def score(name: str, response: str, truth: object = None, *, extra: dict | None = None, **settings) -> float:
    function = load_reward(name, options_of(RewardConfig(**settings)))
    return function("", response, truth, extra or {}, None)


def test_exact_and_match_are_one_function():
    assert REWARDS["exact"] is REWARDS["match"]
    assert score("exact", " fig\n", "fig") == 1 and score("exact", "Fig", "fig") == 0


@pytest.mark.parametrize(
    ("truth", "response", "expected"),
    [
        (r"\b42\b", "it is 42.", 1),
        (r"\b42\b", "it is 421.", 0),
        ("(?i)paris|rome", "In PARIS", 1),
        ("^end", "the\nend", 0),
        ("(?m)^end", "the\nend", 1),
    ],
)
def test_regex_searches_the_response(truth, response, expected):
    assert score("regex", response, truth) == expected


@pytest.mark.parametrize("truth", ["(", "*", "", None, 5, "a" * 9 + "{99999999999999999999}"])
def test_a_ground_truth_that_is_no_pattern_is_a_failure(truth):
    with pytest.raises(ValueError, match="is no regular expression"):
        score("regex", "a", truth)


def test_a_pattern_that_takes_forever_costs_its_sample_only():
    with RewardPool("regex", timeout_s=5) as pool:
        pool.submit(0, "", "a" * 50 + "b", "(a+)+$")
        pool.submit(1, "", "abc", "b")
        rewards = pool.results()
        assert rewards[0].failure == "timeout" and rewards[1].score == 1


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (R1, 1),
        (f"\n{R1}\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a<b></think> <answer>1 < 2</answer>", 1),
        (f"so: {R1}", 0),
        (f"{R1} and more", 0),
        (f"{R1}<answer>6</answer>", 0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0),
        ("<think>a<answer>5</answer>", 0),
        ("<answer>5</answer><think>a</think>", 0),
        ("", 0),
    ],
)
def test_format_is_that_of_r1_by_default(response, expected):
    assert score("format", response) == expected


def test_format_takes_a_pattern_of_ones_own():
    assert score("format", "a\nb: 5", format=r".*: \d") == 1 and score("format", "5", format=r".*: \d") == 0
    config = TrainerConfig()
    config.reward.function, config.reward.format = "format", "(unclosed"
    problems = [problem for problem in check_config(config, world_size=1) if "reward" in problem]
    assert problems == [
        "reward.format='(unclosed' is no regular expression (missing ), unterminated subpattern at "
        "position 0); mend it"
    ]
    config.reward.function, config.reward.format = "match", "a+"
    problems = [problem for problem in check_config(config, world_size=1) if "reward" in problem]
    assert len(problems) == 1 and "reward.format=a+ has no effect without format" in problems[0]


@pytest.mark.parametrize(
    ("characters", "expected"), [(0, 1), (10, 1), (15, 0.5), (18, 0.2), (20, 0), (1000, 0)]
)
def test_length_falls_from_the_target_on(characters, expected):
    assert score("length", "x" * characters, target_length=10) == pytest.approx(expected)
    for own in (10, 10.0, "10"):
        extra = {"target_length": own}
        assert score("length", "x" * characters, extra=extra) == pytest.approx(expected)


@pytest.mark.parametrize("own", [0, -1, "long", True, [3], float("nan"), float("inf")])
def test_a_target_length_of_a_row_has_to_be_a_number(own):
    with pytest.raises(ValueError, match="target_length .* of the row is no number above 0"):
        score("length", "x", extra={"target_length": own}, target_length=5)


def test_length_needs_a_target():
    options = options_of(RewardConfig())
    assert check_reward("[length:0.1,match]", options) == []
    assert columns_problem("[length:0.1,match]", ["x"]) == (
        "reward.function=length needs reward.target_length or a column of that name, and the data have none; "
        "they have 'x'"
    )
    assert columns_problem("length", ["target_length"]) == ""
    assert check_reward("length", options_of(RewardConfig(target_length=5))) == []
    assert columns_problem("length", ["x"]) == ""


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ('{"a": [1, 2.0], "b": null}', None, 1),
        ('{"a": [1, 2.0], "b": null}', "", 1),
        ('{"a": [1, 2.0], "b": null}', '{"b": null, "a": [1.0, 2]}', 1),
        ('{"a": [1, 2.0], "b": null}', {"b": None, "a": [1, 2]}, 1),
        ('{"a": [2, 1], "b": null}', {"b": None, "a": [1, 2]}, 0),
        ("true", 1, 0),
        ("[true]", [1], 0),
        ("1", True, 0),
        ("false", False, 1),
        ("5", "5", 1),
        ('"5"', "5", 0),
        ('"Paris"', "Paris", 1),
        ("Paris", "Paris", 0),
        ("NaN", None, 0),
        ("{'a': 1}", None, 0),
        ('{"a": 1} trailing', None, 0),
        ("", None, 0),
        ("[" * 100_000, None, 0),
        ("[" * 900 + "]" * 900, [], 0),
        ("9" * 10_000, None, 0),
        ('So:\n```json\n{"a": 1}\n```\ndone', {"a": 1}, 1),
        ('```json\n{"a": 1}\n```\n```json\n{"a": 2}```', {"a": 2}, 1),
        ('```json\n{"a": 1\n```', {"a": 1}, 0),
        ('```python\n{"a": 1}\n```', {"a": 1}, 0),
    ],
    ids=lambda value: str(value)[:30],
)
def test_json_compares_values(response, truth, expected):
    assert score("json", response, truth) == expected


def test_json_schemas_are_checked_and_fetch_nothing():
    pytest.importorskip("jsonschema", reason="the package is not installed")
    for truth in (SCHEMA, json.dumps(SCHEMA)):
        assert score("json", '{"age": 3, "next": {"age": 0}}', truth) == 1
        assert score("json", '{"age": 3, "next": {"age": -1}}', truth) == 0
        assert score("json", "[]", truth) == 0
    with pytest.raises(ValueError, match="no valid JSON Schema"):
        score("json", "1", {"$schema": SCHEMA["$schema"], "type": "nothing"})
    with pytest.raises(ValueError, match="a reference elsewhere"):
        score("json", "1", {"$schema": SCHEMA["$schema"], "$ref": "http://127.0.0.1:9/x.json"})
    without = {name: value for name, value in SCHEMA.items() if name != "$schema"}
    assert score("json", '{"age": 3}', without) == 0, "a value without $schema is compared"


def test_a_missing_ground_truth_is_no_text_and_a_whole_float_is_an_integer():
    with pytest.raises(ValueError, match="there is no ground truth to compare with"):
        score("match", "None")
    assert score("match", "56", 56.0) == 1 and score("match", "56.5", 56.5) == 1
