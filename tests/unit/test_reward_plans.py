"""Several reward functions: how they are written, which score a row, and what becomes of their scores."""

import functools
import math

import pytest
import torch
import yaml

from tests.documents import FENCE, text_of
from tests.tiny import SERVED, write_hf, write_tokenizer
from tests.worlds import ROOT
from verl_megatron import RLTrainer
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.settings import check_config
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.command_line import settings_of
from verl_megatron.observe.metrics import Sums, own_metric
from verl_megatron.observe.sources import MOST, Sources
from verl_megatron.preflight import Inputs, inspect_run
from verl_megatron.rewards.callables import spec_of
from verl_megatron.rewards.checks import check_reward, columns_problem, sources_note, sources_problem
from verl_megatron.rewards.plan import described, read_plan
from verl_megatron.rewards.pool import RewardPool

FUNCTIONS = """
import os, time

def one(response):
    return 1.0

def half(response):
    return {"score": 0.5, "words": len(response.split())}

def fails(response):
    raise KeyError("gone")

def hangs(response):
    time.sleep(60)

def dies(response):
    os._exit(3)

def huge(response):
    return 3e38

def topical(completions, topic):
    return [float(topic[0])]

IMPORTS = os.environ.setdefault("IMPORTS", "0")
os.environ["IMPORTS"] = str(int(IMPORTS) + 1)

def imports(response):
    return float(os.environ["IMPORTS"])
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


def parts_of(text: str, source: str = "") -> list[tuple[str, float]]:
    return [(part.spec, part.weight) for part in read_plan(text).parts(source)]


# ---- how they are written ----------------------------------------------------------------------------------

ROUTES = {"openai/gsm8k": "math", "codecontests": ["match", "last_number:0.1"], "default": "match"}
WRITTEN = "{openai/gsm8k:math,codecontests:[match,last_number:0.1],default:match}"


def test_a_list_is_the_same_in_every_place():
    config = TrainerConfig()
    expected = [("math", 0.8), ("match", 1.0), ("a b.py:f", 0.25)]
    for value in (
        ["math:0.8", "match", "a b.py:f:0.25"],
        [("math", 0.8), "match", ("a b.py:f", 0.25)],
        [{"math": 0.8}, "match", {"a b.py:f": 0.25}],  # YAML's `- math: 0.8`
        "[math:0.8, match , a b.py:f:0.25]",
    ):
        config.reward.function = value
        assert parts_of(config.reward.function) == expected
    _, settings = settings_of(["reward.function=[math:0.8,match,a b.py:f:0.25]", "data.train=x"])
    assert parts_of(structured(settings, TrainerConfig).reward.function) == expected


def test_a_mapping_is_the_same_in_every_place():
    config = TrainerConfig()
    config.reward.function = ROUTES
    _, settings = settings_of([f"reward.function={WRITTEN}", "data.train=x"])
    for text in (WRITTEN, config.reward.function, structured(settings, TrainerConfig).reward.function):
        assert parts_of(text, "openai/gsm8k") == [("math", 1.0)]
        assert parts_of(text, "codecontests") == [("match", 1.0), ("last_number", 0.1)]
        assert parts_of(text, "another") == parts_of(text) == [("match", 1.0)]
        assert read_plan(text).is_routed and read_plan(text).specs == ["math", "match", "last_number"]
    assert parts_of("{1:match}", "1") == [("match", 1.0)] and parts_of("{1:match}", "2") == []


@pytest.mark.parametrize("mark", ["'", '"'])
def test_names_in_quotes_hold_colons_and_commas(mark):
    text = "{QaQ:math, Qb: cQ:[match:1,Qa, b.py:fQ:2], Qd, eQ:QmathQ, it's:match}".replace("Q", mark)
    assert set(read_plan(text).routes) == {"a", "b: c", "d, e", "it's"}
    assert parts_of(text, "b: c")[0] == ("match", 1.0) and parts_of(text, "d, e") == [("math", 1.0)]


def test_values_of_the_command_line_meet_those_of_a_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("reward:\n  function: {a: match, b: exact}\n")

    def given(value: str) -> str:
        _, settings = settings_of(
            ["--config", f"{tmp_path}/mine.yaml", "data.train=x", f"reward.function={value}"]
        )
        return structured(settings, TrainerConfig).reward.function

    assert set(read_plan(given("{c:json}")).routes) == {"a", "b", "c"}
    assert set(read_plan(given("'{c:json}'")).routes) == {"c"} and given("json") == "json"
    assert parts_of(given("[exact]")) == [("exact", 1)] and parts_of(given("'[match:2]'")) == [("match", 2)]


def test_an_address_of_another_kind_and_an_empty_format_are_refused():
    (problem,) = check_reward("ftp://host/score")
    assert "'ftp://host/score' is no address of a server; write http://HOST:PORT/PATH" in problem
    config = TrainerConfig()
    config.reward.function, config.reward.format = "format", ""
    assert [one for one in check_config(config, world_size=1) if "reward.format is empty" in one]


def test_the_trainer_takes_lists_and_no_empty_one():
    for function, words in (([], "names no function"), ([("gone", 0.5)], "'gone' is unknown")):
        with pytest.raises(ValueError, match=words):
            RLTrainer(TrainerConfig(), reward_function=function)


@pytest.mark.parametrize("name", ["math", "folder/mine.py:score", "a,b.py:f", "[x].py:f", "C:1/x.py:f", ""])
def test_one_name_stays_one_name(name):
    assert not name or (read_plan(name).is_plain and parts_of(name) == [(name, 1.0)])
    config = TrainerConfig()
    config.reward.function = name
    assert config.reward.function == name


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("math:0.5", ("math", 0.5)),
        ("math : 5e-1", ("math", 0.5)),
        ("C:1/x.py:f:2", ("C:1/x.py:f", 2)),
        ("http://localhost:8000", ("http://localhost:8000", 1)),
        ("http://localhost:8000:0.5", ("http://localhost:8000", 0.5)),
        ("http://localhost:8000/a/b", ("http://localhost:8000/a/b", 1)),
        ("https://host/a:0.5", ("https://host/a", 0.5)),
        ("http://[::1]:8000/a:-1", ("http://[::1]:8000/a", -1)),
        ("http://[::1]:8000", ("http://[::1]:8000", 1)),
    ],
)
def test_weights_stand_behind_the_last_colon(text, part):
    assert parts_of(f"[{text}]") == parts_of(text) == [part]
    assert not read_plan(f"[{text}]").is_plain


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "names no function"),
        ({}, "has no entries"),
        ([""], "has '' in place of a function"),
        ("[math,]", "has '' in place of a function"),
        (["math", 3], "has 3 in place of a function"),
        (["math", None], "has None in place of a function"),
        ([["math"]], "has ['math'] in place of a function"),
        ([["math"], "match"], "has ['math'] in place of a function"),
        (["math", "math:0.5"], "names 'math' twice"),
        (["math:nan"], "gives 'math' the weight nan; give a number"),
        (["math:inf", "match"], "the weight inf"),
        (["math:1e9"], "the weight 1e9"),
        (["math:0", "match:0.0"], "weights of 0 only"),
        ([":0.5"], "has ':0.5' in place of a function"),
        ({"gsm8k": "math", "code": ""}, "wrong entry 'code': it has '' in place of a function"),
        ({"gsm8k": []}, "wrong entry 'gsm8k': it names no function"),
        ({"gsm8k": None}, "wrong entry 'gsm8k': it is None"),
        ({"gsm8k": {"a": "math"}}, "wrong entry 'gsm8k': it is {'a': 'math'}"),
        ({"math": 0.8, "format": 0.2}, "gives data_source 'math' the number 0.8"),
        ("{a:math,a:match}", "two entries for data_source 'a'"),
        ('{"a":"math","a":"match"}', "two entries for data_source 'a'"),
        ("[" * 100_000 + "]" * 100_000, "reward.function='[["),
        (["mtach", "math"], "reward.function='mtach' is unknown, did you mean \"match\"?; choose match"),
        (["gone.py:f:0.5"], "reward.function='gone.py:f': file 'gone.py' does not exist"),
        ("mine.py", "reward.function='mine.py' names a file and no function; write 'mine.py:NAME'"),
        (
            "match:score",
            "reward.function='match:score': match is built in and is no file; write reward.function=match",
        ),
        ("match,last_number", "reward.function='match,last_number' is unknown"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_once_with_the_setting(value, words):
    config = TrainerConfig()
    config.reward.function = value
    (problem,) = check_reward(config.reward.function)
    assert problem.startswith("reward.function=") and words in problem and len(problem) < 1000


def test_all_wrong_functions_are_named_together(mine):
    problems = check_reward(f"[{mine}:one,mtach,{mine}:gone,{mine}:half]")
    assert [problem.split(";")[0] for problem in problems] == [
        "reward.function='mtach' is unknown, did you mean \"match\"?",
        f"reward.function='{mine}:gone': the file has no function 'gone' at its top level",
    ]


def test_a_file_that_ends_its_process_is_the_one_that_is_named(mine, tmp_path):
    (tmp_path / "bad.py").write_text("import os; os._exit(3)\n")
    (problem,) = check_reward(f"[{mine}:one,{tmp_path}/bad.py:f,{mine}:half]")
    assert f"'{tmp_path}/bad.py:f': importing the file ends its process (exit code 3)" in problem


def test_modules_beside_two_files_must_not_share_a_name(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("import of_mine\ndef score(response): return of_mine.X\n")
        (tmp_path / name / "of_mine.py").write_text("X = 1\n")
    (problem,) = check_reward(f"[{tmp_path}/a/mine.py:score,{tmp_path}/b/mine.py:score]")
    assert (
        f"its folder has a module 'of_mine', which another reward file has imported from '{tmp_path}/a'"
        in (problem)
    )


def test_the_examples_of_the_documents_are_valid(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("def score(response): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    page = text_of(ROOT / "docs/data-and-rewards.md")
    examples = [yaml.safe_load(block) for language, block in FENCE.findall(page) if language == "yaml"]
    specs = []
    for example in examples:
        config = structured({"data": {"train": "x"}} | example, TrainerConfig)
        specs += [spec for spec in read_plan(config.reward.function).specs if spec != "math"]
    assert len(examples) == 2 and check_reward(f"[{','.join(dict.fromkeys(specs))}]") == []


# ---- scores ------------------------------------------------------------------------------------------------


def scored(text: str, *, extra: dict | None = None, **settings):
    with RewardPool(text, **settings) as pool:
        pool.submit(0, "p", "two words", "two words", extra)
        return pool.results()[0], pool


def test_the_score_is_the_weighted_sum_and_each_score_a_metric(mine):
    reward, pool = scored(f"[{mine}:one:0.8,{mine}:half:0.2,match:-2,last_number:0]", failure_score=0.25)
    assert reward.score == pytest.approx(0.8 + 0.1 - 2 + 0)
    assert reward.failure == "exception", "last_number has no number to compare with"
    assert reward.metrics == {"one": 1, "half": 0.5, "half/words": 2, "match": 1, "last_number": 0.25}
    assert "reward exception of last_number on sample 0: ValueError" in str(pool.first_failure)


def test_one_function_without_weight_has_its_own_metrics_only(mine):
    assert scored(f"{mine}:half")[0].metrics == {"words": 2}
    assert scored(f"[{mine}:half]")[0].metrics == {"half": 0.5, "half/words": 2}
    assert scored(f"{mine}:half:4")[0].score == 2


def test_all_files_are_imported_once(mine):
    assert scored(f"{{a:{mine}:one,default:[{mine}:imports,{mine}:half:0]}}")[0].score == 1


def test_functions_go_by_the_source_of_the_row(mine):
    text = f"{{a:{mine}:one,b:[{mine}:half,match]}}"
    assert scored(text, extra={"data_source": "a"})[0].metrics == {"one": 1}
    assert scored(text, extra={"data_source": "b"})[0].score == 1.5
    with pytest.raises(ValueError, match="has no entry for data_source 'c'"):
        scored(text, extra={"data_source": "c"})


def test_a_part_that_fails_leaves_the_others_their_scores(mine):
    text = f"[{mine}:dies:10,{mine}:one,{mine}:fails:100,{mine}:half]"
    reward, pool = scored(text, failure_score=-1)
    assert reward.score == -10 + 1 - 100 + 0.5 and reward.failure == "worker died"
    assert pool.failures == {"worker died": 1, "exception": 1} and pool.failed == 0
    assert reward.metrics["dies"] == -1 and reward.metrics["one"] == 1
    assert set(pool.examples) == {"worker died of dies", "exception of fails"}
    assert pool.complaint(pool.failed, pool.calls) == ""
    _, pool = scored(f"[{mine}:dies,{mine}:fails]")
    assert "failed on all 1 samples" in pool.complaint(pool.failed, pool.calls)


def test_the_time_limit_is_for_all_functions_of_a_sample(mine):
    reward, pool = scored(f"[{mine}:one,{mine}:hangs,{mine}:half]", timeout_s=5)
    assert reward.score == 1 and pool.failures == {"timeout": 2} and 5000 <= pool.total_ms


def test_a_sum_that_float32_cannot_hold_is_a_failure(mine):
    reward, pool = scored(f"[{mine}:huge:2,{mine}:one]")
    assert reward.score == 0 and pool.failures == {"not finite": 1}


def test_a_plan_in_words():
    assert described("[math:0.8,a.py:f:-2]") == "score: 0.8 x math + -2 x f"
    assert described("{a b:math,default:[exact,json:0.5]}") == (
        "score: 1 x math for 'a b'; 1 x exact + 0.5 x json for all others"
    )
    assert described("math") == described("") == ""


def test_equal_names_are_told_apart(tmp_path):
    text = f"[match,{tmp_path}/a.py:score,{tmp_path}/b.py:score,{tmp_path}/c/b.py:score,x.py:match,x.py:f]"
    names = [part.name for part in read_plan(text).parts("")]
    assert names == ["match", "a.score", "b.score", "b.score_2", "x.match", "f"]
    urls = "[http://a:80/score,http://b:80/score,http://c:80,https://d/x/rate?k=v]"
    assert [part.name for part in read_plan(urls).parts("")] == ["a_80_score", "b_80_score", "c_80", "rate"]
    assert own_metric("source") == "reward/own_source" and own_metric("mean/x") == "reward/mean/x"
    assert own_metric("own_source/a") == "reward/own_own_source/a"


def test_functions_of_python_in_lists_and_mappings(tmp_path):
    bonus = 0.5

    def longer(response):
        return len(response) * bonus

    given = {"a": [(longer, 0.1), "match:0.5", lambda response: 3.0], "default": longer}
    config = TrainerConfig()
    config.reward.function = spec_of(given, tmp_path / "run")
    plan = read_plan(config.reward.function)
    assert [part.name for part in plan.parts("a")] == ["longer", "match", "score"]
    with RewardPool(config.reward.function) as pool:
        for sample, source in enumerate("ab"):
            pool.submit(sample, "", "four", "four", {"data_source": source})
        rewards = pool.results()
    assert rewards[0].score == pytest.approx(2 * 0.1 + 0.5 + 3) and rewards[1].score == 2
    assert spec_of((longer, 0.5), tmp_path / "run")[0][1] == 0.5
    assert spec_of(functools.partial(longer), tmp_path / "run").endswith(":score")


# ---- the data ----------------------------------------------------------------------------------------------


def test_rows_without_a_function_are_refused_and_unused_entries_noted():
    text = "{a:match,b:last_number}"
    assert sources_problem(text, {"a": 3, "b": 1}) == sources_note(text, {"a": 3, "b": 1}) == ""
    assert sources_problem(text, {"a": 1, "": 1200, "c": 7}) == (
        f"reward.function='{text}' has no entry for data_source (none) (1,200 rows), 'c' (7 rows); add one, "
        "or an entry default for all others"
    )
    many = sources_problem(text, {f"s{n:02}": 1 for n in range(30)})
    assert "'s04' (1 rows) and 25 more" in many
    assert sources_note(text, {"a": 3}) == "no row has the data_source 'b' of reward.function"
    assert sources_problem("match", {"": 3}) == sources_note("match", {"x": 3}) == ""
    assert sources_problem("{a:match,default:match}", {"c": 3}) == ""


def test_columns_are_those_of_the_rows_that_a_function_scores(mine):
    text = f"{{a:{mine}:topical,default:match}}"
    assert check_reward(text) == []
    assert columns_problem(text, ["x"], "b") == columns_problem(text, ["topic"], "a") == ""
    assert "takes the argument 'topic'" in columns_problem(text, ["x"], "a")


def test_the_sources_of_a_run_are_checked_before_it(tmp_path, mine):
    write_hf(tmp_path / "model", "llama", **SERVED["llama"])
    write_tokenizer(tmp_path / "model")
    lines = [f'{{"prompt": "w3", "answer": "w4", "data_source": "{source}"}}\n' for source in "aab"]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    config = TrainerConfig()
    config.run.output_dir, config.actor.path = tmp_path / "out", tmp_path / "model"
    config.data.train, config.data.max_prompt_tokens = tmp_path / "train.jsonl", 8
    config.rollout.max_tokens = 8
    config.reward.function = {"a": "match", "c": "last_number"}
    (problem,) = inspect_run(config, world_size=1)
    assert "no entry for data_source 'b' (1 rows)" in problem and "train.jsonl" in problem
    config.reward.function = {"a": "match", "c": "last_number", "default": "match"}
    inputs = Inputs()
    assert inspect_run(config, world_size=1, inputs=inputs) == []
    assert "no row has the data_source 'c' of reward.function" in inputs.notes
    assert inputs.train.sources == {"a": 2, "b": 1}


def test_scores_by_source_are_means_of_the_largest_sources():
    counts = {f"s{n}": 100 - n for n in range(MOST + 5)}
    sources, sums = Sources([counts, {"s0": 5}]), Sums()
    rows = [{"data_source": source} for source in ("s0", "s1", "s0", f"s{MOST + 1}", "unknown")]
    numbers = sources.numbers(rows)
    assert numbers.tolist() == [0, 1, 0, MOST, MOST]
    sources.add(sums, "reward", torch.tensor([1.0, 2.0, 2.0, 5.0, 7.0]), numbers)
    found = {name: value for name, (value, count) in sums.state_dict()["totals"].items() if count}
    assert found == {"reward/source/s0": 3, "reward/source/s1": 2, "reward/source/other": 12}
    assert Sources([{"a": 3}]).numbers(rows) is None and Sources().numbers(rows) is None
    assert Sources([{"a": 3}], always=True).numbers(rows[:0]).tolist() == []
    assert not math.isnan(sums.state_dict()["totals"]["reward/source/s5"][0])
