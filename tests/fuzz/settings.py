"""Settings of both schemas, by reflection: wrong types, ranges, absurd values, names that do not exist."""

import math
import random
from dataclasses import fields
from functools import partial
from typing import Any, get_type_hints

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.job import Job
from verl_megatron.checks.limits import inside
from verl_megatron.config import RENAMED, SCHEMAS
from verl_megatron.config.section import attribute_of, shown
from verl_megatron.config.trl_names import TRL
from verl_megatron.config.verl_names import VERL

# Values as a command line gives them, by what is wrong with them.
OF_ANOTHER_TYPE = {
    int: ("abc", "1.5", "true", "[1]", "{a:1}", "null", "''", "1e3", "²", "0x10", "nan"),
    float: ("abc", "true", "[0.1]", "{a:1}", "null", "''", "1,5e", "½", "1/3"),
    bool: ("maybe", "[true]", "{a:true}", "null", "2.5", "''", "trüe"),
    str: ("[a,b]", "{a:b}", "null"),
    list[str]: ("{a:b}", "[[a]]", "null", "[{a:b}]", "7"),
    list[int]: ("{a:1}", "[[1]]", "null", "[a]", "[1.5]", "[null]", "7"),
    list[float]: ("{a:1}", "[[1]]", "null", "[a,b]", "[null,0.9]", "0.5"),
}
ABSURD = ("inf", "-inf", "nan", "1e300", "-1e300")
LARGE = ("-1000000000", "1" + 30 * "0", "-1" + 30 * "0")  # of floats, only outside their interval
LONG = "x" * 60_000
# Values that any run may have, beside the recipe's; drawn by `sound`.
SOUND = {
    "run.seed": (0, 7, 2**31 - 1),
    "run.iterations": (1, 2, 1_000_000),
    "run.keep_last_k": (0, 1, 9),
    "run.async_save": ("true", "false"),
    "run.resume": ("newest", "never", "verify"),
    "run.stall_timeout_s": (0, 30.5, 3600),
    "run.export": ("true", "false"),
    "run.track_metrics": ("[console]", "[]", "[jsonl,csv]"),
    "data.overlong": ("error", "drop"),
    "data.shuffle": ("true", "false"),
    "engine.dtype": ("auto", "float32", "bfloat16"),
    "engine.recompute": ("none", "selective", "full"),
    "engine.tokens_per_micro_batch": (512, 16384),
    "engine.distributed_optimizer": ("true", "false"),
    "engine.lr_decay_style": ("constant", "linear", "cosine"),
    "engine.weight_decay": (0, 0.1),
    "engine.clip_grad": (0, 0.5, 1),
    "engine.adam_betas": ("[0.9,0.999]", "[0,0.5]"),
    "engine.adam_eps": (1e-8, 1e-5),
}
LR = (0, 1e-6, 3e-4)
OF_PAIRS = {"data.max_tokens": (64, 256), "data.pairs_per_step": (4, 24), "run.save_interval": (0, 3)}
SOUND_ONLY = {
    "sft": {"actor.lr": LR, "data.max_tokens": (64, 256), "data.samples_per_step": (4, 24, 128)},
    "dpo": {"actor.lr": LR, "dpo.beta": (0.01, 1), "dpo.loss": ("sigmoid", "ipo"), **OF_PAIRS},
    "reward_model": {"reward.lr": LR, **OF_PAIRS},
    "train": {
        "actor.lr": LR,
        "run.save_interval": (0, 1, 5),
        "run.validate_interval": (0, 2),
        "data.max_prompt_tokens": (32, 64, 200),
        "data.prompts_per_iteration": (16, 192, 400),
        "data.samples_per_prompt": (1, 2, 8),
        "data.validation_samples": (0, 8),
        "data.validation_temperature": (0, 0.7, 1),
        "critic.lr": (0, 1e-5),
        "reward.function": ("match", "last_number"),
        "reward.timeout_s": (0.5, 60),
        "reward.workers": (1, 4),
        "reward.failure_score": (-1, 0, 0.5),
        "rollout.tp": (1, 2),
        "rollout.temperature": (0.3, 1, 1.5),
        "rollout.top_p": (0.5, 1),
        "rollout.top_k": (-1, 1, 50),
        "rollout.min_tokens": (0, 1, 8),
        "rollout.max_tokens": (8, 16, 50),
        "rollout.stop": ("[abc]", "[]", "['a b',c]"),
        "rollout.stop_token_ids": ("[2]", "[]", "[2,5,383]"),
        "rollout.ignore_eos": ("true", "false"),
        "rollout.max_num_seqs": (2, 64),
        "rollout.dynamic_batching": ("true", "false"),
        "rollout.adaptive_sampling": ("true", "false", "[0-8:greedy,9-:temperature:0.7+top_k:20]"),
        "rollout.gpu_memory_utilization": (0.3, 0.6),
        "rollout.kv_cache_mib": (32, 128),
        "rollout.enforce_eager": ("true", "false"),
        "algorithm.gamma": (0.9, 1),
        "algorithm.gae_lambda": (0, 0.5, 1),
        "algorithm.whiten": ("true", "false"),
        "algorithm.epochs": (1, 3),
        "algorithm.num_mini_batches": (1, 2, 4),
        "algorithm.clip_ratio_low": (0.1, 0.2),
        "algorithm.clip_ratio_high": (0.1, 0.3),
        "algorithm.cliprange_value": (0, 0.2),
        "algorithm.entropy_coef": (0, 0.01),
        "algorithm.kl_coef": (0.01, 0.5),
        "algorithm.critic_warmup": (0, 2),
        "reshard.window_mib": (1, 64),
        "reshard.verify": ("sample", "all", "none"),
    },
}

