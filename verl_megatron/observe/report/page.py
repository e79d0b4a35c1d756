"""The HTML file of a report: everything in one file, nothing from the network, no text that is code."""

import base64
import functools
import hashlib
import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_megatron.observe.metrics import PhaseEvent
from verl_megatron.observe.report.alarms import find_alarms, iterations_of
from verl_megatron.observe.report.figures import STACKED, Figure, figures_of, labels_of
from verl_megatron.observe.report.record import RunRecord
from verl_megatron.observe.report.rules import Alarm
from verl_megatron.observe.report.samples import Group
from verl_megatron.observe.report.starts import settings_apart
from verl_megatron.observe.report.summary import facts, summary
from verl_megatron.observe.report.thinning import thinned
from verl_megatron.observe.timeline import RankPhases, Timeline
from verl_megatron.observe.tracking import replace_text

REPORT_FILE = "report.html"
MAX_RANKS = 128  # of a timeline
HERE = Path(__file__).parent


def write_report(path: Path, runs: Sequence[RunRecord]) -> None:
    """Write the report of these runs atomically.

    Raises:
        ValueError: plotly is not installed.
    """
    replace_text(path, render(runs))


def render(runs: Sequence[RunRecord]) -> str:
    """Return the HTML text of a report."""
    runs = with_own_names(runs)
    alarms = [find_alarms(run) for run in runs]
    plots = plots_of(runs)
    sections: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, plot in enumerate(plots):
        sections.setdefault(plot["section"], []).append((number, plot))
    return _template().render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs,
        alarms=list(zip(runs, alarms)),
        iterations_of=iterations_of,
        num_alarms=sum(map(len, alarms)),
        summary=summary(runs),
        facts=facts(runs),
        apart=settings_apart([run.folder for run in runs]) if len(runs) > 1 else [],
        sections=sections,
        timelines=[number for number, run in enumerate(runs) if run.timeline],
        has_groups=any(run.groups for run in runs),
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        data=embedded({"runs": list(map(data_of, runs, alarms)), "plots": plots}),
        plotly=_plotly(),
        script=_own_script(),
        script_digests=[_digest(_plotly()), _digest(_own_script())],
        style=(HERE / "page.css").read_text(encoding="utf-8"),
    )


def with_own_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with a name that no other has: the second "ppo" becomes "ppo (2)"."""
    named: list[RunRecord] = []
    for run in runs:
        taken, name, number = {other.name for other in named}, run.name, 2
        while name in taken:
            name, number = f"{run.name} ({number})", number + 1
        named.append(replace(run, name=name))
    return named


def plots_of(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the plots: a figure with the curves of all runs, or one for each run where they are stacked."""
    figures = figures_of(key for run in runs for key in run.series)
    everyone = list(range(len(runs)))
    plots = []
    for figure in figures:
        for members in [[number] for number in everyone] if figure.kind == STACKED else [everyone]:
            of_run = f": {runs[members[0]].name}" if figure.kind == STACKED and len(runs) > 1 else ""
            if any(key in runs[number].series for number in members for key in figure.metrics):
                plots.append(_plot(figure, members, of_run))
    return plots


def _plot(figure: Figure, members: list[int], of_run: str) -> dict[str, Any]:
    return {
        "section": figure.section,
        "title": figure.title + of_run,
        "unit": figure.unit,
        "note": figure.note,
        "kind": figure.kind,
        "from_zero": figure.from_zero,
        "runs": members,
        "curves": list(zip(figure.metrics, labels_of(figure.metrics))),
    }


def data_of(run: RunRecord, alarms: Sequence[Alarm]) -> dict[str, Any]:
    """Return what the page's script reads of a run. Metrics of the same iterations share these."""
    places: dict[tuple[int, ...], int] = {}
    series = {}
    for key, curve in run.series.items():
        small = thinned(curve)
        series[key] = [places.setdefault(tuple(small.steps), len(places)), small.values]
    return {
        "name": run.name,
        "steps": list(places),
        "series": series,
        "resumed": [start.resumed_from for start in run.starts if start.resumed_from],
        "alarms": [
            {"name": alarm.name, "metric": alarm.metric, "first": alarm.first, "last": alarm.last}
            for alarm in alarms
            if alarm.metric and alarm.first is not None
        ],
        "timeline": timeline_data(run.timeline) if run.timeline else None,
        "groups": [group_data(group) for group in run.groups],
    }


def timeline_data(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the phases of ranks: all, or of each world the first ones."""
    worlds: dict[str, list[RankPhases]] = {}
    for each in timeline.ranks:
        worlds.setdefault(each.world, []).append(each)
    most = max(1, MAX_RANKS // max(len(worlds), 1))
    shown = [each for ranks in worlds.values() for each in ranks[:most]]
    return [
        {"rank": each.rank, "world": each.world, "events": list(map(event_data, each.events))}
        for each in shown
    ]


def event_data(event: PhaseEvent) -> list[Any]:
    """Return name, start, end of work and end of a phase, in seconds."""
    return [event.name, round(event.start_s, 4), round(event.busy_end_s, 4), round(event.end_s, 4)]


def group_data(group: Group) -> dict[str, Any]:
    """Return a group of samples for the page's script, without fields that are empty."""
    samples = [
        {
            "step": sample.step,
            "response": sample.response,
            "score": sample.score,
            "cut": sample.is_cut,
            "tokens": sample.tokens,
            "logprobs": sample.logprobs,
            "gaps": sample.gaps,
            "left_out": sample.left_out,
        }
        for sample in group.samples
    ]
    return {"source": group.source, "prompt": group.prompt, "answer": group.answer, "samples": samples}


def embedded(value: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: it has no `<`, `>`, `&` and nothing beyond ASCII."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # U+2028 and its like are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


@functools.cache
def _own_script() -> str:
    return (HERE / "page.js").read_text(encoding="utf-8")


@functools.cache
def _plotly() -> str:
    """Return plotly.js, which the Python package plotly holds; the package itself is not imported.

    Raises:
        ValueError: plotly is not installed, or holds no plotly.js.
    """
    found = importlib.util.find_spec("plotly")
    places = found.submodule_search_locations if found else None
    path = Path(places[0], "package_data", "plotly.min.js") if places else None
    if path is None or not path.is_file():
        raise ValueError(f"{REPORT_FILE} needs the package plotly for its plots; pip install 'plotly>=6,<8'")
    script = path.read_text(encoding="utf-8")
    assert "</script" not in script.lower(), f"{path} would end its script element"
    return script


@functools.cache
def _digest(script: str) -> str:
    """Return the digest by which the page's policy knows a script; any other is not run."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
