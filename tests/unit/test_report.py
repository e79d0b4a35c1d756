"""The report's file: what it holds of one or several runs, damaged folders, and text that would be code."""

import importlib.util
import json
import math
import os
import re
import time

import pytest

from tests.reported_runs import HOSTILE, SEPARATORS, data_in, healthy_rows, starts_of, write_run
from verl_megatron.lifecycle.base_trainer import BaseTrainer
from verl_megatron.observe.report import page
from verl_megatron.observe.report.figures import figures_of
from verl_megatron.observe.report.page import embedded, render, write_report
from verl_megatron.observe.report.record import RunRecord, Series, read_run, series_of
from verl_megatron.observe.report.samples import MAX_TOKENS, read_groups, spread_out
from verl_megatron.observe.report.sink import ReportWriter
from verl_megatron.observe.report.thinning import thinned
from verl_megatron.observe.tracking import MetricsTracker


def without_plotly(html: str) -> str:
    return html.replace(page._plotly(), "")


def test_a_report_has_every_metric_sample_and_rank(tmp_path):
    rows = healthy_rows(40)
    html = render([read_run(write_run(tmp_path / "run", rows))])
    (run,) = data_in(html)["runs"]
    assert run["series"].keys() == {key for row in rows for key in row} - {"step"}
    steps, values = run["series"]["kl/ref"]
    assert run["steps"][steps] == list(range(1, 41))
    assert values == pytest.approx([row["kl/ref"] for row in rows[1:]], rel=1e-5)
    assert [len(rank["events"]) for rank in run["timeline"]] == [6] * 8
    training = [group for group in run["groups"] if group["source"] == "training"]
    assert [group["samples"][0]["step"] for group in training] == [40, 40, 20, 20, 1, 1]
    first = training[0]["samples"][0]
    assert len(first["tokens"]) == len(first["gaps"]) == len(first["logprobs"])
    validation = [group for group in run["groups"] if group["source"] == "validation"]
    assert [sample["step"] for sample in validation[0]["samples"]] == [1, 20, 40]
    titles = re.findall(r'<span class="name">([^<]+)</span>', html)
    for title in (
        "Reward",
        "Validation",
        "Entropy",
        "Phases of an iteration",
        "Weight sync: bytes",
        "reward/format",
    ):
        assert title in titles
    assert "data-metric" not in html.split("<style>")[0] and "None." in html


def test_nothing_is_loaded_and_only_our_scripts_run(tmp_path):
    html = without_plotly(render([read_run(write_run(tmp_path / "run", healthy_rows(3)))]))
    assert not re.findall(r'(?:src|href)="(?!#)', html) and "@import" not in html and "url(" not in html
    assert "default-src 'none'" in html and "unsafe-eval" not in html
    assert html.count("<script") == html.count("</script>") == 3
    assert "innerHTML" not in page._own_script() and "insertAdjacentHTML" not in page._own_script()


def test_text_of_a_run_is_never_code(tmp_path):
    folder = write_run(tmp_path / "a<b>&\"'", healthy_rows(3), hostile=True)
    name = f"reward/{HOSTILE}"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, name: 1.0}) + "\n")
    html = without_plotly(render([read_run(folder)]))
    assert HOSTILE not in html and "<img" not in html
    assert html.count("<script") == 3 and "<!--" not in html
    run = data_in(html)["runs"][0]
    assert run["name"] == "a<b>&\"'" and name in run["series"]
    tokens = next(sample["tokens"] for sample in run["groups"][0]["samples"] if HOSTILE in sample["tokens"])
    assert SEPARATORS in tokens


@pytest.mark.parametrize("text", ["</script>", "<!--", "<![CDATA[", "\u2028\u2029", "&lt;", "\0", "\ud800"])
def test_embedded_json_has_no_character_that_means_something(text):
    written = embedded({text: text})
    assert written.isascii() and written.isprintable() and not set("<>&") & set(written)
    assert json.loads(written) == {text: text}


def test_several_runs_share_plots_and_have_names_of_their_own(tmp_path):
    one = read_run(write_run(tmp_path / "one" / "ppo", healthy_rows(30)))
    other = read_run(write_run(tmp_path / "two" / "ppo", healthy_rows(20, seed=2)))
    sft = RunRecord(name="sft", series=series_of([{"step": 1, "sft/loss": 2.0, "time/update_s": 1.0}]))
    html = render([one, other, sft])
    data = data_in(html)
    assert [run["name"] for run in data["runs"]] == ["ppo", "ppo (2)", "sft"]
    reward = next(plot for plot in data["plots"] if plot["title"] == "Reward")
    assert reward["runs"] == [0, 1, 2]
    phases = [plot["title"] for plot in data["plots"] if plot["kind"] == "stacked"]
    assert phases == [f"Phases of an iteration: {name}" for name in ("ppo", "ppo (2)", "sft")]
    assert (
        "<title>3 runs" in html
        and html.count('<tr><th scope="row">iterations</th><td>30</td><td>20</td>') == 1
    )


