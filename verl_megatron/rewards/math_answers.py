"""The reward `math`: whether a response's answer equals the ground truth as mathematics (math-verify)."""

import functools
import importlib.util
import logging
import re
from typing import Any

from verl_megatron.rewards.answers import truth_text

_MARK = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")  # of mathematics in a text; \$ is money

INSTALL = "pip install 'math-verify[antlr4_9_3]'"


def missing() -> str:
    """Return what the reward lacks, as a clause with its remedy; empty if it can be used."""
    if importlib.util.find_spec("math_verify") is None:
        return f"needs the package math-verify, which is not installed; {INSTALL}"
    return ""


def math(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    r"""1 if the last \boxed{}, formula or number of the response equals the ground truth; else 0.

    The ground truth is LaTeX or a number; of a text with `####`, what stands behind it.

    Raises:
        ValueError: there is no mathematics in the ground truth.
    """
    from math_verify import parse, verify

    truth = _parsed("" if ground_truth is None else truth_text(ground_truth))
    # The worker's own time limit applies; math-verify's would take SIGALRM.
    answer = parse(response, parsing_timeout=0)
    return float(verify(truth, answer, timeout_seconds=0))


@functools.lru_cache(maxsize=1024)
def _parsed(ground_truth: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it sets no alarm
    text = ground_truth.rpartition("####")[2].strip()
    parsed = parse(text if _MARK.search(text) else f"${text}$", parsing_timeout=0)
    if not parsed:
        raise ValueError(f"ground truth {ground_truth!r} has no number or formula to compare with")
    return parsed
