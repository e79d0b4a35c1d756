"""Help of every command: a usage line, what it does, and examples that parse."""

import shlex
import subprocess
import sys

import pytest

from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.commands import COMMANDS, main
from verl_megatron.commands.benchmark import BENCHMARKS
from verl_megatron.commands.convert import SUMMARIES
from verl_megatron.launch import command_line
from verl_megatron.launch.options import Options, launcher_options

RUNS = (
    "train",
    "sft",
    "dpo",
    "reward-model",
    "benchmark offload",
    "benchmark batching",
)  # which read settings, by Hydra
OTHERS = [name for name in COMMANDS if name not in (*RUNS, "data")]
KINDS = [f"benchmark {name}" for name in BENCHMARKS if f"benchmark {name}" not in RUNS]
ALL = [*RUNS, *OTHERS, *KINDS, "data check", *(f"convert {name}" for name in SUMMARIES)]


class ParsedError(Exception):
    """Raised in place of running a command whose arguments are right."""


@pytest.fixture
def only_parsed(monkeypatch):
    def parsed(parse):
        def parse_and_stop(self, args=None, namespace=None):
            parse(self, args, namespace)
            raise ParsedError

        return parse_and_stop

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(Options, name, parsed(getattr(Options, name)))
    monkeypatch.setattr("sys.argv", ["verl-megatron"])


def help_of(command: str, capsys) -> str:
    try:
        assert main([*command.split(), "--help"]) == 0
    except SystemExit as ended:  # of an argument parser
        assert not ended.code
    return capsys.readouterr().out


def examples_of(shown: str) -> list[list[str]]:
    text = shown.partition("\nexamples:\n")[2].replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("command", ALL)
def test_help_has_usage_options_and_examples_that_parse(command, capsys, request, tmp_path, monkeypatch):
    shown = help_of(command, capsys)
    program = ["verl-megatron", *command.split()]
    assert shown.startswith(f"usage: {' '.join(program)} ")
    assert len(shown) - len(shown.lstrip()) == 0 and "None" not in shown and "==SUPPRESS==" not in shown
    examples = examples_of(shown)
    assert len(examples) >= 1 + (command != "convert inspect") and all(
        words[: len(program)] == program for words in examples
    ), shown
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_toy_cpu]\n")
    monkeypatch.chdir(tmp_path)
    request.getfixturevalue("only_parsed")
    for words in examples:
        parse(command, words[1:])


def parse(command: str, words: list[str]) -> None:
    if command in RUNS:
        rest = launcher_options(words[len(command.split()) :])[1]
        known, settings = command_line.settings_of(rest)
        assert (known.config or known.config_name) and settings
    elif command == "benchmark":
        assert words[1] in BENCHMARKS
    elif command == "quickstart":
        assert (ROOT / "recipes/quickstart.sh").is_file()  # whose settings are those of a run
        assert all(word == "--dry-run" or "=" in word for word in words[1:])
    else:
        with pytest.raises(ParsedError):
            main(words)


@pytest.mark.parametrize("command", [name for name in ALL if name not in ("benchmark", "quickstart")])
def test_every_option_says_what_it_is(command, capsys):
    """No line of the options is an option alone, with nothing on the next one either."""
    lines = help_of(command, capsys).partition("\nexamples:\n")[0].splitlines()
    for line, after in zip(lines, [*lines[1:], ""]):
        is_alone = line.startswith("  -") and "  " not in line.strip()
        assert not is_alone or after.startswith("      "), line


