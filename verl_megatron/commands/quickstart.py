"""usage: verl-megatron quickstart [SECTION.SETTING=VALUE ...] [--dry-run]

Builds the toy job in outputs/toy, fine-tunes its model, trains it by PPO and exports it: two to three
minutes on a two-core CPU. Settings are those of the PPO run, such as run.iterations=5. Environment: SEED
(1), OUT (outputs/toy).

options:
  -h, --help  show this help message and exit
  --dry-run   check and plan the runs, and train nothing

examples:
  verl-megatron quickstart
  verl-megatron quickstart run.iterations=5
  verl-megatron quickstart --dry-run
"""

import os
import sys
from pathlib import Path

from verl_megatron.launch.recipe import SHIPPED


def run(arguments: list[str]) -> int:
    """Replace this process by the recipe, which uses this Python."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    from verl_megatron.checks.overrides import structured
    from verl_megatron.config import TrainerConfig
    from verl_megatron.launch.command_line import settings_of

    structured(settings_of(["--config-name", "ppo_toy_cpu", *arguments])[1], TrainerConfig)
    os.environ["VERL_MEGATRON_VENV"] = sys.prefix
    os.environ["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    )
    sys.stdout.flush()
    os.execvp("bash", ["bash", str(SHIPPED / "quickstart.sh"), *arguments])