# Settings that change nothing beside others, each of a right value; the recipe is PPO's.
USELESS = {
    "algorithm.gamma": ("algorithm.gamma=0.9", "algorithm.name=grpo", "data.samples_per_prompt=2"),
    "algorithm.gae_lambda": ("algorithm.gae_lambda=1", "algorithm.name=remax"),
    "algorithm.whiten": ("algorithm.whiten=false", "algorithm.name=reinforce_plus_plus"),
    "algorithm.scale_by_std": ("algorithm.scale_by_std=false",),
    "algorithm.critic_warmup": ("algorithm.critic_warmup=2", "algorithm.name=reinforce_plus_plus"),
    "algorithm.clip_ratio_high": ("algorithm.clip_ratio_high=0.3", "algorithm.objective=reinforce"),
    "algorithm.dual_clip": ("algorithm.dual_clip=3", "algorithm.objective=cispo"),
    "algorithm.correction_high": ("algorithm.correction_high=3",),
    "algorithm.kl_ctrl_horizon": ("algorithm.kl_ctrl_horizon=64",),
    "algorithm.kl_ctrl_target": ("algorithm.kl_ctrl_target=1", "algorithm.kl_in=none"),
    "algorithm.target_kl": ("algorithm.target_kl=0.1", "algorithm.num_mini_batches=1"),
    "algorithm.dynamic_sampling": ("algorithm.dynamic_sampling=true", "data.samples_per_prompt=2"),
    "algorithm.max_sampling_rounds": ("algorithm.max_sampling_rounds=3",),
    "algorithm.check_logprobs_interval": (
        "algorithm.check_logprobs_interval=3",
        "algorithm.reuse_logprobs=false",
    ),
    "algorithm.reuse_logprobs": ("algorithm.reuse_logprobs=false", "algorithm.old_logprobs=sampler"),
    "algorithm.teacher_coef": ("algorithm.teacher_coef=2",),
    "algorithm.mask_cut": ("algorithm.mask_cut=true", "rollout.ignore_eos=true"),
    "data.curriculum": ("data.curriculum=files",),
    "reward.missing_eos_penalty": ("reward.missing_eos_penalty=1", "rollout.ignore_eos=true"),
    "reward.overlong_penalty": ("reward.overlong_penalty=2",),
    "rollout.dynamic_batching": ("rollout.dynamic_batching=true", "rollout.max_num_seqs=1"),
    "rollout.speculative_tokens": ("rollout.speculative_tokens=2",),
    "rollout.speculative_max_seqs": ("rollout.speculative_max_seqs=2", "rollout.speculative=off"),
    "engine.shared_prompts": ("engine.shared_prompts=true", "data.samples_per_prompt=1"),
}


