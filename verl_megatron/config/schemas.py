"""All sections of each kind of run."""

from dataclasses import dataclass, field

from verl_megatron.config.algorithm import AlgorithmConfig, DPOLossConfig
from verl_megatron.config.asynchrony import AsyncConfig
from verl_megatron.config.data import DataConfig, PairDataConfig, RewardConfig, SFTDataConfig
from verl_megatron.config.models import (
    CriticConfig,
    EngineConfig,
    ModelConfig,
    ReferenceConfig,
    TeacherConfig,
)
from verl_megatron.config.older_names import OLDER_NAMES
from verl_megatron.config.rollout import ReshardConfig, RolloutConfig
from verl_megatron.config.run import RunConfig
from verl_megatron.config.section import Section, accept


@accept({name: older.read for name, older in OLDER_NAMES.items()})
@dataclass(kw_only=True)
class TrainerConfig(Section):
    """All sections of an RL run. It also takes the names of the older interface (docs/python.md)."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)  # "async" for users: Python keeps that word


@dataclass(kw_only=True)
class SFTConfig(Section):
    """All sections of a supervised run; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(kw_only=True)
class DPOConfig(Section):
    """All sections of a run of direct preference optimization; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    actor: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    dpo: DPOLossConfig = field(default_factory=DPOLossConfig)


@dataclass(kw_only=True)
class RewardModelConfig(Section):
    """All sections of reward-model training; `run.iterations` counts optimizer steps.

    `reward` is the model to train. From the folder of a language model it starts with a new score head.
    """

    run: RunConfig = field(default_factory=RunConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    reward: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)


SupervisedConfig = SFTConfig | DPOConfig | RewardModelConfig
SCHEMAS: dict[str, type[Section]] = {
    "train": TrainerConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward_model": RewardModelConfig,
}  # by command: python -m verl_megatron.COMMAND
