"""The program tools/convert.py as a user starts it: memory, kills, exit status, one-line errors."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.convert import to_megatron
from parallel.convert.compare import differences
from parallel.convert.staging import staged
from parallel.convert.to_hugging_face import CheckpointArguments
from parallel.convert.workers import Budget, run_jobs
from parallel.weights.writing import write_json
from tests.processes import all_ended
from tests.tiny import write_hf
from tests.worlds import ROOT
from verl_megatron.commands import convert

JOURNAL = ".convert.jsonl"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
CAP_MIB = 64
# Growth of the resident memory's peak from the moment at which everything is imported.
MEASURE = """
import re, sys
from parallel.convert import compare, to_hugging_face, to_megatron
from verl_megatron.commands import convert
status = lambda name: int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
convert.parser()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what is resident now
before = status("VmRSS")
result = convert.run(sys.argv[1:])
print("grown by", status("VmHWM") - before, "KiB")
sys.exit(result)
"""


def tool(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "verl_megatron", "convert", *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )


def grown_mib(*arguments) -> float:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(re.search(r"grown by (\d+) KiB", done.stdout)[1]) / 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model whose embedding alone is three times the cap."""
    folder = tmp_path_factory.mktemp("large") / "hf"
    write_hf(folder, "llama_tied_llama3", hidden_size=1024, num_hidden_layers=1)
    weights = load_file(folder / "model.safetensors")
    words = torch.arange(3 * CAP_MIB * 2**20 // 4, dtype=torch.float32).view(-1, 1024)
    save_file(weights | {"model.embed_tokens.weight": words}, folder / "model.safetensors")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 150', f'"vocab_size": {len(words)}'))
    return folder


def test_memory_stays_below_the_cap_with_a_larger_tensor_both_ways(large, tmp_path):
    cap = ("--memory-gib", CAP_MIB / 1024, "--workers", 1)
    assert (large / "model.safetensors").stat().st_size > 3 * CAP_MIB * 2**20
    assert grown_mib("hf-to-mcore", large, tmp_path / "mcore", *cap) < CAP_MIB
    to_megatron.convert(
        large, tmp_path / "whole", spec="te", budget=Budget(slab_bytes=2**30, workers=1), file_bytes=2**30
    )  # one chunk a tensor
    assert grown_mib("mcore-to-hf", tmp_path / "whole", tmp_path / "back", *cap) < CAP_MIB
    assert grown_mib("verify", tmp_path / "whole", tmp_path / "back", *cap) < CAP_MIB
    assert not differences(
        *map(CheckpointArguments, (large, tmp_path / "mcore")), Budget.of(2**28, workers=1)
    )


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def killed_at_work(command: list[str], journal: Path) -> list[int]:
    """Start a conversion and kill it after its first files; return its child processes.

    There are none if it has ended before.
    """
    process = subprocess.Popen(
        [sys.executable, "tools/convert.py", *command], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    children = []
    with contextlib.suppress(FileNotFoundError):  # at its end the journal goes, and then its place in /proc
        while process.poll() is None and not children:
            if journal.is_file() and len(journal.read_text().splitlines()) >= 4:
                listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                children = list(map(int, listed.split()))
            else:
                time.sleep(0.002)
    process.kill()
    assert process.wait() in (0, -signal.SIGKILL)
    assert all_ended(children), "workers outlived their parent"
    return children


def test_a_killed_run_is_continued_where_it_stopped(large, tmp_path):
    def command(name, workers):
        return list(
            map(
                str,
                [
                    "hf-to-mcore",
                    large,
                    tmp_path / name,
                    "--file-gib",
                    0.004,
                    "--memory-gib",
                    0.1875,
                    "--workers",
                    workers,
                ],
            )
        )

    assert convert.run(command("unbroken", 1)) == 0
    files = files_in(tmp_path / "unbroken")
    total = sum(path.suffix == ".distcp" for path in files)
    for attempt in range(5):  # it may end before it is seen at work
        target, partial = tmp_path / f"mcore{attempt}", tmp_path / f"mcore{attempt}.partial"
        children = killed_at_work(command(target.name, 2), partial / JOURNAL)
        journal = (partial / JOURNAL).read_text() if (partial / JOURNAL).exists() else ""
        finished = set(re.findall(r'"name": "(\S+)", "bytes"', journal))
        if 0 < len(finished) < total:
            break
    else:
        pytest.fail("it ended before it could be killed")
    ages = {name: (partial / name).stat().st_mtime_ns for name in finished}
    assert len(children) >= 2 and len(finished) >= 3 and not target.exists()
    assert convert.run(command(target.name, 1)) == 0
    assert {name: (target / name).stat().st_mtime_ns for name in finished} == ages  # not written again
    assert files == files_in(target)
    for name in files:
        assert (tmp_path / "unbroken" / name).read_bytes() == (target / name).read_bytes(), name


def test_exit_status_and_one_line_errors(tmp_path, capsys):
    write_hf(tmp_path / "a", "qwen3")
    write_hf(tmp_path / "b", "qwen3", seed=1)
    other = tool("verify", tmp_path / "a", tmp_path / "b", "--workers", 1)
    assert (
        other.returncode == 1
        and other.stdout.startswith("model.embed_tokens.weight differs")
        and "and 37 more" in other.stdout
    )
    assert convert.run(["verify", str(tmp_path / "a"), str(tmp_path / "a"), "--workers", "1"]) == 0
    assert "every tensor has the same bits" in capsys.readouterr().out
    for template in ("none", "a"):
        with pytest.raises(SystemExit):
            convert.run(["inspect", str(tmp_path / "a"), "--template", str(tmp_path / template)])
        said = "is no folder; name a" if template == "none" else "is a Hugging Face folder; leave it out"
        assert said in capsys.readouterr().err
    (tmp_path / "a" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SystemExit) as end:
        convert.run(["hf-to-mcore", str(tmp_path / "a"), str(tmp_path / "c")])
    error = capsys.readouterr().err
    assert end.value.code == 2 and len(error.splitlines()) == 1 and "model.safetensors is truncated" in error


@pytest.mark.parametrize(("command", "source"), [("hf-to-mcore", "hf"), ("mcore-to-hf", "mcore")])
def test_a_disk_that_fills_up_is_one_error(converted, tmp_path, capsys, small_files, command, source):
    with pytest.raises(SystemExit) as end:
        convert.run([command, str(converted / source), str(tmp_path / "target"), "--workers", "1"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and len(error.splitlines()) == 1 and "File too large" in error


def killed(job: int, report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_of_a_pool_is_one_error():
    with pytest.raises(ValueError, match="a process of verify was killed; .* with fewer --workers"):
        list(run_jobs(killed, [1, 2], workers=2, total_bytes=2, title="verify"))


def test_files_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr("os.fsync", lambda file: steps.append(Path(f"/proc/self/fd/{file}").readlink()))
    rename = os.replace
    monkeypatch.setattr("os.replace", lambda source, to: (steps.append(Path(to)), rename(source, to)))
    with staged(tmp_path / "target") as scratch:
        (scratch / "inner").mkdir(parents=True)
        (scratch / "inner/weights").touch()
        write_json(scratch / "config.json", {})
        partial, config, *_ = steps
        assert config == scratch / "config.json" and partial.name.endswith(".partial")
    assert steps[-1] == tmp_path / "target"
    assert {scratch, scratch / "inner", scratch / "inner/weights", config} <= set(steps[2:-1])


def test_a_link_to_an_empty_folder_stays_and_a_mount_point_is_refused(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with staged(tmp_path / "link") as scratch:
        assert scratch == tmp_path / "disk.partial"
        scratch.mkdir()
        (scratch / "file").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk/file").is_file()
    (tmp_path / "disk/file").unlink()
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "disk")
    with pytest.raises(ValueError, match="disk is a mount point, which cannot be replaced; name a folder in"):
        with staged(tmp_path / "link"):
            pytest.fail("the work began")


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nothing"), os.mkfifo])
def test_a_target_that_is_there_is_refused_before_the_work(tmp_path, make):
    make(tmp_path / "target")
    with pytest.raises(ValueError, match="target exists already; remove it or name another folder"):
        with staged(tmp_path / "target"):
            pytest.fail("the work began")


def test_a_file_that_fails_later_is_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setitem(convert.COMMANDS, "inspect", lambda options: os.mkdir("/proc/a.partial"))
    with pytest.raises(SystemExit):
        convert.run(["inspect", "a"])
    said = "error: '/proc/a.partial': No such file or directory; name another file or folder (--help"
    assert capsys.readouterr().err.startswith(said)
