"""Checks of a model section: layout and devices on the ranks, the folder's sizes, and how they split."""

from dataclasses import dataclass, field, replace

from parallel.layout import Layout
from parallel.runtime.refusal import counted, short_repr
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import tp_problems
from verl_megatron.checks.problems import problem_of
from verl_megatron.config import EngineConfig, ModelConfig, RewardConfig, TeacherConfig, TrainerConfig
from verl_megatron.model_specs import layout_of, scoring_worlds

FROZEN = ("reference", "teacher", "reward")


@dataclass
class CheckedModel:
    """A model section's layout and architecture, as far as they are valid, and what is wrong."""

    named: str  # the setting of its layout, with the value
    layout: Layout | None = None
    arch: Architecture | None = None
    problems: list[str] = field(default_factory=list)


def check_model(
    name: str,
    model: ModelConfig | RewardConfig | TeacherConfig,
    engine: EngineConfig,
    *,
    world_size: int,
    is_apart: bool = False,
) -> CheckedModel:
    """Check the section `name`: its layout on `world_size` ranks, and its folder if it has a path.

    Args:
        is_apart: the ranks are those of a world of its own, which its devices name.
    """
    found = CheckedModel(f"{name}.layout={model.layout!r}")
    try:
        found.layout = layout_of(replace(model, devices="") if is_apart else model, world_size)
    except ValueError as error:
        devices = f"{name}.devices={short_repr(model.devices)}, " if model.devices else ""
        found.problems.append(
            f"{name}.layout={short_repr(model.layout)}, {devices}with {counted(world_size, 'rank')}: {error}"
        )
    if model.path:
        try:
            found.arch = read_architecture(model.path)
        except ValueError as error:
            found.problems.append(f"{name}.path={short_repr(model.path)}: {error}")
    found.problems += _layout_problems(found, engine)
    return found


def layout_problems(config: TrainerConfig, name: str, layout: Layout, arch: Architecture) -> list[str]:
    """Return what keeps a model of a plan, an RL run's `name`, from having this layout."""
    found = CheckedModel(f"{name}.layout={str(layout)!r}", layout, arch)
    problems = _layout_problems(found, config.engine)
    return problems + (dtype_problems(config, name, found) if name in FROZEN else [])


def _layout_problems(found: CheckedModel, engine: EngineConfig) -> list[str]:
    """Return what is wrong with a layout and the compute settings, and with its split of the model."""
    layout, arch, problems = found.layout, found.arch, []
    if layout is None:
        return []
    if engine.shared_prompts and layout.cp > 1:
        problems.append(
            f"engine.shared_prompts=true: {found.named} cuts samples over cp ranks, and "
            "only whole ones share their prompt; use a layout without cp, or leave it at false"
        )
    if engine.sharding == "full":
        problems += _full_sharding_problems(found.named, layout)
    if arch is not None:
        problems += [f"{found.named}: {problem}" for problem in _check_split(arch, layout)]
    return problems + (_width_problems("engine.dtype", found) if engine.dtype == "fp8" else [])


def _full_sharding_problems(named: str, layout: Layout) -> list[str]:
    """Return what a layout has that full sharding cannot be combined with."""
    wrong = [
        f"{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "vpp", "cp") if getattr(layout, axis) > 1
    ]
    return [
        f"engine.sharding=full: {named} has {' and '.join(wrong)}, and full sharding divides "
        "weights among dp ranks alone; use tp1, or engine.sharding=replicated"
    ] * bool(wrong)


def scorer_problems(config: TrainerConfig, actor: CheckedModel, world_size: int) -> list[str]:
    """Return the problems of the reward model, the teacher and the reference.

    Args:
        actor: checked already; a reference without ranks of its own has its layout.
    """
    try:
        worlds = scoring_worlds(config)
    except ValueError:
        return []  # reported with the rollout's devices
    sizes = {name: len(world.ranks) for world in worlds for name in world.models}
    problems = []
    for name in ("teacher", "reward"):
        section: TeacherConfig | RewardConfig = getattr(config, name)
        if name in sizes and not section.path:
            problems.append(
                f"{name}.devices={short_repr(section.devices)} names ranks that only score, and {name}.path "
                "is empty; set it, or leave the devices empty"
            )
        elif section.path:
            size = sizes.get(name, world_size)
            found = check_model(name, section, config.engine, world_size=size, is_apart=name in sizes)
            problems += found.problems + dtype_problems(config, name, found)
    reference = actor
    if "reference" in sizes:
        own, size = config.reference, sizes["reference"]
        model = ModelConfig(path=config.actor.path, layout=own.layout, devices=own.devices)
        reference = check_model("reference", model, config.engine, world_size=size, is_apart=True)
        problems += [problem for problem in reference.problems if not problem.startswith("reference.path")]
    return problems + dtype_problems(config, "reference", reference)


def _check_split(arch: Architecture, layout: Layout) -> list[str]:
    """Return what prevents the model from being split by this layout."""
    problems = tp_problems(arch, layout.tp) + problem_of(layout.layers_of, arch.num_layers)
    if len(set(layout.stage_layers[1:-1])) > 1:
        problems.append(
            f"stage_layers={list(layout.stage_layers)}: only the first and the last pipeline stage may "
            "differ from the others; make those between alike"
        )
    return problems


def dtype_problems(config: TrainerConfig, name: str, found: CheckedModel) -> list[str]:
    """Return what keeps the weights of a frozen model from being in fp8, if its dtype asks for it."""
    setting, engine = f"{name}.dtype", config.engine
    if getattr(config, name).dtype != "fp8":
        return []
    problems = [
        f"{setting}=fp8 with engine.{other}={value}: {reason}; {remedy}, or leave {setting} at auto"
        for other, value, reason, remedy in (
            ("transformer_impl", "local", "only transformer-engine's layers compute in fp8", "use auto"),
            ("dtype", "float32", "the model is in bfloat16 but for its layers' weights", "use bfloat16"),
            ("sharding", "full", "only whole weights are rounded to fp8", "use replicated"),
        )
        if getattr(engine, other) == value
    ]
    return problems + (_width_problems(setting, found) if engine.dtype != "fp8" else [])  # else known


def _width_problems(setting: str, found: CheckedModel) -> list[str]:
    """Return what in a model's split keeps it from computing in fp8, as `setting` asks."""
    arch, layout = found.arch, found.layout
    if arch is None or layout is None:
        return []
    widths = {
        "hidden size": arch.hidden_size,
        "heads' channels": arch.num_heads * arch.head_dim // layout.tp,
        "feed-forward channels": arch.intermediate_size // layout.tp,
    }
    wrong = " and ".join(f"{width} {name}" for name, width in widths.items() if width % 16)
    return [
        f"{found.named}: {setting}=fp8 multiplies matrices whose sides are multiples of 16, and a rank has "
        f"{wrong}; use another tp, or bfloat16"
    ] * bool(wrong)
