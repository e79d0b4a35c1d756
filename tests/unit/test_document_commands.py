"""Every command of the documents is run by a test, or says that it needs GPUs or a cluster."""

import ast
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import COMMANDS, FENCE, FOLDERS, INLINE, PAGES, Command, text_of
from tests.worlds import ROOT
from verl_megatron.commands import COMMANDS as COMMANDS_OF_PROGRAM
from verl_megatron.commands.evaluation import EVALUATE_EXAMPLES, GENERATE_EXAMPLES
from verl_megatron.commands.training import DPO, REWARD_MODEL, SFT, TRAIN
from verl_megatron.examples.toy import make_toy

NEEDS = ("needs GPUs", "needs a cluster")
TOY, RANDOM = (ROOT / "verl_megatron/examples" / name for name in ("toy.py", "random_weights.py"))
# Pattern of a command -> tests that run its program, on a smaller case.
RUN_BY = {
    r"verl-megatron doctor": (
        "tests/unit/test_doctor.py::test_a_real_run_has_stable_keys",
        "tests/unit/test_doctor_system.py::test_a_recipe_that_fits",
    ),
    r"bash recipes/quickstart\.sh$": (
        "tests/unit/test_recipes.py::test_the_quickstart_looks_at_all_settings_before_it_trains",
        "tests/end_to_end/test_ppo.py::test_whole_run_leaves_what_it_promises",  # its recipe
    ),
    r"MODEL=.* --dry-run$": ("tests/unit/test_recipes.py::test_every_launcher_plans_every_recipe",),
    r"NNODES=4 GPUS=8 bash .* rollout\.devices=.* --dry-run$": (
        "tests/unit/test_dry_run.py::test_each_world_is_shown",
        "tests/unit/test_recipes.py::test_every_launcher_plans_every_recipe",
    ),
    r"(torchrun .* -m verl_megatron\.|verl-megatron )train ": (
        "tests/end_to_end/test_ppo.py::test_whole_run_leaves_what_it_promises",
        "tests/end_to_end/test_commands.py::test_a_run_starts_the_ranks_that_it_needs",
    ),
    r"bash tools/install\.sh$": (
        "tests/unit/test_install.py::test_an_installation_that_fails_is_begun_anew",
    ),
    r"verl-megatron train --config mine": (
        "tests/end_to_end/test_first_run.py::test_the_plan_and_the_run_are_those_of_the_recipe",
        "tests/unit/test_commands.py::test_a_recipe_anywhere_extends_a_shipped_one",
    ),
    r"verl-megatron sft ": ("tests/end_to_end/test_sft.py::test_sft_lowers_the_loss_under_any_layout",),
    r"verl-megatron (dpo|reward-model) ": (
        "tests/end_to_end/test_supervised.py::test_a_stopped_run_resumes_to_the_last_bit",
    ),
    r"verl-megatron (evaluate|generate) ": (
        "tests/end_to_end/test_commands.py::test_a_model_is_asked_and_scored",
    ),
    r"verl-megatron data check ": (
        "tests/unit/test_data_check.py::"
        "test_it_shows_prompts_lengths_sources_duplicates_and_what_is_too_long",
    ),
    r"python tools/make_toy\.py ": (
        "tests/unit/test_make_toy.py::test_model_is_a_llama_folder_in_two_shards",
    ),
    r"python tools/make_random\.py ": (
        "tests/unit/test_benchmark_scaling.py::test_runs_train_on_the_prompts_that_are_made_last",
    ),
    r"verl-megatron convert ": ("tests/unit/test_convert_tool.py::test_exit_status_and_one_line_errors",),
    r"verl-megatron benchmark convert ": (
        "tests/unit/test_bench_convert.py::"
        "test_conversions_are_measured_beside_cp_and_an_exceeded_cap_is_an_error",
    ),
    r"verl-megatron benchmark data ": (
        "tests/unit/test_bench_data.py::test_reading_is_measured_in_a_process_of_its_own",
    ),
    r"verl-megatron report ": (
        "tests/unit/test_report_command.py::test_the_command_writes_a_page_and_prints_alarms",
    ),
    r"verl-megatron plan .* --gpu machine\.json": (
        "tests/unit/test_planner_tools.py::test_calibration_on_two_ranks_is_a_machine_that_plans_read",
    ),
    r"verl-megatron benchmark scaling ": (
        "tests/end_to_end/test_benchmark_scaling.py::"
        "test_the_table_has_measured_and_modelled_sizes_of_fixed_length",
    ),
    r"verl-megatron benchmark verl ": (
        "tests/end_to_end/test_benchmark_scaling.py::test_ways_of_the_job_beside_verl_are_compared",
    ),
    r"python -m tests\.fuzz ": (
        "tests/end_to_end/test_fuzz.py::test_bad_inputs_are_refused_in_a_sentence_and_good_ones_are_not",
    ),
    r"(pip install -e \.\[docs\]|mkdocs serve)$": (
        "tests/unit/test_documents.py::test_the_site_builds_and_loads_nothing_from_the_network",
    ),
    r"bash tests/run\.sh": (),  # runs this test
}
# Programs whose whole run is too long here and needs nothing special: their options are read.
TRAININGS = {training.command: training for training in (TRAIN, SFT, DPO, REWARD_MODEL)}
ONLY_HELP = ("python tools/compare_runs.py", "python tools/compare_algorithms.py")


