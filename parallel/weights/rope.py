"""Rotary positions: the scalings that models use, read from and written to a config.json."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from parallel.runtime.refusal import short_repr
from parallel.weights.config_keys import FIXED, LARGEST, typed
from parallel.weights.json_files import shown_key


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """Linear scaling: positions divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's scaling of the low frequencies."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071); a field that is None is computed from `factor` as in transformers."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling = LinearRope | Llama3Rope | YarnRope
ROPE_TYPES = {rope.rope_type: rope for rope in (LinearRope, Llama3Rope, YarnRope)}
DEFAULT_ROPE_THETA = 10_000.0


def read_rope(config: Mapping[str, Any], max_positions: int, problems: list[str]) -> dict[str, Any]:
    """Read `rope_theta` and `rope_scaling` from transformers 5's `rope_parameters` or the older two keys."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            problems.append(f"{name}={short_repr(value)} must be an object or null")
            return {}
    where = "rope_scaling" if old else "rope_parameters"
    given = dict(old or new or {})
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
        if key in given and given[key] is None:
            problems.append(f"{where}.{key} is null, which transformers cannot read; remove it")
            return {}
    if old and new and old != new:
        problems.append(
            f"rope_scaling={short_repr(old)} and rope_parameters={short_repr(new)} contradict each other; "
            "keep one of them"
        )
    rope_type = _pop_type(given, where, problems)
    theta = _pop_theta(given, config.get("rope_theta"), where, problems)
    partial = given.pop("partial_rotary_factor", 1.0)
    if partial != 1.0 or isinstance(partial, bool):
        problems.append(
            f"{where}.partial_rotary_factor={short_repr(partial)} is not supported (only 1.0):"
            f" {FIXED['partial_rotary_factor'][1]}"
        )
    if rope_type == "default":
        problems += [
            f"{where}.{shown_key(key)}={short_repr(value)} is not understood with rope type 'default'; "
            "remove it if it has no effect"
            for key, value in given.items()
            if value is not None
        ]
        return {"rope_theta": theta, "rope_scaling": None}
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        problems.append(
            f"{where} has rope type {short_repr(rope_type)}, which is not supported; supported are default,"
            f" {', '.join(ROPE_TYPES)}"
        )
        return {}
    scaling = _read_scaling(ROPE_TYPES[rope_type], given, where, max_positions, problems)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _pop_type(given: dict[str, Any], where: str, problems: list[str]) -> Any:
    types = [given.pop(name) for name in ("rope_type", "type") if name in given]
    if types[1:] and types[0] != types[1]:
        problems.append(
            f"{where}.rope_type={short_repr(types[0])} and {where}.type={short_repr(types[1])} contradict "
            "each other; keep one of them"
        )
    return types[0] if types else "default"


def _pop_theta(given: dict[str, Any], outer: Any, where: str, problems: list[str]) -> float | None:
    """Return the base of the frequencies: from `given`, else `outer`, the key beside it, else the default."""
    inner = given.pop("rope_theta", None)
    if inner is not None and outer is not None and inner != outer:
        problems.append(
            f"{where}.rope_theta={short_repr(inner)} and rope_theta={short_repr(outer)} contradict each "
            "other; keep one of them"
        )
    key, value = ("rope_theta", outer) if inner is None else (f"{where}.rope_theta", inner)
    theta = typed(key, DEFAULT_ROPE_THETA if value is None else value, float, problems)
    if theta is not None and theta <= 1:
        problems.append(f"{key}={short_repr(theta)} must be above 1: positions turn by its powers")
    return theta


def _read_scaling(
    rope: type, given: dict[str, Any], where: str, max_positions: int, problems: list[str]
) -> RopeScaling | None:
    known = {field.name: field for field in fields(rope)}
    problems += [
        f"{where}.{shown_key(key)}={short_repr(value)} is not understood with rope type {rope.rope_type!r}"
        for key, value in given.items()
        if key not in known and value is not None
    ]
    if "original_max_position_embeddings" in known:
        given.setdefault("original_max_position_embeddings", max_positions)  # as in transformers
    num_problems = len(problems)
    values = {}
    for name, field in known.items():
        kind = {"original_max_position_embeddings": int, "truncate": bool}.get(name, float)
        value = given.get(name, field.default)
        values[name] = typed(f"{where}.{name}", value, kind, problems, may_be_null=field.default is None)
    if len(problems) == num_problems:
        problems += _odd_scaling(values, where)
    return rope(**values) if len(problems) == num_problems else None


def _odd_scaling(values: Mapping[str, Any], where: str) -> list[str]:
    """Return problems: numbers of valid types that are out of range or inconsistent with each other."""
    problems = [
        f"{where}.{name}={short_repr(value)} must lie between 0.001 and 1,000,000"
        for name, value in values.items()
        if isinstance(value, float) and not 1e-3 <= value <= 1e6
    ]
    if values["factor"] < 1:
        problems.append(
            f"{where}.factor={values['factor']} must be at least 1: scaling makes sequences longer"
        )
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in values and values[low] >= values[high]:
            problems.append(f"{where}.{low}={values[low]} must be below {where}.{high}={values[high]}")
    original = values.get("original_max_position_embeddings", 1)
    if (table := original * values["factor"]) > (most := LARGEST["max_position_embeddings"]):
        problems.append(f"{where} reaches {table:g} positions, more than any model's (at most {most:g})")
    return problems


def write_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return `rope_scaling` with only the fields that differ from the defaults; older readers lack some."""
    if scaling is None:
        return None
    defaults = {field.name: field.default for field in fields(scaling)}
    return {"rope_type": scaling.rope_type} | {
        name: value for name, value in asdict(scaling).items() if value != defaults[name]
    }
