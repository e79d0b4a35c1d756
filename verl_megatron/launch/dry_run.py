"""What a run would be, without ranks, GPUs and weights: its settings are checked as a run checks them, then its plan is said in words."""

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel.layout import Layout, parse_devices
from parallel.placement import described, place
from parallel.reshard.plan import compile_plan
from parallel.runtime.refusal import shown
from parallel.weights.rules import megatron_parameters, vllm_parameters
from parallel.weights.shapes import SHAPES, shape
from verl_megatron.checks.settings import batch_arithmetic, refuse, structured
from verl_megatron.config import MISSING, SFTConfig, TrainerConfig
from verl_megatron.planner import Case, report, supervised_report
from verl_megatron.preflight import SAMPLE_ROWS, Inputs, inspect_run, inspect_supervised

HOST_RANKS = 8  # of a host, where LOCAL_WORLD_SIZE does not say it
PLANNED_SPEC = "te"  # parameter names and shapes of GPU runs

Settings = dict[str, Any]  # by section, as a recipe and the command line give them


def training_plan(settings: Settings, *, gpu: str = "h200") -> str:
    """Layouts, batch arithmetic, reshard and predicted memory and time of a reinforcement-learning run on the ranks of `world()`.

    A path of actor, critic or reward that is no folder may be the name of a published shape (`parallel.weights.shapes`); with such
    an actor data.train may be left out, and with any it may be empty. Weights, tokenizer and data that are there are checked,
    of each data file the first `SAMPLE_ROWS` rows.

    Raises:
        ValueError: everything that is wrong with the settings, at once, or a GPU that the planner does not know.
    """
    world_size, ranks_per_host = world()
    with _stand_ins(settings) as (complete, rows):
        config = structured(complete, TrainerConfig)
        inputs = Inputs()
        refuse(inspect_run(config, world_size=world_size, rows=rows, inputs=inputs))
        case = Case.of(config, world_size=world_size, ranks_per_host=ranks_per_host)
        lines = [
            _title(world_size, ranks_per_host),
            *_layouts(case, settings),
            batch_arithmetic(config, world_size),
            _reshard(case),
            *inputs.notes,
            report(config, world_size=world_size, gpu=gpu, ranks_per_host=ranks_per_host),
        ]
    return "\n".join(lines)


def supervised_plan(settings: Settings, *, gpu: str = "h200") -> str:
    """Layout, rows, predicted memory and time of a supervised run on the ranks of `world()`; stand-ins and errors as in `training_plan`."""
    world_size, ranks_per_host = world()
    with _stand_ins(settings) as (complete, rows):
        config = structured(complete, SFTConfig)
        inputs = Inputs()
        refuse(inspect_supervised(config, world_size=world_size, rows=rows, inputs=inputs))
        layout = Layout.parse(
            config.actor.layout,
            parse_devices(config.actor.devices, world_size),
            tuple(config.actor.stage_layers),
        )
        planned = supervised_report(config, world_size=world_size, gpu=gpu, ranks_per_host=ranks_per_host)
    rows = config.data.rows_per_step
    share = f"actor {layout}: {rows} rows a step, about {rows / layout.dp:.1f} a data-parallel rank"
    return "\n".join([_title(world_size, ranks_per_host), share, *inputs.notes, planned])


def world() -> tuple[int, int]:
    """Ranks of the run and of each of its hosts, from the variables in which launchers tell each rank.

    Raises:
        ValueError: WORLD_SIZE or LOCAL_WORLD_SIZE is no positive number, or the hosts do not share the ranks evenly.
    """
    sizes = []
    for name, default in (("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", HOST_RANKS)):
        text = os.environ.get(name, "") or str(default)
        if not text.isdecimal() or not int(text):
            raise ValueError(f"{name}={text!r} is no number of ranks; set it to that of the run to plan")
        sizes.append(int(text))
    world_size, ranks_per_host = sizes[0], min(sizes)
    if world_size % ranks_per_host:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={ranks_per_host} must divide WORLD_SIZE={world_size}: "
            "every host starts as many ranks; change one of them"
        )
    return world_size, ranks_per_host