@pytest.mark.parametrize(
    ("rows", "titles"),
    [
        (
            [{"step": 1, "sft/loss": 2.0, "policy/grad_norm": 1.0, "validation/loss": 2.1}],
            ["Loss", "Gradient norm"],
        ),
        (
            [
                {
                    "step": 1,
                    "dpo/loss": 0.7,
                    "dpo/accuracy": 0.5,
                    "dpo/margin": 0.1,
                    "validation/accuracy": 0.5,
                }
            ],
            ["Loss", "Pairs in the right order", "Rewards of pairs"],
        ),
        ([{"step": 1, "reward_model/loss": 0.7, "reward_model/grad_norm": 1.0}], ["Loss", "Gradient norm"]),
        ([{"step": 1, "my/metric": 0.7}], ["my/metric"]),
        ([], []),
    ],
)
def test_any_kind_of_run_has_its_plots(rows, titles):
    run = RunRecord(name="run", series=series_of(rows))
    assert [figure.title for figure in figures_of(run.series)] == titles
    html = render([run])
    assert all(title in html for title in titles) and ("No iteration has ended yet" in html) == (not rows)


def test_no_metric_is_in_two_plots():
    keys = list(series_of(healthy_rows(30)))
    shown = [key for figure in figures_of(keys) for key in figure.metrics]
    assert len(shown) == len(set(shown)) and set(keys) - set(shown) == {"train/step_time_ms"}


# ---- folders that are not whole ---------------------------------------------------------------------------


def test_a_cut_line_and_lines_of_something_else_are_left_out_and_told(tmp_path):
    folder = write_run(tmp_path, healthy_rows(5))
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "garbage", '{"step": -1}', *lines[3:]])[:-7])
    (folder / "timeline.json").write_text("{")
    (folder / "samples" / "step_1.jsonl").write_text('{"sample": 1}\nnull\n{"prompt": ' + "[" * 50_000 + "\n")
    (folder / "samples" / "step_2.jsonl").write_bytes(b"\xff\n")
    run = read_run(folder)
    assert run.last_step == 4
    assert run.notes == [
        "2 lines of metrics.jsonl are no rows of metrics and are left out",
        "timeline.json is no timeline and is left out",
        "1 lines of samples/step_2.jsonl are no samples",
        "3 lines of samples/step_1.jsonl are no samples",
    ]
    html = render([run])
    assert all(note in html for note in run.notes)


def test_names_that_are_no_text_are_escaped(tmp_path):
    folder = write_run(tmp_path / os.fsdecode(b"\xff"), [{"step": 1, "a/\ud800": 1.0}])
    write_report(folder / "report.html", [read_run(folder)])
    assert r"a/\ud800" in (folder / "report.html").read_text(encoding="utf-8")


BAD = {
    "tokens": [1],
    "logprobs": ["x"],
    "rollout_logprobs": [],
    "score": "1",
    "response": None,
    "group": 0.5,
    "sample": True,
}


@pytest.mark.parametrize("field", BAD)
def test_a_sample_with_a_field_of_another_type_is_left_out(tmp_path, field):
    row = {"sample": 0, "group": 0, "prompt": "p", "response": "r", "score": 1.0}
    row |= {"tokens": ["r"], "logprobs": [-1.0], "rollout_logprobs": [None]}
    (tmp_path / "samples").mkdir()
    lines = [json.dumps(row), json.dumps(row | {field: BAD[field]})]
    (tmp_path / "samples" / "step_1.jsonl").write_text("\n".join(lines) + "\n")
    notes = []
    (group,) = read_groups(tmp_path, last_step=1, notes=notes)
    assert notes == ["1 lines of samples/step_1.jsonl are no samples"]
    (sample,) = group.samples
    assert sample.tokens == ["r"] and sample.gaps == [None]


def test_a_folder_without_metrics_is_refused_and_an_empty_run_is_shown(tmp_path):
    with pytest.raises(
        ValueError, match=r"is no folder of a run: it has no metrics\.jsonl; name a run\.output_dir"
    ):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert "No iteration has ended yet" in render([read_run(tmp_path)])


