"""usage: verl-megatron benchmark NAME [--ranks N] [OPTION ...]

Times a run or a part of it. `verl-megatron benchmark NAME --help` explains one.
"""

import runpy
import sys
from dataclasses import dataclass
from importlib import import_module

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.launch.options import is_rank, launcher_options


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A program that measures, and whether it is started once on every rank."""

    summary: str
    module: str
    on_ranks: bool = True


BENCHMARKS = {
    "scaling": Benchmark(
        "recipes on several numbers of ranks, and a model of larger sizes", "scaling.command", False
    ),
    "reshard": Benchmark("the reshard against the link's own rates and other methods", "reshard.command"),
    "weight-sync": Benchmark(
        "the whole way between training and rollout, with a real vLLM", "weight_sync.command"
    ),
    "engine": Benchmark("forward passes and optimizer steps of one model, with MFU and memory", "engine"),
    "precision": Benchmark("log-probs or scores of a model in fp8, against bfloat16", "precision"),
    "rollout": Benchmark("generation against a bare vLLM", "rollout"),
    "offload": Benchmark("whole iterations with and without reshard.offload", "offload"),
    "batching": Benchmark("whole iterations with fitted and fixed sizes of micro-batches", "batching"),
    "verl": Benchmark("the same job through verl, on the same GPUs", "beside_verl.command", False),
    "calibrate": Benchmark(
        "this machine's rates, as a file for `verl-megatron plan --gpu FILE`", "calibrate"
    ),
    "copies": Benchmark("how long other copies wait while optimizer state moves", "copies", False),
    "convert": Benchmark("the converter against `cp` of the same bytes, with its memory", "convert", False),
    "data": Benchmark("how long a million prompts take to start on, and their memory", "data", False),
    "load": Benchmark("how a rank reads its slices, against `from_pretrained`", "load", False),
}

EXAMPLES = (
    "calibrate --ranks 2 machine.json",
    "scaling --recipe ppo_toy_cpu --gpus 1,2 actor.path=outputs/toy/model",
)


def run(arguments: list[str]) -> int:
    """Run a benchmark, on `--ranks` ranks of this host if it is one of those that use ranks.

    Raises:
        ValueError: an unknown name, or a bad number of ranks.
    """
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        lines = [f"  {each:<14}{benchmark.summary}" for each, benchmark in BENCHMARKS.items()]
        examples = [f"  verl-megatron benchmark {example}" for example in EXAMPLES]
        print("\n".join([(__doc__ or "").strip(), "", *lines, "", "examples:", *examples]))
        return 0 if arguments else 2
    if name not in BENCHMARKS:
        raise ValueError(
            f"{short_repr(name)} is no benchmark{nearest(name, BENCHMARKS)}; "
            f"benchmarks are {', '.join(BENCHMARKS)}"
        )
    benchmark, rest = BENCHMARKS[name], arguments[1:]
    sys.argv = [f"{sys.argv[0]} {name}", *rest]  # what its parser calls the program
    given = None
    if benchmark.on_ranks and not is_rank() and not {"-h", "--help"} & set(rest):
        given, rest = launcher_options(rest)
    options = import_module(f"verl_megatron.benchmarks.options.{name.replace('-', '_')}")
    options.read_options(rest)
    module = f"verl_megatron.benchmarks.{benchmark.module}"
    if given is not None:
        from verl_megatron.launch.ranks import start

        start(module, rest, ranks=given.ranks or 1, restarts=given.max_restarts)
    runpy.run_module(module, run_name="__main__", alter_sys=False)
    return 0
