"""Command lines: unknown flags, sweeps, open quotes and brackets, interpolations, and harmless forms."""

import random
from functools import partial

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation, Names
from tests.fuzz.job import RECIPES, Job
from tests.fuzz.settings import sound
from tests.worlds import ROOT

FLAGS = ("--dry-run", "--track_metrics", "--verify", "--config-name", "--config-path", "--gpu")
UNKNOWN = ("--foo", "--foo=3", "-x", "--nproc", "--resume", "-vvv", "--Dry-Run", "--no-dry-run", "---gpu")
SWEEPS = (
    "{}=1,2",
    "{}=range(1,3)",
    "{}=choice(1,2)",
    "{}=interval(0,1)",
    "{}=glob(*)",
    "{}=shuffle(1,2)",
    "{}=sort(2,1)",
    "{}=extend_list(1)",
)
UNREADABLE = (
    "{}='abc",
    '{}="abc',
    "{}=[1,2",
    "{}=1]",
    "{}={{a:1",
    "{}={{a}}",
    "{}=(1",
    "{}=a b'c",
    "{}=[1,,2]",
    "{}=cast(1",
    "{}=int()",
    "={}",
    "{}",
    ".{}=1",
    "{}.=1",
    "+{}",
    "~",
    "+=3",
)
# Those that are read as a text: a folder may have such a name.
TEXTS = ("{}=extend_list(1)", "{}=1]", "{}=(1", "{}=a b'c", "{}=cast(1", "{}=int()")
INTERPOLATED = (
    "${oc.env:NO_SUCH_VARIABLE}",
    "${run.nothing}",
    "${nothing.at.all}",
    "${oops:1}",
    "${",
    "${run",
    "${run.output_dir}/${run.output_dir",
    "${oc.decode:[}",
    "${oc.select:}",
)
HYDRA = (
    "--multirun",
    "-m",
    "hydra/launcher=nothing",
    "hydra/sweeper=nothing",
    "--config-dir=/no/such/folder",
    "hydra.nothing=3",
)
TELLING = (
    "--help",
    "--hydra-help",
    "--version",
    "--info",
    "--info=plugins",
    "--cfg=job",
    "--cfg=all",
    "--cfg=nothing",
    "--resolve",
    "--package=nothing",
    "hydra.verbose=maybe",
)
HARMLESS = (
    "+run.seed=3",
    "++run.seed=3",
    "run.seed= 3",
    "run.output_dir='a b'",
    'run.output_dir="ü/é"',
    "run.output_dir=${data.train}.out",
    "run.output_dir=${oc.env:HOME}/out",
    "actor.devices='0-3'",
    "--gpu=h100",
)
NAMES = ("run.seed", "rollout.temperature", "actor.lr", "algorithm.name", "run.output_dir", "data.train")
PATHS = ("{}/nothing", "/no/such/folder", "", "\udcff", "{}/file")


def mutations() -> list[Mutation]:
    found: list[Mutation] = [
        partial(added, argument=flag, names=(flag.partition("=")[0],)) for flag in UNKNOWN
    ]
    found += [partial(misspelt_flag, flag=flag) for flag in FLAGS]
    found += [partial(of_a_setting, form=form, says_name=True) for form in SWEEPS]
    found += [
        partial(of_a_setting, form=form, says_name="cast" not in form and "int" not in form)
        for form in UNREADABLE
    ]
    found += [
        partial(added, argument=f"run.output_dir={text}", names=("run.output_dir",)) for text in INTERPOLATED
    ]
    found += [partial(added, argument=text, names=()) for text in HYDRA]
    found += [partial(added, argument=text, names=(), expected=EITHER) for text in TELLING]
    found += [partial(added, argument=text, names=(), expected=ACCEPTED) for text in HARMLESS]
    found += [partial(other_recipe, path=path) for path in PATHS] + [
        other_name,
        no_recipe,
        no_value,
        surrogate,
        circle,
        removed,
        gpu,
        shuffled,
        shuffled,
        twice,
    ]
    return found


def added(job: Job, rng: random.Random, *, argument: str, names: Names, expected: str = REFUSED) -> Case:
    given = sound("train", rng, 2, without=("run.seed", "run.output_dir"))
    given.insert(rng.randrange(3), argument)
    return Case(name=" ".join(given), expected=expected, names=names, act=job.dry_run(*given))


