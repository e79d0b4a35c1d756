"""The command line: `verl-megatron COMMAND ...`, and `python -m verl_megatron COMMAND ...`.

A command is a function `run(arguments) -> exit status | None` of a module here. It is imported when it is
called, so that help is quick.
"""

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

import verl_megatron
from parallel.runtime import process
from parallel.runtime.refusal import complain, nearest, short_repr
from verl_megatron.commands.interrupts import end_interrupted, take_interrupts
from verl_megatron.commands.streams import prepare_streams
from verl_megatron.launch.options import words_of

PROGRAM = "verl-megatron"
# Errors that a file or folder causes which the user has named.
OF_A_PATH = {
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EEXIST),
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command and where it is defined."""

    summary: str
    module: str  # of this package
    function: str = "run"

    def load(self) -> Callable[[list[str]], int | None]:
        """Import the module and return the command's function."""
        return getattr(import_module(f"{__name__}.{self.module}"), self.function)


COMMANDS = {
    "quickstart": Command("from nothing to a trained model: toy job, fine-tuning, PPO, export", "quickstart"),
    "recipes": Command("list, show or copy the recipes", "recipes"),
    "train": Command("train a policy by PPO, GRPO or another algorithm", "training", "train"),
    "sft": Command("fine-tune on demonstrations", "training", "sft"),
    "dpo": Command("direct preference optimization on pairs", "training", "dpo"),
    "reward-model": Command("train a reward model on pairs", "training", "reward_model"),
    "reward-server": Command("serve a reward model in vLLM, for reward.function=http://...", "reward_server"),
    "report": Command("write the report of one or several runs, and print their alarms", "report"),
    "generate": Command("write a model's responses to prompts", "evaluation", "generate"),
    "evaluate": Command("score a model's responses to prompts", "evaluation", "evaluate"),
    "plan": Command("find layouts that fit a number of GPUs", "plan.command"),
    "reshard-plan": Command("show what a weight sync would move", "reshard_plan"),
    "convert": Command("convert between Hugging Face folders and Megatron-Core checkpoints", "convert"),
    "export": Command("write a run's checkpoint as Hugging Face folders", "export"),
    "data": Command("show what a run would read of a data file", "data"),
    "doctor": Command("look at this machine: what is wrong, and what to do about it", "doctor"),
    "benchmark": Command("time a part of a run, or recipes on several numbers of ranks", "benchmark"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument, and return the exit status.

    A ValueError is a user error, and so is a path that cannot be used: one line, and the status is 2.

    Args:
        arguments: those of the process if None, whose standard streams are then prepared.
    """
    if arguments is not None:
        return _run(list(arguments))
    prepare_streams()
    process.keep_exit_statuses()
    take_interrupts()
    try:
        try:
            return _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        end_interrupted()


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Context that says a user error in one line, and exits with status 2."""
    try:
        yield
    except ValueError as error:
        complain(str(error))
    except OSError as error:
        if error.errno not in OF_A_PATH or error.filename is None:
            raise
        complain(words_of(error))


@refusing()
def _run(given: list[str]) -> int:
    name = given[0] if given else ""
    if name == "help" and len(given) > 1:
        return _run([given[1], "--help", *given[2:]])
    if name in ("", "-h", "--help", "help"):
        print(_help(), flush=True)
        return 0 if name else 2
    if name == "--version":
        print(verl_megatron.__version__, flush=True)
        return 0
    if name not in COMMANDS:
        raise ValueError(_about_word(name))
    sys.argv[0] = f"{PROGRAM} {name}"  # what a parser calls the program
    return COMMANDS[name].load()(given[1:]) or 0


def _about_word(word: str) -> str:
    """Describe a word that is no command: maybe an algorithm."""
    from verl_megatron.config.algorithm import ALGORITHM_NAMES

    said, algorithm = f"{short_repr(word)} is no command", word.lower().replace("-", "_")
    if algorithm in ALGORITHM_NAMES:
        return f"{said}; write {PROGRAM} train --config-name RECIPE algorithm.name={algorithm}"
    return f"{said}{nearest(word, COMMANDS)}; commands are {', '.join(COMMANDS)}"


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [ARGUMENTS]",
            "",
            "Reinforcement learning of language models with Megatron-Core and vLLM.",
            "",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help explains a command.",
        ]
    )
