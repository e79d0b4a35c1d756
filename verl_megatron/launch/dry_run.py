"""Dry run without ranks, GPUs or weights: check the settings as a run does, then print its plan."""

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel.layout import Layout
from parallel.placement import described, place
from parallel.reshard.plan import Plan, compile_plan
from parallel.runtime.refusal import counted, short_repr
from parallel.weights.remote.models import is_remote, local_folder, shown
from parallel.weights.row_shards import row_shards
from parallel.weights.rules import megatron_shards, vllm_shards
from parallel.weights.shapes import SHAPES, shape
from verl_megatron.checks.batches import batch_arithmetic, supervised_arithmetic
from verl_megatron.checks.limits import check_types
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.problems import refuse
from verl_megatron.config import MISSING, AlgorithmConfig, SupervisedConfig, TrainerConfig
from verl_megatron.config.section import sections_of
from verl_megatron.launch.hosts import Part, place_worlds
from verl_megatron.model_specs import (
    has_critic,
    has_worlds,
    is_separate,
    models_of,
    num_ranks,
    num_training_ranks,
    rollout_worlds,
)
from verl_megatron.planner.machine import GIB, Machine, find_machine
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.supervised import supervised_report
from verl_megatron.planner.text import report
from verl_megatron.preflight import SAMPLE_ROWS, Inputs, inspect_run, inspect_supervised
from verl_megatron.rewards.plan import described as described_reward

HOST_RANKS = 8  # ranks per host, if LOCAL_WORLD_SIZE is not set
PLANNED_SPEC = "te"  # parameter names and shapes of GPU runs

Settings = dict[str, Any]  # by section, from the recipe and the command line


def training_plan(settings: Settings, *, gpu: str = "h200") -> str:
    """Plan an RL run on the ranks of `world()`: worlds, layouts, batches, weight sync, memory and time.

    The path of a model may be the name of a built-in shape (`parallel.weights.shapes`). With such an actor,
    data.train may be omitted; with any actor it may be empty. Weights, tokenizer and data are checked if they
    exist, with the first `SAMPLE_ROWS` samples of each data file.

    Raises:
        ValueError: lists all problems of the settings; or the planner does not know the GPU.
    """
    with _stand_ins(settings, TrainerConfig) as given:
        config = structured(given.settings, TrainerConfig)
        inputs = Inputs()
        refuse(check_types(config))  # before the devices are read
        placed, (world_size, ranks_per_host) = [], world(config)
        if has_worlds(config):
            placed = place_worlds(config, world_size=world_size, ranks_per_host=ranks_per_host)
            world_size = num_training_ranks(config)
        problems = inspect_run(config, world_size=world_size, rows=given.rows, inputs=inputs)
        refuse(given.with_models(problems))
        run = PlannedRun.of(config, world_size=world_size, ranks_per_host=ranks_per_host)
        lines = [
            _title(run.gpus, ranks_per_host),
            *_worlds(run, placed, find_machine(gpu)),
            *_layouts(run, settings),
            batch_arithmetic(config, world_size),
            *filter(None, [described_reward(config.reward.function)]),
            *_reshard(run),
            *inputs.notes,
            report(config, world_size=world_size, gpu=gpu, ranks_per_host=ranks_per_host),
        ]
    return "\n".join(lines)


def supervised_plan(settings: Settings, schema: type[SupervisedConfig], *, gpu: str = "h200") -> str:
    """Plan a supervised run on the ranks of `world()`: layout, samples, memory and time.

    Built-in shapes and errors are as in `training_plan`.

    Args:
        schema: class of the run's settings.
    """
    world_size, ranks_per_host = world()
    with _stand_ins(settings, schema) as given:
        config = structured(given.settings, schema)
        inputs = Inputs()
        problems = inspect_supervised(config, world_size=world_size, rows=given.rows, inputs=inputs)
        refuse(given.with_models(problems))
        planned = supervised_report(config, world_size=world_size, gpu=gpu, ranks_per_host=ranks_per_host)
    share = supervised_arithmetic(config, world_size)
    reference = ["reference: the initial weights of the actor, frozen"] * (len(models_of(config)) > 1)
    title = _title(world_size, ranks_per_host)
    return "\n".join([title, share, *reference, *inputs.notes, planned])