def mutations() -> list[Mutation]:
    found: list[Mutation] = [partial(useless, name=name, given=given) for name, given in USELESS.items()]
    for program, schema in SCHEMAS.items():
        for section, name, kind in described(schema):
            found += [
                partial(bad_value, program=program, setting=f"{section}.{name}", value=value)
                for value in bad_values(schema, section, name, kind)
            ]
            found += [
                partial(misspelt, program=program, section=section, name=name),
                partial(misspelt_section, program=program, section=section, name=name),
            ]
            found += [partial(too_long, program=program, setting=f"{section}.{name}", kind=kind)]
        names = {f"{section}.{name}" for section, name, _ in described(schema)}
        found += [
            partial(former_name, program=program, old=old, new=new)
            for old, new in RENAMED.items()
            if new in names
        ]
        found += [partial(name_of_others, program=program, names=names)] * 40
        found += [partial(two_at_once, program=program)] * 30 + [partial(harmless, program=program)] * 160
    return found


def described(schema: type) -> list[tuple[str, str, Any]]:
    """The users' names of section and setting, and the type, of every setting."""
    sections = get_type_hints(schema)
    return [
        (shown(section.name), setting.name, get_type_hints(sections[section.name])[setting.name])
        for section in fields(schema)
        for setting in fields(sections[section.name])
    ]


def bad_values(schema: type, section: str, name: str, kind: Any) -> list[str]:
    """What this setting may not be, as a command line gives it."""
    limits = get_type_hints(schema)[attribute_of(section)].__dataclass_fields__[name].metadata
    values = list(OF_ANOTHER_TYPE[kind])
    if kind in (int, float):
        interval = limits["within"]
        large = [value for value in LARGE if kind is int or not inside(float(value), interval)]
        values += [*ABSURD, *large, *outside(interval, kind)]
    if choices := limits["choices"]:
        values += [choice + choice[-1] for choice in choices] + [choices[0].upper(), "''", "ü", "0"]
    return values


def outside(interval: str, kind: type) -> tuple[str, ...]:
    """Just outside the ends of an interval such as "[0, inf)"."""
    low, high = map(float, interval[1:-1].split(","))
    below = low if interval[0] == "(" else low - 1 if kind is int else math.nextafter(low, -math.inf)
    above = high if interval[-1] == ")" else high + 1 if kind is int else math.nextafter(high, math.inf)
    return tuple(str(kind(end)) for end in (below, above) if math.isfinite(end))


def sound(program: str, rng: random.Random, count: int, *, without: tuple[str, ...] = ()) -> list[str]:
    """So many settings with values that any run may have."""
    known = SOUND | SOUND_ONLY[program]
    names = rng.sample(sorted(known.keys() - set(without)), count)
    return [f"{name}={rng.choice(known[name])}" for name in names]


def bad_value(job: Job, rng: random.Random, *, program: str, setting: str, value: str) -> Case:
    given = [*sound(program, rng, rng.randrange(3), without=(setting,)), f"{setting}={value}"]
    return Case(
        name=" ".join(given), expected=REFUSED, names=(setting,), act=job.dry_run(*given, program=program)
    )


