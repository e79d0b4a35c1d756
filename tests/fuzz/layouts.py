"""Layouts, devices, stages and worlds; which of them fit the toy model is worked out here anew."""

import random
from functools import partial

from tests.fuzz.case import ACCEPTED, REFUSED, Case, Mutation
from tests.fuzz.job import Job

HEADS, KV_HEADS, FEED_FORWARD, LAYERS, SAMPLES = (
    6,
    2,
    640,
    4,
    48,
)  # the toy model, and the samples of a mini-batch
LAYOUTS = (
    *(
        "",
        "tp",
        "tp0",
        "tp-1",
        "tp1.5",
        "2",
        "tp2tp2",
        "pp2pp1",
        "tp3",
        "tp5",
        "tp8",
        "pp3",
        "pp8",
        "tp2pp4",
        "dp3",
        "dp8",
        "cp3",
        "sp2",
        "vpp2",
        "pp2vpp3",
        "pp2vpp0",
    ),
    *(
        "ep2",
        "tp2xpp2",
        "tp2,pp2",
        "[tp2]",
        "tp\u00b2",
        "pp99",
        "tp" + "9" * 30,
        "tp" + "0" * 20 + "3",
        "x" * 300,
        "tp2pp2dp2",
        "None",
        "-tp2",
        "tp2-",
        "sptp2sp",
        "tpsp2",
        "tp 2",
        "p p2",
    ),
)
DEVICES = (
    *(
        "0-",
        "-3",
        "3-0",
        "0,0",
        "0-9",
        "4",
        "cuda:",
        "cuda:9",
        "cpu",
        "gpu:0-3",
        "0;1",
        "a-b",
        "0-3-5",
        "1,0",
        "0..3",
        "all",
        ",",
        "0,",
        "-1",
        "0-1,1-2",
        "0 1",
        "0-1 3",
    ),
    *("0-99999999999", "0-" + "9" * 30, "\u00b2", "0-2", "cuda:0-2", "9" * 300),
)
STAGES = (
    "[1]",
    "[2,1]",
    "[0,4]",
    "[-1,5]",
    "[5,-1]",
    "[4,4]",
    "[1,1,1,1]",
    "[2,2,0]",
    "[1000000000000,2]",
    "[4]",
    "[3,3]",
)
WORLDS = (
    "0",
    "-1",
    "abc",
    "1e1",
    "4.0",
    " ",
    "0x4",
    "3",
    "5",
    "7",
    "4,4",
    "+4",
    "9" * 12,
    "9" * 30,
    "9" * 5000,
    "None",
    "[4]",
)
ROLES = ("actor", "critic")


def mutations() -> list[Mutation]:
    found: list[Mutation] = [
        partial(bad, role=role, setting="layout", value=layout) for role in ROLES for layout in LAYOUTS
    ]
    found += [
        partial(bad, role=role, setting="devices", value=devices) for role in ROLES for devices in DEVICES
    ]
    found += [partial(bad_stages, role=role, stages=stages) for role in ROLES for stages in STAGES]
    found += [partial(shared_over_cp, role=role) for role in ROLES]
    found += [
        partial(bad_world, name=name, value=value)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for value in WORLDS
    ]
    return found + [drawn] * 60 + [replicas] * 8


def bad(job: Job, rng: random.Random, *, role: str, setting: str, value: str) -> Case:
    given = f"{role}.{setting}='{value}'" if value else f"{role}.{setting}="
    if setting == "layout" and not value:  # every size is 1: a model on all ranks
        return Case(name=given, expected=REFUSED, names=(role,), act=job.dry_run(given))
    return Case(name=given[:80], expected=REFUSED, names=(f"{role}.{setting}",), act=job.dry_run(given))


def bad_stages(job: Job, rng: random.Random, *, role: str, stages: str) -> Case:
    given = (f"{role}.layout=pp2", f"{role}.stage_layers={stages}")
    return Case(
        name=" ".join(given),
        expected=REFUSED,
        names=(role, ("stage_layers", "stages")),
        act=job.dry_run(*given),
    )


def shared_over_cp(job: Job, rng: random.Random, *, role: str) -> Case:
    given = (f"{role}.layout=cp2", "engine.shared_prompts=true", "data.samples_per_prompt=2")
    return Case(
        name=" ".join(given),
        expected=REFUSED,
        names=("engine.shared_prompts", f"{role}.layout"),
        act=job.dry_run(*given),
    )


def bad_world(job: Job, rng: random.Random, *, name: str, value: str) -> Case:
    return Case(
        name=f"{name}={value[:40]}",
        expected=REFUSED,
        names=((name, "ranks"),),
        act=job.dry_run(env={name: value}),
    )


def drawn(job: Job, rng: random.Random) -> Case:
    """A layout of small sizes on as many ranks as it needs, or one too many."""
    tp, pp, dp, vpp, excess = (
        rng.choice((1, 2, 3, 4, 6)),
        rng.choice((1, 2, 3, 4)),
        rng.choice((1, 2, 4)),
        rng.choice((1, 1, 2)),
        rng.random() < 0.2,
    )
    world = tp * pp * dp + excess
    fits = (
        HEADS % tp == 0
        and (KV_HEADS % tp == 0 or tp % KV_HEADS == 0)
        and FEED_FORWARD % tp == 0
        and LAYERS % pp == 0
    )
    fits = (
        fits
        and (vpp == 1 or (pp > 1 and LAYERS % (pp * vpp) == 0))
        and dp <= SAMPLES
        and not (excess and world % (tp * pp))
    )
    layout = f"tp{tp}pp{pp}" + (f"vpp{vpp}" if vpp > 1 else "") + rng.choice(("", "sp"))
    given = (f"actor.layout={layout}", f"critic.layout={layout}", "rollout.tp=1")
    env = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return Case(
        name=f"{layout} on {world} ranks",
        expected=ACCEPTED if fits else REFUSED,
        names=() if fits else ("actor.layout", layout),
        act=job.dry_run(*given, env=env),
    )


def replicas(job: Job, rng: random.Random) -> Case:
    tp = rng.randrange(3, 20)
    expected = ACCEPTED if 4 % tp == 0 and HEADS % tp == 0 else REFUSED
    return Case(
        name=f"rollout.tp={tp}", expected=expected, names=("rollout.tp",), act=job.dry_run(f"rollout.tp={tp}")
    )
