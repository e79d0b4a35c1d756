"""What this machine, which starts ranks, cannot compute."""

from parallel import device
from verl_megatron.checks.models import FROZEN
from verl_megatron.config import SupervisedConfig, TrainerConfig


def machine_problems(config: TrainerConfig | SupervisedConfig) -> list[str]:
    """Return the settings that cannot work here; only those that ask for fp8 look for GPUs."""
    remedies = {"engine.dtype": "use auto"} if config.engine.dtype == "fp8" else {}
    quantizes = False
    if isinstance(config, TrainerConfig):
        in_fp8 = [name for name in FROZEN if getattr(config, name).dtype == "fp8"]
        remedies |= {f"{name}.dtype": "leave it at auto" for name in in_fp8}
        is_auto = config.rollout.dtype == config.engine.dtype == "auto"
        quantizes = is_auto and config.rollout.weight_dtype == "fp8"
    if not (remedies or quantizes) or device.is_gpu():
        return []
    problems = [
        f"{setting}=fp8 needs GPUs that compute in fp8, and this machine has none; {remedy}"
        for setting, remedy in remedies.items()
    ]
    if quantizes:
        problems.append(
            "rollout.weight_dtype=fp8 quantizes weights of two bytes, and vLLM's are float32 on this machine "
            "without GPUs; set rollout.dtype=bfloat16"
        )
    return problems
