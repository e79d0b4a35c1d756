"""The command line of a program that users call: help in one form, and errors of one line."""

import argparse
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from parallel.runtime.refusal import complain, nearest, readable, short_repr

WIDTH = 110
# As argparse says it.
UNKNOWN, NEEDED = "unrecognized arguments: ", "the following arguments are required: "
ONE_NEEDED = "one of the arguments "
MOST_LOCAL = 1024  # ranks of one host
LAUNCHER_OPTIONS = {"--ranks": 1, "--max-restarts": 0}  # least value
OF_A_RANK = ("RANK", "LOCAL_RANK")  # environment variables that a launcher sets for each rank
KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}  # by argument type


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines; says defaults, and N or FILE for what an option takes."""

    def __init__(self, prog: str):
        super().__init__(prog, width=min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        usual, text = action.default, action.help or ""
        is_said = usual == 0 or "default" in text or "without it" in text or f"({usual})" in text
        has_one = isinstance(usual, str | int | float | Path) and not isinstance(usual, bool) and usual != ""
        if usual == argparse.SUPPRESS or is_said or not has_one or not action.option_strings:
            return text
        return f"{text} (default: %(default)s)".strip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "FILE" if action.type is Path else "TEXT" if action.type is None else "N"


class Options(argparse.ArgumentParser):
    """A parser that takes no abbreviations and no option twice, and says an error in one line.

    Args:
        examples: command lines without the program, for the end of the help.
    """

    def __init__(self, *, examples: Sequence[str] = (), **settings: Any):
        settings.setdefault("formatter_class", _Help)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)
        self._words: list[str] = []
        lines = [f"  {self.prog} {example}".rstrip() for example in examples]
        self.epilog = "\n".join(["examples:", *lines]) if lines else self.epilog

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse options given twice, and `--option=--`, an empty list there.

        Without any arguments all that are required are named at once.
        """
        words = self._words = [text for text in args or () if isinstance(text, str)]
        if args is not None and not words and (needed := self._needed()):
            self.error(NEEDED + ", ".join(needed))
        if empty := [text for text in words if text.startswith("-") and text.endswith("=--")]:
            self.error(f"argument {empty[0][:-3]}: expected one argument")
        if name := given_twice(self, words):
            self.error(f"argument {name}: it is given twice; leave one of them out")
        return super().parse_known_args(args, namespace)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Read what is given for an argument as argparse does, but refuse an empty value."""
        is_command = action.nargs == argparse.PARSER  # whose own arguments these are, too
        if not is_command and not all(text.strip() for text in arg_strings):
            instead = ", or leave the option out" * bool(action.option_strings)
            raise argparse.ArgumentError(action, f"its value is empty; give one{instead}")
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Read a value as argparse does, but no number as only Python writes it."""
        try:
            if action.type in KINDS and not re.fullmatch(r"[-+.\da-zA-Z]*", arg_string, re.ASCII):
                raise argparse.ArgumentError(action, arg_string)  # such as 1_000
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if (kind := KINDS.get(action.type)) is None:
                raise
            said = f"{short_repr(arg_string)} is not accepted; write {kind}"
            raise argparse.ArgumentError(action, said) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is none of an argument's choices, as a setting's value is refused."""
        if action.choices is not None and value not in action.choices:
            names = [str(name) for name in action.choices]
            said = (
                f"{short_repr(value)} is not known{nearest(value, names)}; choose one of {', '.join(names)}"
            )
            raise argparse.ArgumentError(action, said)

    def _unknown(self) -> str:
        """Return the first option given that this parser does not have, empty if a subcommand may have it."""
        if any(action.nargs == argparse.PARSER for action in self._actions):
            return ""
        given = self._words[: self._words.index("--")] if "--" in self._words else self._words
        names = (word.partition("=")[0] for word in given if word.startswith("--"))
        return next((name for name in names if name not in self._option_string_actions), "")

    def _needed(self) -> list[str]:
        """Return the names of the arguments without which there is nothing to do."""
        needed = [action for action in self._actions if action.required and action.nargs != "*"]
        return [str((action.option_strings or [action.metavar or action.dest])[0]) for action in needed]

    def option_names(self) -> list[str]:
        """Return the options of this parser, and of its subcommands."""
        below = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        names = [action.option_strings[0] for action in _shown(self._actions)]
        return names + [name for each in below for one in each.values() for name in one.option_names()]

    def error(self, message: str) -> NoReturn:
        is_incomplete = message.startswith((NEEDED, ONE_NEEDED))
        if is_incomplete and (name := self._unknown()):  # instead of what it should have been
            message = UNKNOWN + name
        if message.startswith(UNKNOWN):
            name = re.split("[= ]", message.removeprefix(UNKNOWN))[0]
            # a command may have no option of another one
            message += nearest(name, [option for option in self.option_names() if option != name])
        text = f"{readable(message)} (--help lists the options)"
        if os.environ.get("RANK"):  # all ranks have these arguments
            complain(text, agreed=True)
        self.exit(2, f"error: {text}\n")


def words_of(error: ValueError | OSError) -> str:
    """Return the words of a user error; those of a file or folder name it, with a remedy."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{short_repr(str(error.filename))}: {error.strerror}; name another file or folder"
    return str(error)


