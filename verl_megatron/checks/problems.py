"""Problems of settings: collected from checks that raise, and raised together as one error."""

from collections.abc import Callable
from typing import Any

from parallel.runtime.refusal import readable


def refuse(problems: list[str]) -> None:
    """Raise a ValueError that lists `problems`, if there are any."""
    if len(problems) == 1:
        raise ValueError(readable(problems[0]))
    if problems:
        raise ValueError(
            readable(
                f"{len(problems)} settings cannot work:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )
        )


def problem_of(check: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Run `check` and return the message of its ValueError as a list; empty if it passes."""
    try:
        check(*args, **kwargs)
    except ValueError as error:
        return [str(error)]
    return []
