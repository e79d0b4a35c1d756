"""Models from URLs and the hub: byte ranges, resuming, faults of servers and disks."""

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from parallel.weights.files import CheckpointFolder, has_weights
from parallel.weights.remote import arriving, source
from parallel.weights.remote.folder import folder_of
from parallel.weights.remote.models import is_remote, local_folder
from parallel.weights.shard import Block
from tests.job_files import write_job
from tests.served import COMMIT, serving
from tests.worlds import ROOT
from verl_megatron.checks.remote import different_versions, fetch_models
from verl_megatron.config import TrainerConfig

PART = 4096
ROWS, COLUMNS = 64, 128  # 32 KiB: eight parts and a little
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_MEGATRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arriving, "PART_BYTES", PART)
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.0)
    arriving._opened.clear()


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder of two weight files, with a tensor each, and a tokenizer's file."""
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(ROWS, COLUMNS, generator=generator) for name in ("a.weight", "b.weight")}
    for file, (name, tensor) in zip(SHARDS, tensors.items()):
        save_file({name: tensor}, folder / file)
    index = {"weight_map": dict(zip(tensors, SHARDS))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def server(model):
    with serving(model) as served:
        yield served


def rows(name: str, top: int, bottom: int) -> Block:
    return Block(tensor=name, rows=(top, bottom), cols=(0, COLUMNS), row=0, col=0)


def read_all(folder: str | Path) -> dict[str, torch.Tensor]:
    with CheckpointFolder(folder) as files:
        names = sorted(files.names)
        files.announce((name, 0, ROWS) for name in names)
        return {name: files.read(rows(name, 0, ROWS), torch.float32) for name in names}


def assert_same(folder: str | Path, expected: Path) -> None:
    found, wanted = read_all(folder), read_all(expected)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- ranges ----------------------------------------------------------------------------------------------


def test_a_rank_fetches_its_own_bytes_only(server, model):
    folder = Path(local_folder(server.url))
    assert (folder / "config.json").read_text() == (model / "config.json").read_text()
    assert (folder / "tokenizer_config.json").exists() and not (folder / "tokenizer.json").exists()
    assert has_weights(folder) and server.bytes_of(SHARDS[0]) == 0, "weights come when they are read"
    with CheckpointFolder(folder) as files, CheckpointFolder(model) as whole:
        assert files.shape("a.weight") == (ROWS, COLUMNS)
        half = rows("a.weight", ROWS // 2, ROWS)
        assert torch.equal(files.read(half, torch.float32), whole.read(half, torch.float32))
        assert server.bytes_of(SHARDS[0]) <= PART + ROWS * COLUMNS * 4 // 2 + PART
        assert server.bytes_of(SHARDS[1]) == PART, "the table of its tensors"
        assert torch.equal(torch.cat(list(files.rows("b.weight", 1000))), next(whole.rows("b.weight")))
    assert (folder / SHARDS[1]).exists() and not (folder / SHARDS[0]).exists()
    assert not server.repeated()


def test_what_is_announced_arrives_before_it_is_read(server):
    heard = []
    with CheckpointFolder(local_folder(server.url)) as files, arriving.telling(heard.append):
        files.announce([("a.weight", ROWS // 2, ROWS), ("no such tensor", 0, 1)])
        deadline = time.monotonic() + 10
        while server.bytes_of(SHARDS[0]) < ROWS * COLUMNS * 4 // 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not heard, "listeners are called by the thread that reads"
        files.read(rows("a.weight", ROWS // 2, ROWS), torch.float32)
        files.announce([("b.weight", 0, ROWS)])
    assert 0 < server.bytes_of(SHARDS[0]) < ROWS * COLUMNS * 4 and sum(heard) >= ROWS * COLUMNS * 2


def test_what_is_complete_is_not_fetched_again(server, model):
    folder = local_folder(server.url, whole=True)
    names = {path.name for path in Path(folder).iterdir()}  # no .incomplete, .parts or .source
    assert names == {path.name for path in model.iterdir()} | {"source.json", ".lock"}
    sent = sum(size for *_, size in server.answered if size > 1)
    assert local_folder(server.url) == folder and not server.repeated()
    assert sum(size for *_, size in server.answered if size > 1) == sent
    assert_same(folder, model)


def test_a_broken_download_goes_on_where_it_ended(server, model):
    folder = Path(local_folder(server.url))
    with CheckpointFolder(folder) as files:
        files.read(rows("a.weight", 0, ROWS // 2), torch.float32)
    arriving._opened.clear()  # as in another process
    assert_same(local_folder(server.url), model)
    assert not server.repeated()


def test_a_killed_process_leaves_what_it_had_and_no_lock(server, model):
    path = Path(local_folder(server.url)) / SHARDS[0]
    file = arriving.arriving(path)
    file.fetch(0, 2 * PART)
    server.open.clear()
    reader = start_reader(path)
    with CheckpointFolder(model) as whole:  # meanwhile
        expected = whole.read(rows("a.weight", 0, ROWS), torch.float32)
    time.sleep(0.3)  # it holds the locks of the parts that it waits for
    reader.kill()
    reader.wait()
    server.open.set()
    with CheckpointFolder(path.parent) as files:
        assert torch.equal(files.read(rows("a.weight", 0, ROWS), torch.float32), expected)
    assert (SHARDS[0], 0) not in server.repeated() and (SHARDS[0], PART) not in server.repeated()


READER = """
import sys
from parallel.weights.remote import arriving
from pathlib import Path
path = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
file = arriving.arriving(path)
if file: file.fetch(0, file.size)
print("complete" if path.exists() else "missing")
"""


def start_reader(path: Path) -> subprocess.Popen:
    """A process that fetches a file, once it has begun."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    reader = subprocess.Popen([sys.executable, "-c", READER, str(path)], **pipes)
    assert reader.stdout.readline() == "ready\n"
    reader.stdin.write("go\n")
    reader.stdin.flush()
    return reader


def test_two_processes_share_one_download(server, model):
    path = Path(local_folder(server.url)) / SHARDS[0]
    server.open.clear()
    readers = [start_reader(path) for _ in range(2)]
    server.open.set()
    assert [reader.communicate(timeout=30)[0] for reader in readers] == ["complete\n"] * 2
    assert not server.repeated() and path.read_bytes() == (model / SHARDS[0]).read_bytes()


# ---- servers with faults -----------------------------------------------------------------------------------


def test_a_server_without_ranges_will_do(server, model):
    server.has_ranges = False
    assert_same(local_folder(server.url), model)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_cut_connections_and_busy_servers_are_asked_again(server, model, has_ranges):
    server.has_ranges = has_ranges
    server.faults = {"config.json": [503], SHARDS[0]: [500], SHARDS[1]: [429]}
    folder = local_folder(server.url)
    server.faults = {SHARDS[0]: [0, 0], SHARDS[1]: [503, 0]}
    assert_same(folder, model)


def test_answers_that_stay_short_are_one_error(server):
    folder = local_folder(server.url)
    server.faults = {SHARDS[0]: [0] * 99}
    with pytest.raises(ValueError, match=f"{SHARDS[0]} cannot be read .*, tried 5 times; .* goes on"):
        read_all(folder)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"config.json": [404]}, "has no config.json that may be read; name the folder"),
        ({"config.json": [500] * 5}, "config.json cannot be read .status 500., tried 5 times"),
        ({"config.json": [401]}, "config.json: the server answers with status 401"),
        ({SHARDS[1]: [404]}, f"lacks {SHARDS[1]}; name a folder with"),
        ({"model.safetensors.index.json": [404]}, "lacks model.safetensors; name a folder with"),
    ],
)
def test_a_folder_that_cannot_be_had_is_one_error(server, faults, message):
    server.faults = faults
    config = TrainerConfig()
    config.actor.path = server.url
    with pytest.raises(ValueError, match=f"^actor.path='{server.url}': .*{message}"):
        fetch_models(config)


@pytest.mark.parametrize("weight_map", [{}, [1], None, {"a": 1}, {"a": ["x"]}, {"a": "../x.safetensors"}])
def test_an_index_that_is_none_is_refused(server, model, weight_map):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="index.json is no index of safetensors files"):
        local_folder(server.url)


def test_a_server_that_is_not_there_leaves_what_is_complete(model):
    with serving(model) as served:
        url, folder = served.url, local_folder(served.url)
    with socket.socket() as holder:  # so that no other program listens there
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", urlsplit(url).port))
        with pytest.raises(ValueError, match="cannot be read"):
            local_folder(url)
    with serving(model) as served:  # another port, the same folder of the cache
        for path in Path(folder).glob("*.source"):
            path.write_text(path.read_text().replace(url, served.url))
        assert_same(folder, model)
    assert local_folder(url) == folder


def test_a_file_that_changes_on_the_server_is_fetched_anew(server, model):
    folder = local_folder(server.url)
    save_file({"b.weight": torch.ones(ROWS, COLUMNS)}, model / SHARDS[1])
    with pytest.raises(ValueError, match="has changed on the server .*start again"):
        read_all(folder)
    assert_same(local_folder(server.url, whole=True), model)
    save_file({"b.weight": torch.zeros(ROWS, COLUMNS)}, model / SHARDS[1])
    assert_same(local_folder(server.url), model)


def test_hosts_with_different_versions_are_named(server, model):
    def fetched():
        config = TrainerConfig()
        config.actor.path = server.url
        return fetch_models(config)

    first = fetched()
    assert different_versions([first, fetched(), first]) == different_versions([[], []]) == []
    save_file({"b.weight": torch.ones(ROWS, COLUMNS)}, model / SHARDS[1])
    (problem,) = different_versions([first, first, fetched()])
    assert problem.startswith(f"actor.path='{server.url}' is not the same on all hosts: ")


def test_checksums_of_the_server_are_compared(server, model):
    digests = {name: hashlib.sha256((model / name).read_bytes()).hexdigest() for name in SHARDS}
    (model / "SHA256SUMS").write_text(f"{'0' * 64}  {SHARDS[0]}\n{digests[SHARDS[1]]} *{SHARDS[1]}\n")
    folder = local_folder(server.url)
    with pytest.raises(ValueError, match=f"{SHARDS[0]} has arrived with the SHA-256 {digests[SHARDS[0]]}"):
        read_all(folder)
    (model / "SHA256SUMS").write_text(f"{digests[SHARDS[0]]}  {SHARDS[0]}\n")
    with pytest.raises(ValueError, match="has arrived with"):  # the file is described as before
        read_all(local_folder(server.url))


def test_a_full_disk_is_one_error(server, monkeypatch):
    folder = local_folder(server.url)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(arriving.os, "pwrite", full)
    with pytest.raises(ValueError, match="its disk is full.; make room there, or .* VERL_MEGATRON_CACHE"):
        read_all(folder)


def test_a_cache_that_is_no_folder_is_one_error(server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VERL_MEGATRON_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="the cache folder .* VERL_MEGATRON_CACHE"):
        local_folder(server.url)


# ---- other paths -------------------------------------------------------------------------------------------


def test_other_file_systems_are_read_in_ranges(model):
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in model.iterdir():
        memory.pipe_file(f"/models/tiny/{path.name}", path.read_bytes())
    assert_same(local_folder("memory://models/tiny"), model)
    assert local_folder(f"file://{model}") == local_folder(str(model)) == str(model)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing://host/model", "cannot be read .*give a folder, a hub name such as"),
        ("http://127.0.0.1:9/model?token=1", "has a query or a fragment"),
        ("http://", "'http://' is no URL of a folder; give a folder"),
        ("https://[::1/model", r"is no URL \(Invalid IPv6 URL\); give a folder"),
        ("file://models/tiny", "names the host models; write file:///folder"),
        ("ftp://127.0.0.1:9/model", r"ftp://127.0.0.1:9/model cannot be reached \(.*refused\)"),
        ("github://host/model", "github://host/model cannot be read .*give a folder"),
        ("http://me:secret@127.0.0.1:9/model", ": http://127.0.0.1:9/model/config.json cannot be read"),
    ],
)
def test_urls_that_cannot_be_read(path, message):
    config = TrainerConfig()
    config.actor.path = path
    with pytest.raises(ValueError, match=message) as error:
        fetch_models(config)
    assert "secret" not in str(error.value) and "secret" not in str(folder_of(path))


def test_a_dry_run_takes_no_weights(server):
    local_folder(server.url, weights=False)
    assert not [name for name, *_ in server.answered if name.endswith(".safetensors")]


# ---- the hub -----------------------------------------------------------------------------------------------


def test_what_may_be_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    remote = ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B@v1.0", "https://host/x", "s3://bucket/x"]
    assert all(map(is_remote, remote))
    assert not any(map(is_remote, ["a/b", "model", "/a/b/c", "a/b/c", "./a/c", "../a", "llama3-8b", ""]))


def test_a_critic_that_the_algorithm_does_not_have_is_not_fetched():
    config = TrainerConfig()
    config.algorithm.name, config.critic.path = "grpo", "http://127.0.0.1:9/critic"
    assert fetch_models(config) == []


def test_without_a_network_the_message_has_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = TrainerConfig()
    config.actor.path, config.teacher.path = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B@v1"
    with pytest.raises(ValueError) as error:
        fetch_models(config)
    said = str(error.value)
    assert "fetch it into HF_HOME with: hf download Qwen/Qwen2.5-0.5B\n" in said + "\n"
    assert "hf download Qwen/Qwen2.5-7B --revision v1" in said


def test_a_model_of_the_hub_is_fetched_without_what_nobody_reads(monkeypatch, tmp_path, server, model):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (model / "pytorch_model.bin").write_bytes(b"not read")
    (model / "README.md").write_text("not read")
    folder = local_folder("Qwen/Tiny")
    assert folder.endswith(COMMIT) and not server.bytes_of("pytorch_model.bin")
    assert_same(folder, model)
    asked = len(server.answered)
    assert local_folder("Qwen/Tiny") == folder and len(server.answered) == asked
    assert {path.name for path in Path(folder).iterdir()} == {
        path.name for path in model.iterdir() if path.suffix not in (".bin", ".md")
    }


def test_a_model_in_the_hubs_cache_is_found(monkeypatch, tmp_path, model):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    home = tmp_path / "models--Qwen--Tiny"
    (home / "snapshots").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    model.rename(home / "snapshots" / commit)
    config = TrainerConfig()
    config.actor.path = "Qwen/Tiny"
    (found,) = fetch_models(config)
    assert config.actor.path == str(home / "snapshots" / commit) and found.version == commit
    assert str(found) == f"actor.path='Qwen/Tiny' is {config.actor.path}"
    assert len(read_all(config.actor.path)) == 2
