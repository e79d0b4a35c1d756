"""Idle time and its causes, and profiles of recurring phases, with the real torch.profiler."""

import json
import re

import torch

from verl_megatron.observe.metrics import PhaseTimer
from verl_megatron.observe.profiling import BETWEEN, PhaseProfiler, Span, idle_between, idle_lines, meanwhile

KERNELS = [
    Span(10, 20, "a"),
    Span(12, 15, "inside a"),
    Span(20, 22, "b"),
    Span(50, 60, "c"),
    Span(61, 70, "d"),
]
OPERATORS = [
    Span(0, 100, "step"),
    Span(25, 48, "aten::item"),
    Span(30, 45, "cudaStreamSynchronize"),
    Span(46, 47, "short"),
]


def test_the_gaps_between_kernels_are_named_after_those_that_end_them():
    assert idle_between(KERNELS) == [Span(22, 50, "c"), Span(60, 61, "d")]
    assert idle_between(KERNELS[:3]) == idle_between([]) == []


def test_idle_time_counts_for_the_innermost_operator():
    assert meanwhile(idle_between(KERNELS), OPERATORS) == {"cudaStreamSynchronize": 28, "step": 1}
    assert meanwhile(idle_between(KERNELS), OPERATORS[2:]) == {"cudaStreamSynchronize": 28, BETWEEN: 1}
    assert meanwhile([Span(46.2, 46.4, "x"), Span(47.5, 47.7, "y")], OPERATORS).keys() == {
        "short",
        "aten::item",
    }


def test_the_text_says_how_long_the_gpu_was_idle():
    first, *rest = idle_lines(KERNELS, OPERATORS)
    assert "0.000 s of 0.000 (48.3%), 2 times" in first and [line.split()[-1] for line in rest] == [
        "cudaStreamSynchronize",
        "step",
    ]


def test_a_phase_is_profiled_the_second_time_it_comes_and_for_so_long(tmp_path):
    clock, profiler = PhaseTimer(), PhaseProfiler(tmp_path / "profile", 3, seconds=0.05)
    clock.enter(profiler.around)
    ones, products = torch.ones(8, 8), {"long": 0}
    for _ in range(3):
        with clock.phase("short"):
            ones @ ones
            profiler.beat()
        with clock.phase("long"):
            while profiler._stop is not None or not products["long"]:
                ones + ones
                products["long"] += 1
                profiler.beat()
            ones @ ones
    assert sorted(path.name for path in profiler.folder.iterdir()) == [
        "long_rank3.json",
        "long_rank3.txt",
        "short_rank3.json",
        "short_rank3.txt",
    ]
    text = (profiler.folder / "short_rank3.txt").read_text()
    assert re.match(r"short on rank 3, the first \d+\.\d\d? s", text) and "aten::mm" in text
    text = (profiler.folder / "long_rank3.txt").read_text()
    assert "aten::add" in text and "aten::mm" not in text, "the profile goes on after its time"
    assert json.loads((profiler.folder / "long_rank3.json").read_text())["traceEvents"]
    assert set(clock.pop()) == {"short", "long", "other"}
