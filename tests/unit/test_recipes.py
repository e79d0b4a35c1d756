"""Every recipe names existing settings; under every launcher its dry run passes all checks."""

import json
import re
import subprocess
import sys
from functools import cache

import pytest
from omegaconf import OmegaConf

from parallel.weights.shapes import shape
from tests.launchers import LAUNCH, Call, environment, hostfile, operator, say, say_recipe
from tests.planned import H200, run_of
from tests.recipes import schema_of
from tests.worlds import ROOT
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.checks.algorithm import algorithm_problems
from verl_megatron.checks.limits import check_values
from verl_megatron.checks.overrides import structured
from verl_megatron.config import SCHEMAS, TrainerConfig
from verl_megatron.launch.dry_run import supervised_plan, training_plan
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.seconds import plan_seconds

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ALGORITHM_RECIPES = sorted((ROOT / "recipes/toy_cpu").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "recipes").glob("*.sh"))
# Script: nodes, GPUs of each, environment, and what the plan says of the layouts.
RUNS = [
    ("quickstart", 1, 4, {}, r"critic    pp2dp2 "),
    ("sft", 1, 2, {}, r"actor tp2sp: 256 samples"),
    ("llama3_8b_ppo", 1, 4, {}, r"critic    tp2dp2sp .* llama3-8b"),
    ("llama3_8b_ppo", 1, 2, {}, r"critic    tp2sp .* llama3-8b"),
    ("llama3_8b_grpo", 1, 4, {}, r"actor     dp4 "),
    ("llama3.1_8b_grpo_16k", 1, 4, {}, r"micro-batches of at most 16384 tokens"),
    ("llama3.1_8b_grpo_16k", 1, 2, {}, r"rollout 1 replica of tp2"),
    ("qwen2.5_7b_grpo", 1, 4, {}, r"actor     dp4 .* qwen2.5-7b"),
    ("qwen2.5_32b_ppo", 2, 8, {}, r"critic    tp2pp4vpp4dp2sp .* qwen2.5-32b"),
    ("llama3_70b_ppo", 4, 8, {}, r"critic    tp4pp4vpp4dp2sp .* llama3-70b"),
    ("llama3_70b_ppo", 8, 8, {}, r"critic    tp4pp4vpp4dp4sp .* llama3-70b"),
    ("llama3_70b_ppo", 4, 8, {"CRITIC": "8b"}, r"critic    tp8dp4sp .* llama3-8b"),
    ("llama3_70b_ppo", 8, 8, {"CRITIC": "8b"}, r"critic    tp8dp8sp .* llama3-8b"),
    ("qwen2_72b_ppo", 4, 8, {}, r"critic    tp4pp4vpp4dp2sp .* qwen2.5-72b"),
    ("qwen2_72b_ppo", 8, 8, {"CRITIC": "8b"}, r"critic    tp4dp16sp .* qwen2.5-7b"),
    ("llama3_70b_grpo", 8, 8, {}, r"actor     tp4pp4vpp4dp4sp "),
]


def named(run) -> str:
    script, nodes, gpus, more, _ = run
    return "-".join([script, str(nodes * gpus), *more.values()])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_settings_exist_and_fit(path):
    recipe = OmegaConf.load(path)
    recipe.setdefault("data", {}).setdefault("train", "train.jsonl")
    config = structured(recipe, schema_of(path))
    assert config.run.output_dir.startswith("outputs/")


PLANNED = {
    **{"grpo_8b": "llama3-8b", "llama3_8b_ppo": "llama3-8b", "grpo_70b": "llama3-70b"},
    **{"ppo_32b": "qwen2.5-32b", "ppo_70b": "llama3-70b"},
}
FIGURES = re.compile(r"(\d+)(?: H200)?: (\d+) GiB[^,;.]*, (\d+) s\b")  # GPUs, of the fullest, an iteration


