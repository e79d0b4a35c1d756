"""Arguments of reward functions: by position, by verl's and TRL's names, and what no name gives."""

import functools

import pytest

from verl_megatron.rewards.arguments import bound, columns_of
from verl_megatron.rewards.checks import check_reward, columns_problem
from verl_megatron.rewards.pool import RewardPool

EXTRA = {"data_source": "gsm8k", "extra_info": {"index": 3}, "level": 2}
CALL = ("the prompt", "the response", "the truth", EXTRA, None)
CHAT = [{"role": "user", "content": "hi"}]


def ours(prompt, response, ground_truth, extra):
    return prompt, response, ground_truth, extra


def positions(a, b, c, d):
    return a, b, c, d


def verls(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info


def swapped(extra_info, ground_truth, *, solution_str, scale=2):
    return extra_info, ground_truth, solution_str, scale


def mixed(response, data_source):
    return response, data_source


def any_of_ours(response, **others):
    return response, sorted(others)


def any_of_verls(solution_str, **others):
    return solution_str, sorted(others)


def only_keywords(**all_of_them):
    return sorted(all_of_them)


def fixed(ground_truth, solution_str, extra_info):
    return ground_truth, solution_str, extra_info


INFO = EXTRA["extra_info"]


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (ours, CALL[:4]),
        (positions, CALL[:4]),
        (lambda *arguments: arguments, CALL[:4]),
        (verls, ("gsm8k", "the response", "the truth", INFO)),
        (swapped, (INFO, "the truth", "the response", 2)),
        (mixed, ("the response", "gsm8k")),
        (any_of_ours, ("the response", ["extra", "ground_truth", "prompt"])),
        (any_of_verls, ("the response", ["data_source", "extra_info", "ground_truth"])),
        (only_keywords, ["extra", "ground_truth", "prompt", "response"]),
        (functools.partial(fixed, extra_info="mine"), ("the truth", "the response", "mine")),
        (functools.partial(positions, 1), None),
    ],
)
def test_arguments_are_passed_by_the_names_that_a_function_has(function, returned):
    if returned is None:
        with pytest.raises(
            ValueError, match=r"takes \(b, c, d\) and is called with .*: argument .b. is none of them"
        ):
            bound(function)
    else:
        assert bound(function)(*CALL) == returned


def test_without_verls_columns_extra_info_is_all_of_extra():
    assert bound(verls)("p", "r", "t", {"level": 2}) == ("", "r", "t", {"level": 2})


def test_functions_of_lists_get_lists_of_one():
    def trls(completions, answer, level, **kwargs):
        return [(completions, answer, level, sorted(kwargs))]

    scored = bound(trls)(*CALL)
    assert scored[:3] == (["the response"], ["the truth"], [2])
    assert scored[3] == ["data_source", "extra_info", "ground_truth", "prompts", "solution"]
    assert bound(lambda prompts, completions: [(prompts, completions)])("p", "r", None, {}, CHAT) == (
        [CHAT],
        [[{"role": "assistant", "content": "r"}]],
    )
    with pytest.raises(TypeError, match="a list with a score for each completion"):
        bound(lambda completions: 1.0)(*CALL)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'difficulty'"):
        bound(lambda completions, difficulty: [1.0])(*CALL)


def test_a_column_that_a_function_of_lists_takes_has_to_be_in_the_data(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(completions, answer, level, topic, bonus=1, **kwargs):\n    return [1.0]\n")
    spec = f"{path}:score"
    assert check_reward(spec) == []
    assert columns_problem(spec, {"level": 1, "topic": 2, "x": 3}) == ""
    assert columns_problem(spec, {"level": 1, "x": 3}) == (
        f"reward.function='{spec}' takes the argument 'topic', and the data have no such column; "
        "they have 'level', 'x'"
    )
    assert columns_problem("match", {}) == "" and columns_of(bound(ours)) == []


@pytest.mark.parametrize(
    ("parameters", "argument"),
    [
        ("response, truth", "truth"),
        ("response, prompt, truth, info", "truth"),
        ("solution_str, ground_truth, tokenizer", "tokenizer"),
        ("a", "a"),
    ],
)
def test_an_argument_that_nothing_gives_is_named_before_the_run(tmp_path, parameters, argument):
    path = tmp_path / "mine.py"
    path.write_text(f"def score({parameters}):\n    return 1.0\n")
    (problem,) = check_reward(f"{path}:score")
    assert f"{path}:score" in problem and f"argument '{argument}' is none of them" in problem
    assert "(prompt, response, ground_truth, extra), or by name" in problem and "solution_str" in problem


def test_a_reward_file_imports_its_neighbours_in_its_worker(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import helper_of_mine\n"
        "def compute_score(solution_str, ground_truth, **kwargs):\n"
        "    import json  # not the neighbour of that name\n"
        "    import later_helper.parts\n"
        "    return helper_of_mine.score(json.loads(solution_str), ground_truth) + later_helper.parts.BONUS\n"
    )
    (tmp_path / "helper_of_mine.py").write_text("def score(a, b): return float(a == b)\n")
    (tmp_path / "json.py").write_text("1 / 0\n")
    (tmp_path / "later_helper").mkdir()
    (tmp_path / "later_helper" / "__init__.py").write_text("")
    (tmp_path / "later_helper" / "parts.py").write_text("BONUS = 0.5\n")
    spec = f"{tmp_path}/mine.py:compute_score"
    assert check_reward(spec) == []
    with RewardPool(spec) as pool:
        pool.submit(0, "p", "7", 7, {}, CHAT)
        assert pool.results()[0].score == 1.5


MATH = [
    (r"so \boxed{\frac{1}{2}}", "0.5", 1),
    (r"the answer is $x = 3$", "3", 1),
    ("it is 1,234", "1234", 1),
    ("72", "Natalia sold 48 + 24 = 72 clips.\n#### 72", 1),
    (r"\boxed{(1, 2)}", "(1,2)", 1),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
    (r"\boxed{4}", "5", 0),
    (r"\boxed{18.9}", r"\$18.90", 1),
    (r"\boxed{32348}", r"\$32,\!348", 1),
    (r"\boxed{19}", r"\$18.90", 0),
    (r"\boxed{10^{-5}}", 1e-05, 1),
    ("no idea", "5", 0),
]


def test_math_compares_answers_as_mathematics():
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    with RewardPool("math", timeout_s=60) as pool:
        for number, (response, truth, _) in enumerate([*MATH, ("4", None, 0)]):
            pool.submit(number, "", response, truth, {})
        rewards = pool.results()
    assert {number: rewards[number].score for number in range(len(MATH))} == {
        number: score for number, (_, _, score) in enumerate(MATH)
    }
    assert rewards[len(MATH)].failure == "exception"
    assert "has no number or formula" in str(pool.first_failure)


def test_math_without_its_package_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check_reward("math") == [
        "reward.function=math needs the package math-verify, which is not installed; "
        "pip install 'math-verify[antlr4_9_3]'"
    ]