def former_name(job: Job, rng: random.Random, *, program: str, old: str, new: str) -> Case:
    given = f"{old}={rng.choice(('0', '1', 'te'))}"
    return Case(name=given, expected=REFUSED, names=(old, new), act=job.dry_run(given, program=program))


def name_of_others(job: Job, rng: random.Random, *, program: str, names: set[str]) -> Case:
    """A setting of verl or TRL, in full or without its first section."""
    tables = [row for table in (VERL, TRL) for rows in table.values() for row in rows]
    given = rng.choice([name for row in tables for name in row.theirs])
    if given.count(".") > 1 and rng.random() < 0.3:
        given = given.partition(".")[2]
    section, _, setting = given.partition(".")
    is_ours = given in names or f"{section}.{setting.partition('.')[0]}" in names
    return Case(
        name=f"{given}=1",
        expected=EITHER if is_ours else REFUSED,
        names=() if is_ours else (given.split(".")[0],),
        act=job.dry_run(f"{given}=1", program=program),
    )


def too_long(job: Job, rng: random.Random, *, program: str, setting: str, kind: Any) -> Case:
    """A value of many characters or elements, which comes back cut."""
    value = (
        f"[{','.join(['123456'] * 3000)}]"
        if kind in (list[int], list[float])
        else f"[{LONG}]"
        if kind == list[str]
        else LONG
    )
    expected = EITHER if kind in (str, list[str]) else REFUSED
    return Case(
        name=f"{setting}={value[:9]}... ({len(value)} characters)",
        expected=expected,
        names=(setting,) if expected == REFUSED else (),
        act=job.dry_run(f"{setting}={value}", program=program),
    )


def misspelt(job: Job, rng: random.Random, *, program: str, section: str, name: str) -> Case:
    known = {
        known_name for known_section, known_name, _ in described(SCHEMAS[program]) if known_section == section
    }
    wrong = next(text for text in iter(partial(_misspell, name, rng), None) if text not in known)
    names = (f"{section}.{wrong} is no setting", f'"{name}"')
    return Case(
        name=f"{section}.{wrong}=1",
        expected=REFUSED,
        names=names,
        act=job.dry_run(f"{section}.{wrong}=1", program=program),
    )


def misspelt_section(job: Job, rng: random.Random, *, program: str, section: str, name: str) -> Case:
    wrong = _misspell(section, rng)
    return Case(
        name=f"{wrong}.{name}=1",
        expected=REFUSED,
        names=(f"{wrong} is no section", f'"{section}"'),
        act=job.dry_run(f"{wrong}.{name}=1", program=program),
    )


def _misspell(name: str, rng: random.Random) -> str:
    at = rng.randrange(len(name))
    return name[:at] + name[at] * 2 + name[at + 1 :]


def two_at_once(job: Job, rng: random.Random, *, program: str) -> Case:
    """Two values of a wrong type: one error names both."""
    (a_section, a, a_kind), (b_section, b, b_kind) = rng.sample(described(SCHEMAS[program]), 2)
    given = [
        f"{a_section}.{a}={rng.choice(OF_ANOTHER_TYPE[a_kind][:3])}",
        f"{b_section}.{b}={rng.choice(OF_ANOTHER_TYPE[b_kind][:3])}",
    ]
    return Case(
        name=" ".join(given),
        expected=REFUSED,
        names=(f"{a_section}.{a}", f"{b_section}.{b}"),
        act=job.dry_run(*given, program=program),
    )


def useless(job: Job, rng: random.Random, *, name: str, given: tuple[str, ...]) -> Case:
    return Case(name=" ".join(given), expected=REFUSED, names=(name,), act=job.dry_run(*given))


def harmless(job: Job, rng: random.Random, *, program: str) -> Case:
    given = sound(program, rng, rng.randrange(1, 7))
    return Case(name=" ".join(given), expected=ACCEPTED, act=job.dry_run(*given, program=program))
