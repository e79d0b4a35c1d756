"""Validation of checkpoint manifests and their attachments, and the settings that a resumed run has changed.

A digest proves that a file is unmodified; these checks prove that its content is what a run writes.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from parallel.checkpoint import resume
from parallel.checkpoint.folders import CheckpointError
from parallel.checkpoint.sealed import shortened
from parallel.runtime.refusal import short_repr
from verl_megatron.config import PATHS, RENAMED
from verl_megatron.data.batch import RolloutBatch

_MOST = 2**53  # integers up to here are exact as floats
_SHOWN = 20
_ABSENT = "not there"


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def is_number(value: Any) -> bool:
    return is_count(abs(value)) if type(value) is int else type(value) is float


def are_numbers(value: Any) -> bool:
    """Whether `value` is a dictionary of numbers (NaN allowed)."""
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_tables(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(table, dict) for table in value.values())


def _is_validation(value: Any) -> bool:
    return value == {} or (are_numbers(value) and is_count(value.get("step")))


def _is_before(value: Any) -> bool:
    return value == {} or (
        are_numbers(value) and not {"validation/accuracy", "validation/loss"}.isdisjoint(value)
    )


def _is_kl(value: Any) -> bool:
    return value == {} or (
        isinstance(value, dict)
        and value.keys() == {"coef"}
        and _is_finite(value["coef"])
        and value["coef"] >= 0
    )


def _is_cursor(value: Any) -> bool:
    names = {"epoch", "position", "num_prompts", "seed", "shuffle"}
    if not (isinstance(value, dict) and names <= value.keys() <= names | {"mixture", "curriculum", "data"}):
        return False
    if "curriculum" in value and not _is_curriculum(value["curriculum"]):
        return False
    if type(value["seed"]) is not int or not all(
        is_count(value.get(name, 0)) for name in ("mixture", "data")
    ):
        return False
    if abs(value["seed"]) >= 2**64:
        return False
    return (
        all(is_count(value[name]) for name in names - {"seed"}) and value["position"] <= value["num_prompts"]
    )


def _is_curriculum(value: Any) -> bool:
    names = {"weight", "drawn", "groups", "score", "variance", "varied", "credits"}
    if not isinstance(value, dict) or value.keys() != names:
        return False
    if not all(isinstance(column, list) and all(map(_is_finite, column)) for column in value.values()):
        return False
    positive = [number for name in names - {"score", "credits"} for number in value[name]]
    same_length = len({len(column) for column in value.values()}) == 1
    return same_length and all(map(is_count, value["drawn"])) and min(positive, default=-1) >= 0


def _is_scheduler(value: Any) -> bool:
    numbers = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "start_wd", "end_wd", "wd_incr_steps")
    if not isinstance(value, dict) or not is_count(value.get("num_steps")):
        return False
    texts = all(isinstance(value.get(name), str) for name in ("lr_decay_style", "wd_incr_style"))
    return texts and all(_is_finite(value.get(name)) for name in numbers)


def _is_roles(value: Any) -> bool:
    return _are_tables(value) and all(
        is_count(role.get("optimizer_step")) and _is_scheduler(role.get("scheduler"))
        for role in value.values()
    )


_MANIFEST: dict[str, Callable[[Any], bool]] = {
    "layouts": _are_texts,
    "models": _are_tables,
    "versions": _are_texts,
    "settings": _are_tables,
    "validation": _is_validation,
    "before": _is_before,
    "kl": _is_kl,
    "cursor": _is_cursor,
    "roles": _is_roles,
}
_SAMPLES: dict[str, Callable[[Any], bool]] = {
    "made_with": lambda value: isinstance(value, dict),
    "batch": lambda value: _is_batch(value),
    "sums": lambda value: _is_sums(value),
    "reshard_bytes": _is_finite,
    "seconds": are_numbers,
    "cursor": _is_cursor,
}


def manifest_problem(manifest: dict) -> str | None:
    """Return the first invalid entry of a manifest as a clause; None if it is valid."""
    if problem := _problem(manifest, _MANIFEST):
        return f"the manifest {problem}"
    roles, models, layouts = (manifest[name].keys() for name in ("roles", "models", "layouts"))
    if not (roles == models == layouts) or not roles:
        return "the manifest's models are not those of its trained roles"
    missing = [f"{role}/.metadata" for role in roles if f"{role}/.metadata" not in manifest["files"]]
    if missing:
        return f"the manifest does not list {missing[0]}"
    if manifest["validation"].get("step", 0) > manifest["step"]:
        return f"the manifest has a validation of the later step {manifest['validation']['step']}"
    return None


def samples_problem(part: dict) -> str | None:
    """Return the first invalid entry of a rank's saved samples as a clause; None if they are valid."""
    taken = part.get("taken", [])
    if not (isinstance(taken, list) and all(map(is_count, taken))):
        return f"has taken={shortened(taken, 100)}, which no run writes"
    return _problem(part, _SAMPLES)