REFUSED = [
    (["plan", "--gpu", "h100", "--gpu", "h200"], "argument --gpu: it is given twice"),
    (["train", "--config-name", "a", "--config-name=b"], "argument --config-name: it is given twice"),
    (["train", "--ranks", "2", "--ranks", "3"], "--ranks: it is given twice"),
    (["train", "--config", "a.yaml", "--config-name", "b"], "name two recipes; leave one of them out"),
    (["report", "none", "--outptu", "x"], 'unrecognized arguments: --outptu x, did you mean "--output"?'),
    (["convert", "verify", "a", "b", "--wokers=2"], 'did you mean "--workers"?'),
    (["benchmark", "reshard", "--nope"], "unrecognized arguments: --nope"),
    (
        ["benchmark", "rollout", "--utilization", "nan"],
        "'nan' is not accepted; write a number from 0.001 to 1",
    ),
    (["reshard-plan", "--same-gpu-rate", "1e308"], "'1e308' is not accepted; write a number from 1 to"),
    (["reward-server", "none", "--gpu-memory-utilization", " 0.5"], "' 0.5' is not accepted; write a number"),
    (["doctor", "--ranks", "-1"], "argument --ranks: '-1' is not accepted; write a whole number from 1"),
    (["plan", "--model", "llama3-8b", "--gpus", "²"], "'²' is not accepted; write a whole number from 1"),
    (["export", "run", "--step", "x"], "argument --step: 'x' is not accepted; write a whole number"),
    (["convert", "verify", "a", "b", "--memory-gib", "1e308"], "'1e308' is not accepted; write a number"),
    (["train", "--gpus", "2"], "unrecognized arguments: --gpus; --ranks N says how many processes start"),
    (["train", "--resume"], "--resume; it is a setting: write run.resume=VALUE"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(given) for given, _ in REFUSED])
def test_unknown_and_repeated_options_are_named(arguments, said, capfd, monkeypatch):
    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr("parallel.runtime.process.end", end)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capfd.readouterr().err
    assert ended.value.code == 2 and said in shown and shown.count("\n") == 1, shown


# Ends with the first command whose arguments were not answered, or not before a heavy package was imported.
WRONG = """
import os, sys
from verl_megatron.commands import COMMANDS, main
from verl_megatron.commands.benchmark import BENCHMARKS
from verl_megatron.commands.convert import SUMMARIES
from parallel.runtime import process

def end(status):
    raise SystemExit(status)

process.end = end
one_word = [[name] for name in COMMANDS if name not in ("recipes", "data", "benchmark")]
named = [("recipes", "list"), ("data", "check"), *(("benchmark", name) for name in BENCHMARKS)]
for command in [*one_word, *named, *(("convert", name) for name in SUMMARIES)]:
    sys.argv = ["verl-megatron"]
    for wrong in ("--no-such-option", "--help"):
        try:
            status = main([*command, wrong])
        except SystemExit as ended:
            status = ended.code
        heavy = {"torch", "transformers", "vllm", "megatron"} & set(sys.modules)
        if heavy or bool(status) != (wrong != "--help"):
            sys.exit(f"{' '.join(command)} {wrong}: {status} {heavy}")
"""


PROGRAMS = ("tools/bench/*.py", "tools/calibrate.py", "tools/benchmark_scaling.py")


@pytest.mark.parametrize(
    "path", sorted(path for each in PROGRAMS for path in ROOT.glob(each)), ids=lambda path: path.stem
)
def test_the_programs_of_benchmarks_are_the_commands_and_refuse_without_torch(path, capsys, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    env = environment_of_ranks() | {"PYTHONPATH": str(tmp_path)}
    given = dict(cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    name = path.stem.removeprefix("benchmark_").replace("_", "-")
    said = subprocess.run([sys.executable, path, "--help"], **given)
    assert said.stdout == help_of(f"benchmark {name}", capsys)
    said = subprocess.run([sys.executable, path, "--bogus"], **given)
    assert said.returncode == 2 and said.stderr.startswith("error: "), said.stderr[-500:]


def test_wrong_arguments_and_help_are_answered_before_anything_heavy_is_imported():
    said = subprocess.run(
        [sys.executable, "-c", WRONG],
        cwd=ROOT,
        env=environment_of_ranks(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr[-500:]
