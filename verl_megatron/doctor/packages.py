"""Checks of Python and packages: versions, which pair does not go together, and what is optional."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from verl_megatron.checks.problems import problem_of
from verl_megatron.checks.versions import TESTED, check_versions, installed, versions_here
from verl_megatron.doctor.finding import NO_GPU, PROBE_S, Case, Finding, ask, last_line

NEEDED = ("torch", "megatron-core", "transformers")  # and vLLM, under one of two names
LARGE = ("torch", "transformers", "vllm")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def check_python(case: Case) -> Iterator[Finding]:
    tested = sorted({combination.python for combination in TESTED})
    version = platform.python_version()
    is_tested = ".".join(version.split(".")[:2]) in tested
    yield Finding(
        check="python",
        status="ok" if is_tested else "warning",
        found=f"Python {version} at {sys.executable}",
        why="" if is_tested else f"the test suite has passed with Python {' and '.join(tested)}",
        remedy="" if is_tested else f"make a virtual environment with Python {tested[-1]}",
    )


def check_packages(case: Case) -> Iterator[Finding]:
    """Versions, and the first pair that does not go together."""
    versions = versions_here()
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "python")
    if not (problems := problem_of(check_versions)):
        yield Finding(check="packages", status="ok", found=shown)
        return
    supervised = "" if problem_of(check_versions, vllm=False) else "; supervised runs need no vLLM and work"
    reason, _, remedy = problems[0].partition("; ")
    yield Finding(
        check="packages",
        status="problem",
        found=f"{reason} (found {shown})",
        why=f"a run refuses to start, because imports or weight transfers would fail later{supervised}",
        remedy=f"bash tools/install.sh, or install what is tested: {remedy.removeprefix('tested are ')}",
    )


def check_compiled(case: Case) -> Iterator[Finding]:
    """Whether Python finds the bytecode of large packages; pip writes it, uv and some images do not."""
    specs = {name: importlib.util.find_spec(name) for name in LARGE}
    files = {name: Path(spec.origin) for name, spec in specs.items() if spec and spec.origin}
    absent = [
        name for name, file in files.items() if not os.path.exists(importlib.util.cache_from_source(file))
    ]
    never = [name for name in absent if sys.dont_write_bytecode or not os.access(files[name].parent, os.W_OK)]
    if not never:
        later = f"that of {', '.join(absent)} will be written at the first start"
        there = f"that of {', '.join(files)} is there"
        yield Finding(check="bytecode", status="ok", found=later if absent else there)
        return
    reason = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "its folder is read-only"
    yield Finding(
        check="bytecode",
        status="warning",
        found=f"there is none of {', '.join(never)}, and Python writes none: {reason}",
        why="each start compiles thousands of modules anew, which takes many seconds",
        remedy=f"python -m compileall -q {files[never[0]].parents[1]}",
    )


def check_import(case: Case) -> Iterator[Finding]:
    """Whether torch can be imported; in another process, which a broken library may end."""
    answer = ask([sys.executable, "-c", "import torch"], timeout_s=PROBE_S)
    if not answer.problem:
        yield Finding(check="torch", status="ok", found="it can be imported")
        return
    version = installed("torch") or TESTED[0].packages["torch"]
    yield Finding(
        check="torch",
        status="problem",
        found=f"it cannot be imported: {last_line(answer.text) or answer.problem}",
        why="nothing works without it",
        remedy=f"pip install --force-reinstall --no-deps torch=={version}",
    )


def check_transformer_engine(case: Case) -> Iterator[Finding]:
    yield _kernels(
        case,
        check="transformer engine",
        package="transformer-engine",
        module="transformer_engine.pytorch",
        without="layers of plain PyTorch are used: slower, and engine.dtype=fp8 is refused",
        remedy="pip install verl-megatron[te]",
    )


def check_flash_attention(case: Case) -> Iterator[Finding]:
    package = "flash-attn-3" if installed("flash-attn-3") else "flash-attn"
    finding = _kernels(
        case,
        check="flash attention",
        package=package,
        module="flash_attn_interface" if package == "flash-attn-3" else "flash_attn",
        without="attention comes from cuDNN by Transformer Engine, or from PyTorch, which is as good",
        remedy="",
    )
    yield finding


def _kernels(case: Case, *, check: str, package: str, module: str, without: str, remedy: str) -> Finding:
    """Whether an optional package of GPU kernels is there and can be imported."""
    version = installed(package)
    if not case.gpus:
        return Finding(check=check, status="skipped", found=NO_GPU)
    if not version:
        status = "warning" if remedy else "ok"
        return Finding(check=check, status=status, found="not installed", why=without, remedy=remedy)
    answer = ask([sys.executable, "-c", f"import {module}"], timeout_s=PROBE_S)
    if answer.problem:
        return Finding(
            check=check,
            status="problem",
            found=f"{package} {version} cannot be imported: {last_line(answer.text) or answer.problem}",
            why="it was built for another version of torch or CUDA",
            remedy=f"pip uninstall {package}, or install the build that goes with torch {installed('torch')}",
        )
    return Finding(check=check, status="ok", found=f"{package} {version}")


def check_report(case: Case) -> Iterator[Finding]:
    """What is optional: packages for metrics, and a browser for reports."""
    found, absent = [], []
    for name in ("plotly", "tensorboard", "wandb", "mlflow"):
        is_there = importlib.util.find_spec(name) is not None
        (found if is_there else absent).append(f"{name} {installed(name)}".strip() if is_there else name)
    browser = next((path for name in CHROMIUM if (path := shutil.which(name))), "")
    (found if browser else absent).append(browser or "chromium")
    used = f"found {', '.join(found)}" if found else "nothing found"
    yield Finding(
        check="reports and tracking",
        status="ok",
        found=used + (f"; without {', '.join(absent)}, which are optional" if absent else ""),
    )
