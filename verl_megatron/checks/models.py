"""Checks of a model section: layout and devices on the ranks, the folder's sizes, and how they split."""

from dataclasses import dataclass, field, replace

from parallel.layout import Layout
from parallel.runtime.refusal import counted, short_repr
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import tp_problems
from verl_megatron.checks.problems import problem_of
from verl_megatron.config import EngineConfig, ModelConfig, RewardConfig, TeacherConfig, TrainerConfig
from verl_megatron.model_specs import layout_of, scoring_worlds


@dataclass
class CheckedModel:
    """A model section's layout and architecture, as far as they are valid, and what is wrong."""

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
    found = CheckedModel()
    try:
        found.layout = layout_of(replace(model, devices="") if is_apart else model, world_size)
    except ValueError as error:
        devices = f"{name}.devices={short_repr(model.devices)}, " if model.devices else ""
        found.problems.append(
            f"{name}.layout={short_repr(model.layout)}, {devices}"
            f"{counted(world_size, 'rank')} started: {error}"
        )
    if engine.shared_prompts and found.layout is not None and found.layout.cp > 1:
        found.problems.append(
            f"engine.shared_prompts=true: {name}.layout={model.layout!r} cuts samples over cp ranks, and "
            "only whole ones share their prompt; use a layout without cp, or leave it at false"
        )
    if engine.sharding == "full" and found.layout is not None:
        found.problems += _full_sharding_problems(name, model.layout, found.layout)
    if model.path:
        try:
            found.arch = read_architecture(model.path)
        except ValueError as error:
            found.problems.append(f"{name}.path={short_repr(model.path)}: {error}")
    if found.layout is not None and found.arch is not None:
        found.problems += [
            f"{name}.layout={model.layout!r}: {problem}"
            for problem in _check_split(found.arch, found.layout, engine.dtype)
        ]
    return found


def _full_sharding_problems(name: str, text: str, layout: Layout) -> list[str]:
    """Return what a layout has that full sharding cannot be combined with."""
    wrong = [
        f"{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "vpp", "cp") if getattr(layout, axis) > 1
    ]
    return [
        f"engine.sharding=full: {name}.layout={text!r} has {' and '.join(wrong)}, and full sharding divides "
        "weights among dp ranks alone; use tp1, or engine.sharding=replicated"
    ] * bool(wrong)


def scorer_problems(config: TrainerConfig, world_size: int) -> list[str]:
    """Return the problems of the reward model and the teacher, and of frozen models that have a world."""
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
            problems += check_model(
                name, section, config.engine, world_size=size, is_apart=name in sizes
            ).problems
    if "reference" in sizes:
        own, size = config.reference, sizes["reference"]
        model = ModelConfig(path=config.actor.path, layout=own.layout, devices=own.devices)
        found = check_model("reference", model, config.engine, world_size=size, is_apart=True)
        problems += [problem for problem in found.problems if not problem.startswith("reference.path")]
    return problems


def _check_split(arch: Architecture, layout: Layout, dtype: str) -> list[str]:
    """Return what prevents the model from being split by this layout."""
    problems = tp_problems(arch, layout.tp) + problem_of(layout.layers_of, arch.num_layers)
    if len(set(layout.stage_layers[1:-1])) > 1:
        problems.append(
            f"stage_layers={list(layout.stage_layers)}: only the first and the last pipeline stage may "
            "differ from the others; make those between alike"
        )
    if dtype == "fp8":
        widths = {
            "hidden size": arch.hidden_size,
            "heads' channels": arch.num_heads * arch.head_dim // layout.tp,
            "feed-forward channels": arch.intermediate_size // layout.tp,
        }
        wrong = " and ".join(f"{width} {name}" for name, width in widths.items() if width % 16)
        problems += [
            f"engine.dtype=fp8 multiplies matrices whose sides are multiples of 16, and a rank has {wrong}; "
            "use another tp, or bfloat16"
        ] * bool(wrong)
    return problems