@pytest.mark.parametrize(("name", "model"), PLANNED.items())
def test_comments_have_the_figures_of_the_plan(name, model):
    text = (ROOT / f"recipes/{name}.yaml").read_text()
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    figures = FIGURES.findall(comment)
    assert figures, comment
    for gpus, gib, seconds in figures:
        recipe = OmegaConf.create(text)
        recipe["data"]["train"], recipe["actor"]["path"] = "train.jsonl", model
        run = run_of(structured(recipe, TrainerConfig), int(gpus))
        memory = plan_memory(run, H200)
        planned = memory.peak_bytes / 2**30, plan_seconds(run, H200, memory).iteration
        assert planned == pytest.approx((int(gib), int(seconds)), abs=0.51), comment  # rounded


def test_every_algorithm_has_a_recipe_whose_settings_are_right():
    shared, names = OmegaConf.load(ROOT / "recipes/toy_cpu/group.yaml"), {"ppo"}
    for path in ALGORITHM_RECIPES:
        recipe = OmegaConf.merge(shared, OmegaConf.load(path))
        recipe.pop("defaults", None)
        config = structured(recipe, TrainerConfig)
        if path.stem != "group":
            assert config.run.output_dir == f"outputs/toy/{path.stem}"
            names.add(config.algorithm.name)
            needs = ALGORITHMS[config.algorithm.name].needs
            assert check_values(config) + algorithm_problems(config, needs) == [], path
    assert names == set(ALGORITHMS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short_and_name_recipes(path):
    text = path.read_text()
    names = re.findall(r"--config-name (\w+)", text)
    assert names and all((ROOT / "recipes" / f"{name}.yaml").is_file() for name in names)
    assert len(text.splitlines()) <= 40
    assert path.stem in {script for script, *_ in RUNS}, "no dry run of it is tested"


@cache
def plan_of(arguments: tuple[str, ...], world: tuple[str, str]) -> str:
    """What `python -m MODULE ... --dry-run` would print."""
    recipe = OmegaConf.load(ROOT / "recipes" / f"{arguments[arguments.index('--config-name') + 1]}.yaml")
    given = OmegaConf.from_dotlist([argument for argument in arguments if "=" in argument])
    for argument in arguments:
        if argument.endswith("="):  # an empty text to Hydra, and nothing at all to OmegaConf
            OmegaConf.update(given, argument[:-1], "")
    settings = OmegaConf.to_container(OmegaConf.merge(recipe, given))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", world[0])
        patch.setenv("LOCAL_WORLD_SIZE", world[1])
        schema = SCHEMAS[arguments[1].removeprefix("verl_megatron.")]
        return training_plan(settings) if schema is TrainerConfig else supervised_plan(settings, schema)


@pytest.mark.parametrize("launcher", ["alone", "local", "hostfile", "slurm", "ray", "kubernetes"])
@pytest.mark.parametrize("run", RUNS, ids=named)
def test_every_launcher_plans_every_recipe(run, launcher, tmp_path_factory, tmp_path):
    script, nodes, gpus, more, expected = run
    size = {"NNODES": str(nodes), "GPUS": str(gpus)}
    before, told = {
        "alone": (["bash"], size),
        "local": (["bash", LAUNCH / "local.sh"], size),
        "hostfile": (
            ["bash", LAUNCH / "hostfile.sh", hostfile(tmp_path / "hosts", nodes=nodes, slots=gpus)],
            {},
        ),
        "slurm": (
            ["bash", LAUNCH / "slurm.sbatch"],
            {"SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": str(gpus)},
        ),
        "ray": ([sys.executable, LAUNCH / "ray.py"], size),
        "kubernetes": (["bash"], operator(nodes, gpus)),
    }[launcher]
    toy = tmp_path_factory.getbasetemp() / "toy"
    write_toy(toy)
    said = say(*before, f"recipes/{script}.sh", "--dry-run", folder=tmp_path, OUT=str(toy), **told | more)
    assert said.code == 0, said.stderr
    assert "verl_megatron.launch.node" in said.stdout and f"--nproc-per-node {gpus}" in said.stdout
    call = said.calls[-1]
    assert call.arguments[0] == "-m" and "--dry-run" in call.arguments
    assert (call.world_size, call.local_world_size) == (str(nodes * gpus), str(gpus))
    plan = plan_of(call.arguments, (call.world_size, call.local_world_size))
    where = f", {gpus} a host" if nodes > 1 else " on one host"
    assert f"{nodes * gpus} ranks{where}\n" in plan
    assert re.search(expected, plan), plan
    assert "does not fit" not in plan


@pytest.mark.parametrize("launcher", ["hostfile", "kubernetes"])
def test_the_quickstart_plans_its_one_node_of_several(launcher, tmp_path):
    write_toy(tmp_path / "toy")
    before, told = {
        "hostfile": (["bash", LAUNCH / "hostfile.sh", hostfile(tmp_path / "hosts", nodes=2, slots=8)], {}),
        "kubernetes": (["bash"], operator(nodes=4, gpus=8, node=3)),
    }[launcher]
    said = say(
        *before, "recipes/quickstart.sh", "--dry-run", folder=tmp_path, OUT=str(tmp_path / "toy"), **told
    )
    assert said.code == 0, said.stderr
    assert "quickstart.sh runs on one node only" in said.stdout and said.stdout.count("node 0 of 1: ") == 2
    assert all(
        call.world_size == call.local_world_size for call in said.calls if "--dry-run" in call.arguments
    )


def write_toy(folder) -> None:
    """What the quickstart's dry run plans with: a model's config.json and files of prompts."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps(shape("llama3-1b") | {"num_hidden_layers": 4}))
    for name in ("sft", "train", "val"):
        (folder / f"{name}.jsonl").touch()


@pytest.mark.parametrize(("visible", "ranks"), [(None, 2), ("0", 1), ("1,0", 2), ("", 4)])
def test_the_quickstart_starts_a_rank_on_each_visible_gpu(visible, ranks, tmp_path, monkeypatch):
    """Of two; where none is visible, four on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: another'\n")
    smi.chmod(0o755)
    write_toy(tmp_path / "toy")
    seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    said = say_recipe("quickstart", "--dry-run", folder=tmp_path, OUT=str(tmp_path / "toy"), **seen)
    assert (
        said.code == 0
        and f"quickstart: {ranks} ranks on" in said.stdout
        and said.calls[-1].world_size == str(ranks)
    ), said


def test_own_model_and_settings_come_last(tmp_path):
    given = {"MODEL": "/models/mine", "DATA": "/data/mine.jsonl", "CRITIC_MODEL": "/models/critic"}
    said = say_recipe("llama3_70b_ppo", "actor.lr=2e-6", "--dry-run", folder=tmp_path, **given)
    arguments = said.calls[-1].arguments
    assert {"actor.path=/models/mine", "data.train=/data/mine.jsonl", "critic.path=/models/critic"} <= set(
        arguments
    )
    assert arguments[-2:] == ("actor.lr=2e-6", "--dry-run")


def makes_weights(call: Call) -> bool:
    return call.arguments[:2] == ("-m", "verl_megatron.examples.random_weights")


def test_random_weights_are_made_once(tmp_path):
    scratch = tmp_path / "scratch"
    said = say_recipe("llama3_70b_ppo", folder=tmp_path, SCRATCH=str(scratch), NNODES="1", CRITIC="8b")
    checked, *made = [
        call.arguments for call in said.calls if makes_weights(call) or "--dry-run" in call.arguments
    ]
    assert "--dry-run" in checked, "weights are made before the settings are looked at"
    made = [arguments[2:] for arguments in made if "--dry-run" not in arguments]
    assert made == [
        (f"{scratch}/llama3-70b", "--shape", "llama3-70b"),
        (f"{scratch}/llama3-8b", "--shape", "llama3-8b", "--rows", "1"),
    ]
    assert {f"actor.path={scratch}/llama3-70b/model", f"critic.path={scratch}/llama3-8b/model"} <= set(
        said.calls[-1].arguments
    )
    for name in ("llama3-70b", "llama3-8b"):
        (scratch / name).mkdir()
        (scratch / name / "reward.py").touch()
    again = say_recipe("llama3_70b_ppo", folder=tmp_path, SCRATCH=str(scratch), NNODES="1", CRITIC="8b")
    assert again.calls == said.calls[-1:], "nothing but the start"
    assert "--check" in again.calls[0].arguments


@pytest.mark.parametrize(("status", "made"), [("2", False), ("3", True)])
def test_no_weights_are_made_for_settings_that_are_refused(status, made, tmp_path):
    """Want of room (3) is that of the GPU which a dry run supposes: what is here may have more."""
    said = say_recipe(
        "llama3_8b_ppo",
        folder=tmp_path,
        SCRATCH=str(tmp_path / "scratch"),
        FAIL="--dry-run",
        FAIL_STATUS=status,
    )
    assert (said.code == 0) == made and any(map(makes_weights, said.calls)) == made, said
    if not made:
        assert said.code == 2 and "asked to fail" in said.stderr


@pytest.mark.parametrize(("status", "starts"), [("2", False), ("3", True)])
@pytest.mark.parametrize(
    "given", [{"MODEL": "/models/mine", "DATA": "mine.jsonl"}, {}], ids=["own", "random"]
)
def test_nothing_starts_on_several_hosts_with_settings_that_are_refused(given, status, starts, tmp_path):
    (tmp_path / "llama3-8b").mkdir()
    (tmp_path / "llama3-8b/reward.py").touch()
    said = say_recipe(
        "llama3_8b_ppo",
        "actor.lr=2",
        folder=tmp_path,
        SCRATCH=str(tmp_path),
        FAIL="--dry-run",
        FAIL_STATUS=status,
        NNODES="2",
        MASTER_ADDR="host",
        **given,
    )
    checked, *started = said.calls
    assert checked.arguments[-2:] == ("actor.lr=2", "--dry-run") and (
        checked.world_size,
        checked.local_world_size,
    ) == ("8", "4")
    assert [call.starts_ranks for call in started] == [True] * starts
    assert (said.code, said.stderr) == ((0, "") if starts else (2, "error: asked to fail\n"))


def test_the_quickstart_looks_at_all_settings_before_it_trains(tmp_path):
    said = say_recipe(
        "quickstart", folder=tmp_path, OUT=str(tmp_path / "toy"), FAIL="verl_megatron.train", FAIL_STATUS="2"
    )
    assert (
        said.code == 2
        and said.stderr.endswith("error: asked to fail\n")
        and not any(call.starts_ranks for call in said.calls)
    )


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ([], {"MODEL": "/models/none"}, r"actor.path='/models/none' is neither a folder nor "),
        ([], {"DATA": "/data/none.jsonl"}, r"data.train='/data/none.jsonl' does not exist; "),
        (["actor.layout=tp3sp"], {}, r"actor.layout='tp3sp'"),
        (["--bogus"], {}, r"unrecognized arguments: --bogus"),
    ],
)
def test_what_does_not_exist_is_said_in_one_line(settings, given, message, tmp_path):
    """Without a stand-in for python."""
    write_toy(tmp_path)
    told = {"MODEL": str(tmp_path / "model"), "DATA": str(tmp_path / "train.jsonl")} | given
    run = subprocess.run(
        ["bash", "recipes/llama3_8b_grpo.sh", *settings],
        cwd=ROOT,
        env=environment(**told),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert (
        run.returncode == 2
        and re.fullmatch(rf"(\w+\.py: )?error: {message}.*\n", run.stderr)
        and not run.stdout
    ), run


@pytest.mark.parametrize("shape_name", ["llama3-70b", "llama3-8b"])
def test_nothing_starts_where_random_weights_fail(shape_name, tmp_path):
    said = say_recipe(
        "llama3_70b_ppo",
        folder=tmp_path,
        SCRATCH=str(tmp_path / "scratch"),
        NNODES="1",
        CRITIC="8b",
        FAIL=f"--shape {shape_name}",
    )
    assert said.code and makes_weights(said.calls[-1])


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        (
            "llama3_8b_ppo",
            {"MODEL": "/models/mine"},
            r"DATA is not set; name the data file on which MODEL=/models/mine is trained",
        ),
        ("sft", {"DATA": "mine.jsonl"}, r"MODEL has to name"),
        ("llama3_8b_ppo", {"GPUS": "four"}, r"GPUS=four has to be a whole number from 1 "),
        ("llama3_8b_ppo", {"GPUS": "0"}, r"GPUS=0 has to be a whole number from 1 "),
        ("llama3_8b_ppo", {"GPUS": "9" * 30}, r"GPUS=9+ has to be a whole number from 1 "),
        ("llama3_8b_ppo", {"NNODES": "08"}, r"NNODES=08 has to be a whole number"),
        (
            "llama3_8b_ppo",
            {"NODE_RANK": "x[$(touch ran)]"},
            r"NODE_RANK=x.* has to be a whole number from 0 ",
        ),
        ("llama3_8b_ppo", {"NODE_RANK": "4", "NNODES": "4"}, r"NODE_RANK=4 must be below NNODES=4"),
        ("llama3_8b_ppo", {"MAX_RESTARTS": "-1"}, r"MAX_RESTARTS=-1 has to be a whole number"),
        (
            "llama3_8b_ppo",
            {"MASTER_PORT": "70000"},
            r"MASTER_PORT=70000 has to be a whole number from 1 to 65535",
        ),
        ("llama3_8b_ppo", {"MASTER_ADDR": "a b"}, r"MASTER_ADDR=a b has to be the name"),
        ("llama3_8b_ppo", {"GRACE_S": "soon"}, r"GRACE_S=soon must be greater than 0"),
        (
            "llama3_70b_ppo",
            {"NNODES": "1", "MODEL": "/models/mine", "DATA": "mine.jsonl", "CRITIC": "9b"},
            r"CRITIC=9b is not known; choose 8b or 70b",
        ),
        ("quickstart", {"NNODES": "2"}, r"one node"),
    ],
)
def test_wrong_variables_are_named(script, given, message, tmp_path):
    said = say_recipe(script, folder=tmp_path, **given)
    assert said.code == 2 and re.fullmatch(f"error: .*{message}.*\n", said.stderr) and not said.calls


@pytest.mark.parametrize(
    "given", [{"MODEL": "/models/mine", "DATA": "mine.jsonl"}, {}], ids=["own", "random"]
)
def test_several_nodes_need_an_address(given, tmp_path):
    said = say_recipe("llama3_70b_ppo", folder=tmp_path, SCRATCH=str(tmp_path / "scratch"), **given)
    assert (
        said.code == 2
        and "needs MASTER_ADDR" in said.stderr
        and not said.calls
        and not (tmp_path / "scratch").exists()
    )


def test_a_plan_needs_no_data(tmp_path):
    write_toy(tmp_path)
    said = say_recipe("llama3_8b_grpo", "--dry-run", folder=tmp_path, MODEL=str(tmp_path / "model"))
    assert said.code == 0 and not said.stderr
    assert f"from {tmp_path}/model" in plan_of(said.calls[-1].arguments, ("4", "4"))


def test_a_plan_of_supervised_training_speaks_of_no_random_weights(tmp_path):
    said = say_recipe("sft", "--dry-run", folder=tmp_path)
    assert (
        said.stderr
        == "MODEL is not set: planned for the shape llama3-8b, with samples as long as the recipe allows\n"
    )
