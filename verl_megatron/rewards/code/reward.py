"""The reward `code`: the share of a row's tests that the program of a response passes.

Worker processes import this file, so it needs only the standard library.
"""

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_megatron.rewards.answers import same_json
from verl_megatron.rewards.code import harness
from verl_megatron.rewards.code.cases import Cases, is_same_output, program_of, read_cases
from verl_megatron.rewards.code.program import MOST_PROCESSES, REMEDY, Ended, Limits, run_program

_LEAST_OUTPUT = 1 << 16  # bytes that a program may print, at least
# Harmless: it looks at what it could do, and each process that it starts ends with it.
_PROBE = """
import json, os, socket, time
found = {"networks": [name for _, name in socket.if_nameindex()], "processes": 1, "written": []}
for path in ("/", "/usr", "/etc", "/dev"):
    try:
        os.close(os.open(os.path.join(path, "probe"), os.O_CREAT | os.O_WRONLY))
        found["written"].append(path)
    except OSError:
        pass
try:
    while found["processes"] < 2 * MOST:
        if not os.fork():
            time.sleep(60)
        found["processes"] += 1
except OSError:
    pass
found["folders"] = [path for path in ("/proc/self", "/home", "/root/.ssh") if os.path.exists(path)]
print(json.dumps(found))
"""


def code(
    prompt: str,
    response: str,
    ground_truth: Any,
    extra: dict[str, Any],
    *,
    may: Mapping[str, float],
) -> float:
    """Return the share of the tests that the last Python block of the response passes.

    Tests after one that runs out of time, and those that are left after the total time, count as not passed.

    Args:
        may: "seconds" and "memory_mib" of a run of the program, and "total_seconds" of all runs.

    Raises:
        ValueError: the ground truth has no tests.
        OSError: the sandbox cannot be made.
    """
    cases = read_cases(ground_truth)
    program = program_of(response)
    if not program.strip() or "\0" in program:
        return 0.0
    trial = _Trial(program, may)
    if cases.tests:
        asked = {"tests": cases.tests, "entry_point": str(extra.get("entry_point") or "")}
        answers = trial.ask(asked)
        return sum(number in answers for number in range(len(cases.tests))) / len(cases.tests)
    if cases.function:
        values = trial.ask({"function": cases.function, "calls": cases.inputs})
        expected = enumerate(json.loads(json.dumps(cases.outputs)))
        passed = sum(number in values and _is_result(values[number], one) for number, one in expected)
    else:
        passed = trial.count_outputs(cases)
    return passed / len(cases.outputs)


def _is_result(value: Any, expected: Any) -> bool:
    """Whether a call gave what is expected, which some data sets write as a list of one."""
    return same_json(value, expected) or same_json([value], expected)


class _Trial:
    """A program and what its runs may use."""

    def __init__(self, program: str, may: Mapping[str, float]):
        self._program, self._seconds = program, may["seconds"]
        self._memory_bytes = int(may["memory_mib"]) << 20
        self._until = time.monotonic() + may["total_seconds"]

    def count_outputs(self, cases: Cases) -> int:
        """Return how many inputs give their output."""
        passed = 0
        for given, expected in zip(cases.inputs, cases.outputs):
            ended = self._run(self._program, given, len(expected.encode()))
            if ended is None or ended.cut == "time":
                break
            text = ended.output.decode(errors="replace")
            passed += not ended.cut and ended.code == 0 and is_same_output(text, expected)
        return passed

    def ask(self, wanted: dict[str, Any]) -> dict[int, Any]:
        """Return what the harness answers for the program, by number."""
        secret = secrets.token_hex()
        lines = [{"program": self._program}, wanted | {"secret": secret}]
        given = "".join(json.dumps(line) + "\n" for line in lines)
        ended = self._run(_harness(), given, 1 << 24)
        answers: dict[int, Any] = {}
        for line in ended.output.splitlines() if ended else []:
            try:
                said, number, value = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                continue
            if said == secret and isinstance(number, int):
                answers[number] = value
        return answers

    def _run(self, source: str, given: str, most: int) -> Ended | None:
        left = self._until - time.monotonic()
        if left <= 0:
            return None
        limits = Limits(
            seconds=min(self._seconds, left),
            memory_bytes=self._memory_bytes,
            output_bytes=_LEAST_OUTPUT + 2 * most,
        )
        return run_program(source, given.encode(errors="replace"), limits)


def _harness() -> str:
    return Path(harness.__file__).read_text(encoding="utf-8") + "\n\nmain()\n"


def code_problem(*, memory_mib: int) -> str:
    """Return why programs cannot be confined on this machine, as a clause with the remedy; "" if they can.

    It runs a harmless program that tries what must not succeed.
    """
    limits = Limits(seconds=30, memory_bytes=memory_mib << 20)
    try:
        ended = run_program(_PROBE.replace("MOST", str(MOST_PROCESSES)), b"", limits)
        found = json.loads(ended.output)
    except OSError as error:
        return f"cannot confine programs here ({error}); {REMEDY}"
    except ValueError:
        how = f"{ended.cut or 'exit code'} {ended.code}"
        return (
            f"cannot start Python in its sandbox ({how}); raise reward.code_memory_mib={memory_mib}, or let "
            "all users read Python's folder"
        )
    open_ = [path for path in found["networks"] if path != "lo"] + found["written"] + found["folders"]
    open_ += ["processes without limit"] * (found["processes"] > MOST_PROCESSES)
    return f"cannot confine programs here (they reach {', '.join(open_)}); {REMEDY}" if open_ else ""
