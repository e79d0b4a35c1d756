"""The command line of a program that users call: its docstring as help, and errors that name --help."""

import argparse
from typing import Any, NoReturn


class Options(argparse.ArgumentParser):
    """A parser that keeps the description's lines, takes no abbreviations and says errors without a usage."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")
