"""Layers of imports, read from the source: who may import whom, and who imports the heavy packages."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.worlds import ROOT

FILES = sorted(path for package in ("parallel", "verl_megatron") for path in (ROOT / package).rglob("*.py"))

# A heavy package and the only files (or folders) that may import it.
OWNERS = {
    "vllm": (
        "verl_megatron/rollout/vllm",  # vllm.py and what its name begins with
        "verl_megatron/benchmarks/weight_sync/",  # looks into its allocator
    ),
    "hydra": ("verl_megatron/launch/command_line.py", "verl_megatron/launch/merging.py"),
    "omegaconf": (
        "verl_megatron/launch/command_line.py",
        "verl_megatron/launch/merging.py",
        "verl_megatron/checks/overrides.py",
        "verl_megatron/train.py",
        "verl_megatron/launch/supervised.py",
        "verl_megatron/benchmarks/",
    ),
    "megatron": (
        "parallel/megatron.py",
        "parallel/device.py",
        "parallel/groups.py",
        "parallel/checkpoint/optimizer_shards.py",
        "parallel/checkpoint/training_state.py",
        "verl_megatron/models/",
        "verl_megatron/roles/",
        "verl_megatron/benchmarks/",
    ),
    "pyarrow": ("verl_megatron/data/formats/arrow_tables.py", "verl_megatron/benchmarks/data.py"),
    "math_verify": ("verl_megatron/rewards/math_answers.py",),
    "transformer_engine": ("verl_megatron/models/", "verl_megatron/benchmarks/calibrate.py"),
    "matplotlib": (
        "verl_megatron/observe/pictures.py",
        "verl_megatron/planner/reshard/picture.py",
        "verl_megatron/benchmarks/",
    ),
    "triton": (
        "parallel/reshard/kernels.py",
        "verl_megatron/models/log_prob_kernels.py",
        "verl_megatron/models/attention_kernels.py",
    ),
    "transformers": (
        "verl_megatron/data/tokenizer.py",
        "verl_megatron/data/token_ids.py",
        "verl_megatron/checks/folders.py",
        "verl_megatron/models/rope.py",
        "verl_megatron/examples/",
        "verl_megatron/benchmarks/",
    ),
}
# From the outside in: a layer may import what stands after it, and its own layer.
LAYERS = (
    ("__main__",),
    ("commands",),
    ("benchmarks", "doctor"),
    ("train", "sft", "dpo", "reward_model", "evaluation", "utils"),
    ("launch",),
    ("trainer", "supervised"),
    ("saved_state",),
    ("iteration",),
    ("run",),
    ("separate",),
    ("lifecycle",),
    ("preflight", "learner"),
    ("planner",),
    ("checks",),
    ("roles", "rollout"),
    ("model_specs",),
    ("algorithms", "models", "rewards"),
    ("manifest",),
    ("observe",),
    ("data",),
    ("examples",),
    ("config", "residency"),
)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(node: ast.AST, *, everywhere: bool = True) -> set[str]:
    """Full names imported below `node`; without `everywhere` those inside functions are left out."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports name the whole module"
            found |= {f"{child.module}.{alias.name}" for alias in child.names}
        elif everywhere or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= imports_of(child, everywhere=everywhere)
    return found


IMPORTS = {path: imports_of(ast.parse(path.read_text())) for path in FILES}


def layer_of(name: str) -> int:
    """The place of verl_megatron.NAME... in LAYERS."""
    part = name.split(".")[1]
    return next(place for place, layer in enumerate(LAYERS) if part in layer)


def test_parallel_knows_nothing_of_reinforcement_learning():
    strangers = {
        (path, name)
        for path in FILES
        if path.is_relative_to(ROOT / "parallel")
        for name in IMPORTS[path]
        if name.split(".")[0] in ("verl_megatron", "vllm", "hydra")
    }
    assert not strangers


def top_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in IMPORTS[path]}


@pytest.mark.parametrize("package", OWNERS)
def test_heavy_packages_stay_with_their_owners(package):
    users = {str(path.relative_to(ROOT)) for path in FILES if package in top_packages(path)}
    assert {user for user in users if not user.startswith(OWNERS[package])} == set()


def test_every_part_has_a_layer_and_imports_inwards_only():
    wrong = []
    for path in FILES:
        module = module_of(path)
        if not module.startswith("verl_megatron."):
            continue
        for name in IMPORTS[path]:
            if name.startswith("verl_megatron.") and layer_of(name) < layer_of(module):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_no_module_imports_itself_through_others():
    modules = {module_of(path) for path in FILES}

    def known(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    graph = {}
    for path in FILES:
        names = {known(name) for name in imports_of(ast.parse(path.read_text()), everywhere=False)}
        graph[module_of(path)] = {name for name in names & modules if name != module_of(path)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_packages_do_not_import_each_other():
    """`roles` and `rollout`, say: at most one of two packages imports the other."""

    def package(name: str) -> str:
        return ".".join(name.split(".")[:2])

    edges = {
        (package(module_of(path)), package(name))
        for path in FILES
        for name in IMPORTS[path]
        if name.split(".")[0] in ("parallel", "verl_megatron")
    }
    folders = {module_of(path) for path in FILES if path.name == "__init__.py"}
    both = {(a, b) for a, b in edges if a < b and a in folders and b in folders and (b, a) in edges}
    assert not both


def test_no_folder_has_more_than_16_files():
    counts = Counter(path.parent for path in FILES)
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > 16} == {}


def test_every_folder_is_a_package():
    assert {str(path.parent) for path in FILES} == {
        str(path.parent) for path in FILES if path.name == "__init__.py"
    }
