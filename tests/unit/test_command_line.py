"""Every command line that cannot be meant ends with one sentence and 2, and starts nothing."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn, TextIO

import pytest

from tests.worlds import ROOT
from verl_megatron import train
from verl_megatron.launch import dry_run  # noqa: F401  # imported before the forks
from verl_megatron.launch.command_line import FLAGS, _read_arguments, run_command, settings_of
from verl_megatron.launch.options import OF_A_RANK, is_rank
from verl_megatron.launch.recipe import check_recipe

# What follows the options --config-path and --config-name, and what has to be said.
ARGUMENTS = [
    (["run.seed=1,2"], "'run.seed=1,2': a run has one value of each setting"),
    (["run.seed=range(1,3)"], "run.seed=range(1,3)"),
    (["--multirun", "run.seed=1,2"], "--multirun: a command is one run"),
    (["-m"], "--multirun: a command is one run"),
    (["--dry-rnu"], 'did you mean "--dry-run"?'),
    (["--seed=3"], "unrecognized arguments: --seed"),
    (["--config-name"], "--config-name/-cn: expected one argument"),
    (["reward.function={a:math,a:match}"], "reward.function={a:math,a:match} has two entries 'a'; keep one"),
    (["data.train={'a.jsonl':1,'a.jsonl':2}"], "has two entries 'a.jsonl'; keep one of them"),
    (["--config-name", "run.seed=3"], "--config-name has no recipe after it but 'run.seed=3'"),
    (["--config-name", "nope"], "has no recipe 'nope'; it has good"),
    (["--gpu"], "--gpu: expected one argument"),
    (["--cfg", "nothing"], "--cfg/-c: 'nothing' is not known; choose one of job, hydra, all"),
    (["--dry-run", "--gpu", "h900"], "--gpu 'h900' is not known, did you mean \"h200\"?; choose one of h200"),
    (["--dry-run", "--gpu", "no.json"], "--gpu 'no.json' does not exist or is no file; name the .json file"),
    ([""], "'' is no setting; settings are"),
    (["foo"], "'foo' is no setting; settings are"),
    (["=3"], "cannot be read"),
    (["run.seed="], "run.seed="),
    (["~run.sed"], "run.sed"),
    (["a.b@c=d"], "a.b@c=d"),
    (["rolout.tp=2"], 'rolout is no section, did you mean "rollout"?'),
    (["rollout=2"], "rollout=2 is no section with settings"),
    (["reward=[1]"], "reward=[1] is no section with settings"),
    (["rollout.stop=[a]", "rollout.stop={a:b}"], "Error merging override rollout.stop={a:b}: there is a"),
    (["run.seed=${x}"], "run.seed: Interpolation key 'x' not found"),
    (["run.seed=${run.seed}"], "run.seed"),
    (["rollout.stop=["], "'rollout.stop=[' cannot be read"),
    (["hydra/launcher=none"], "'hydra/launcher=none': Hydra's own settings have no effect"),
    (["++hydra.run.dir=elsewhere"], "Hydra's own settings have no effect on a run; leave it out"),
    (["--num_generations", "8"], "num_generations of TRL is called data.samples_per_prompt here"),
    (["--learning-rate=1e-6"], "learning_rate of TRL is called actor.lr here"),
    (["--rollout.tp=2"], "settings have no dashes: write rollout.tp=2"),
    (["run.seed=" + "9" * 5000], "the settings cannot be read"),
    (["run.output_dir='" + "a" * 100_000 + "'"], "run.output_dir="),
    ([b"run.output_dir=a\xff"], "is no UTF-8 text"),
]
BAD_RECIPES = [
    (b"run: [1", "recipe.yaml, line 1, column 8: not valid YAML"),
    (b"run:\n\tseed: 3\n", "recipe.yaml, line 2, column 1: not valid YAML"),
    (b"run:\n  seed: 3\nactor:\n  lr: 1\nrun:\n  seed: 4\n", "recipe.yaml, line 5: 'run' stands there twice"),
    (b"run:\n  seed: 3\n  seed: 4\n", "recipe.yaml, line 3: 'seed' stands there twice"),
    (b"run:\n  seed: !nothing 3\n", "recipe.yaml, line 2: the tag '!nothing'"),
    (b"run:\n  seed: !!python/object/apply:os.getcwd []\n", "python/object/apply:os.getcwd"),
    ("run:\n  output_dir: ä\n".encode("latin-1"), "is no UTF-8 text (byte 19)"),
    ("run: {seed: 3}".encode("utf-16"), "is no UTF-8 text"),
    (b"run: {seed: 3}\0", "not valid YAML"),
    (b"- run\n- data\n", "must be sections with settings"),
    (b"just a text", "must be sections with settings"),
    (b"? [a, b]\n: 3\n", "line 1: a setting's name must be a word"),
    (b"run: *nothing\n", "not valid YAML"),
    (b"[" * 100_000, "nested too deeply"),
    (b"#" * (2 << 20), "has more than 1,048,576 bytes"),
    (
        b"a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 10)),
        "stands for more than 100,000 values",
    ),
]


def options(folder: Path, recipe: str) -> list[str]:
    named = ["--config-name", recipe] if recipe else []
    return ["--config-path", str(folder), *named, "--dry-run"]


def command(
    arguments: list[str | bytes], folder: Path, *, recipe: str = "good"
) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "verl_megatron.train", *options(folder, recipe), *arguments]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    } | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(line, cwd=folder, env=environment, text=True, capture_output=True, timeout=60)


def forked(arguments: list[str], folder: Path, *, recipe: str = "good") -> subprocess.CompletedProcess:
    """As `command`, in a fork of this process, which spares it the imports."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        if not (child := os.fork()):
            run_here([*options(folder, recipe), *arguments], folder, stdout, stderr)
        _, status = os.waitpid(child, 0)
        texts = [(file.seek(0), file.read())[1] for file in (stdout, stderr)]
    return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), *texts)


