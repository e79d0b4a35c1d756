"""Checks of GPUs: what they are, who uses them, how they are linked, and whether processes share memory."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator

from verl_megatron.checks.versions import installed
from verl_megatron.doctor.finding import (
    NO_GPU,
    PROBE_S,
    Case,
    Finding,
    Gpu,
    ask,
    end_group,
    first_line,
    last_line,
    line_within,
    plain,
)

PROBE = "verl_megatron.doctor.gpu_probe"
IDLE_MIB = 1024  # in use on a GPU that nobody uses
SLOW_LINKS = {"PHB": "a PCIe host bridge", "NODE": "PCIe and a NUMA node", "SYS": "the link between CPUs"}


def check_gpus(case: Case) -> Iterator[Finding]:
    """Name, memory and driver, and whether torch can use them."""
    if case.gpu_problem:
        yield Finding(
            check="gpus",
            status="problem",
            found=case.gpu_problem,
            why="nothing can be said of the GPUs, and a run would not find them either",
            remedy="run nvidia-smi by hand; look at dmesg for Xid errors, and restart the driver or the host",
        )
        return
    if not case.gpus:
        yield Finding(check="gpus", status="skipped", found=NO_GPU + "; runs use the CPU")
        return
    kinds: dict[tuple[str, float], int] = {}
    for gpu in case.gpus:
        kinds[gpu.name, gpu.total_mib] = kinds.get((gpu.name, gpu.total_mib), 0) + 1
    text = ", ".join(f"{count} x {name}, {mib / 1024:.0f} GiB" for (name, mib), count in kinds.items())
    if len(kinds) > 1:
        yield Finding(
            check="gpus",
            status="warning",
            found=text,
            why="GPUs differ: all ranks wait for the slowest, and memory is planned for the smallest",
            remedy="choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Finding(check="gpus", status="ok", found=f"{text}; driver {case.gpus[0].driver}")
    yield _torch_on_gpu(case)


def _torch_on_gpu(case: Case) -> Finding:
    if "+cpu" in installed("torch"):
        return Finding(
            check="torch on gpu",
            status="problem",
            found=f"torch {installed('torch')} is built for CPUs, and there are {len(case.gpus)} GPUs",
            why="runs would use the CPU",
            remedy="bash tools/install.sh in a new virtual environment",
        )
    answer = ask([sys.executable, "-m", PROBE, "describe"], timeout_s=PROBE_S)
    if answer.problem:
        return Finding(
            check="torch on gpu",
            status="problem",
            found=last_line(answer.text) or answer.problem,
            why="torch cannot use the GPUs that nvidia-smi lists",
            remedy=f"see that driver {case.gpus[0].driver} is new enough for torch {installed('torch')}, and"
            " that CUDA_VISIBLE_DEVICES names GPUs which exist",
        )
    said = json.loads(last_line(answer.text))
    return Finding(
        check="torch on gpu",
        status="ok",
        found=f"torch for CUDA {said['cuda']} computes on {said['gpus']} GPUs; NCCL {said['nccl']}",
    )


def check_shared_prompts(case: Case) -> Iterator[Finding]:
    """The kernels with which samples that share a prompt attend to it."""
    check = "shared prompts"
    if not case.gpus:
        yield Finding(check=check, status="skipped", found=NO_GPU)
        return
    answer = ask([sys.executable, "-m", PROBE, "attention"], timeout_s=PROBE_S)
    if answer.problem:
        yield Finding(
            check=check,
            status="warning",
            found=last_line(answer.text) or answer.problem,
            why="it is not known which kernels attend to shared prompts",
            remedy="mend what is named above; engine.shared_prompts=false does without them",
        )
        return
    yield Finding(check=check, status="ok", found=f"their attention: {last_line(answer.text)}")


def check_users(case: Case) -> Iterator[Finding]:
    """Processes that use the GPUs now."""
    if not case.gpus:
        yield Finding(check="gpu users", status="skipped", found=NO_GPU)
        return
    answer = ask(
        [
            "nvidia-smi",
            "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
            "--format=csv,noheader,nounits",
        ]
    )
    index = {gpu.uuid: gpu.index for gpu in case.gpus}
    users = []
    for line in answer.text.splitlines() if not answer.problem else []:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0] in index:
            users.append(f"process {cells[1]} ({first_line(cells[2])}) on GPU {index[cells[0]]}")
    busy = [gpu for gpu in case.gpus if gpu.used_mib > IDLE_MIB]
    memory = ", ".join(f"GPU {gpu.index}: {gpu.used_mib / 1024:.1f} GiB" for gpu in busy)
    if not users and not busy:
        yield Finding(check="gpu users", status="ok", found="nobody uses the GPUs")
        return
    yield Finding(
        check="gpu users",
        status="warning",
        found="; ".join(filter(None, ["; ".join(users) or "processes that are not visible here", memory])),
        why="their memory is missing to a run, which may end out of memory",
        remedy="end them, wait for them, or choose other GPUs with CUDA_VISIBLE_DEVICES",
    )


def check_links(case: Case) -> Iterator[Finding]:
    """How the GPUs are connected."""
    if not case.gpus:
        yield Finding(check="gpu links", status="skipped", found=NO_GPU)
        return
    if len(case.gpus) == 1:
        yield Finding(check="gpu links", status="ok", found="one GPU has no links")
        return
    answer = ask(["nvidia-smi", "topo", "-m"])
    links = _links(plain(answer.text), case.gpus)
    kinds = sorted(set(links.values()))
    if answer.problem or not links:
        yield Finding(
            check="gpu links",
            status="warning",
            found=answer.problem or "nvidia-smi topo -m shows no links",
            why="tensor parallelism is slow without NVLink, which is not known here",
            remedy="nvidia-smi topo -m",
        )
        return
    slow = {pair: kind for pair, kind in links.items() if not kind.startswith("NV")}
    if not slow:
        yield Finding(check="gpu links", status="ok", found=f"NVLink between all pairs ({', '.join(kinds)})")
        return
    (first, second), kind = next(iter(slow.items()))
    through = SLOW_LINKS.get(kind, "PCIe")
    yield Finding(
        check="gpu links",
        status="warning",
        found=f"{len(slow)} of {len(links)} pairs without NVLink, such as GPUs {first} and {second}: {kind}",
        why=f"these pairs reach each other through {through}; tensor parallelism over them is slow",
        remedy="keep tp and rollout.tp within GPUs that NVLink connects, with actor.devices or smaller sizes",
    )


def _links(matrix: str, gpus: list[Gpu]) -> dict[tuple[int, int], str]:
    """Return the kind of link of each pair of GPUs from the table of `nvidia-smi topo -m`."""
    known, links = {gpu.index for gpu in gpus}, {}
    for line in matrix.splitlines():
        if row := re.match(r"GPU(\d+)\s+(.*)", line):
            for column, kind in enumerate(row[2].split()[: len(gpus)]):
                pair = int(row[1]), column
                if pair[0] < pair[1] and {*pair} <= known and re.fullmatch(r"[A-Z]{2,4}\d*", kind):
                    links[pair] = kind
    return links


def check_cuda_ipc(case: Case) -> Iterator[Finding]:
    """A process reads the GPU memory of another one, as ranks do in a weight sync."""
    if not case.gpus:
        yield Finding(check="cuda ipc", status="skipped", found=NO_GPU)
        return
    began = time.monotonic()
    if problem := _ipc_problem(other=min(1, len(case.gpus) - 1)):
        yield Finding(
            check="cuda ipc",
            status="warning",
            found=problem,
            why="ranks of a host cannot read each other's weights, so a weight sync sends messages: slower",
            remedy="start containers with --ipc=host and one PID namespace for all ranks; unset"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
        return
    seconds = time.monotonic() - began
    yield Finding(
        check="cuda ipc",
        status="ok",
        found=f"a process reads another one's GPU memory (two programs, {seconds:.0f} s)",
    )


def _ipc_problem(*, other: int) -> str:
    """Export memory in one process and read it in a second one, on GPU `other`; return what went wrong."""
    owner = subprocess.Popen(
        [sys.executable, "-m", PROBE, "export", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        exported = line_within(owner, PROBE_S)
        if not exported:
            return "a process cannot export GPU memory"
        answer = ask([sys.executable, "-m", PROBE, "read", str(other)], timeout_s=PROBE_S, given=exported)
        return (last_line(answer.text) or answer.problem) if answer.problem else ""
    finally:
        end_group(owner)