def world(config: TrainerConfig | SupervisedConfig | None = None) -> tuple[int, int]:
    """Return the number of ranks, and of those of a host, from the launcher's environment variables.

    Args:
        config: of a run; if it has several worlds, their ranks are the default.

    Raises:
        ValueError: WORLD_SIZE or LOCAL_WORLD_SIZE is no positive number, or the hosts have unequal numbers of
            ranks.
    """
    sizes, usual = [], 1
    if isinstance(config, TrainerConfig) and has_worlds(config):
        usual = num_ranks(config)
    for name, default in (("WORLD_SIZE", usual), ("LOCAL_WORLD_SIZE", HOST_RANKS)):
        text = os.environ.get(name, "") or str(default)
        if not text.isdecimal() or not int(text):
            raise ValueError(f"{name}={text!r} is no number of ranks; set it to that of the run to plan")
        sizes.append(int(text))
    world_size, ranks_per_host = sizes[0], sizes[1] if os.environ.get("LOCAL_WORLD_SIZE") else min(sizes)
    if world_size % ranks_per_host:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={ranks_per_host} must divide WORLD_SIZE={world_size}: "
            "every host starts as many ranks; change one of them"
        )
    return world_size, ranks_per_host


@dataclass(kw_only=True, slots=True)
class _Given:
    """Settings that can be planned: built-in shapes are folders, and absent data is an empty file."""

    settings: Settings
    rows: int = SAMPLE_ROWS  # to check of each data file; 0 if the data are a stand-in
    models: dict[str, str] = field(default_factory=dict)  # why a section's model cannot be had

    def with_models(self, problems: list[str]) -> list[str]:
        """Return all problems, where those of `models` replace what was found about these paths."""
        known = tuple(f"{section}.path=" for section in self.models)
        return [*self.models.values(), *(each for each in problems if not each.startswith(known))]


@contextlib.contextmanager
def _stand_ins(settings: Settings, schema: type[TrainerConfig | SupervisedConfig]) -> Iterator[_Given]:
    """Replace built-in shapes by temporary model folders, and absent data by an empty file.

    With a built-in shape for the model that learns, data.train may be omitted.
    """
    given = _Given(settings=copy.deepcopy(settings))
    complete, trained = given.settings, models_of(schema())[0].section
    models = [name for name, section in sections_of(schema()).items() if hasattr(section, "path")]
    algorithm = complete.get("algorithm")
    if isinstance(algorithm, dict) and not has_critic(str(algorithm.get("name", AlgorithmConfig().name))):
        models = [name for name in models if name != "critic"]
    with TemporaryDirectory(prefix="dry_run_") as scratch:
        for role in models:
            section = complete.get(role)
            name = section.get("path", "") if isinstance(section, dict) else ""
            if name in ("", MISSING) or not isinstance(name, str) or _is_folder(name):
                continue
            if name in SHAPES:
                folder = Path(scratch) / name
                folder.mkdir(exist_ok=True)
                (folder / "config.json").write_text(json.dumps(shape(name)))
                complete[role]["path"] = str(folder)
            else:
                complete[role]["path"] = _fetched(role, name, given.models)
            is_planned = role == trained and (name in SHAPES or role in given.models)
            if is_planned and isinstance(data := complete.setdefault("data", {}), dict):
                data.setdefault("train", "")
        data = complete.get("data")
        if isinstance(data, dict) and data.get("train", MISSING) == "":
            prompts, given.rows = Path(scratch) / "prompts.jsonl", 0
            prompts.touch()
            data["train"] = str(prompts)
        yield given


def _fetched(role: str, name: str, problems: dict[str, str]) -> str:
    """Return the folder of a hub name or a URL, or add the problem of `role` and return the name."""
    given = f"{role}.path={short_repr(shown(name))}"
    if is_remote(name):
        try:
            return local_folder(name, weights=False)
        except ValueError as error:
            problems[role] = f"{given}: {error}"
    else:
        problems[role] = (
            f"{given} is neither a folder nor a built-in shape; give a folder with a config.json, a hub "
            f"name, a URL, or one of {', '.join(SHAPES)}"
        )
    return name


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # the name is too long
        return False