def name_of(command: Command) -> str:
    return command.line


def each_command(commands):
    return pytest.mark.parametrize("command", commands, ids=name_of)


@each_command(sorted({*COMMANDS, *INLINE}))
def test_commands_name_what_exists(command):
    words = shlex.split(re.sub(r"[\[\]]", " ", command.line))
    for before, word in zip(["", *words], words):
        if word.startswith(("tools/", "recipes/", "tests/")) and "." in word:
            assert (ROOT / word).is_file(), f"{word} does not exist"
        if before == "-m" and word.startswith(("verl_megatron", "tests")):
            assert importlib.util.find_spec(word), f"module {word} does not exist"
        if before == "--config-name":
            assert (ROOT / "recipes" / f"{word}.yaml").is_file(), f"there is no recipe {word}"
    source = source_of(words)
    if source is not None:
        options = {word for word in words if word.startswith("--")}
        known = {option for option in options if option in source or option.replace("no-", "") in source}
        assert options == known, f"{command.line} has no option {options - known}"


def source_of(words: list[str]) -> str | None:
    """The code that reads a command's options; None if it is not ours."""
    if words[0] == "verl-megatron":
        assert words[1] in COMMANDS_OF_PROGRAM, f"there is no command {words[1]}"
        module = COMMANDS_OF_PROGRAM[words[1]].module.replace("command", "options")
        modules = ["launch.options", "launch.command_line", f"commands.{module}"]
        if words[1] == "benchmark":
            modules += ["benchmarks.options.__init__", f"benchmarks.options.{words[2].replace('-', '_')}"]
        paths = [ROOT / "verl_megatron" / f"{module.replace('.', '/')}.py" for module in modules]
        return "".join(path.read_text() for path in paths)
    program = next((word for word in words if re.fullmatch(r"tools/\w+\.py", word)), None)
    return None if program is None else (ROOT / program).read_text() + TOY.read_text() + RANDOM.read_text()


def runs_anywhere(line: str) -> bool:
    """Plans need no GPU, no weights and no data; words in capitals stand for a user's files."""
    planners = ("verl-megatron plan ", "verl-megatron reshard-plan ")
    is_plan = "--dry-run" in line or line.startswith(planners)
    return is_plan and not re.search(r"\.\.\.|machine\.json|mine\.yaml|\b[A-Z]{3,}\b(?!=)|/models/", line)


