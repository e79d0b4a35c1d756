"""Models of a run (name, settings, head, trainable or not), and the ranks that train and generate."""

from dataclasses import dataclass, replace
from itertools import chain

from parallel.layout import Layout, last_rank, parse_devices
from parallel.runtime.refusal import short_repr
from parallel.weights.rules import Head
from verl_megatron.algorithms import get_algorithm
from verl_megatron.config import (
    DPOConfig,
    ModelConfig,
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

    @property
    def exports(self) -> dict[str, Head]:
        """Names of the exported folders and their heads."""
        return {"actor": "lm", "critic": "token"} if self.head == "lm_token" else {self.name: self.head}

    @classmethod
    def actor(cls, model: ModelConfig) -> "ModelSpec":
        """Return the trained language model."""
        return cls(name="actor", section="actor", model=model, head="lm", trainable=True)


def layout_of(model: ModelConfig | RewardConfig | TeacherConfig, world_size: int) -> Layout:
    """Return the layout of a model section on `world_size` ranks, with its ranks in the default order.

    Raises:
        ValueError: the layout or the devices are not understood, or do not go with the ranks.
    """
    stage_layers = tuple(model.stage_layers) if isinstance(model, ModelConfig) else ()
    return Layout.parse(model.layout, parse_devices(model.devices, world_size), stage_layers)


def models_of(config: TrainerConfig | SupervisedConfig) -> tuple[ModelSpec, ...]:
    """Return the models of a run: the actor first, or the one that a supervised run trains."""
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
    specs = [actor]
    if shares_trunk(config):
        specs = [replace(actor, head="lm_token")]
    elif "critic" in get_algorithm(config.algorithm).needs:
        critic = replace(config.critic, path=config.critic.path or config.actor.path)
        specs.append(ModelSpec(name="critic", section="critic", model=critic, head="token", trainable=True))
    if config.algorithm.kl_coef > 0:
        specs.append(reference)
    if config.teacher.path:
        specs.append(ModelSpec(name="teacher", section="teacher", model=_frozen(config.teacher), head="lm"))
    if config.reward.path:
        reward = _frozen(config.reward)
        specs.append(ModelSpec(name="reward", section="reward", model=reward, head="sequence"))
    return tuple(specs)


def shares_trunk(config: TrainerConfig) -> bool:
    """Whether the critic is a value head on the actor's trunk."""
    return config.critic.share_trunk and "critic" in get_algorithm(config.algorithm).needs


def _frozen(section: RewardConfig | TeacherConfig) -> ModelConfig:
    return ModelConfig(path=section.path, layout=section.layout, devices=section.devices)


def shares_dtype(config: TrainerConfig) -> bool:
    """Whether vLLM's weights have the actor's dtype."""
    return config.rollout.dtype in ("auto", config.engine.dtype.replace("fp8", "bfloat16"))


# ---- ranks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ServingWorld:
    """A world of its own that serves training."""

    name: str  # "rollout" if there is one of its kind, else "rollout:0", "rollout:1", ...
    ranks: tuple[int, ...]  # of the run

    @property
    def kind(self) -> str:
        """The world's role, "rollout"."""
        return self.name.partition(":")[0]


def rollout_worlds(config: TrainerConfig) -> tuple[ServingWorld, ...]:
    """Return the worlds that only generate; empty if the ranks that train generate, too.

    Raises:
        ValueError: the devices are not understood, or are not the last ranks of the run.
    """
    text = config.rollout.devices
    parts = text.split("+") if text else []
    try:
        ranks_of = [_ranks_of_world(part) for part in parts]
    except ValueError as error:
        raise ValueError(f"rollout.devices={short_repr(text)}: {error}") from None
    ranks = tuple(chain.from_iterable(ranks_of))
    if ranks and (ranks != tuple(range(ranks[0], ranks[-1] + 1)) or not ranks[0]):
        raise ValueError(
            f"rollout.devices={short_repr(text)} must be the last ranks of the run in order, after those "
            "that train, such as 2-3 of four, or 2+3 for two worlds"
        )
    if len(ranks_of) == 1:
        return (ServingWorld(name="rollout", ranks=ranks),)
    return tuple(ServingWorld(name=f"rollout:{at}", ranks=own) for at, own in enumerate(ranks_of))


def _ranks_of_world(text: str) -> tuple[int, ...]:
    if not text.strip():
        raise ValueError("a world has no ranks; write those of each, such as 2+3")
    return parse_devices(text, last_rank(text) + 1)


def rollout_devices(config: TrainerConfig) -> tuple[int, ...]:
    """Return the ranks that only generate, of all worlds; errors as of `rollout_worlds`."""
    return tuple(chain.from_iterable(each.ranks for each in rollout_worlds(config)))


def is_separate(config: TrainerConfig) -> bool:
    """Whether the rollout has ranks of its own."""
    return bool(config.rollout.devices)


def num_training_ranks(config: TrainerConfig) -> int:
    """Return how many ranks train in a run with `rollout.devices`: those before them."""
    return rollout_devices(config)[0]


def num_rollout_ranks(config: TrainerConfig, world_size: int) -> int:
    """Return how many ranks generate beside, or among, `world_size` training ranks."""
    return len(rollout_devices(config)) or world_size
