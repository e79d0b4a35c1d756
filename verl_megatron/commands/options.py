"""The command line of a program that users call: its docstring as help, and errors that name --help."""

import argparse
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from parallel.runtime.refusal import readable


class Options(argparse.ArgumentParser):
    """A parser that keeps the description's lines, takes no abbreviations and says an error in one line."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse `--option=--`, which argparse reads as an empty list."""
        if empty := [text for text in args or () if text.startswith("-") and text.endswith("=--")]:
            self.error(f"argument {empty[0][:-3]}: expected one argument")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {readable(message)} (--help lists the options)\n")


def check_output(option: str, path: str | Path, *, is_replaced: bool = False) -> None:
    """Check that a file can be written, before the work that it is for.

    Args:
        is_replaced: a new file takes the place of the old one, so pipes and devices cannot be written.

    Raises:
        ValueError: names the option.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        is_stream = stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
        can_be = (stat.S_ISREG(mode) or (is_stream and not is_replaced)) and os.access(path, os.W_OK)
    except FileNotFoundError:
        can_be = os.access(path.parent, os.W_OK | os.X_OK)
    except (OSError, ValueError):  # a circle of links, too long a name, a null byte
        can_be = False
    if not can_be:
        raise ValueError(f"{option} {path} cannot be written: name a file in a folder that exists")
