"""A recipe as a Ray job, one Ray Train worker a rank: the same world, the same processes as torchrun starts.

    python recipes/launch/ray.py recipes/llama3_70b_ppo.sh [settings]

NNODES and GPUS (ranks per node) default to those of the Ray cluster (RAY_ADDRESS; none: this machine); set
them where there are no GPUs. All nodes see this folder under the same path. MAX_RESTARTS (0): how often Ray
starts the ranks again after a failure. Needs `pip install verl-megatron[ray]`, except with --dry-run.
"""

import fnmatch
import os
import shlex
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).resolve().parent
sys.path[:] = [
    path for path in sys.path if Path(path).resolve() != LAUNCH
]  # this file's own name is that of the package


def forwarded() -> dict[str, str]:
    """The variables that ranks get from here."""
    patterns = [
        line for line in (LAUNCH / "forwarded.txt").read_text().splitlines() if not line.startswith("#")
    ]
    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def run_rank(job: dict) -> None:
    """Run the recipe in a process of its own: a rank needs a main thread for its signals, and ends by itself.

    Ray Train has set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR; its own group holds the
    port that it chose.

    Raises:
        RuntimeError: the rank failed, or Ray placed another number of ranks on this node than GPUS.
    """
    import socket

    import torch.distributed as dist

    placed, wanted = os.environ["LOCAL_WORLD_SIZE"], job["environment"]["GPUS"]
    if placed != wanted:
        raise RuntimeError(
            f"Ray placed {placed} ranks on {socket.gethostname()} and GPUS={wanted}; every node has "
            f"to run as "
            "many: choose NNODES and GPUS that fill whole nodes"
        )
    address = (
        os.environ["MASTER_ADDR"] if os.environ["RANK"] == "0" else "127.0.0.1"
    )  # only the port of rank 0 is used
    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listener:
        listener.bind(place)
        port = [listener.getsockname()[1]]
        dist.broadcast_object_list(port)
    environment = {**os.environ, **job["environment"], "MASTER_PORT": str(port[0])}
    command = [
        "setpriv",
        "--pdeathsig",
        "TERM",
        "bash",
        *job["recipe"],
    ]  # when Ray ends the worker, its rank gets SIGTERM
    if status := subprocess.run(command, cwd=job["folder"], env=environment).returncode:
        raise RuntimeError(f"rank {os.environ['RANK']} on {socket.gethostname()} ended with {status}")


def cluster_size() -> tuple[int, int]:
    """Nodes, and ranks of each: as the environment says, else the cluster's nodes with GPUs."""
    import ray

    gpus = [
        int(node["Resources"]["GPU"])
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("GPU", 0) >= 1
    ]
    nodes, size = (
        os.environ.get("NNODES") or str(len(gpus)),
        os.environ.get("GPUS") or str(min(gpus, default=0)),
    )
    if not (nodes.isdecimal() and size.isdecimal() and int(nodes) and int(size)):
        raise SystemExit(
            f"error: NNODES={nodes!r} and GPUS={size!r} (ranks of a node) make no world; the Ray "
            f"cluster has {len(gpus)} nodes with GPUS: set both"
        )
    return int(nodes), int(size)


def main(recipe: list[str]) -> None:
    """Plan, or connect to Ray and run the recipe on every worker."""
    if not Path(recipe[0]).is_file():
        known = " ".join(sorted(f"recipes/{path.name}" for path in LAUNCH.parent.glob("*.sh")))
        raise SystemExit(f"error: recipe {recipe[0]!r} does not exist; choose one of {known}")
    if "--dry-run" in recipe:
        print(
            f"on every rank: RANK=... LOCAL_RANK=... WORLD_SIZE=... LOCAL_WORLD_SIZE=... "
            f"MASTER_ADDR=... MASTER_PORT=... bash {shlex.join(recipe)}",
            flush=True,
        )
        os.execvp("bash", ["bash", *recipe])
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise SystemExit(f"error: {error}; pip install verl-megatron[ray]") from None

    class Rendezvous(TorchConfig):
        @property
        def train_func_context(self):
            from contextlib import nullcontext

            # Ray's own opens a CUDA context in every worker: half a GiB of each GPU beside the rank's.
            return nullcontext

    ray.init()
    nodes, size = cluster_size()
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    job = {
        "recipe": recipe,
        "folder": os.getcwd(),
        "environment": forwarded() | {"NNODES": str(nodes), "GPUS": str(size)},
    }
    trainer = TorchTrainer(
        run_rank,
        train_loop_config=job,
        torch_config=Rendezvous(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=nodes * size, use_gpu=on_gpus),
        run_config=RunConfig(
            storage_path=str(Path.cwd() / "outputs/ray"),  # of Ray's own records, which all nodes write
            failure_config=FailureConfig(max_failures=int(os.environ.get("MAX_RESTARTS", "0"))),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
