"""`verl-megatron evaluate` and `generate`: what their arguments become, and what is refused."""

import json
import os

import pytest

from parallel.runtime import leftovers
from tests.characters import characters
from tests.tiny import tiny_architecture
from verl_megatron.commands import evaluation
from verl_megatron.evaluation import Evaluation


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """The evaluations that are started, which are not checked and do nothing."""
    found = []
    monkeypatch.setattr(
        "verl_megatron.launch.ranks.start", lambda module, given, **_: found.append(json.loads(given[0]))
    )
    monkeypatch.setattr(Evaluation, "problems", lambda self, world_size: [])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a tokenizer and a configuration."""
    folder = tmp_path_factory.mktemp("model")
    characters().hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(tiny_architecture(vocab_size=128).to_hf()))
    return str(folder)


@pytest.mark.parametrize("text", ["modèle", r"a\b", "${run.seed}", r"a\${x}", "a,b", "it's", "模型 (1)"])
def test_arguments_stay_as_they_are_typed(started, text):
    evaluation.evaluate([text, f"{text}.jsonl", "--reward", f"{text}.py:f", "rollout.tp=1"])
    (given,) = started
    config = Evaluation(**given).config()
    assert (config.actor.path, config.data.validation) == (text, f"{text}.jsonl")
    assert config.reward.function == f"{text}.py:f"


@pytest.mark.parametrize("setting", ["data.validation=x", "++data.validation=x", "+data.validation=x"])
def test_an_argument_is_not_given_as_a_setting_too(started, setting):
    with pytest.raises(ValueError, match="data.validation is an argument of its own; leave the setting out"):
        evaluation.evaluate(["a", "b", setting])
    with pytest.raises(ValueError, match="data=5 is no section with settings"):
        evaluation.evaluate(["a", "b", "data=5"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("algorithm.kl_coef=0", "algorithm.kl_coef=0 is for training; leave it out"),
        ("run.iterations=3", "run.iterations=3 is for training"),
        ("critic.path=none", "critic.path='none' is for training"),
        ("reward.path=none", "reward.path='none' is for training"),
        ("run.output_dir=out", "run.output_dir='out' is for training"),
        ("data.samples_per_prompt=2", "data.samples_per_prompt=2 is for training; write --samples N"),
        ("reward.target_length=5", "reward.target_length=5 has no effect without length in reward.function"),
    ],
)
def test_settings_that_are_not_read_are_refused(settings, said):
    name, _, value = settings.partition("=")
    section, _, setting = name.partition(".")
    given = {section: {setting: int(value) if value.isdigit() else value}}
    found = Evaluation(settings=given).problems(world_size=1)
    assert any(problem.startswith(said) for problem in found), found


def test_samples_have_the_limit_of_the_setting():
    (problem, *_) = Evaluation(samples=20_000_000).problems(world_size=1)
    assert problem == "--samples=20000000 lies outside [1, 1000000]; choose a value inside"


def test_generate_reads_no_settings_of_scores():
    given = {"reward": {"function": "nope"}}
    (problem, *_) = Evaluation(settings=given, scored=False).problems(world_size=1)
    assert problem == "reward.function='nope' is for scores, which evaluate gives; leave it out"


def test_prompts_have_no_weights_and_functions_are_checked_as_in_training(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    prompts = f"{tmp_path}/a.jsonl:0.5,{tmp_path}/b.jsonl:0.5"
    given = {"data": {"validation": prompts}, "reward": {"function": "format", "format": "("}}
    found = Evaluation(settings=given).problems(world_size=1)
    assert any("has weights, and every prompt is asked once" in problem for problem in found)
    assert any("reward.format='(' is no regular expression" in problem for problem in found)


def test_rows_have_what_the_reward_needs(tmp_path, model):
    prompts = tmp_path / "a.jsonl"
    prompts.write_text('{"prompt": "a", "answer": "b"}\n')
    settings = {"actor": {"path": model}, "data": {"validation": str(prompts)}}
    given = Evaluation(settings=settings | {"reward": {"function": "length"}})
    given.problems(world_size=1)
    with pytest.raises(ValueError, match="reward.function=length needs reward.target_length or a column"):
        given.read()


@pytest.mark.parametrize("function", ["match", "[last_number:1,format:1]", "{a:match,default:json}", "json"])
def test_rows_without_ground_truth_are_refused_where_one_is_compared(tmp_path, model, function):
    prompts = tmp_path / "a.jsonl"
    rows = [{"prompt": "a", "answer": answer, "data_source": "a"} for answer in ("b", None, None)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"actor": {"path": model}, "data": {"validation": str(prompts)}}
    given = Evaluation(settings=settings | {"reward": {"function": function}})
    if function == "json":
        given.read()
        return
    with pytest.raises(ValueError, match=f"and 2 rows have none, first at {prompts}, line 2; name its"):
        given.read()


def test_samples_that_find_no_room_are_kept_elsewhere(tmp_path, monkeypatch):
    own = f"{leftovers.mark_of(1)}/{leftovers.mark_of(os.getpid())}"  # is removed with its process
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/{own}")
    rows = [{"sample": 0, "response": "a\ud800"}, {"sample": 1, "response": "模"}]
    with pytest.raises(
        ValueError, match=r"--out /dev/full cannot be written .No space left on device.; "
    ) as error:
        Evaluation(settings={}, out="/dev/full").save(rows)
    (kept,) = tmp_path.iterdir()
    assert str(error.value).endswith(f"the samples are in {kept}")
    Evaluation(settings={}, out=str(tmp_path / "out.jsonl")).save(rows)
    assert kept.read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert json.loads(kept.read_text().splitlines()[1]) == rows[1]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="the samples are lost; run the command again"):
        Evaluation(settings={}, out="/dev/full").save(rows)
