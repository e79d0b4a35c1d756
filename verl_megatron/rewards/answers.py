"""Rewards that look at the text of a response: equality, numbers, patterns, length, JSON.

Worker processes import this file, so it needs only the standard library.
"""

import functools
import json
import math
import re
from decimal import Decimal
from typing import Any

MARKED = r"```(?:{languages})[ \t]*\r?\n(.*?)(?:\r?\n)?[ \t]*```"  # a block of code, whose text is group 1

# An exponent of ten digits or more is none: Decimal refuses those beyond 18.
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,9}(?!\d))?")
_JSON_BLOCK = re.compile(MARKED.format(languages="json|JSON"), re.DOTALL)


def match(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the response equals the ground truth, ignoring surrounding white space; else 0.

    Raises:
        ValueError: there is no ground truth.
    """
    if ground_truth is None:
        raise ValueError("there is no ground truth to compare with")
    return float(response.strip() == truth_text(ground_truth).strip())


def truth_text(ground_truth: Any) -> str:
    """Return a ground truth as people write it: a number without exponent, and a whole one as an integer.

    A Parquet column of integers with missing ones has floats.
    """
    if not isinstance(ground_truth, float) or not math.isfinite(ground_truth):
        return str(ground_truth)
    return f"{Decimal(str(ground_truth)):f}".removesuffix(".0")


def last_number(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the last number in the response equals the last number in the ground truth; else 0.

    Raises:
        ValueError: there is no number in the ground truth.
    """
    truth = _last_number(truth_text(ground_truth))
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r} has no number to compare with")
    return float(_last_number(response) == truth)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def regex(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the ground truth, a Python regular expression, is found in the response; else 0.

    Raises:
        ValueError: the ground truth is no regular expression.
    """
    if not isinstance(ground_truth, str) or not ground_truth:
        raise ValueError(f"ground truth {ground_truth!r} is no regular expression")
    return float(_compiled(ground_truth).search(response) is not None)


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    if problem := pattern_problem(pattern):
        raise ValueError(f"ground truth {pattern!r} is no regular expression ({problem})")
    return re.compile(pattern)


def pattern_problem(pattern: str) -> str:
    """Return why `pattern` is no regular expression; empty if it is one."""
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error) or type(error).__name__
    return ""


def format_of(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any], *, pattern: str) -> float:
    """1 if the whole response has the form `pattern`, in which `.` is any character; else 0."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def length(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any], *, target: int) -> float:
    """1 up to the target length of the response, in characters; from there it falls to 0 at twice the target.

    The target is the row's column `target_length`, or else `target`.

    Raises:
        ValueError: the row's target is no number above 0.
    """
    own = extra.get("target_length")
    allowed = target if own is None else own
    if isinstance(allowed, str):
        allowed = _as_number(allowed)
    if isinstance(allowed, bool) or not isinstance(allowed, int | float) or not 0 < allowed < math.inf:
        raise ValueError(f"target_length {own!r} of the row is no number above 0")
    return min(1.0, max(0.0, 2 - len(response) / allowed))


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# ---- JSON --------------------------------------------------------------------------------------------------


def json_value(prompt: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 if the response, or its last ```json block, is JSON and agrees with the ground truth; else 0.

    Without ground truth every value will do. A ground truth with the key `$schema` is a JSON Schema. Every
    other one is a value that the response's must equal; a text stands for the JSON in it, if it is JSON.

    Raises:
        ValueError: the ground truth is a schema that is not valid or has references to others, or the package
            jsonschema is missing.
    """
    blocks = _JSON_BLOCK.findall(response)
    try:
        value = _parsed(blocks[-1] if blocks else response)
    except ValueError:
        return 0.0
    if ground_truth is None or ground_truth == "":
        return 1.0
    if isinstance(ground_truth, str):
        try:
            ground_truth = _parsed(ground_truth)
        except ValueError:
            pass
    if isinstance(ground_truth, dict) and "$schema" in ground_truth:
        return float(_is_valid(value, ground_truth))
    return float(same_json(value, ground_truth))


def same_json(value: Any, expected: Any) -> bool:
    """Whether two values are the same in JSON."""
    try:
        return _plain(value) == _plain(expected)
    except RecursionError:
        return False


def _parsed(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text.strip(), parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _plain(value: Any) -> Any:
    """Return a value whose equality is JSON's: true is not 1."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return ("bool", value) if isinstance(value, bool) else value


def _is_valid(value: Any, schema: dict[str, Any]) -> bool:
    try:
        import jsonschema.validators
        import referencing.exceptions
    except ImportError:
        raise ValueError(
            "the ground truth is a JSON Schema, which needs a package: pip install jsonschema"
        ) from None
    kind: Any = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
        # without its own registry it would fetch what `$ref` names
        return kind(schema, registry=referencing.Registry()).is_valid(value)
    except jsonschema.SchemaError as error:
        raise ValueError(f"the ground truth is no valid JSON Schema: {error.message}") from None
    except referencing.exceptions.Unresolvable as error:
        raise ValueError(f"the ground truth is a JSON Schema with a reference elsewhere: {error}") from None
