"""How a reward function is called: by position, or by the names that its signature uses.

Worker processes import this file, so it needs only the standard library.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

OURS = ("prompt", "response", "ground_truth", "extra")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions")
ANSWERS = ("ground_truth", "answer", "solution")  # what TRL's functions call the ground truth

Call = Callable[..., Any]  # (prompt, response, ground_truth, extra, messages) -> what the function returns


def bound(function: Callable[..., Any]) -> Call:
    """Return `function` as one of (prompt, response, ground_truth, extra, messages), by its signature.

    - Names of OURS and VERL, some or all, in any order, get these values; `**kwargs` gets the others.
    - `completions` or `prompts` make it one of TRL's: lists of one element, with columns as further lists.
    - Otherwise it gets (prompt, response, ground_truth, extra) by position.

    `messages` are those of a chat prompt, or None.

    Raises:
        ValueError: a clause that says which argument is not available.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _by_position(function)  # written in C: only the first call shows it
    parameters = list(signature.parameters.values())
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    names = [one.name for one in named if one.name not in fixed]
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    has_positions = any(one.kind is one.POSITIONAL_ONLY and one.default is one.empty for one in parameters)
    if set(names) & set(TRL) and not has_positions:
        return functools.partial(_call_batched, function, names, open_ended)
    needed = [one.name for one in named if one.default is one.empty and one.name not in fixed]
    known = set(OURS + VERL)
    if (set(names) & known or (open_ended and not names)) and set(needed) <= known and not has_positions:
        taken = tuple(name for name in names if name in known)
        if open_ended:
            taken = tuple(dict.fromkeys(taken + (VERL if set(names) & (set(VERL) - set(OURS)) else OURS)))
        return functools.partial(_call_by_name, function, tuple(name for name in taken if name not in fixed))
    if problem := _position_problem(signature, names):
        raise ValueError(problem)
    return _by_position(function)


def columns_of(call: Call) -> list[str]:
    """Return the columns that a function of lists needs: arguments without a default."""
    if not (isinstance(call, functools.partial) and call.func is _call_batched):
        return []
    function, names, _ = call.args
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    parameters = inspect.signature(function).parameters
    given = {*TRL, *ANSWERS, *fixed}
    return [
        name for name in names if parameters[name].default is inspect.Parameter.empty and name not in given
    ]


def _position_problem(signature: inspect.Signature, names: list[str]) -> str:
    """Return why a function cannot be called with OURS by position, or ""."""
    taken = " ".join(str(signature).split())
    head = (
        f"takes {taken[:500]} and is called with ({', '.join(OURS)}), or by name with any of these"
        f" and of {', '.join(name for name in VERL if name not in OURS)}"
    )
    unknown = next((name for name in names if name not in OURS + VERL), "")
    try:
        signature.bind(*OURS)
    except TypeError as error:
        return f"{head}: {f'argument {unknown!r} is none of them' if unknown else error}"
    moved = [name for at, name in enumerate(names) if name in OURS + VERL and name not in OURS[at : at + 1]]
    return f"{head}: argument {unknown!r} is none of them" if moved and unknown else ""


def _by_position(function: Callable[..., Any]) -> Call:
    return functools.partial(_call_by_position, function)


def _call_by_position(
    function: Call, prompt: str, response: str, ground_truth: Any, extra: dict[str, Any], messages: Any = None
) -> Any:
    return function(prompt, response, ground_truth, extra)


def _call_by_name(function: Call, names: tuple[str, ...], *call: Any) -> Any:
    prompt, response, ground_truth, extra = call[:4]
    values = {
        "prompt": prompt,
        "response": response,
        "ground_truth": ground_truth,
        "extra": extra,
        "data_source": extra.get("data_source", ""),
        "solution_str": response,
        "extra_info": extra["extra_info"] if "extra_info" in extra else extra,
    }
    return function(**{name: values[name] for name in names})


def _call_batched(function: Call, names: list[str], open_ended: bool, *call: Any) -> Any:
    """Call a function of lists with lists of one element; return the one score."""
    prompt, response, ground_truth, extra = call[:4]
    messages = call[4] if len(call) > 4 else None
    values: Mapping[str, Any] = (
        dict.fromkeys(ANSWERS, ground_truth)
        | extra
        | {
            "prompts": messages or prompt,
            "completions": [{"role": "assistant", "content": response}] if messages else response,
        }
    )
    given = values if open_ended else {name: values[name] for name in names if name in values}
    scores = function(**{name: [value] for name, value in given.items()})
    if not hasattr(scores, "__len__") or isinstance(scores, str | dict) or len(scores) != 1:
        raise TypeError("a reward of lists must return a list with a score for each completion")
    return scores[0]