def misspelt_flag(job: Job, rng: random.Random, *, flag: str) -> Case:
    at = rng.randrange(2, len(flag))
    wrong = flag[:at] + flag[at] + flag[at:]
    return Case(name=wrong, expected=REFUSED, names=(wrong,), act=job.dry_run(wrong))


def of_a_setting(job: Job, rng: random.Random, *, form: str, says_name: bool) -> Case:
    name = rng.choice(NAMES)
    given, is_text = form.format(name), form in TEXTS and name == "run.output_dir"
    return Case(
        name=given,
        expected=EITHER if is_text else REFUSED,
        names=(name,) if says_name and "{}" in form and not is_text else (),
        act=job.dry_run(given),
    )


def other_recipe(job: Job, rng: random.Random, *, path: str) -> Case:
    job.write("file", "no folder")
    path = path.format(job.folder)
    return Case(
        name=f"--config-path {path!r}",
        expected=REFUSED,
        names=(("--config-path", "--config-name", "argument"),),
        act=job.dry_run(recipe=("--config-path", path, "--config-name", RECIPES["train"])),
    )


def other_name(job: Job, rng: random.Random) -> Case:
    name = rng.choice(
        ("nothing", "../nothing", "ppo_toy_cp", "/etc/passwd", "", "ppo_toy_cpu.yml", "launch", "a=b", "ü")
    )
    return Case(
        name=f"--config-name {name!r}",
        expected=REFUSED,
        names=("--config-name",),
        act=job.dry_run(recipe=("--config-path", str(ROOT / "recipes"), f"--config-name={name}")),
    )


def no_recipe(job: Job, rng: random.Random) -> Case:
    """Without a recipe: one rank's layouts of the defaults on four ranks."""
    return Case(name="no --config-name", expected=EITHER, act=job.dry_run(recipe=()))


def no_value(job: Job, rng: random.Random) -> Case:
    flag = rng.choice(("--gpu", "--config-name", "--config-path"))
    return Case(name=f"{flag} at the end", expected=REFUSED, names=(flag,), act=job.dry_run(flag))


def surrogate(job: Job, rng: random.Random) -> Case:
    """Bytes that are no UTF-8, as Python hands them on."""
    name = rng.choice(("run.output_dir", "actor.path", "reward.function", "data.prompt_key", "engine.dtype"))
    expected = EITHER if name == "run.output_dir" else REFUSED
    return Case(
        name=f"{name}=caf\\xe9",
        expected=expected,
        names=(name,) if expected == REFUSED else (),
        act=job.dry_run(f"{name}=caf\udce9"),
    )


def circle(job: Job, rng: random.Random) -> Case:
    given = rng.choice(
        (
            ["run.output_dir=${run.output_dir}"],
            ["run.output_dir=${data.train}", "data.train=${run.output_dir}"],
        )
    )
    return Case(name=" ".join(given), expected=REFUSED, names=("run.output_dir",), act=job.dry_run(*given))


def removed(job: Job, rng: random.Random) -> Case:
    name = rng.choice(("data.train", "actor.path", "run.nothing", "nothing"))
    return Case(name=f"~{name}", expected=REFUSED, names=(name,), act=job.dry_run(f"~{name}"))


def gpu(job: Job, rng: random.Random) -> Case:
    name = rng.choice(("abacus", "", "H2000", "h200,h100", "0", "ü"))
    return Case(name=f"--gpu {name!r}", expected=REFUSED, names=("gpu", name), act=job.dry_run("--gpu", name))


def shuffled(job: Job, rng: random.Random) -> Case:
    """The order of arguments plays no part."""
    given = [*job.settings(), *sound("train", rng, 4), "--gpu=h100", "--track_metrics"]
    rng.shuffle(given)
    return Case(name=" ".join(given[:4]) + " ...", expected=ACCEPTED, act=job.dry_run(settings=given))


def twice(job: Job, rng: random.Random) -> Case:
    return Case(name="a setting twice", expected=ACCEPTED, act=job.dry_run("run.seed=3", "run.seed=4"))
