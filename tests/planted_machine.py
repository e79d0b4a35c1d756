"""Machines for the doctor: this one without its GPUs, or with two that a program on the PATH makes up."""

import os
import subprocess
import sys
from pathlib import Path

from tests.worlds import ROOT
from verl_megatron.doctor import finding, nccl
from verl_megatron.doctor.finding import Case, Finding

SMI = """\
#!/bin/sh
case "$*" in
  *query-gpu*) printf '%s' "$GPU_LINES" ;;
  *query-compute-apps*) printf '%s' "$APP_LINES" ;;
  *topo*) printf '%b' "$TOPO_LINES" ;;
esac
exit ${SMI_STATUS:-0}
"""
GPU = "{}, GPU-{}, NVIDIA H200, 143771, {}, 580.159.03\n"
NVLINK = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-15\nGPU1\tNV18\t X \t0-15\n\nLegend:\n"


def without_gpus(folder: Path, monkeypatch) -> Case:
    """A machine without GPUs and without variables of NCCL, whatever this one has."""
    _unset(monkeypatch)
    monkeypatch.setattr(finding.Case, "_gpus", ([], ""))
    return Case(folder=folder)


def with_gpus(folder: Path, monkeypatch) -> Case:
    """Two GPUs, as a program on the PATH in place of nvidia-smi says."""
    _unset(monkeypatch)
    (folder / "bin").mkdir()
    smi = folder / "bin/nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("GPU_LINES", GPU.format(0, "a", 4) + GPU.format(1, "b", 4))
    monkeypatch.setenv("TOPO_LINES", NVLINK.replace("\n", "\\n").replace("\t", "\\t"))
    return Case(folder=folder)


def _unset(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith(nccl.PREFIXES)]:
        monkeypatch.delenv(name)


def found(check, case: Case) -> list[Finding]:
    findings = list(check(case))
    assert findings
    for each in findings:
        assert each.status in ("ok", "skipped") or (each.why and each.remedy), each
    return findings


def only(check, case: Case) -> Finding:
    (each,) = found(check, case)
    return each


def worst(check, case: Case) -> Finding:
    order = ("problem", "warning", "ok", "skipped")
    return min(found(check, case), key=lambda each: order.index(each.status))


def doctor_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The doctor as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "verl_megatron", "doctor", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