def recorded_problem(recorded: dict) -> str | None:
    """Return the problem with an iteration's recorded metrics as a clause; None if they are valid."""
    return None if are_numbers(recorded) else "they are not all numbers"


def _problem(content: dict, checks: Mapping[str, Callable[[Any], bool]]) -> str | None:
    for name, is_valid in checks.items():
        if name not in content:
            return f"has no {name}"
        if not is_valid(content[name]):
            return f"has {name}={shortened(content[name], 100)}, which no run writes"
    return None


def _is_batch(value: Any) -> bool:
    dtypes = dict.fromkeys(
        ("sample_id", "group_id", "policy_version", "input_ids", "generated_ids"), torch.int64
    )
    dtypes |= dict.fromkeys(("attention_mask", "response_mask"), torch.bool)
    required = dtypes.keys()
    dtypes = dtypes | {"is_cut": torch.bool, "source_id": torch.int64, "token_versions": torch.int64}
    known = RolloutBatch.__dataclass_fields__.keys()
    if not isinstance(value, dict) or not required <= value.keys() <= known:
        return False
    if not all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        return False
    samples, whole = value["sample_id"].shape, value["generated_ids"].shape
    if len(samples) != 1 or len(whole) != 2 or value["input_ids"].dim() != 2:
        return False
    per_sample = ("sample_id", "group_id", "source_id", "policy_version", "temperature", "rewards", "is_cut")
    per_sample += ("baselines",)
    shapes = {name: samples if name in per_sample else whole for name in value}
    shapes["input_ids"] = (*samples, value["input_ids"].size(1))
    return all(
        t.dtype == dtypes.get(name, torch.float32) and t.shape == shapes[name] for name, t in value.items()
    )


def _is_sums(value: Any) -> bool:
    if (
        not isinstance(value, dict)
        or value.keys() != {"totals", "maxima"}
        or not isinstance(value["totals"], dict)
    ):
        return False
    return are_numbers(value["maxima"]) and all(map(_is_pair, value["totals"].values()))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))


def refuse_other_run(path: Path, manifest: dict, *, kind: str, models: dict[str, dict]) -> None:
    """Compare what a checkpoint is of with what is to resume from it.

    Args:
        kind: name of the settings' class.
        models: architectures of the trained roles.

    Raises:
        CheckpointError: it is of another kind of run, or of other models.
    """
    if (saved := manifest.get("kind", kind)) != kind:
        raise CheckpointError(
            f"{path} is of another kind of run: its settings are a {short_repr(saved)}, here a {kind}; "
            "choose another run.output_dir, or set run.resume=never"
        )
    resume.refuse_other_models(path, manifest, models)


# ---- settings --------------------------------------------------------------------------------------------


def changed_settings(saved: dict[str, dict], present: dict[str, dict]) -> list[str]:
    """Return `section.name: old -> new` for every changed setting; two spellings of one path are equal.

    Args:
        saved: by section and name, as in a manifest.
        present: those of this run, in the same form.
    """
    old, new = settings_by_name(saved), settings_by_name(json.loads(json.dumps(present)))
    both = {name: (old.get(name, _ABSENT), new.get(name, _ABSENT)) for name in sorted(old | new)}
    changed = [name for name, values in both.items() if not _is_same(name, *values)]
    lines = [f"{name}: {_shown(old, name)} -> {_shown(new, name)}" for name in changed[:_SHOWN]]
    return lines + ([f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else [])


def with_present_names(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the saved settings of a section with those that were renamed since under their present names."""
    prefix = f"{section}."
    return {
        RENAMED.get(prefix + name, prefix + name).removeprefix(prefix): value
        for name, value in values.items()
    }


def settings_by_name(settings: dict[str, dict]) -> dict[str, Any]:
    """Return the settings by section.name, those that were renamed since under their present names."""
    named = {}
    for section, values in settings.items():
        for name, value in with_present_names(section, values).items():
            named[f"{section}.{name}"] = value
    return named


def _is_same(name: str, old: Any, new: Any) -> bool:
    if name in PATHS and isinstance(old, str) and isinstance(new, str) and old and new:
        return Path(old).absolute() == Path(new).absolute() or Path(old).resolve() == Path(new).resolve()
    return old == new


def _shown(settings: dict[str, Any], name: str) -> str:
    return shortened(json.dumps(settings[name]), 60) if name in settings else _ABSENT