@contextlib.contextmanager
def _stand_ins(settings: Settings) -> Iterator[tuple[Settings, int]]:
    """`settings` with a folder for each published shape that is named as a path, and with a file of prompts where none is needed.

    Also how many rows of its data files there are to check: none where the prompts are a stand-in.
    """
    complete, rows = copy.deepcopy(settings), SAMPLE_ROWS
    with TemporaryDirectory(prefix="dry_run_") as scratch:
        for role in ("actor", "critic", "reward"):
            section = complete.get(role)
            name = section.get("path", "") if isinstance(section, dict) else ""
            if name in ("", MISSING) or not isinstance(name, str) or _is_folder(name):
                continue
            if name not in SHAPES:
                raise ValueError(
                    f"{role}.path={shown(name)} is neither a folder nor a built-in shape; "
                    f"give a folder with a config.json or one of {', '.join(SHAPES)}"
                )
            folder = Path(scratch) / name
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(shape(name)))
            section["path"] = str(folder)
            if role == "actor" and isinstance(data := complete.setdefault("data", {}), dict):
                data.setdefault("train", "")
        data = complete.get("data")
        if isinstance(data, dict) and data.get("train", MISSING) in ("", None):
            prompts, rows = Path(scratch) / "prompts.jsonl", 0
            prompts.touch()
            data["train"] = str(prompts)
        yield complete, rows


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # too long a name
        return False


def _title(world_size: int, ranks_per_host: int) -> str:
    return f"dry run: {world_size} ranks, {ranks_per_host} a host"


def _layouts(case: Case, settings: Settings) -> list[str]:
    """A line for each model, with its path as it was given, and one for vLLM."""
    lines = []
    for role in case.roles:
        own = settings.get(role.name, {}).get(
            "path", ""
        )  # a critic without a folder of its own and the reference are the actor's
        lines.append(
            f"  {role.name:<10}{str(role.layout):<20}on {len(role.layout.ranks)} ranks, "
            f"from {own or settings['actor']['path']}"
        )
    return [*lines, f"  {'rollout':<10}{case.replicas} x tp{case.config.rollout.tp}"]


def _reshard(case: Case) -> str:
    """What moves between the actor and vLLM, in one line; ranks of a host read each other's memory, as they do on GPUs."""
    arch, config = case.actor.arch, case.config
    served_by = Layout.parse(f"tp{config.rollout.tp}", tuple(range(case.world_size)))
    train, rollout = place(arch, case.actor.layout, served_by, ranks_per_host=case.ranks_per_host)
    held = {
        (tp, pp): megatron_parameters(arch, train, train.rank_of(tp=tp, pp=pp), spec=PLANNED_SPEC)
        for tp in range(train.tp)
        for pp in range(train.pp)
    }
    served = [vllm_parameters(arch, rollout.tp, slot) for slot in range(rollout.tp)]
    places = {rank: train.coordinates(rank) for rank in train.ranks}
    plan = compile_plan(
        source={rank: held[at.tp, at.pp] for rank, at in places.items()},
        destination={rank: served[rollout.coordinates(rank).tp] for rank in rollout.ranks},
        element_bytes=case.rollout_element_bytes,
        window_bytes=config.reshard.window_mib << 20,
        host_of=lambda rank: rank // case.ranks_per_host,
        peer_memory=True,
    )
    # Where Megatron's parameters lie is known only when they are there; what a rank receives does not depend on it.
    overlaid = (
        "" if config.reshard.mode == "keep" else ", counted before vLLM's weights are laid over Megatron's"
    )
    return f"reshard.mode={config.reshard.mode}{overlaid}: {plan}; ranks: {described(train, rollout)}"
