"""Runs the same job here and through verl, one after the other on the same GPUs: seconds by phase.

Weights are random unless --hf names a model; prompts are random words, and all responses have the same
length. Both programs use Megatron-Core and vLLM with the same layouts, micro-batches and optimizer steps;
verl reaches Megatron-Core through Megatron-Bridge. The reference model takes part: in the loss of GRPO, in
the reward of PPO. Ours runs once as its recipe is, and once more for each --way, beside its plan. GRPO's
recipe computes a shared prompt once: `--way row_by_row engine.shared_prompts=false` does as verl does.
OUT/table.md has the table, and OUT/NAME the output of a run. --only ours needs no verl.

A call that was cut short goes on with --resume, which keeps what an earlier call has measured of the same
job on this machine since it started.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from parallel.weights.shapes import SHAPES
from verl_megatron.launch.options import COUNT, SHARE, Options, number, whole_number

EXAMPLES = (
    "--gpus 2 --tp 2 --rollout-tp 2 --way fp8 engine.dtype=fp8 rollout.kv_cache_dtype=fp8",
    "--gpus 1 --layers 8 --algorithm ppo --verl-python /opt/verl/bin/python",
    "--gpus 1 --layers 12 --only ours --way row_by_row engine.shared_prompts=false",
)
RECIPES = {"grpo": "grpo_8b", "ppo": "llama3_8b_ppo"}


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument("--gpus", type=COUNT, default=1, help="of this host; ranks that share a CPU without")
    options.add_argument("--algorithm", choices=sorted(RECIPES), default="grpo", help="of both programs")
    options.add_argument("--shape", choices=list(SHAPES), default="llama3-8b", help="of random weights")
    options.add_argument(
        "--layers", type=whole_number(0), default=0, help="another number of layers than published"
    )
    options.add_argument("--hf", type=Path, metavar="DIR", help="a model of yours instead of random weights")
    options.add_argument("--tp", type=COUNT, default=1, help="tensor-parallel size in training")
    options.add_argument("--rollout-tp", type=COUNT, default=1, help="vLLM's tensor-parallel size")
    options.add_argument("--prompts", type=COUNT, help="of an iteration (default: 64, with PPO 256)")
    options.add_argument("--samples", type=COUNT, help="of each prompt (default: 4, with PPO 1)")
    options.add_argument("--steps", type=COUNT, default=4, help="optimizer steps of an iteration")
    options.add_argument("--prompt-tokens", type=COUNT, default=512, help="of every prompt")
    options.add_argument("--response-tokens", type=COUNT, default=512, help="of every response")
    options.add_argument("--tokens", type=COUNT, default=8192, help="most of a micro-batch")
    options.add_argument(
        "--iterations", type=COUNT, default=5, help="of each run; the first two do not count"
    )
    options.add_argument(
        "--gpu-memory-utilization", type=SHARE, default=0.3, metavar="SHARE", help="vLLM's share of the GPU"
    )
    options.add_argument("--only", choices=("ours", "verl"), help="one of the programs")
    options.add_argument(
        "--resume", action="store_true", help="keep the runs of an earlier call on this machine"
    )
    options.add_argument(
        "--way",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "SECTION.SETTING=VALUE"),
        help="one more run of ours with these settings; may be repeated",
    )
    options.add_argument(
        "--ours", nargs="+", default=[], metavar="SECTION.SETTING=VALUE", help="settings of all our runs"
    )
    options.add_argument(
        "--verl", nargs="+", default=[], metavar="SETTING=VALUE", help="further settings of verl"
    )
    options.add_argument(
        "--verl-python", default="python3", metavar="PYTHON", help="the Python that verl is installed for"
    )
    options.add_argument(
        "--limit", type=number(0.01, 10**7), default=900.0, metavar="SECONDS", help="that a run may take"
    )
    options.add_argument(
        "--out", type=Path, default=Path("outputs/beside_verl"), metavar="DIR", help="for job, runs and table"
    )
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
