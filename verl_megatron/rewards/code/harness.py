"""What runs in a sandbox around the program of a response whose functions are called.

This text stands before `main()` in a file of its own, so it needs only the standard library. Standard input
has a line {"program"} and, which stays unread until the program has defined its functions, a line {"secret"}
with "function" and "calls", or with "tests" and "entry_point". Standard output gets a line of JSON [secret,
number, value] for each call that returned and each test that passed.
"""

import builtins
import io
import os
import sys
import types
from json import dumps, loads
from os import read, write


def main():
    """Run the program, then what is asked of it."""
    asked, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    before = dict(vars(builtins))
    program = _line(asked)["program"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # the program's, in place of this one
    names = vars(sys.modules["__main__"])
    sys.stdin = io.StringIO()
    exec(compile(program, "response.py", "exec"), names)
    sys.settrace(None)
    sys.setprofile(None)
    builtins.__dict__.update(before)  # the program may have put others in their place
    wanted = _line(asked)
    os.close(asked)
    for number, value in _called(names, wanted) if "calls" in wanted else _tested(names, wanted):
        write(answers, dumps([wanted["secret"], number, value]).encode() + b"\n")
    os._exit(0)


def _line(stream):
    """Read one line and nothing behind it."""
    text = b""
    while b"\n" not in text:
        text += read(stream, 1 << 16)
    line, _, rest = text.partition(b"\n")
    os.lseek(stream, -len(rest), os.SEEK_CUR)
    return loads(line)


def _called(names, wanted):
    """Yield the value of each call that returns one of JSON."""
    function = names.get(wanted["function"])
    if function is None:
        function = getattr(names["Solution"](), wanted["function"])
    for number, arguments in enumerate(wanted["calls"]):
        try:
            value = function(*arguments)
            dumps(value)
        except Exception:
            continue
        yield number, value


def _tested(names, wanted):
    """Yield each test that passes."""
    entry = wanted["entry_point"] or _last_function(names)
    names["__entry_point__"] = lambda: names[entry]
    names["__is_equal__"] = _is_equal
    for number, text in enumerate(wanted["tests"]):
        try:
            exec(compile(text, "tests.py", "exec"), names)
        except Exception:
            continue
        yield number, True


def _last_function(names):
    functions = [name for name, value in names.items() if isinstance(value, types.FunctionType)]
    return functions[-1] if functions else ""


def _is_equal(left, right):
    """Compare; an object with an `__eq__` of the program equals only objects of its own class."""
    return _judges(left) == _judges(right) and left == right


def _judges(value, depth=0):
    """Return the classes in a value that decide for themselves what they equal, and are of no library."""
    if depth < 20 and isinstance(value, (list, tuple, set, frozenset)):
        return set().union(*(_judges(one, depth + 1) for one in value))
    if depth < 20 and isinstance(value, dict):
        return _judges([*value.keys(), *value.values()], depth + 1)
    kind = type(value)
    for base in kind.__mro__:
        code = getattr(vars(base).get("__eq__"), "__code__", None)
        if code is not None:
            is_library = code.co_filename.startswith((sys.prefix, sys.base_prefix, "<string>"))
            return set() if is_library else {kind}
    return set()
