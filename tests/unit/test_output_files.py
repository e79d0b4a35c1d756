"""Options that name a file to write: what is read stays as it is."""

import re

import pytest

from verl_megatron.commands import COMMANDS
from verl_megatron.launch.options import check_output

ROW = '{"prompt": "a", "answer": "b"}\n'


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("model/config.json", "run/metrics.jsonl", "a.jsonl", "b.jsonl", "reward.py"):
        (tmp_path / name).write_text(ROW)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to("a.jsonl")
    (tmp_path / "hard.json").hardlink_to("model/config.json")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate model a.jsonl --out a.jsonl", "--out a.jsonl is a.jsonl, which is read"),
        ("generate model a.jsonl --out link.jsonl", "--out link.jsonl is a.jsonl, which is read"),
        ("generate model a.jsonl --out hard.jsonl", "--out hard.jsonl is a.jsonl, which is read"),
        ("generate model a.jsonl --out hard.json", "--out hard.json is a file of model"),
        ("generate model a.jsonl,b.jsonl --out b.jsonl", "--out b.jsonl is b.jsonl, which is read"),
        ("generate model a.jsonl --out model/config.json", "--out model/config.json is a file of model"),
        ("evaluate model a.jsonl --reward reward.py:f --out reward.py", "--out reward.py is reward.py"),
        ("report run --output run/metrics.jsonl", "--output run/metrics.jsonl must end in .html"),
        ("report run --output a.jsonl", "--output a.jsonl must end in .html"),
        (
            "plan --model model --gpus 1 --json model/config.json",
            "--json model/config.json is model/config.json",
        ),
        (
            "reshard-plan --hf model --train tp1 --rollout tp1 --json model/config.json",
            "--json model/config.json is model/config.json",
        ),
    ],
)
def test_a_file_that_is_read_is_not_written(files, line, said, capsys):
    command, *arguments = line.split()
    with pytest.raises((ValueError, SystemExit)) as refused:
        COMMANDS[command].load()(arguments)
    assert said in str(refused.value) + capsys.readouterr().err
    assert all(path.read_text() == ROW for path in files.rglob("*.*") if path.is_file())


def test_other_files_are_written(files):
    check_output("--out", "model-2.jsonl", inputs=["model", "a.jsonl", "gone"])
    check_output("--out", "model/new.jsonl", inputs=["model"])
    check_output("--out", "b.jsonl", inputs=["a.jsonl"])


def test_too_long_a_name_is_called_so(files):
    with pytest.raises(
        ValueError, match=r"a.jsonl cannot be written \(File name too long\): name another file"
    ):
        check_output("--out", "a" * 252 + ".jsonl")


def test_a_copied_script_leaves_changed_files_as_they_are(files):
    copy = COMMANDS["recipes"].load()
    assert copy(["copy", "quickstart.sh", "mine"]) == 0
    assert copy(["copy", "sft.sh", "mine"]) == 0  # the files that both start are the same
    changed = files / "mine" / "launch" / "local.sh"
    changed.write_text("mine\n")
    with pytest.raises(ValueError, match=re.escape("mine/launch/local.sh exists already; remove it")):
        copy(["copy", "llama3_8b_ppo.sh", "mine"])
    assert changed.read_text() == "mine\n"