def _worlds(run: PlannedRun, placed: list[Part], machine: Machine) -> list[str]:
    """Describe each world of a separate run, a line each: ranks, where they are, models and memory."""
    kinds, lines = plan_memory(run, machine).kinds if placed else (), []
    models = ", ".join(f"{role.name} {role.layout}" for role in run.roles)
    scored = {}
    for planned in run.scoring:
        scored[planned.world.name] = ", ".join(f"{role.name} {role.layout}" for role in planned.roles)
    for part in (part for part in placed if part.host == part.hosts[0]):
        first = part.host * run.ranks_per_host + part.local.start
        ranks = range(first, first + len(part.hosts) * len(part.local))
        host = f"host {part.host}" if part.is_alone else f"hosts {part.host}-{part.hosts[-1]}"
        fullest = max(
            (kind for kind in kinds if kind.ranks[0] in ranks or ranks[0] in kind.ranks),
            key=lambda kind: kind.total(kind.fullest),
        )
        tp = run.config.rollout.tp
        scorers = scored.get(part.name, "")
        lines.append(
            f"  {part.name:<10}ranks {_span(ranks)}, {host}, GPUs {_span(part.local)}: "
            f"{models if part.trains else scorers or f'vLLM {len(ranks) // tp} x tp{tp}'}; "
            f"{fullest.total(fullest.fullest) / GIB:.1f} of {machine.gpu_bytes / GIB:.1f} GiB on each GPU "
            f"({fullest.fullest})"
        )
    return lines


def _span(numbers: range) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _title(world_size: int, ranks_per_host: int) -> str:
    where = f", {ranks_per_host} a host" if world_size > ranks_per_host else " on one host"
    return f"dry run: {counted(world_size, 'rank')}{where}"


def _layouts(run: PlannedRun, settings: Settings) -> list[str]:
    """Describe each model with its path as given, and vLLM, a line each."""
    lines = []
    for role in run.roles:
        # the reference, and a critic without a folder, use the actor's
        own = settings.get(role.name, {}).get("path", "")
        heads = ", with the critic's value head" if role.head == "lm_token" else ""
        lines.append(
            f"  {role.name:<10}{str(role.layout):<20}on {counted(len(role.layout.ranks), 'rank')}, "
            f"from {shown(own or settings['actor']['path'])}{heads}"
        )
    return [*lines, f"  {'rollout':<10}{run.replicas} x tp{run.config.rollout.tp}"]


def _reshard(run: PlannedRun) -> list[str]:
    """Describe the weight sync in one line, or that into each kind of rollout world."""
    if is_separate(run.config):
        sizes = dict.fromkeys(len(each.ranks) for each in rollout_worlds(run.config))
        return [
            f"weights of a version into a rollout world of {size} ranks: {_plan_over_bridge(run, size)}"
            for size in sizes
        ]
    arch, config = run.actor.arch, run.config
    served_by = Layout.parse(f"tp{config.rollout.tp}", tuple(range(run.world_size)))
    train, rollout = place(arch, run.actor.layout, served_by, ranks_per_host=run.ranks_per_host)
    plan = _plan(run, train, rollout, peer_memory=run.reads_peer_memory)  # of ranks of a host, as on GPUs
    # Addresses of Megatron's parameters are known only at run time; the bytes received do not depend on them.
    in_place = config.reshard.mode != "keep"
    remark = ", counted before vLLM's weights alias Megatron's" if in_place else ""
    return [f"reshard.mode={config.reshard.mode}{remark}: {plan}; ranks: {described(train, rollout)}"]


def _plan_over_bridge(run: PlannedRun, size: int) -> Plan:
    serving = tuple(range(run.world_size, run.world_size + size))
    return _plan(
        run, run.actor.layout, Layout.parse(f"tp{run.config.rollout.tp}", serving), peer_memory=False
    )


def _plan(run: PlannedRun, train: Layout, rollout: Layout, *, peer_memory: bool) -> Plan:
    source = megatron_shards(run.actor.arch, train, spec=PLANNED_SPEC)
    return compile_plan(
        source=row_shards(source, train) if run.is_fully_sharded else source,
        destination=vllm_shards(run.actor.arch, rollout),
        element_bytes=run.rollout_element_bytes,
        window_bytes=run.config.reshard.window_mib << 20,
        host_of=lambda rank: rank // run.ranks_per_host,
        peer_memory=peer_memory,
    )
