"""The command `report`, and what a report says of the starts and the settings of runs."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
import yaml

from tests.reported_runs import ILLNESSES, data_in, healthy_rows, starts_of, write_run
from verl_megatron.commands import COMMANDS, main
from verl_megatron.observe.destination import replace_text
from verl_megatron.observe.report.alarms import find_alarms
from verl_megatron.observe.report.page import render
from verl_megatron.observe.report.record import read_run

# ---- the command ------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_prints_alarms(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = healthy_rows(60)
    ILLNESSES["cut responses"](rows)
    for name, content in (("one", rows), ("two", healthy_rows(60, seed=2))):
        write_run(tmp_path / name, content)
    assert main(["report", "one"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one: cut responses, iterations 39 to 60: 40 % of the responses end at rollout.max_tokens, "
        "without an answer (limit 25 %)",
        "wrote one/report.html",
    ]
    assert main(["report", "one", "two"]) == 0 and main(["report", "two", "--output", "of two.html"]) == 0
    assert data_in(Path("report.html").read_text(encoding="utf-8"))["runs"][1]["name"] == "two"
    assert "<title>two" in Path("of two.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is no folder of a run"),
        (
            ["run", "--output", "no/such/folder/report.html"],
            "cannot be written: name a file in a folder that exists",
        ),
        (["run", "--output", "run"], "--output run cannot be written: name a file"),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", healthy_rows(3))
    with pytest.raises(ValueError, match=re.escape(said)):
        COMMANDS["report"].load()(arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# ---- the record of a run ----------------------------------------------------------------------------------


def test_the_record_tells_how_starts_ended_and_where_they_went_on(tmp_path):
    folder = write_run(tmp_path, healthy_rows(40))
    starts = starts_of(("error", "ValueError: no <room>"), ("stuck", "rank 3 made no progress"), ("", ""))
    (folder / "run.json").write_text(json.dumps(starts))
    run = read_run(folder)
    assert [(alarm.name, alarm.is_over) for alarm in find_alarms(run)] == [
        ("failed", True),
        ("stalled", True),
    ]
    html = render([run])
    assert "start 1 ended: ValueError: no &lt;room&gt;" in html.replace("Start", "start")
    assert data_in(html)["runs"][0]["resumed"] == [10, 20] and "40 of 60" in html
    for fact in (
        "4 on worker-0",
        "actor tp2pp2",
        "torch 2.13.0",
        "abc, with changes",
        "actor.lr: 1e-06 → 2e-06",
    ):
        assert fact in html
    (folder / "run.json").write_text(json.dumps(starts_of(("done", "all"))))
    assert find_alarms(read_run(folder)) == [] and ">done<" in render([read_run(folder)])


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 100_000, '[{"number": "1"}]', '[{"number": NaN}]'])
def test_a_record_that_no_run_has_written_is_left_out(tmp_path, text):
    folder = write_run(tmp_path, healthy_rows(3))
    (folder / "run.json").write_text(text)
    run = read_run(folder)
    assert run.starts == [] and "run.json is no list of a run's starts and is left out" in run.notes


def test_fields_of_a_record_may_be_anything(tmp_path):
    folder = write_run(tmp_path, healthy_rows(3))
    fields = list(starts_of(("done", ""))[0]) + ["launcher"]
    for value in ([1], {"a": None}, "<b>", -1, None, True):
        (folder / "run.json").write_text(json.dumps([{**dict.fromkeys(fields, value), "number": 1}]))
        assert "<b>" not in render([read_run(folder)])


def test_settings_that_differ_are_shown_for_several_runs(tmp_path):
    for name, lr in (("one", 1e-6), ("two", 2e-6), ("damaged", None), ("none", 0)):
        folder = write_run(tmp_path / name, healthy_rows(3))
        settings = {"run": {"output_dir": name, "seed": 1}, "actor": {"lr": lr}}
        settings |= {"critic": {"lr": 1e-5}} if name == "one" else {}  # another kind of run has none
        if lr != 0:
            (folder / "config.yaml").write_text(yaml.safe_dump(settings) if lr else "{: [")
    html = render([read_run(tmp_path / name) for name in ("one", "two", "damaged", "none")])
    rows = re.findall(r'<tr><th scope="row">([a-z]+\.[a-z_]+)</th>(.*?)</tr>', html)
    assert rows == [("actor.lr", "<td>1e-06</td><td>2e-06</td><td>–</td><td>–</td>")]


# ---- damaged folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"traceEvents": 3}', "\x00"])
def test_a_timeline_that_no_run_has_written_is_left_out(tmp_path, text):
    folder = write_run(tmp_path, healthy_rows(3))
    (folder / "timeline.json").write_text(text)
    run = read_run(folder)
    assert run.timeline is None and "timeline.json is no timeline and is left out" in run.notes


def test_files_larger_than_any_run_writes_are_not_read(tmp_path):
    folder = write_run(tmp_path, healthy_rows(3))
    for name in ("timeline.json", "samples/step_3.jsonl"):
        os.truncate(folder / name, 2**33)
    notes = " ".join(read_run(folder).notes)
    assert "timeline.json is no timeline" in notes and "step_3.jsonl cannot be read (File too large)" in notes
    os.truncate(folder / "metrics.jsonl", 2**33)
    with pytest.raises(ValueError, match="metrics.jsonl cannot be read .*File too large"):
        read_run(folder)


@pytest.mark.parametrize("value", [10**400, -(2**70)])
@pytest.mark.parametrize("key", ["score", "logprobs", "rollout_logprobs"])
def test_samples_with_numbers_beyond_those_of_a_float_are_left_out(tmp_path, key, value):
    folder = write_run(tmp_path, healthy_rows(3))
    path = folder / "samples" / "step_3.jsonl"
    first, *others = path.read_text().splitlines()
    row = json.loads(first)
    row[key] = value if key == "score" else [value, *row[key][1:]]
    path.write_text("\n".join([json.dumps(row), *others]) + "\n")
    run = read_run(folder)
    assert "1 lines of samples/step_3.jsonl are no samples" in run.notes and render([run])


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    device = tmp_path / "device"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device takes root")
    with pytest.raises(OSError, match="it is a device"):
        replace_text(device, "text")
    with pytest.raises(ValueError, match="cannot be written"):
        COMMANDS["report"].load()(
            [str(write_run(tmp_path / "run", healthy_rows(3))), "--output", str(device)]
        )
    assert device.is_char_device() and not list(tmp_path.glob("*.new"))