def run_here(arguments: list[str], folder: Path, stdout: TextIO, stderr: TextIO) -> NoReturn:
    """What `python -m verl_megatron.train` does, in this process with these files."""
    try:
        signal.alarm(60)
        for number, file in ((1, stdout), (2, stderr)):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        os.chdir(folder)
        sys.argv[1:] = arguments
        run_command(train.main, plan=train.plan)
    finally:
        os._exit(99)


def is_one_sentence(ended: subprocess.CompletedProcess, words: str) -> bool:
    return (
        ended.returncode == 2
        and words in ended.stderr
        and ended.stderr.startswith("error: ")
        and ended.stderr.count("\n") == 1
        and not ended.stdout
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "good.yaml").write_text("actor:\n  path: llama3-8b\nreward:\n  function: match\n")
    return folder


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS, ids=lambda x: str(x)[:30])
def test_arguments_that_cannot_be_meant(arguments, words, folder):
    is_special = isinstance(arguments[0], bytes) or len(arguments[0]) > 4000  # what only a real one gets
    recipe = "" if arguments[0] == "--config-name" else "good"
    ended = (command if is_special else forked)(arguments, folder, recipe=recipe)
    assert is_one_sentence(ended, words), (ended.returncode, ended.stdout[-500:], ended.stderr[-2000:])
    assert len(ended.stderr) < 1500


def test_a_run_sees_the_arguments_that_were_given(folder, monkeypatch):
    """The command that a single process recommends is made of them."""
    given, seen = ["--config-path", str(folder), "--config-name", "good", "run.seed=3"], []
    monkeypatch.setattr(sys, "argv", ["train", *given])
    monkeypatch.setattr("parallel.runtime.process.end", sys.exit)
    with pytest.raises(SystemExit):
        run_command(lambda config: seen.append(sys.argv[1:]))
    gc.enable()
    assert seen == [given]


