"""Models of a run (name, settings, head, trainable or not), and the ranks that train and generate."""

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil

from parallel.layout import Layout, named_ranks, parse_devices
from parallel.runtime.refusal import short_repr
from parallel.weights.rules import Head
from verl_megatron.algorithms import ALGORITHMS, get_algorithm
from verl_megatron.config import (
    SCORERS,
    DPOConfig,
    ModelConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    SFTConfig,
    SupervisedConfig,
    TeacherConfig,
    TrainerConfig,
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One of a run's Megatron-Core models."""

    name: str  # role name
    section: str  # settings section
    model: ModelConfig
    head: Head
    trainable: bool = False
    # The setting that asks for the layers' weights in fp8, such as reference.dtype; empty: none does.
    fp8_weights_by: str = ""

    @property
    def exports(self) -> dict[str, Head]:
        """Names of the exported folders and their heads."""
        return {"actor": "lm", "critic": "token"} if self.head == "lm_token" else {self.name: self.head}

    @classmethod
    def actor(cls, model: ModelConfig) -> "ModelSpec":
        """Return the trained language model."""
        return cls(name="actor", section="actor", model=model, head="lm", trainable=True)


def has_critic(algorithm: str) -> bool:
    """Whether runs of the algorithm of this name have a critic, whose settings are ignored otherwise."""
    return algorithm not in ALGORITHMS or "critic" in ALGORITHMS[algorithm].needs


def layout_of(model: ModelConfig | RewardConfig | TeacherConfig, world_size: int) -> Layout:
    """Return the layout of a model section on `world_size` ranks, with its ranks in the default order.

    Raises:
        ValueError: the layout or the devices are not understood, or do not go with the ranks.
    """
    stage_layers = tuple(model.stage_layers) if isinstance(model, ModelConfig) else ()
    return Layout.parse(model.layout, parse_devices(model.devices, world_size), stage_layers)


def models_of(config: TrainerConfig | SupervisedConfig) -> tuple[ModelSpec, ...]:
    """Return the models of the ranks that train: the actor first, or the one that a supervised run trains.

    Raises:
        ValueError: as of `serving_worlds`.
    """
    if isinstance(config, RewardModelConfig):
        spec = ModelSpec(
            name="reward", section="reward", model=config.reward, head="sequence", trainable=True
        )
        return (spec,)
    actor = ModelSpec.actor(config.actor)
    reference = replace(actor, name="reference", trainable=False)
    if isinstance(config, SFTConfig):
        return (actor,)
    if isinstance(config, DPOConfig):
        return (actor, reference)
    reference = replace(reference, fp8_weights_by=_fp8_weights_by(config, "reference"))
    specs = [actor]
    if shares_trunk(config):
        specs = [replace(actor, head="lm_token")]
    elif "critic" in get_algorithm(config.algorithm).needs:
        critic = replace(config.critic, path=config.critic.path or config.actor.path)
        specs.append(ModelSpec(name="critic", section="critic", model=critic, head="token", trainable=True))
    if config.algorithm.kl_coef > 0:
        specs.append(reference)
    specs += [_scorer(config, name) for name in ("teacher", "reward") if getattr(config, name).path]
    apart = names_apart(config)
    return tuple(spec for spec in specs if spec.name not in apart)


def names_apart(config: TrainerConfig) -> set[str]:
    """Return the names of the frozen models of the scoring worlds; errors as of `serving_worlds`."""
    return set(chain.from_iterable(each.models for each in scoring_worlds(config)))


def models_apart(config: TrainerConfig | SupervisedConfig) -> tuple[ModelSpec, ...]:
    """Return the frozen models of the scoring worlds, world by world."""
    if not isinstance(config, TrainerConfig):
        return ()
    return tuple(chain.from_iterable(models_of_world(config, each) for each in scoring_worlds(config)))


def models_of_world(config: TrainerConfig, world: "ServingWorld") -> tuple[ModelSpec, ...]:
    """Return the models of a scoring world, each on all of its ranks, counted from 0."""
    specs = (_scorer(config, name) for name in world.models)
    return tuple(replace(spec, model=replace(spec.model, devices="")) for spec in specs)


def _scorer(config: TrainerConfig, name: str) -> ModelSpec:
    """Return a frozen model; the reference as it is on ranks of its own."""
    section: ReferenceConfig | RewardConfig | TeacherConfig = getattr(config, name)
    path = config.actor.path if isinstance(section, ReferenceConfig) else section.path
    return ModelSpec(
        name=name,
        section=name,
        model=ModelConfig(path=path, layout=section.layout, devices=section.devices),
        head="sequence" if name == "reward" else "lm",
        fp8_weights_by=_fp8_weights_by(config, name),
    )


def _fp8_weights_by(config: TrainerConfig, name: str) -> str:
    return f"{name}.dtype" * (getattr(config, name).dtype == "fp8")


def shares_trunk(config: TrainerConfig) -> bool:
    """Whether the critic is a value head on the actor's trunk."""
    return config.critic.share_trunk and "critic" in get_algorithm(config.algorithm).needs


def shares_dtype(config: TrainerConfig) -> bool:
    """Whether vLLM's weights have the actor's dtype."""
    return config.rollout.dtype in ("auto", config.engine.dtype.replace("fp8", "bfloat16"))


# ---- ranks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ServingWorld:
    """A world of its own that serves training."""

    # "rollout" if there is one of its kind, else "rollout:0", "rollout:1", ...; or that of its first model
    name: str
    ranks: tuple[int, ...]  # of the run
    models: tuple[str, ...] = ()  # the frozen models of a scoring world; a rollout world has none

    @property
    def kind(self) -> str:
        """The world's role: "rollout", "reward", "reference" or "teacher"."""
        return self.name.partition(":")[0]


def serving_worlds(config: TrainerConfig) -> tuple[ServingWorld, ...]:
    """Return the worlds that generate or score for training, by their ranks; the settings of devices say it.

    Devices that share ranks with those that surely train (`_training_ranks`) make no world. Frozen models
    with the same devices share one. A rollout or reference with other devices has a world. So has a reward
    model or teacher whose devices come after all that `actor.devices`, `critic.devices` and a colocated
    rollout name, or after the first ranks of another such world. Else it is on ranks that train.

    Raises:
        ValueError: the devices are not understood, or are not the last ranks of the run.
    """
    rollouts = _rollouts(config)
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in _ranks_apart(config, rollouts).items():
        by_ranks.setdefault(ranks, []).append(name)
    scoring = [
        ServingWorld(name=names[0], ranks=ranks, models=tuple(names)) for ranks, names in by_ranks.items()
    ]
    worlds = sorted([*rollouts, *scoring], key=lambda each: each.ranks) if scoring else rollouts
    ranks = tuple(chain.from_iterable(each.ranks for each in worlds))
    if ranks and (ranks != tuple(range(ranks[0], ranks[-1] + 1)) or not ranks[0]):
        raise ValueError(
            f"{named_devices(config)} must be the last ranks of the run in order, after those "
            "that train, such as 2-3 of four, or 2+3 for two worlds"
        )
    return tuple(worlds)


def find_world(config: TrainerConfig, role: str) -> ServingWorld:
    """Return the world that serves training under a name of --role; "rollout" is the first of several.

    Raises:
        ValueError: there is none; and as of `serving_worlds`.
    """
    worlds = {each.name: each for each in serving_worlds(config)}
    if found := worlds.get(role) or worlds.get(f"{role}:0"):
        return found
    raise ValueError(
        f"--role {role} is none of the worlds of {named_devices(config) or 'this run'}; "
        + (f"choose {', '.join(['train', *worlds])}" if worlds else "leave it out, for there is one world")
    )


def named_devices(config: TrainerConfig) -> str:
    """Return the settings that give worlds their ranks, with their values, for a message."""
    try:
        names = list(_ranks_apart(config, _rollouts(config)))
    except ValueError:
        names = []
    given = ["rollout"] * is_separate(config) + names
    return " and ".join(f"{name}.devices={short_repr(getattr(config, name).devices)}" for name in given)


def _rollouts(config: TrainerConfig) -> list[ServingWorld]:
    text = config.rollout.devices
    ranks_of = [_named_ranks("rollout", text, part) for part in text.split("+")] if text else []
    if len(ranks_of) == 1:
        is_colocated = _training_ranks(config) & set(ranks_of[0])
        return [] if is_colocated else [ServingWorld(name="rollout", ranks=ranks_of[0])]
    return [ServingWorld(name=f"rollout:{at}", ranks=own) for at, own in enumerate(ranks_of)]


def _ranks_apart(config: TrainerConfig, rollouts: list[ServingWorld]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of the frozen models that have a world, by model."""
    named: dict[str, tuple[int, ...]] = {}
    for name in SCORERS:
        devices: str = getattr(config, name).devices
        if devices:
            named[name] = _named_ranks(name, devices, devices)
    training = _training_ranks(config)
    # From the first of these on ranks do not train.
    firsts = [each.ranks[0] for each in rollouts]
    if config.rollout.devices and not rollouts:
        training |= set(named_ranks(config.rollout.devices))
        firsts.append(1 + max(training))
    if "reference" in named and not training & set(named["reference"]):
        firsts.append(named["reference"][0])
    if config.actor.devices:
        firsts.append(1 + max(training))
    return {name: ranks for name, ranks in named.items() if firsts and ranks[0] >= min(firsts)}


def _training_ranks(config: TrainerConfig) -> set[int]:
    """Return ranks that surely train: the first, and those that are named for the actor and the critic."""
    ranks = {0}
    for devices in (config.actor.devices, config.critic.devices):
        with suppress(ValueError):  # refused with the model's other settings
            ranks.update(named_ranks(devices))
    return ranks


def _named_ranks(section: str, text: str, part: str) -> tuple[int, ...]:
    try:
        if not part.strip():
            raise ValueError("a world has no ranks; write those of each, such as 2+3")
        return named_ranks(part)
    except ValueError as error:
        raise ValueError(f"{section}.devices={short_repr(text)}: {error}") from None


def rollout_worlds(config: TrainerConfig) -> tuple[ServingWorld, ...]:
    """Return the worlds that only generate; errors as of `serving_worlds`.

    It is empty if the ranks that train generate, too.
    """
    return tuple(each for each in serving_worlds(config) if not each.models)


def scoring_worlds(config: TrainerConfig) -> tuple[ServingWorld, ...]:
    """Return the worlds that only score; errors as of `serving_worlds`."""
    return tuple(each for each in serving_worlds(config) if each.models)


def rollout_devices(config: TrainerConfig) -> tuple[int, ...]:
    """Return the ranks that only generate, of all worlds; errors as of `serving_worlds`."""
    return tuple(chain.from_iterable(each.ranks for each in rollout_worlds(config)))


def is_separate(config: TrainerConfig) -> bool:
    """Whether the rollout has ranks of its own; so it counts if devices are not understood."""
    try:
        return bool(_rollouts(config))
    except ValueError:
        return True


def has_worlds(config: TrainerConfig) -> bool:
    """Whether worlds of their own generate or score for training."""
    return bool(serving_worlds(config))


def num_ranks(config: TrainerConfig) -> int:
    """Return the ranks of all worlds of a run that has several."""
    return serving_worlds(config)[-1].ranks[-1] + 1


def num_training_ranks(config: TrainerConfig) -> int:
    """Return how many ranks train in a run of several worlds: those before all others."""
    return serving_worlds(config)[0].ranks[0]


def num_rollout_ranks(config: TrainerConfig, world_size: int) -> int:
    """Return how many ranks generate beside, or among, `world_size` training ranks."""
    return len(rollout_devices(config)) or world_size


def generated_samples(config: TrainerConfig) -> int:
    """Return how many samples are generated for an iteration, greedy ones included."""
    has_greedy = "greedy" in get_algorithm(config.algorithm).needs
    return config.data.prompts_per_iteration * (config.data.samples_per_prompt + has_greedy)


def samples_at_most(config: TrainerConfig, *, replicas: int, validation: int | None) -> int:
    """Return how many samples a replica decodes concurrently at most, if its KV cache has room for them.

    That is its share of an iteration or of a validation (rollout/dispatch.py), and no more than
    `rollout.max_num_seqs`. Rollout worlds may have samples of several iterations.

    Args:
        validation: prompts in `data.validation`, 0 without such a file; None: not known.
    """
    most = config.rollout.max_num_seqs
    if validation is None:
        validation = replicas * most if config.data.validation else 0
    if taken := config.data.validation_samples:
        validation = min(validation, taken)
    if is_separate(config):
        return most
    return min(most, ceil(max(generated_samples(config), validation) / replicas))


def scores_ahead(config: TrainerConfig) -> bool:
    """Whether scoring worlds work on the samples of later iterations while training is at an earlier one.

    With a window, it is not known before an iteration which samples are in it; with a greedy sample, which
    of them are trained on.
    """
    has_greedy = "greedy" in get_algorithm(config.algorithm).needs
    is_known = config.async_.buffer == "in_order" and not has_greedy
    return is_separate(config) and config.async_.max_staleness > 0 and is_known