OF_A_RUN = ("NNODES", "NODE_RANK", "GPUS", "MODEL", "DATA", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
RUNNABLE = [command for command in COMMANDS if runs_anywhere(command.line)]
RUNNABLE += [command for command in INLINE if "--dry-run" in command.line]
HELPED = [command for command in COMMANDS if command.line.startswith(ONLY_HELP)]


def test_there_are_plans_to_run():
    assert 5 <= len(RUNNABLE) <= 16


PLANNER = r"verl-megatron (plan|reshard-plan) "
FOR_GPUS = re.compile(r"([A-Z]+=\S+ )*(bash recipes/\w[\w.]*\.sh|verl-megatron train --config-name) ?")
OF_USER = re.compile(r"\b(MODEL|DATA)=\S+ | (actor\.path|data\.train|reward\.function)=\S*/\S+| --role \w+")


def plan_of(line: str) -> str:
    """A command for GPUs as a dry run, with a published shape for the user's model."""
    shape = " actor.path=llama3-1b" * line.startswith("verl-megatron")
    return f"{OF_USER.sub('', line)}{shape} --dry-run"


FOR_GPUS_OF_ONE_HOST = [
    Command(plan_of(command.line))
    for command in COMMANDS
    if command.note in NEEDS and FOR_GPUS.match(command.line) and "recipes/sft.sh" not in command.line
]


@each_command([command for command in RUNNABLE if re.match(PLANNER, command.line)])
def test_planners_run(command, tmp_path, monkeypatch):
    """In this process, which spares the imports."""
    monkeypatch.chdir(tmp_path)
    name = re.match(PLANNER, command.line)[1]
    assert COMMANDS_OF_PROGRAM[name].load()(shlex.split(command.line)[2:]) == 0


@each_command([each for each in RUNNABLE if not re.match(PLANNER, each.line)] + FOR_GPUS_OF_ONE_HOST)
def test_dry_runs_run(command, tmp_path):
    for folder in FOLDERS:
        (tmp_path / folder).symlink_to(ROOT / folder)  # what a command writes stays out of the repository
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "VERL_MEGATRON_VENV": str(tmp_path / "none")}
    check(
        ["bash", "-c", command.line],
        cwd=tmp_path,
        env={**os.environ, **dict.fromkeys(OF_A_RUN, ""), **environment},
    )


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A folder with the toy job in outputs/toy; its model stands for those that runs train."""
    folder = tmp_path_factory.mktemp("toy")
    make_toy(folder / "outputs/toy")
    for name in ("sft", "ppo"):
        shutil.copytree(folder / "outputs/toy/model", folder / "outputs/toy" / name / "actor")
    return folder


def of_the_toy_job() -> list[str]:
    """Commands of the documents and of --help that need nothing but the toy job."""
    examples = {command: training.examples for command, training in TRAININGS.items()}
    examples |= {"generate": GENERATE_EXAMPLES, "evaluate": EVALUATE_EXAMPLES}
    helped = [f"verl-megatron {command} {line}" for command in examples for line in examples[command]]
    lines = {command.line for command in COMMANDS} | set(helped)
    kinds = re.compile(rf"verl-megatron ({'|'.join(examples)}) ")
    others = re.compile(r"demonstrations|pairs\.jsonl|my_|MODEL|ppo_reward_model")  # need more files
    return sorted(line for line in lines if kinds.match(line) and "toy" in line and not others.search(line))


@pytest.mark.parametrize("line", of_the_toy_job())
def test_commands_of_the_toy_job_are_valid(line, toy, monkeypatch, capsys):
    """As they stand: everything is checked, and no rank is started."""
    started = []

    def start(module, *_, check=None, **__):
        if check is not None:
            check()
        started.append(module)
        raise SystemExit(0)

    monkeypatch.setattr("verl_megatron.launch.ranks.start", start)
    monkeypatch.setattr("verl_megatron.launch.ranks.check_and_start", start)
    monkeypatch.setattr("verl_megatron.launch.supervisor.supervise_here", start)
    monkeypatch.chdir(toy)
    _, name, *words = shlex.split(line)
    with pytest.raises(SystemExit) as ended:
        sys.exit(COMMANDS_OF_PROGRAM[name].load()(words))
    assert ended.value.code == 0 and (started or "--dry-run" in words), capsys.readouterr()


def test_there_are_commands_of_the_toy_job():
    named = {line.split()[1] for line in of_the_toy_job()}
    assert named == {"train", "sft", "dpo", "reward-model", "generate", "evaluate"}


@each_command(HELPED)
def test_options_of_long_programs_are_read(command):
    program = next(word for word in command.line.split() if word.endswith(".py"))
    check([sys.executable, program, "--help"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def check(command: list[str], *, cwd: Path, env: dict[str, str]) -> None:
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


def patterns_of(line: str) -> list[str]:
    return [pattern for pattern in RUN_BY if re.match(pattern, line)]


@each_command([command for command in COMMANDS if command not in RUNNABLE + HELPED])
def test_other_commands_have_a_test_or_a_mark(command):
    """A comment such as `# needs GPUs` stands behind a command that no test can run."""
    assert command.note in NEEDS or patterns_of(command.line), (
        f"mark it as one of {NEEDS}, or add it to RUN_BY"
    )


@pytest.mark.parametrize("pattern", RUN_BY)
def test_tests_of_commands_exist(pattern):
    lines = [command.line for command in COMMANDS if command.note not in NEEDS]
    assert any(re.match(pattern, line) for line in lines), "no document has such a command"
    for node in RUN_BY[pattern]:
        path, _, name = node.partition("::")
        functions = {
            part.name
            for part in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(part, ast.FunctionDef)
        }
        assert name in functions, f"{node} does not exist"


PYTHON = [
    (page, block)
    for page in PAGES
    for language, block in FENCE.findall(text_of(page))
    if language == "python"
]


@pytest.mark.parametrize(("page", "block"), PYTHON)
def test_python_examples_import_what_exists(page, block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