def test_an_empty_variable_makes_no_rank(monkeypatch):
    for name in OF_A_RANK:
        monkeypatch.setenv(name, "")
    assert not is_rank()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_rank()


@pytest.mark.parametrize("option", ["--config-path", "--config-dir"])
@pytest.mark.parametrize("path", ["nowhere", "good.yaml", "circle", "a" * 5000])
def test_what_is_no_folder_of_recipes_is_named_with_its_option(option, path, folder, monkeypatch):
    monkeypatch.chdir(folder)
    if not os.path.lexists("circle"):
        os.symlink("circle", "circle")
    with pytest.raises(ValueError, match=f"^{option} '{path[:9]}.* is no folder of recipes; name one"):
        settings_of([option, path, "--config-name", "good"])


@pytest.mark.parametrize(("text", "words"), BAD_RECIPES, ids=lambda x: str(x)[:20])
def test_recipes_that_cannot_be_meant(text, words, tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(text)
    with pytest.raises(ValueError) as error:
        check_recipe(tmp_path / "recipe.yaml")
    assert words in str(error.value), error.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n\tseed: 3\n", "recipe.yaml, line 2"),
        ("defaults: [nowhere]\n", "'nowhere'"),
        ("defaults: 3\n", "defaults"),
        ("run: {seed: '${nothing}'}\n", "run.seed"),
        ("sed: 3\n", "sed is no section"),
        ("hydra: {run: {dir: here}}\n", "section 'hydra': Hydra's own settings have no effect"),
        ("data:\n  train: ???\nactor:\n  path: ???\n", "actor.path has to be given"),
        ("", "data.train has to be given"),
    ],
)
def test_recipes_on_the_command_line(text, words, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    ended = forked([], tmp_path, recipe="recipe")
    assert (
        ended.returncode == 2
        and words in ended.stderr
        and "Traceback" not in ended.stderr
        and not ended.stdout
    ), ended


def test_aliases_and_empty_recipes_are_fine(tmp_path):
    (tmp_path / "recipe.yaml").write_text("actor: &model\n  layout: tp2\ncritic: *model\n")
    check_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text("# nothing\n")
    check_recipe(tmp_path / "recipe.yaml")


def test_help_and_settings_are_shown(folder):
    told = command(["--help"], folder)
    assert told.returncode == 0 and "--dry-run" in told.stdout and "SECTION.SETTING=VALUE" in told.stdout
    shown = command(["--cfg", "job", "run.seed=7"], folder)
    assert shown.returncode == 0 and "seed: 7" in shown.stdout


def test_flags_stand_for_settings():
    known = _read_arguments(["--verify", "run.seed=3", "~run.seed", "+run.seed=4", "--track_metrics"])
    assert known.overrides == [
        "++run.seed=3",
        "~run.seed",
        "++run.seed=4",
        *("++" + setting for setting in FLAGS.values()),
    ]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("日本/ü.jsonl", "日本/ü.jsonl"),
        ("http://host:80/a?b=c&d=(e)#f", "http://host:80/a?b=c&d=(e)#f"),
        ("it's.py:f", "it's.py:f"),
        ("[。,<|end|>,b]", ["。", "<|end|>", "b"]),
        ("[1,a=b]", ["1", "a=b"]),
        ("a b", "a b"),
        ("'ü'", "ü"),
        ("[1, 2]", ["1", "2"]),
        ("['a,b',ü,1e3]", ["a,b", "ü", "1e3"]),
        ("{a:b}", {"a": "b"}),
    ],
)
def test_texts_with_any_signs_need_no_quotes(written, value):
    _, settings = settings_of([f"reward.function={written}"])
    assert settings["reward"]["function"] == value


def test_a_mapping_whose_names_need_quotes_is_refused_with_the_remedy():
    for written in ("{ü:math}", '{"a b":math}'):
        with pytest.raises(ValueError, match="cannot be read.*stands in quotes: '{"):
            settings_of([f"reward.function={written}"])
