"""Reward functions: (prompt, response, ground truth, extra) -> score, or a dict with "score" and other numbers to report.

Worker processes import this file, so it needs only the standard library.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

RewardFunction = Callable[[str, str, Any, dict[str, Any]], float | dict[str, float]]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def match(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the response, without white space around it, is the ground truth; else 0."""
    return float(response.strip() == str(ground_truth).strip())


def last_number(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the last number in the response equals the ground truth's (its last, if it is a text); else 0.

    Raises:
        ValueError: there is no number in the ground truth.
    """
    truth = _last_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r} has no number to compare with")
    return float(_last_number(response) == truth)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


REWARDS: dict[str, RewardFunction] = {"match": match, "last_number": last_number}


def load_reward(spec: str) -> RewardFunction:
    """The reward function `spec` names: an entry of REWARDS, or `path.py:function`.

    Raises:
        ValueError: no such name, file or function, or a file that cannot be imported.
    """
    if spec in REWARDS:
        return REWARDS[spec]
    path, colon, name = spec.rpartition(":")
    if not colon:
        raise ValueError(f"reward.function={spec!r} is unknown; choose {', '.join(REWARDS)} or path.py:function")
    if not Path(path).is_file():
        raise ValueError(f"reward.function={spec!r}: file {path!r} does not exist")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"reward.function={spec!r}: {path!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"reward.function={spec!r}: importing {path!r} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward.function={spec!r}: {path!r} has no function {name!r}")
    return function
