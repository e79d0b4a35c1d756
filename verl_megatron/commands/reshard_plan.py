"""Shows what a reshard from Megatron's shards to vLLM's would move, without a GPU and without weights.

In the JSON, a list has one number per rank;
`train_ranks` and `rollout_ranks` give the rank at each position of the layout, tp fastest, then cp, dp and
pp.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

from parallel.reshard.plan import compile_plan
from parallel.weights.shapes import SHAPES
from verl_megatron.launch.options import COUNT, Options, check_output, number, whole_number, words_of
from verl_megatron.planner.reshard.case import HOST_RANKS, MAX_RANKS, read_case
from verl_megatron.planner.reshard.picture import draw
from verl_megatron.planner.reshard.report import Rates, flows_of, report_of, table

EXAMPLES = (
    "--hf llama3-8b --train tp2pp2 --rollout tp4",
    "--hf llama3-70b --train tp8pp4 --rollout tp8 --hosts 4 --json plan.json --png plan.png",
)
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def stages(text: str) -> tuple[int, ...]:
    """Argument type: layers of each pipeline stage."""
    return tuple(map(COUNT, text.split(",")))


def parser() -> argparse.ArgumentParser:
    options = Options(description=__doc__, examples=EXAMPLES)
    _add_layouts(options)
    _add_transport(options)
    options.add_argument("--json", type=Path, help="write all numbers to this file")
    options.add_argument("--png", type=Path, help="draw who sends what to whom into this file")
    return options


def _add_layouts(options: argparse.ArgumentParser) -> None:
    ranks = whole_number(1, MAX_RANKS)
    options.add_argument(
        "--hf",
        required=True,
        metavar="MODEL",
        help=f"folder with a config.json, or a built-in shape: {', '.join(SHAPES)}",
    )
    options.add_argument(
        "--train", required=True, metavar="LAYOUT", help="Megatron's layout, such as tp8pp4 or tp4pp4vpp2"
    )
    options.add_argument(
        "--rollout",
        required=True,
        metavar="LAYOUT",
        help="vLLM's tensor parallelism, such as tp8; replicas fill the ranks",
    )
    options.add_argument(
        "--ranks", type=ranks, help="of all hosts; default: the smallest number that fits both layouts"
    )
    options.add_argument("--hosts", type=ranks, help=f"number of hosts; default: {HOST_RANKS} ranks a host")
    options.add_argument(
        "--rank-order",
        default="auto",
        choices=["auto", "plain"],
        help="auto: ranks take the places that move least; plain: tp varies fastest",
    )
    options.add_argument(
        "--stage-layers",
        type=stages,
        default=(),
        help="layers of each pipeline stage, such as 15,16,16,16; default: all alike",
    )


def _add_transport(options: argparse.ArgumentParser) -> None:
    rate = number(1, 10**15)
    options.add_argument(
        "--peer-memory",
        action="store_true",
        help="ranks of one host read each other's memory: neither messages nor staging between them",
    )
    options.add_argument(
        "--dtype", default="bfloat16", choices=list(ELEMENT_BYTES), help="of the weights in both copies"
    )
    options.add_argument(
        "--window-mib",
        type=whole_number(1, 2**20),
        default=256,
        help="staging memory of one exchange",
    )
    for name, usual, what in (
        ("--same-gpu-rate", Rates.same_gpu, "bytes copied a second on one GPU (half of read and written)"),
        ("--same-host-rate", Rates.same_host, "bytes a second between GPUs of one host, each way"),
        ("--other-host-rate", Rates.other_host, "bytes a second of a GPU to other hosts, each way"),
    ):
        options.add_argument(name, type=rate, default=usual, help=f"{what} (default: {usual:g})")


def run(arguments: list[str]) -> int:
    command_line = parser()
    options = command_line.parse_args(arguments)
    gc.disable()  # a plan has a million records without reference cycles
    try:
        _check_files(options.json, options.png, Path(options.hf, "config.json"))
        case = read_case(
            hf=options.hf,
            train=options.train,
            rollout=options.rollout,
            ranks=options.ranks,
            hosts=options.hosts,
            stage_layers=options.stage_layers,
        )
        case = case.placed() if options.rank_order == "auto" else case
        shards = case.shards()
        sizes = {"element_bytes": ELEMENT_BYTES[options.dtype], "window_bytes": options.window_mib << 20}
        plan = compile_plan(
            source=shards[0],
            destination=shards[1],
            host_of=case.host_of,
            peer_memory=options.peer_memory,
            **sizes,
        )
        flows = flows_of(plan)
        rates = Rates(
            same_gpu=options.same_gpu_rate,
            same_host=options.same_host_rate,
            other_host=options.other_host_rate,
        )
        report = report_of(case, plan, flows, shards, rates, peer_memory=options.peer_memory)
        print(table(report))
        if options.json:
            options.json.write_text(
                json.dumps(report | {"dtype": options.dtype, "peer_memory": options.peer_memory}, indent=1)
                + "\n"
            )
        if options.png:
            draw(case, flows, options.png)
        return 0
    except (ValueError, OSError) as error:
        command_line.error(words_of(error))


def _check_files(json_path: Path | None, png_path: Path | None, read: Path) -> None:
    """Check the output files before the computation."""
    for option, path in (("--json", json_path), ("--png", png_path)):
        if path:
            check_output(option, path, inputs=[read])
        if path and option == "--png" and path.suffix != ".png":
            raise ValueError(f"--png {path} must end in .png; rename it")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