def test_of_an_iteration_that_occurs_twice_the_later_row_counts():
    rows = [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0},
        {"step": 3, "a": 3.0},
        {"step": 2, "a": 20.0, "b": 1.0},
    ]
    assert series_of(rows) == {"a": Series([1, 2, 3], [1.0, 20.0, 3.0]), "b": Series([2], [1.0])}
    assert series_of([{"step": 1, "a": math.inf}, {"step": 2, "a": None}])["a"].values == [None, None]


def test_samples_after_the_last_iteration_are_of_another_run(tmp_path):
    folder = write_run(tmp_path, healthy_rows(9))
    write_run(folder, healthy_rows(4))
    steps = {sample.step for group in read_run(folder).groups for sample in group.samples}
    assert steps == {1, 2, 4}


def test_what_is_long_is_thinned_but_keeps_its_ends(tmp_path):
    values = [math.sin(place / 500) for place in range(20_000)]
    values[777], values[888] = 5.0, None
    small = thinned(Series(list(range(20_000)), values))
    assert len(small.steps) <= 5_000 and small.steps == sorted(set(small.steps))
    assert (
        5.0 in small.values
        and None in small.values
        and min(x for x in small.values if x is not None) < -0.999
    )
    assert spread_out(list(range(100)), 5) == [0, 25, 50, 74, 99]
    (tmp_path / "samples").mkdir()
    for step in range(1, 9):
        count = MAX_TOKENS // 3 if step > 1 else 10
        row = {"sample": 0, "group": 0, "prompt": "p" * 30_000, "response": "", "score": 1.0}
        row |= {"tokens": ["x"] * count, "logprobs": [-1.0] * count, "rollout_logprobs": [-1.0] * count}
        (tmp_path / "samples" / f"step_{step}.jsonl").write_text(json.dumps(row) + "\n")
    groups = read_groups(tmp_path, last_step=8, notes=[])
    tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
    assert groups[0].samples[0].step == 8 and tokens <= MAX_TOKENS and len(groups[0].prompt) < 21_000
    assert groups[0].samples[0].left_out == MAX_TOKENS // 3 - 2_000


# ---- while a run goes on ----------------------------------------------------------------------------------


def test_the_file_is_there_after_the_first_row_and_complete_at_the_end(tmp_path):
    with MetricsTracker(tmp_path, ["report", "jsonl"], total_steps=3) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        html = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "at work" in html and "1 of 3" in html
        tracker.log(2, {"reward/mean": math.nan})
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "at work" not in html and "2 of 3" in html and "<h4>NaN</h4>" in html
    with MetricsTracker(tmp_path, ["jsonl", "report"], total_steps=3, first_step=2) as tracker:
        tracker.log(2, {"reward/mean": 0.75})
    (run,) = data_in((tmp_path / "report.html").read_text(encoding="utf-8"))["runs"]
    assert run["steps"] == [[1, 2]] and run["series"]["reward/mean"] == [0, [0.5, 0.75]]
    assert not list(tmp_path.glob("*.new"))


def test_a_run_that_fails_leaves_a_report_of_its_failure(tmp_path):
    trainer = BaseTrainer.__new__(BaseTrainer)
    with pytest.raises(RuntimeError, match="out of luck"), trainer._closing_metrics():
        trainer.tracker = MetricsTracker(tmp_path, ["report"], total_steps=3)
        trainer.tracker.log(1, {"reward/mean": 0.5})
        (tmp_path / "run.json").write_text(json.dumps(starts_of(("error", "out of luck"))))
        raise RuntimeError("out of luck")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "while the run was at work" not in html and "<h4>failed</h4>" in html and "out of luck" in html


def test_writing_takes_a_bounded_share_of_the_time(tmp_path):
    writer = ReportWriter(tmp_path, healthy_rows(500), total_steps=600)
    written = []
    begin = time.perf_counter()
    for step in range(501, 601):
        writer.add(step, {"reward/mean": 0.5})
        written.append((tmp_path / "report.html").stat().st_mtime_ns)
    assert len(set(written)) == 1, "the next version is not due within these milliseconds"
    seconds = time.perf_counter() - begin
    print(f"{seconds:.3f} s for a report of 500 iterations, {1e3 * seconds / 100:.2f} ms an iteration")
    assert writer._due_at - time.monotonic() > 15


def test_without_plotly_a_run_says_so_once_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    page._plotly.cache_clear()
    writer = ReportWriter(tmp_path, [], total_steps=3)
    for step in (1, 2, 3):
        writer.add(step, {"reward/mean": 0.5})
    writer.write(at_work=False)
    said = capsys.readouterr().out
    assert (
        said.count("needs the package plotly") == 1 and "pip install" in said and not list(tmp_path.iterdir())
    )
    with pytest.raises(ValueError, match="needs the package plotly"):
        write_report(tmp_path / "report.html", [RunRecord(name="run", series={})])
