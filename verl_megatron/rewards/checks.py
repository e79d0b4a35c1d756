"""Checks of reward.function before a run: its text, its functions, and the data that they need."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from parallel.runtime.refusal import counted, short_repr
from verl_megatron.rewards.functions import (
    IN_WORKER,
    REWARDS,
    WITHOUT_TRUTH,
    builtin_columns,
    builtin_problem,
)
from verl_megatron.rewards.plan import DEFAULT, RewardPlan, is_url, read_plan
from verl_megatron.rewards.process import WorkerProcess
from verl_megatron.rewards.server import server_problem

CHECK_TIMEOUT_S = 90.0  # a reward file that takes longer to import is rejected before a model is built
SHOWN = 5  # sources in a message

_COLUMNS: dict[str, list[str]] = {}  # that reward functions need, by their spec


def check_reward(
    text: str, options: Mapping[str, Any] | None = None, *, timeout_s: float = CHECK_TIMEOUT_S
) -> list[str]:
    """Import the functions of reward.function=`text` in a worker, each within `timeout_s`.

    `options` are keyword arguments of built-in functions, by their names.

    Returns:
        The problems found.
    """
    try:
        plan = read_plan(text)
    except ValueError as error:
        return [str(error)]
    problems = [problem for spec in plan.specs if (problem := builtin_problem(spec))]
    built_in = [spec for spec in plan.specs if spec in REWARDS]
    _COLUMNS.update({spec: builtin_columns(spec, options or {}) for spec in built_in})
    for url in filter(is_url, plan.specs):
        if problem := server_problem(url):
            problems.append(f"reward.function={short_repr(url)} {problem}")
    known = [spec for spec in plan.specs if is_url(spec) or (spec in REWARDS and spec not in IN_WORKER)]
    files = [spec for spec in plan.specs if spec not in known]
    if not files:
        return problems
    try:
        worker = WorkerProcess(files, options or {}, output_bytes=0)
    except ValueError as error:
        return [*problems, str(error)]
    try:
        problems += worker.wait(timeout_s)
        _COLUMNS.update(worker.columns)
    finally:
        worker.end()
    return problems


def columns_problem(text: str, columns: Collection[str], source: str = "") -> str:
    """Return which argument of checked functions the rows of `source` have no column for, or ""."""
    for part in read_plan(text).parts(source):
        missing = next((name for name in _COLUMNS.get(part.spec, []) if name not in columns), "")
        shown = ", ".join(map(short_repr, sorted(columns)[:20])) or "none besides prompt and answer"
        if missing and part.spec in REWARDS:
            return (
                f"reward.function={part.spec} needs reward.{missing} or a column of that name, and the data "
                f"have none; they have {shown}"
            )
        if missing:
            return (
                f"reward.function={short_repr(part.spec)} takes the argument {short_repr(missing)}, and the "
                f"data have no such column; they have {shown}"
            )
    return ""


def answers_problem(text: str, missing: Mapping[str, tuple[int, str]]) -> str:
    """Return which rows lack the ground truth that a built-in function compares with; empty if none do.

    Args:
        missing: by data_source, the rows without ground truth and the place of the first.
    """
    plan = read_plan(text)
    for source, (count, first) in missing.items():
        for part in plan.parts(source):
            if part.spec in REWARDS and part.spec not in WITHOUT_TRUTH:
                return (
                    f"reward.function={part.spec} compares with the ground truth, and "
                    f"{counted(count, 'row has', 'rows have')} none, first at {first}; name its column by "
                    "data.answer_key, or leave the rows out"
                )
    return ""


def sources_problem(text: str, counts: Mapping[str, int]) -> str:
    """Return which rows no entry of reward.function is for; empty if there are none.

    Args:
        counts: rows by their data_source, "" for rows without one.
    """
    plan = read_plan(text)
    left = {source: count for source, count in counts.items() if not plan.parts(source)}
    if not left:
        return ""
    return (
        f"reward.function={short_repr(text)} has no entry for data_source {_listed(left)}; add one, or an "
        f"entry {DEFAULT} for all others"
    )


def sources_note(text: str, counts: Mapping[str, int]) -> str:
    """Return which entries of reward.function no row has; empty if there are none."""
    plan: RewardPlan = read_plan(text)
    left = [source for source in plan.routes if source != DEFAULT and source not in counts]
    if not (plan.is_routed and left):
        return ""
    return f"no row has the data_source {_some(left)} of reward.function"


def _listed(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda source: (-counts[source], source))
    return _some([f"{_shown(source)} ({counts[source]:,} rows)" for source in ordered], quote=False)


def _some(names: Sequence[str], *, quote: bool = True) -> str:
    shown = [_shown(name) if quote else name for name in names[:SHOWN]]
    return ", ".join(shown) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)


def _shown(source: str) -> str:
    return short_repr(source) if source else "(none)"
