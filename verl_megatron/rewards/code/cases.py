"""Tests of a row, as data sets of programming problems write them, and the program of a response."""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

ENTRY, EQUAL = "__entry_point__", "__is_equal__"  # names in tests, which the harness gives

_PYTHON = ("python", "python3", "py", "")
_FENCE = re.compile(r"[ \t]{0,3}```[ \t]*([\w+-]*)[^`]*")
_WORDS = 'give {"inputs": [...], "outputs": [...]}, Python code with asserts, or a list of asserts'


@dataclass(frozen=True, slots=True)
class Cases:
    """Tests of one kind: texts for standard input and output, calls of a function, or Python code."""

    inputs: tuple[Any, ...] = ()  # texts, or lists of arguments of `function`
    outputs: tuple[Any, ...] = ()  # texts, or values that it returns
    function: str = ""  # to call
    tests: tuple[str, ...] = ()  # Python code; what has not raised at its end has passed


def program_of(response: str) -> str:
    """Return the last block of Python of a response, or all of a response without blocks; "" for neither.

    A block without a language counts where there is none of Python. A block that does not end is none.
    """
    blocks: list[tuple[str, list[str]]] = []
    inside: list[str] | None = None
    has_fence = False
    for line in response.splitlines():
        fence = _FENCE.fullmatch(line)
        if inside is not None and line.strip() == "```":
            inside = None
        elif inside is not None:
            inside.append(line)
        elif fence:
            has_fence, inside = True, []
            blocks.append((fence[1].lower(), inside))
    if not has_fence:
        return response
    if inside is not None:
        blocks.pop()
    found = [(language, lines) for language, lines in blocks if language in _PYTHON]
    named = [lines for language, lines in found if language] or [lines for _, lines in found]
    return "\n".join(named[-1]) if named else ""


def read_cases(ground_truth: Any) -> Cases:
    """Return the tests in a ground truth.

    Raises:
        ValueError: there are none in a form that is known.
    """
    value = ground_truth
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = ground_truth  # Python code may begin so
    if isinstance(value, str) and value.strip():
        return Cases(tests=_tests(value))
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return Cases(tests=tuple(_strict(_parsed(one)) for one in value))
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        inputs, outputs = zip(*((one.get("input"), one.get("output")) for one in value))
        value = {"inputs": list(inputs), "outputs": list(outputs)}
    if not isinstance(value, dict):
        raise ValueError(f"the ground truth has no tests; {_WORDS}")
    inputs = value.get("inputs", value.get("input"))
    outputs = value.get("outputs", value.get("output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has no inputs and outputs, two lists of one length; {_WORDS}")
    if not inputs:
        raise ValueError(f"the ground truth has no tests: inputs is empty; {_WORDS}")
    function = value.get("fn_name") or ""
    if function:
        return Cases(inputs=tuple(inputs), outputs=tuple(outputs), function=str(function))
    return Cases(inputs=tuple(map(_text, inputs)), outputs=tuple(map(_text, outputs)))


def _text(value: Any) -> str:
    """Return a text for standard input or output; a list is one of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if value is None:
        raise ValueError(f"the ground truth has a test without input or output; {_WORDS}")
    return str(value)


def is_same_output(printed: str, expected: str) -> bool:
    """Whether two outputs differ at most in white space at the ends of lines and of the text."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


# ---- Python code -------------------------------------------------------------------------------------------


def _tests(text: str) -> tuple[str, ...]:
    """Split code into tests: one for each assert at its top level, or one for all of it without any.

    Other statements belong to the test after them. A function `check` that nothing calls, as in HumanEval's
    tests, is called with the function ENTRY.
    """
    statements = _parsed(text).body
    defined = {one.name for one in statements if isinstance(one, ast.FunctionDef)}
    called = {_called(node) for node in ast.walk(ast.Module(statements, []))}
    if "check" in defined - called:
        statements += ast.parse(f"check({ENTRY}())").body
    tests: list[list[ast.stmt]] = [[]]
    for statement in statements:
        tests[-1].append(statement)
        if isinstance(statement, ast.Assert):
            tests.append([])
    if len(tests) > 1:
        last = tests.pop()
        tests[-1] += last
    return tuple(_strict(ast.Module(body, [])) for body in tests)


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the ground truth is no Python code ({error}); {_WORDS}") from None


def _strict(module: ast.Module) -> str:
    """Return code whose comparisons go through EQUAL, which objects of a program cannot answer themselves."""
    return ast.unparse(ast.fix_missing_locations(_Strict().visit(module)))


class _Strict(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            return node
        equal = ast.Call(ast.Name(EQUAL, ast.Load()), [node.left, node.comparators[0]], [])
        return equal if isinstance(node.ops[0], ast.Eq) else ast.UnaryOp(ast.Not(), equal)
