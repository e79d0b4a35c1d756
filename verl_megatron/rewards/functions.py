"""Reward functions: (prompt, response, ground truth, extra) -> score, or a dict with "score" and metrics.

Worker processes import this file, so it needs only the standard library.
"""

import importlib.machinery
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.rewards.arguments import Call, bound
from verl_megatron.rewards.math_answers import math, missing

RewardFunction = Callable[[str, str, Any, dict[str, Any]], float | dict[str, float]]

# Remedy of an error message.
OUT_OF_TOP_LEVEL = "take that out of its top level, which runs whenever a worker starts"

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def match(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the response equals the ground truth, ignoring surrounding white space; else 0."""
    return float(response.strip() == str(ground_truth).strip())


def last_number(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the last number in the response equals the last number in the ground truth; else 0.

    Raises:
        ValueError: there is no number in the ground truth.
    """
    truth = _last_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r} has no number to compare with")
    return float(_last_number(response) == truth)


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


REWARDS: dict[str, RewardFunction] = {"match": match, "last_number": last_number, "math": math}


def builtin_problem(spec: str) -> str:
    """Return what a reward of REWARDS lacks on this machine; empty if nothing."""
    return f"reward.function={spec} {problem}" if spec == "math" and (problem := missing()) else ""


def load_reward(spec: str) -> Call:
    """Load the reward function that `spec` names: an entry of REWARDS, or `path.py:function`.

    It is called with (prompt, response, ground_truth, extra) and, for a chat, the prompt's messages.
    Importing a file runs all its top-level code, so only worker processes call this.

    Raises:
        ValueError: no such name, file or function, a package that is missing, a file that cannot be imported,
            or a function with arguments that nothing gives.
    """
    if spec in REWARDS:
        if problem := builtin_problem(spec):
            raise ValueError(problem)
        return bound(REWARDS[spec])
    setting = f"reward.function={short_repr(spec)}"
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"{setting} is unknown; choose {', '.join(REWARDS)} or path.py:function")
    try:
        module = _import(path)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(
            f"{setting}: the file has no function {short_repr(name)} at its top level{_others(module)}"
        )
    problem = unfit(function)
    if problem:
        raise ValueError(f"{setting}: {short_repr(name)} {problem}")
    return bound(function)


def _import(path: str) -> ModuleType:
    """Import a file as a module; ValueError without the setting's name if that fails."""
    file, problem = Path(path), ""
    try:
        if not file.is_file():
            problem = "is a folder" if file.is_dir() else "is no file" if file.exists() else "does not exist"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise ValueError(f"file {short_repr(path)} {problem}; name a Python file")
    name = f"reward_file_{file.stem}"  # json.py must not stand in for the module of that name
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{short_repr(path)} is not a Python file; its name must end in .py")
    _add_neighbours(file.absolute().parent)
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit as well
        remedy = "mend the file" if isinstance(error, Exception) else OUT_OF_TOP_LEVEL
        raise ValueError(f"importing the file failed: {described(error)}; {remedy}") from None
    return module


class _Neighbours:
    """Finds the modules beside a reward file; those of the standard library keep their names."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or name in sys.stdlib_module_names:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, [self.folder])
        return found if found is not None and found.loader is not None else None


def _add_neighbours(folder: Path) -> None:
    if not any(isinstance(finder, _Neighbours) and finder.folder == str(folder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Neighbours(folder))


def _others(module: ModuleType) -> str:
    """List the functions of a file, for an error message."""
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return f"; it has {', '.join(one_line(name) for name in names[:10])}" if names else "; define one"


def unfit(function: Any) -> str:
    """Return why `function` cannot give a score; empty if it can, as far as is known before a call."""
    if inspect.isclass(function):
        return "is a class; name a function"
    if not callable(function):
        return f"is of type {short_repr(type(function).__name__)}; name a function"
    for code in (function, type(function).__call__):
        if (
            inspect.iscoroutinefunction(code)
            or inspect.isasyncgenfunction(code)
            or inspect.isgeneratorfunction(code)
        ):
            return "is async or a generator, so a call gives no score; make it a function that returns one"
    try:
        bound(function)
    except ValueError as error:
        return one_line(str(error), limit=1000)
    return ""


def described(error: BaseException) -> str:
    """Format type and text of an exception in one line, truncated, even if its `__str__` raises."""
    try:
        text = str(error)
    except BaseException as worse:
        text = f"(no text: {type(worse).__name__})"
    name = one_line(type(error).__name__)
    return f"{name}: {one_line(text)}" if text else name


def one_line(text: str, *, limit: int = 500) -> str:
    """Format `text` in one line of printable characters, cut after `limit` characters."""
    cut = text[:limit] + "..." * (len(text) > limit)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut
    )
