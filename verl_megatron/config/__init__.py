"""All settings with their meaning, unit, default and valid values; `checks/` refuses contradictory ones.

Settings have two levels: section and setting. Each part of the program receives only its own section.
"""

from dataclasses import dataclass, field

from verl_megatron.config.algorithm import (
    ALGORITHM_NAMES,
    CORRECTION_LEVELS,
    NORMALIZER_NAMES,
    OBJECTIVE_NAMES,
    AlgorithmConfig,
)
from verl_megatron.config.data import DataConfig, RewardConfig, SFTDataConfig
from verl_megatron.config.models import EngineConfig, ModelConfig, TeacherConfig
from verl_megatron.config.rollout import ReshardConfig, RolloutConfig
from verl_megatron.config.run import RunConfig
from verl_megatron.config.section import (
    LEAST_TEMPERATURE,
    MISSING,
    RENAMED,
    Section,
    UnknownSettingError,
    present_name,
)

__all__ = [
    "ALGORITHM_NAMES",
    "CORRECTION_LEVELS",
    "LEAST_TEMPERATURE",
    "MISSING",
    "NORMALIZER_NAMES",
    "OBJECTIVE_NAMES",
    "RENAMED",
    "AlgorithmConfig",
    "DataConfig",
    "EngineConfig",
    "ModelConfig",
    "ReshardConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "Section",
    "TeacherConfig",
    "TrainerConfig",
    "UnknownSettingError",
    "present_name",
]


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """All sections of an RL run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ModelConfig = field(default_factory=ModelConfig)
    critic: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)


@dataclass(kw_only=True)
class SFTConfig(Section):
    """All sections of a supervised run; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
