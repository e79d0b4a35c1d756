"""Collectives name their group: torch's default group is known to parallel/rank_set.py alone."""

import ast

import pytest

from tests.architecture.test_imports import FILES
from tests.worlds import ROOT

# The position of `group` among the arguments of each collective and rank query of torch.distributed.
GROUP_AT = {
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_reduce": 2,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "get_backend": 0,
    "get_backend_config": 0,
    "get_rank": 0,
    "get_world_size": 0,
    "irecv": 2,
    "isend": 2,
    "monitored_barrier": 0,
    "P2POp": 3,
    "recv": 2,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
    "send": 2,
}
# These belong to the default group whatever their arguments are.
OF_THE_DEFAULT_GROUP = {"new_group", "new_subgroups", "_get_default_group", "_get_default_store", "WORLD"}
OWNER = "parallel/rank_set.py"
EXCEPTIONS = {
    ("parallel/device.py", "get_world_size"): "counts the ranks of one host where torchrun has not said so",
    ("parallel/reshard/versions.py", "WORLD"): "refuses the default group",
}
# Programs that are whole runs of their own, which always use the whole torchrun world.
PROGRAMS = "verl_megatron/benchmarks/"
# `world()` is the whole torchrun world: only the top of a program may assume that it runs there.
MAY_CALL_WORLD = {
    "verl_megatron/lifecycle/base_trainer.py": "the top of a run",
    "verl_megatron/evaluation.py": "the top of a program",
    "verl_megatron/separate/world.py": "the top of a world",
    "verl_megatron/rollout/vllm.py": "vLLM makes its groups over the default group",
}


def groupless(tree: ast.AST) -> set[str]:
    """Names of collectives and rank queries in a file that use torch's default group."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OF_THE_DEFAULT_GROUP:
            found.add(node.attr)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, of = node.func.attr, ast.unparse(node.func.value)
        if of not in ("dist", "torch.distributed") or name not in GROUP_AT:
            continue
        named = [keyword.value for keyword in node.keywords if keyword.arg == "group"]
        given = named or node.args[GROUP_AT[name] :][:1]
        if not given or isinstance(given[0], ast.Constant):
            found.add(name)
    return found


def imported_names(tree: ast.AST, module: str) -> set[str]:
    """Names that a file imports from `module`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            found |= {alias.name for alias in node.names}
    return found


def parsed() -> dict[str, ast.AST]:
    paths = {str(path.relative_to(ROOT)): path for path in FILES}
    return {
        name: ast.parse(path.read_text()) for name, path in paths.items() if not name.startswith(PROGRAMS)
    }


def test_no_collective_uses_the_default_group():
    found = {(path, name) for path, tree in parsed().items() if path != OWNER for name in groupless(tree)}
    assert found == set(EXCEPTIONS)


def test_torch_distributed_is_imported_whole_so_that_its_calls_are_seen():
    known = GROUP_AT.keys() | OF_THE_DEFAULT_GROUP
    assert not {path for path, tree in parsed().items() if imported_names(tree, "torch.distributed") & known}


def test_only_the_top_of_a_program_asks_for_the_whole_world():
    callers = set()
    for path, tree in parsed().items():
        names = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        is_imported = "world" in imported_names(tree, "parallel.rank_set")
        if "rank_set.world" in names or (is_imported and "world" in names):
            callers.add(path)
    assert callers == set(MAY_CALL_WORLD)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dist.barrier()", {"barrier"}),
        ("dist.barrier(group)", set()),
        ("dist.all_reduce(x, op=dist.ReduceOp.MAX)", {"all_reduce"}),
        ("dist.all_reduce(x, dist.ReduceOp.MAX, group)", set()),
        ("dist.all_reduce(x, group=None)", {"all_reduce"}),
        ("torch.distributed.get_rank()", {"get_rank"}),
        ("dist.new_group([0, 1])", {"new_group"}),
        ("dist.P2POp(dist.isend, x, 1, self.group)", set()),
        ("group or dist.group.WORLD", {"WORLD"}),
    ],
)
def test_calls_without_a_group_are_seen(line, expected):
    assert groupless(ast.parse(line)) == expected