def whole_number(least: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argument type: whole numbers from `least` to `most`, of ASCII digits."""

    def read(text: str) -> int:
        if text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is not accepted; write a whole number from {least} to {most:,}"
        )

    return read


def number(least: float, most: float) -> Callable[[str], float]:
    """Return an argument type: numbers from `least` to `most`, of ASCII digits, such as 0.5 or 5e9."""

    def read(text: str) -> float:
        if re.fullmatch(r"\+?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.ASCII | re.IGNORECASE):
            if least <= (value := float(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is not accepted; write a number from {least:,} to {most:,}"
        )

    return read


COUNT = whole_number()  # argument type of counts above 0
SHARE = number(0.001, 1)  # argument type of shares of a whole


def add_launcher_options(options: argparse.ArgumentParser, *, usual: str = "1") -> None:
    """Add the options that `launcher_options` takes away before, for help."""
    options.add_argument(
        "--ranks",
        type=int,
        help=f"processes on this host, each with a GPU if there are GPUs (default: {usual})",
    )
    options.add_argument(
        "--max-restarts", type=int, default=0, help="how often failed ranks start again (default: 0)"
    )


def launcher_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split off --ranks and --max-restarts (0 if absent); return them and the other arguments.

    Raises:
        ValueError: a value that is no such number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in LAUNCHER_OPTIONS:
        parser.add_argument(option)
    try:
        if name := given_twice(parser, arguments):
            raise ValueError(f"{name}: it is given twice; leave one of them out")
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}; give a number after it") from None
    for option, least in LAUNCHER_OPTIONS.items():
        name = option[2:].replace("-", "_")
        text = getattr(given, name)
        if text is None:
            text = "0"
        elif not (
            isinstance(text, str) and re.fullmatch("[0-9]+", text) and least <= int(text[:7]) <= MOST_LOCAL
        ):
            raise ValueError(
                f"{option} {short_repr(text)} must be a whole number from {least} to {MOST_LOCAL}; change it"
            )
        setattr(given, name, int(text))
    return given, rest


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    return any(os.environ.get(name) for name in OF_A_RANK)


def given_twice(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Return the first option with one value that is given more than once; empty if there is none."""
    given = list(words[: words.index("--")] if "--" in words else words)
    for action in parser._actions:
        names = action.option_strings
        is_single = isinstance(action, argparse._StoreAction) and names
        if is_single and sum(word.partition("=")[0] in names for word in given) > 1:
            return names[0]
    return ""


def _shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.option_strings and action.help != argparse.SUPPRESS]


def check_output(
    option: str, path: str | Path, *, inputs: Iterable[str | Path] = (), is_replaced: bool = False
) -> None:
    """Check that a file can be written, before the work that it is for.

    Args:
        inputs: files and folders that are read, if they exist; the file is none of them and replaces no
            file in them.
        is_replaced: a new file takes the place of the old one, so pipes and devices cannot be written.

    Raises:
        ValueError: names the option.
    """
    path, reason = Path(path), ""
    try:
        mode = path.stat().st_mode
        is_stream = stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
        can_be = (stat.S_ISREG(mode) or (is_stream and not is_replaced)) and os.access(path, os.W_OK)
    except FileNotFoundError:
        can_be = os.access(path.parent, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:  # a circle of links, too long a name, a null byte
        can_be, reason = False, getattr(error, "strerror", None) or str(error)
    if reason:
        raise ValueError(f"{option} {path} cannot be written ({reason}): name another file")
    if not can_be:
        raise ValueError(f"{option} {path} cannot be written: name a file in a folder that exists")
    for given in filter(os.path.exists, inputs):
        is_same = path.exists() and os.path.samefile(path, given)
        if is_same or _is_in(path, given):
            where = "is" if is_same else "is a file of"
            raise ValueError(f"{option} {path} {where} {given}, which is read; name a file elsewhere")


def _is_in(path: Path, folder: str | Path) -> bool:
    """Whether a file exists in a folder or below it, under this name or, as a hard link, under another."""
    if not path.exists() or not os.path.isdir(folder):
        return False
    if os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), "")):
        return True
    if path.stat().st_nlink == 1:
        return False
    inside = (file for file in Path(folder).rglob("*") if file.exists())
    return any(map(path.samefile, inside))
