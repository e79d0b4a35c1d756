"""All settings with their meaning, unit, default and valid values; `checks/` refuses contradictory ones.

Settings have two levels: section and setting. Each part of the program receives only its own section.
"""

from verl_megatron.config.algorithm import (
    ALGORITHM_NAMES,
    CORRECTION_LEVELS,
    NORMALIZER_NAMES,
    OBJECTIVE_NAMES,
    AlgorithmConfig,
    DPOLossConfig,
)
from verl_megatron.config.asynchrony import AsyncConfig
from verl_megatron.config.data import DataConfig, PairDataConfig, RewardConfig, SFTDataConfig
from verl_megatron.config.models import (
    SCORERS,
    CriticConfig,
    EngineConfig,
    ModelConfig,
    ReferenceConfig,
    TeacherConfig,
)
from verl_megatron.config.names import name_here
from verl_megatron.config.older_names import OLDER_NAMES, check_remote_code, older_settings
from verl_megatron.config.presets import get_trainer_config
from verl_megatron.config.rollout import ReshardConfig, RolloutConfig
from verl_megatron.config.run import RunConfig
from verl_megatron.config.schemas import (
    SCHEMAS,
    DPOConfig,
    RewardModelConfig,
    SFTConfig,
    SupervisedConfig,
    TrainerConfig,
)
from verl_megatron.config.section import (
    LEAST_TEMPERATURE,
    MISSING,
    PATHS,
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
    "OLDER_NAMES",
    "PATHS",
    "RENAMED",
    "SCHEMAS",
    "SCORERS",
    "AlgorithmConfig",
    "AsyncConfig",
    "CriticConfig",
    "DPOConfig",
    "DPOLossConfig",
    "DataConfig",
    "EngineConfig",
    "ModelConfig",
    "PairDataConfig",
    "ReferenceConfig",
    "ReshardConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "Section",
    "SupervisedConfig",
    "TeacherConfig",
    "TrainerConfig",
    "UnknownSettingError",
    "check_remote_code",
    "get_trainer_config",
    "name_here",
    "older_settings",
    "present_name",
]
