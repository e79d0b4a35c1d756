"""A recipe as a Ray job, one Ray Train worker a node, which starts the node's ranks of all worlds.

    python recipes/launch/ray.py recipes/llama3_70b_ppo.sh [settings]

NNODES and GPUS (ranks per node) default to those of the Ray cluster (RAY_ADDRESS; none: this machine); set
them where there are no GPUs. All nodes see this folder under the same path. MAX_RESTARTS (0): how often ranks
start again after a failure, and how often Ray starts all nodes again where that did not help or one was lost.
Needs `pip install verl-megatron[ray]`, except with --dry-run.
"""

import fnmatch
import os
import secrets
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


def run_node(job: dict) -> None:
    """Run the recipe in a process of its own: it needs a main thread for its signals, and ends by itself.

    Ray Train has set RANK, WORLD_SIZE and MASTER_ADDR, of nodes here; its own group holds the port that it
    chose.

    Raises:
        RuntimeError: the node's ranks failed.
    """
    import socket

    import ray
    import torch.distributed as dist

    node, address = os.environ["RANK"], ray.util.get_node_ip_address()
    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listener:
        listener.bind(place)
        meeting = [address, str(listener.getsockname()[1])]  # those of node 0 are used
        dist.broadcast_object_list(meeting)
    told = {"NODE_RANK": node, "NODE_ADDR": address, "MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1]}
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # of Ray's workers
    around = {name: value for name, value in os.environ.items() if name not in ranks}
    # When Ray ends the worker, its recipe gets SIGTERM.
    command = ["setpriv", "--pdeathsig", "TERM", "bash", *job["recipe"]]
    if status := subprocess.run(
        command, cwd=job["folder"], env=around | job["environment"] | told
    ).returncode:
        raise RuntimeError(f"node {node} on {socket.gethostname()} ended with {status}")


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
    """Plan, or connect to Ray and run the recipe on every node."""
    if not Path(recipe[0]).is_file():
        known = " ".join(sorted(f"recipes/{path.name}" for path in LAUNCH.parent.glob("*.sh")))
        raise SystemExit(f"error: recipe {recipe[0]!r} does not exist; choose one of {known}")
    if "--dry-run" in recipe:
        print(
            f"on every node: NNODES=... GPUS=... NODE_RANK=... NODE_ADDR=... MASTER_ADDR=... MASTER_PORT=... "
            f"bash {shlex.join(recipe)}",
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
    token = {"VERL_MEGATRON_TOKEN": secrets.token_hex(16)}  # of this run
    job = {
        "recipe": recipe,
        "folder": os.getcwd(),
        "environment": token | forwarded() | {"NNODES": str(nodes), "GPUS": str(size)},
    }
    trainer = TorchTrainer(
        run_node,
        train_loop_config=job,
        torch_config=Rendezvous(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=nodes,
            use_gpu=on_gpus,
            resources_per_worker={"GPU": size} if on_gpus else {"CPU": 1},
            placement_strategy="STRICT_SPREAD",
        ),
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
