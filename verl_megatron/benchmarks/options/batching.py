"""Gain of `engine.dynamic_batching`: a run whose micro-batches alternate between fitted and fixed sizes.

Each turn is three iterations over the same prompts: with the fitted budget, with
`engine.tokens_per_micro_batch`, and with twice as many tokens. Both fixed ones must fit in memory. Fix the
lengths of responses by rollout.min_tokens, rollout.max_tokens and rollout.ignore_eos. Recipe and settings are
those of `verl-megatron train`; nothing is saved, validated or exported. The first turn does not count.
"""

from collections.abc import Sequence

from verl_megatron.benchmarks.options import read_run

HELP = f"""\
usage: verl-megatron benchmark batching [--ranks N] --config-name RECIPE | --config FILE [SETTING=VALUE ...]

{(__doc__ or "").strip()}

options:
  --config-name RECIPE  a shipped recipe
  --config FILE         a recipe of yours
  --ranks N             processes on this host, each with a GPU if it has GPUs (default: 1)

examples:
  verl-megatron benchmark batching --ranks 2 --config-name grpo_8b actor.path=MODEL \\
      data.train=prompts.jsonl reward.function=match rollout.ignore_eos=true run.iterations=12
  verl-megatron benchmark batching --config mine.yaml run.iterations=9"""


def read_options(arguments: Sequence[str]) -> None:
    """Check the options and the recipe.

    Raises:
        ValueError: as of `read_run`.
    """
    read_run(arguments, text=HELP)
