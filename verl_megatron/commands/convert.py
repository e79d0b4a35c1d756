"""Converts between Hugging Face folders and Megatron-Core's distributed checkpoints, within a memory limit.

`verl-megatron convert COMMAND --help` explains a command.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallel.runtime.refusal import short_repr
from verl_megatron.launch.options import Options, number, whole_number, words_of

if TYPE_CHECKING:
    import torch

    from parallel.convert.workers import Budget

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPES = (*SHORT.values(), *SHORT)
NAMED = "|".join(SHORT.values())  # for help
SUMMARIES = {
    "hf-to-mcore": "writes a checkpoint for any tensor, pipeline and virtual pipeline parallelism",
    "mcore-to-hf": "writes a Hugging Face folder from any layout; optimizer state is left out",
    "inspect": "shows the contents of a folder of either kind",
    "verify": "compares two folders of either kind bit by bit; exit status 1 if a tensor differs",
}
EXAMPLES = {
    "hf-to-mcore": (
        "outputs/toy/model checkpoint",
        "outputs/toy/model checkpoint --workers 2 --memory-gib 2",
    ),
    "mcore-to-hf": (
        "checkpoint exported",
        "checkpoint exported --dtype bfloat16 --template outputs/toy/model",
    ),
    "inspect": ("checkpoint", "outputs/toy/model"),
    "verify": ("outputs/toy/model exported", "outputs/toy/model checkpoint --workers 2"),
}
SHOWN = 10
WORKERS = whole_number(1, 1024)  # argument type
LEAST_GIB, MAX_GIB = 1e-9, 2**20  # a byte is more than the least


def parser() -> argparse.ArgumentParser:
    options = Options(description=__doc__, examples=[f"{name} {EXAMPLES[name][0]}" for name in EXAMPLES])
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_mcore, to_hf, inspect, verify = (
        commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", examples=EXAMPLES[name]
        )
        for name, summary in SUMMARIES.items()
    )
    for command in (to_mcore, to_hf):
        command.add_argument("source", type=Path, metavar="SRC", help="folder to read")
        command.add_argument(
            "target",
            type=Path,
            metavar="DST",
            help="appears when it is complete; DST.partial until then, from which a second run goes on",
        )
        command.add_argument(
            "--file-gib",
            type=number(LEAST_GIB, MAX_GIB),
            default=1.0,
            help="GiB of a file; what is lost at most when a run is cut short",
        )
    to_mcore.add_argument(
        "--spec",
        choices=["te", "local"],
        default="te",
        help="layer spec of the models that will load it; te's files are read by both",
    )
    to_hf.add_argument(
        "--dtype", choices=DTYPES, metavar=NAMED, help="of the tensors written; default: as stored"
    )
    inspect.add_argument("source", type=Path, metavar="PATH", help="folder to read")
    verify.add_argument("source", type=Path, metavar="A", help="a folder")
    verify.add_argument("target", type=Path, metavar="B", help="the folder to compare it with")
    for command in (to_hf, inspect, verify):
        command.add_argument(
            "--template",
            type=Path,
            metavar="DIR",
            help="Hugging Face folder with config.json and tokenizer; default: hf in the checkpoint",
        )
    for command in (to_hf, verify):
        command.add_argument(
            "--skip-extra", action="store_true", help="leave out keys that the model does not have"
        )
    for command in (to_mcore, to_hf, verify):
        command.add_argument(
            "--memory-gib",
            type=number(LEAST_GIB, MAX_GIB),
            default=4.0,
            help=(
                "GiB for all buffers together; Python and torch take about 0.4 GiB beside it, which the "
                "processes share"
            ),
        )
        command.add_argument("--workers", type=WORKERS, default=min(8, os.cpu_count() or 1), help="processes")
    return options


def run(arguments: list[str]) -> int:
    command_line = parser()
    options = command_line.parse_args(arguments)
    template = getattr(options, "template", None)
    if template is not None and not template.is_dir():
        command_line.error(f"--template {short_repr(str(template))} is no folder; name a Hugging Face folder")
    try:
        return COMMANDS[options.command](options)
    except (ValueError, OSError) as error:
        command_line.error(" ".join(words_of(error).split()))


def dtype_of(name: str) -> "torch.dtype":
    """Return torch's dtype of a name in `DTYPES`."""
    import torch

    return getattr(torch, SHORT.get(name, name))


def _hf_to_mcore(options) -> int:
    from parallel.convert import to_megatron

    to_megatron.convert(
        options.source,
        options.target,
        spec=options.spec,
        budget=_budget(options),
        file_bytes=int(options.file_gib * 2**30),
    )
    print(f"wrote {options.target}")
    return 0


def _mcore_to_hf(options) -> int:
    from parallel.convert import to_hugging_face
    from parallel.convert.to_hugging_face import CheckpointArguments

    source = CheckpointArguments(options.source, options.template, options.skip_extra)
    dtype = dtype_of(options.dtype) if options.dtype else None
    checkpoint = to_hugging_face.convert(
        source, options.target, dtype=dtype, budget=_budget(options), file_bytes=int(options.file_gib * 2**30)
    )
    if checkpoint.training_keys:
        print(
            f"left out {len(checkpoint.training_keys)} keys of training state, such as "
            f"{checkpoint.training_keys[0]}"
        )
    if checkpoint.extra_keys:
        print(
            f"left out {len(checkpoint.extra_keys)} unknown keys: {', '.join(checkpoint.extra_keys[:SHOWN])}"
        )
    print(f"wrote {options.target}")
    return 0


def _inspect(options) -> int:
    from parallel.convert.compare import describe
    from parallel.convert.to_hugging_face import CheckpointArguments

    print(describe(CheckpointArguments(options.source, options.template, skip_extra=True)))
    return 0


def _verify(options) -> int:
    from parallel.convert.compare import differences
    from parallel.convert.to_hugging_face import CheckpointArguments

    source, target = (
        CheckpointArguments(path, options.template, options.skip_extra)
        for path in (options.source, options.target)
    )
    lines = differences(source, target, _budget(options))
    print("\n".join(lines[:SHOWN]) if lines else "every tensor has the same bits")
    if len(lines) > SHOWN:
        print(f"and {len(lines) - SHOWN} more")
    return 1 if lines else 0


def _budget(options) -> "Budget":
    from parallel.convert.workers import Budget

    return Budget.of(int(options.memory_gib * 2**30), options.workers)


COMMANDS = {"hf-to-mcore": _hf_to_mcore, "mcore-to-hf": _mcore_to_hf, "inspect": _inspect, "verify": _verify}

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
