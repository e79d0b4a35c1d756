"""Reward functions: (prompt, response, ground truth, extra) -> score, or a dict with "score" and metrics.

Worker processes import this file, so it needs only the standard library.
"""

import functools
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.rewards.answers import format_of, json_value, last_number, length, match, regex
from verl_megatron.rewards.arguments import Call, bound
from verl_megatron.rewards.code.reward import code, code_problem
from verl_megatron.rewards.math_answers import math, missing

CODE_SHARE = 0.9  # of reward.timeout_s, for all programs of a sample
# Remedy of an error message.
OUT_OF_TOP_LEVEL = "take that out of its top level, which runs whenever a worker starts"

REWARDS: dict[str, Callable[..., Any]] = {
    "match": match,
    "exact": match,
    "last_number": last_number,
    "math": math,
    "regex": regex,
    "format": format_of,
    "length": length,
    "json": json_value,
    "code": code,
}
WITHOUT_TRUTH = ("format", "length", "json")  # of these, what may do without a ground truth
IN_WORKER = ("code",)  # of these, what is looked at where they run


def options_of(reward: Any) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of entries of REWARDS, by their names, that a RewardConfig gives."""
    return {
        "format": {"pattern": reward.format},
        "length": {"target": reward.target_length},
        "code": {
            "may": {
                "seconds": reward.code_timeout_s,
                "memory_mib": reward.code_memory_mib,
                "total_seconds": CODE_SHARE * reward.timeout_s,
            }
        },
    }


def builtin_problem(spec: str) -> str:
    """Return what a reward of REWARDS lacks on this machine; empty if nothing."""
    return f"reward.function={spec} {problem}" if spec == "math" and (problem := missing()) else ""


def builtin_columns(spec: str, options: Mapping[str, Any]) -> list[str]:
    """Return the columns that a reward of REWARDS needs."""
    return ["target_length"] if spec == "length" and not options.get("length", {}).get("target") else []


def load_reward(spec: str, options: Mapping[str, Any] | None = None) -> Call:
    """Load the reward function that `spec` names: an entry of REWARDS, or `path.py:function`.

    It is called with (prompt, response, ground_truth, extra) and, for a chat, the prompt's messages.
    Importing a file runs all its top-level code, so only worker processes call this. `options` are keyword
    arguments of entries of REWARDS, by their names.

    Raises:
        ValueError: no such name, file or function, a package that is missing, a file that cannot be imported,
            or a function with arguments that nothing gives.
    """
    if spec in REWARDS:
        if problem := builtin_problem(spec):
            raise ValueError(problem)
        given = (options or {}).get(spec, {})
        if spec == "code" and (problem := code_problem(memory_mib=given["may"]["memory_mib"])):
            raise ValueError(f"reward.function=code {problem}")
        return bound(functools.partial(REWARDS[spec], **given))
    setting = f"reward.function={short_repr(spec)}"
    path, colon, name = spec.rpartition(":")
    if name.startswith("//"):
        raise ValueError(f"{setting} is no address of a server; write http://HOST:PORT/PATH, or https")
    if not colon or not path or not name:
        if spec.endswith(".py"):
            raise ValueError(f"{setting} names a file and no function; write {short_repr(spec + ':NAME')}")
        known = f"choose {', '.join(REWARDS)} or path.py:function"
        raise ValueError(f"{setting} is unknown{nearest(spec.lower(), REWARDS)}; {known}")
    if path in REWARDS and not Path(path).exists():
        raise ValueError(f"{setting}: {path} is built in and is no file; write reward.function={path}")
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
    absolute = str(file.absolute())
    name = f"reward_file_{file.stem}"  # json.py must not stand in for the module of that name
    while name in sys.modules and getattr(sys.modules[name], "__file__", "") != absolute:
        name += "_"  # it is a file of that name in another folder
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, absolute)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{short_repr(path)} is not a Python file; its name must end in .py")
    _add_neighbours(file.absolute().parent)
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit as well
        sys.modules.pop(name, None)
        remedy = "mend the file" if isinstance(error, Exception) else OUT_OF_TOP_LEVEL
        raise ValueError(f"importing the file failed: {described(error)}; {remedy}") from None
    return module


class _Neighbours:
    """Finds the modules beside a reward file; those of the standard library keep their names."""

    def __init__(self, folder: Path):
        self.folder = str(folder)
        self.found: set[str] = set()  # modules that were imported from there

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or name in sys.stdlib_module_names:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, [self.folder])
        if found is None or found.loader is None:
            return None
        self.found.add(name)
        return found


def _add_neighbours(folder: Path) -> None:
    """Let modules of `folder` be found.

    Raises:
        ValueError: another reward file has imported one of the same name from its own folder.
    """
    others = [finder for finder in sys.meta_path if isinstance(finder, _Neighbours)]
    if any(finder.folder == str(folder) for finder in others):
        return
    for other in others:
        for name in other.found:
            if importlib.machinery.PathFinder.find_spec(name, [str(folder)]) is not None:
                raise ValueError(
                    f"its folder has a module {short_repr(name)}, which another reward file has imported "
                    f"from {short_repr(other.folder)}; rename one of them"
                )
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
    for called in (function, type(function).__call__):
        if (
            inspect.iscoroutinefunction(called)
            or inspect.isasyncgenfunction(called)
            or inspect.isgeneratorfunction(called)
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
