"""Writes the trained models of a run's checkpoint as Hugging Face folders.

Without --out they are RUN/export/step_N/NAME. It needs no GPU and no ranks, and works while the run goes on.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import read_config
from verl_megatron.commands.convert import DTYPES, NAMED, dtype_of
from verl_megatron.launch.options import Options, whole_number

if TYPE_CHECKING:
    import torch

EXAMPLES = ("outputs/mine", "outputs/mine --step 20 --out exported --dtype bfloat16")
MEMORY_BYTES, FILE_BYTES = 4 << 30, 4 << 30


def run(arguments: list[str]) -> int:
    """Export a checkpoint.

    Raises:
        ValueError: there is no such checkpoint, it cannot be read, or the target is in use.
    """
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument("run", metavar="RUN", type=Path, help="run.output_dir of the run")
    options.add_argument(
        "--step", type=whole_number(0), help="iteration of the checkpoint; without it the newest"
    )
    options.add_argument("--out", type=Path, metavar="DIR", help="where to write; default: RUN/export/step_N")
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar=NAMED,
        help="without it that of the model it started from",
    )
    given = options.parse_args(arguments)
    from parallel.checkpoint.resume import read_manifest
    from parallel.convert import to_hugging_face
    from parallel.convert.to_hugging_face import CheckpointArguments
    from parallel.convert.workers import Budget
    from verl_megatron.manifest import manifest_problem

    path = _checkpoint(given.run, given.step)
    manifest, problem = read_manifest(path, manifest_problem)
    if problem is not None:
        raise ValueError(f"{path} cannot be used: {problem}; name an earlier checkpoint by --step")
    out = given.out or given.run / "export" / path.name
    for name in manifest["roles"]:
        _check_files(path, name, manifest["files"])
        template = _template(name, manifest["settings"])
        dtype = dtype_of(given.dtype) if given.dtype else _stored_dtype(template)
        source = CheckpointArguments(path / name, template, skip_extra=True)
        budget = Budget.of(MEMORY_BYTES, min(8, os.cpu_count() or 1))
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{out} cannot be made ({error.strerror}); name another folder by --out"
            ) from None
        to_hugging_face.convert(source, out / name, dtype=dtype, budget=budget, file_bytes=FILE_BYTES)
        print(f"exported {out / name}")
    return 0


def _checkpoint(run: Path, step: int | None) -> Path:
    from parallel.checkpoint.folders import complete, step_of

    found = {step_of(path): path for path in complete(run / "checkpoint")}
    if not found:
        raise ValueError(
            f"{short_repr(str(run))} has no folder checkpoint with complete checkpoints; name a run's "
            "output folder, of a run with run.save_interval above 0"
        )
    if step is None:
        return found[max(found)]
    if step not in found:
        raise ValueError(f"--step {step}: {run} has the checkpoints {', '.join(map(str, sorted(found)))}")
    return found[step]


def _check_files(path: Path, name: str, files: dict[str, Any]) -> None:
    from parallel.checkpoint.sealed import file_damage

    for file, written in files.items():
        if file.startswith(f"{name}/") and (damage := file_damage(path / file, written)):
            raise ValueError(f"{path} is damaged: {damage}; name another checkpoint by --step")


def _template(name: str, settings: dict[str, dict[str, Any]]) -> Path:
    """Return the folder that the model started from, with its config.json and tokenizer."""
    own = settings.get(name, {}).get("path") or settings["actor"]["path"]
    if not (Path(own) / "config.json").is_file():
        raise ValueError(
            f"the {name} was trained from {own}, which is not there; its config.json and tokenizer are needed"
        )
    return Path(own)


def _stored_dtype(template: Path) -> "torch.dtype | None":
    """Return the dtype that a model's config.json names; None keeps the checkpoint's float32."""
    import torch

    config = read_config(template)
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None
