"""Cost of `reshard.offload`: a run in which it alternates between iterations.

Both variants have the same machine and model. Fix the lengths by rollout.min_tokens, rollout.max_tokens and
rollout.ignore_eos. Recipe and settings are those of `verl-megatron train`; nothing is saved, validated or
exported. Odd iterations use the given `reshard.offload`, even ones none, and both must fit in memory. The
first of each does not count: it allocates host memory and compiles kernels.
"""

from collections.abc import Sequence

from verl_megatron.benchmarks.options import read_run

HELP = f"""\
usage: verl-megatron benchmark offload [--ranks N] --config-name RECIPE | --config FILE [SETTING=VALUE ...]

{(__doc__ or "").strip()}

options:
  --config-name RECIPE  a shipped recipe
  --config FILE         a recipe of yours
  --ranks N             processes on this host, each with a GPU if it has GPUs (default: 1)

examples:
  verl-megatron benchmark offload --ranks 2 --config-name grpo_8b actor.path=MODEL data.train=prompts.jsonl \\
      reward.function=match reshard.offload=all run.iterations=8 rollout.ignore_eos=true
  verl-megatron benchmark offload --ranks 4 --config mine.yaml reshard.offload=optimizer run.iterations=6"""


def read_options(arguments: Sequence[str]) -> None:
    """Check the options and the recipe.

    Raises:
        ValueError: as of `read_run`.
    """
    read_run(arguments, text=HELP)
