"""Sizes that keep the code readable; what is above a budget is split, not excused."""

import ast
from pathlib import Path

import pytest

from tests.worlds import ROOT

FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 6
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FILES = sorted(
    path
    for folder in ("parallel", "verl_megatron", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def place(path: Path, node: ast.AST, name: str = "") -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {name}".rstrip()


def test_files_have_at_most_400_lines():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: size for name, size in sizes.items() if size > FILE_LINES} == {}


def test_functions_have_at_most_60_lines():
    sizes = {}
    for path in FILES:
        for node in functions_of(path):
            sizes[place(path, node, node.name)] = node.end_lineno - node.lineno + 1
    assert {name: size for name, size in sizes.items() if size > FUNCTION_LINES} == {}


def is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton kernels take pointers and sizes one by one."""
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters that a caller passes: not `self`, and not what `*` and `**` collect."""
    if is_triton_kernel(node):
        return 0
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_functions_take_at_most_6_parameters():
    counts = {
        place(path, node, node.name): parameters_of(node) for path in FILES for node in functions_of(path)
    }
    assert {name: count for name, count in counts.items() if count > PARAMETERS} == {}


@pytest.mark.parametrize("folder", ["parallel", "verl_megatron", "tools", "tests"])
def test_no_comprehension_is_inside_another(folder):
    nested = []
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        for outer in ast.walk(ast.parse(path.read_text())):
            if isinstance(outer, COMPREHENSIONS):
                inner = [
                    node for node in ast.walk(outer) if node is not outer and isinstance(node, COMPREHENSIONS)
                ]
                nested += [place(path, node) for node in inner]
    assert sorted(set(nested)) == []
