"""Arithmetic of the scaling benchmark: bubbles, FLOPs, efficiency, smaller layouts, larger sizes."""

from copy import deepcopy
from dataclasses import replace
from math import log2
from types import SimpleNamespace

import pytest

from parallel.layout import Layout
from tests.scaled import PHASES, row_on, run_on, scaling_of
from verl_megatron.benchmarks.scaling.command import CPU_LINKS, planner_of
from verl_megatron.benchmarks.scaling.model import (
    DEALING,
    Dealing,
    Scaling,
    dealing_seconds,
    fit,
    gradient_seconds,
    terms_of,
)
from verl_megatron.benchmarks.scaling.rows import (
    MODELLED,
    UPDATES,
    bubble_share,
    bubbles_of,
    efficiency,
    ideal_seconds,
)
from verl_megatron.benchmarks.scaling.runs import architecture, layout_for
from verl_megatron.planner.machine import MACHINES
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.training import forward_flops


def idle_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Bubble of a stage by simulation: groups of `stages` micro-batches go through all chunks in turn."""
    order = [
        (first + i, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for i in range(min(stages, micro_batches - first))
    ]
    ended: dict[tuple[int, int, int], float] = {}
    free = [0.0] * stages
    pending = [list(order) for _ in range(stages)]
    while any(pending):
        for stage in range(stages):
            if not pending[stage]:
                continue
            micro, chunk = pending[stage][0]
            before = (micro, chunk, stage - 1) if stage else (micro, chunk - 1, stages - 1)
            if before[1] >= 0 and before not in ended:
                continue
            free[stage] = ended[micro, chunk, stage] = max(free[stage], ended.get(before, 0.0)) + 1
            pending[stage].pop(0)
    return 1 - len(order) / max(free)


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(1, 1, 3), (2, 1, 1), (2, 1, 5), (4, 1, 8), (4, 2, 8), (2, 2, 6), (4, 4, 16)]
)
def test_the_bubble_is_what_a_pipeline_played_through_leaves_idle(pp, vpp, count):
    layout = Layout(pp=pp, vpp=vpp, ranks=tuple(range(pp)))
    assert bubble_share(layout, count) == pytest.approx(idle_share(pp, vpp, count))


def test_actor_and_reference_go_through_one_pipeline_together():
    alone = run_on(4, "pp4")
    with_reference = replace(
        alone, roles=(*alone.roles, replace(alone.actor, name="reference", trainable=False))
    )
    count = 4 * with_reference.micro_batches(with_reference.actor)[0]
    assert [bubbles_of(run)["log_probs"] for run in (with_reference, alone)] == pytest.approx(
        [3 / (2 * count + 3), 3 / (count + 3)]
    )
    assert (
        len({dealing_seconds(run, lambda rows, dp: 1.0) for run in (with_reference, alone)}) == 1
    )  # they take the same rows


def test_flops_are_two_for_each_weight_and_token_and_those_of_causal_pairs():
    run = run_on(4, "tp2pp2", prompts=8)
    arch, tokens = run.actor.arch, 8 * 1023
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    weights = arch.num_layers * (2 * queries + 2 * keys + 3 * arch.intermediate_size) * arch.hidden_size
    pairs = 8 * sum(position + 1 for position in range(1023))
    expected = (
        2 * weights * tokens
        + arch.num_layers * 4 * queries * pairs
        + 2 * 8 * 512 * arch.hidden_size * arch.vocab_size
    )
    assert forward_flops(run, run.actor) == pytest.approx(expected, rel=1e-3)
    row = row_on(run, dict.fromkeys(PHASES, 2.0))
    assert row.flops_per_s_gpu(("log_probs",)) == pytest.approx(expected / 2 / 4, rel=1e-3)
    assert row.flops_per_s_gpu(("actor_update",)) == pytest.approx(
        3 * expected / 2 / 4, rel=1e-3
    )  # a backward pass is twice a forward pass


def test_efficiency_is_one_for_a_linear_speed_up_and_the_ideal_leaves_out_what_is_no_work():
    one, four = run_on(1, "tp1", prompts=16), run_on(4, "tp1", prompts=64)
    seconds = dict(zip(PHASES, (1.0, 4.0, 0.5, 0.25, 2.0, 1.0, 0.25, 3.0, 4.0)))
    first, same = row_on(one, seconds), row_on(four, seconds)
    assert efficiency(first, first) == 1.0 and efficiency(same, first) == pytest.approx(1.0)
    assert efficiency(
        row_on(four, {phase: 2 * each for phase, each in seconds.items()}), first
    ) == pytest.approx(0.5)
    assert first.tokens_per_s_gpu == 16 * 1024 / 16.0
    assert (
        ideal_seconds(first, first) == ideal_seconds(same, first) == 14.0
    )  # rollout, log-probs, values and updates
    staged = row_on(run_on(2, "pp2", prompts=32), seconds)
    bubbles = bubbles_of(run_on(2, "pp2", prompts=32))
    assert ideal_seconds(staged, staged) == pytest.approx(
        4 + sum(seconds[phase] * (1 - share) for phase, share in bubbles.items())
    )
    assert bubbles["log_probs"] < bubbles["actor_update"] and staged.bubble > 0 == first.bubble


@pytest.mark.parametrize(
    ("recipe", "ranks", "expected"),
    [
        *[
            ("tp2pp2sp", 4, "tp2pp2sp"),
            ("tp2pp2sp", 8, "tp2pp2sp"),
            ("tp2pp2sp", 2, "tp2sp"),
            ("tp2pp2sp", 1, "tp1"),
            ("tp8pp4vpp2sp", 8, "tp8sp"),
        ],
        *[
            ("tp8pp4vpp2sp", 16, "tp8pp2vpp2sp"),
            ("tp4", 6, "tp2"),
            ("tp2", 3, "tp1"),
            ("pp2vpp2dp2", 4, "pp2vpp2"),
            ("tp2cp2pp2", 2, "tp2"),
            ("TP2 pp2", 2, "tp2"),
        ],
    ],
)
def test_a_layout_shrinks_in_pipeline_stages_first_and_grows_in_data_parallelism(recipe, ranks, expected):
    found = layout_for(recipe, ranks)
    assert found == expected
    Layout.parse(found, tuple(range(ranks)))


def predicted(constants: dict[str, float], terms: dict[str, float]) -> float:
    return sum(constants[name] * terms[name] for name in constants)


def test_constants_are_found_again_and_never_negative():
    runs = [
        run_on(1, "tp1", prompts=16),
        run_on(2, "tp2", prompts=32),
        run_on(4, "tp2", prompts=64),
    ]  # dp 1, 1, 2
    terms = [terms_of(run, "actor_update") for run in runs]
    true = {"work": 0.25, "tensor": 0.01, "sync": 0.5}
    assert fit(terms, [predicted(true, each) for each in terms]) == pytest.approx(true)
    assert fit(terms[:1], [4.0]) == pytest.approx({"work": 0.25}), "one size tells of nothing else"
    assert all(constant >= 0 for constant in fit(terms, [4.0, 3.0, 2.0]).values())
    handed_over = [terms_of(run, "reshard") for run in runs]
    found = fit(handed_over, [1.0, 1.0, 1.0])
    assert [predicted(found, each) for each in handed_over] == pytest.approx([1.0, 1.0, 1.0])
    assert found["work"] == pytest.approx(1.0)


def test_more_gpus_are_never_more_efficient_than_fewer():
    scaling = scaling_of()
    rows, ended = scaling.model(16_384, lambda run: {})
    assert [row.gpus for row in rows] == [2**power for power in range(3, 15)] and not ended
    assert all(
        row.source == MODELLED and row.rows == 64 * row.gpus and row.seconds.keys() == {*PHASES, DEALING}
        for row in rows
    )
    modelled = [replace(row, seconds=row.seconds | {DEALING: 0.0}) for row in rows]  # which is measured here
    for smaller, larger in zip([scaling.rows[-1], *modelled], modelled):
        for phase in PHASES:
            assert larger.seconds[phase] >= smaller.seconds[phase] * (1 - 1e-9), phase
        assert efficiency(larger, scaling.rows[0]) <= efficiency(smaller, scaling.rows[0]) + 1e-9
    grown = log2(16_384 / 4) * 0.01  # what the made-up sizes say of advantages
    assert rows[-1].seconds["advantages"] - scaling.rows[-1].seconds["advantages"] == pytest.approx(
        grown, rel=1e-6
    )


@pytest.mark.parametrize(
    "layouts",
    [{2: "tp2sp", 4: "tp2sp", 8: "tp2sp"}, {1: "tp1", 2: "tp2sp", 4: "tp2pp2sp"}],
    ids=["dp grows", "layouts differ"],
)
def test_sizes_that_the_planner_knows_are_modelled_alike(layouts):
    """A model fitted to small sizes comes near the seconds of large ones.

    The large ones overlap less, and their pipelines cross hosts.
    """
    machine = MACHINES["h200"]
    runs = [run_on(n, layout, rollout=min(2, n), prompts=64 * n) for n, layout in layouts.items()]
    rows = [row_on(run, planner_of(machine)(run)) for run in runs]
    modelled, _ = Scaling(runs=runs, rows=rows, links=machine, ranks_per_host=8).model(
        256, planner_of(machine)
    )
    for row in modelled:
        assert sum(row.seconds.values()) - row.seconds[DEALING] == pytest.approx(
            sum(row.planned.values()), rel=0.05
        )


@pytest.mark.parametrize(
    ("measured", "host", "expected"),
    [
        (4, 8, [8, 16, 32, 64]),
        (8, 8, [16, 32, 64]),
        (3, 8, [24, 48]),
        (4, 6, [12, 24, 48]),
        (1, 1, [2, 4, 8, 16, 32, 64]),
        (4, 72, []),
    ],
)
def test_larger_sizes_are_whole_hosts_and_multiples_of_what_was_measured(measured, host, expected):
    run = run_on(measured, "tp1", prompts=16 * measured)
    scaling = Scaling(
        runs=[run], rows=[row_on(run, dict.fromkeys(PHASES, 1.0))], links=CPU_LINKS, ranks_per_host=host
    )
    rows, ended = scaling.model(64, lambda run: {})
    assert [(row.gpus, row.rows) for row in rows] == [(gpus, 16 * gpus) for gpus in expected]
    assert ended == (
        "" if expected else "up to --to 64 no more than 4 GPUs are both a multiple of 4 and whole hosts of 72"
    )


def test_slower_links_between_hosts_slow_what_crosses_them_only():
    fast, slow = (
        scaling_of(links=replace(MACHINES["h200"], other_host_rate=rate)).model(64, lambda run: {})[0]
        for rate in (50e9, 5e9)
    )
    assert [row.gpus for row in fast] == [8, 16, 32, 64]
    for phase in PHASES:
        crossing = {"reshard": 16} | dict.fromkeys(
            UPDATES, 32
        )  # stages are on other hosts from 16 on, a stage's TP2 x DP fills one until then
        first = crossing.get(phase, 128)
        assert [b.seconds[phase] > a.seconds[phase] for a, b in zip(fast, slow)] == [
            row.gpus >= first for row in fast
        ], phase


def test_gradients_take_a_ring():
    run = run_on(4, "tp1", prompts=64)
    elements = sum(run.actor.elements)
    assert gradient_seconds(run, run.actor, CPU_LINKS) == pytest.approx(
        4 * elements * (4 + 2) * 3 / 4 / 2e9
    )  # four steps
    assert gradient_seconds(run_on(1, "tp1"), run_on(1, "tp1").actor, CPU_LINKS) == 0.0


def test_the_same_rows_on_more_gpus_take_less_time_until_there_are_too_few():
    rows, ended = scaling_of(strong=True, prompts=256).model(16_384, lambda run: {})
    assert [row.gpus for row in rows] == [
        8,
        16,
        32,
        64,
        128,
        256,
    ] and "512 GPUs have 128 data-parallel ranks for 64 rows" in ended
    assert all(row.rows == 256 for row in rows)
    work = [row.seconds["log_probs"] for row in rows]
    assert work == sorted(work, reverse=True)
    assert [row.bubble for row in rows] == sorted(row.bubble for row in rows)


def test_dealing_is_timed_while_quick_and_in_proportion_beyond(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("verl_megatron.benchmarks.scaling.model.time", clock)

    def work(lengths: list[int], dp: int) -> None:
        clock.now += len(lengths) * dp * 1e-6

    deal = Dealing(work)
    assert [deal(1000, dp) for dp in (20, 200, 600, 6000)] == pytest.approx([0.02, 0.2, 0.6, 6.0])
    assert clock.now == pytest.approx(2 * (0.02 + 0.2 + 0.6)), "the last one is not timed"


def test_a_run_with_a_teacher_grows_with_it():
    config = deepcopy(run_on(2, "tp1", algorithm="grpo").config)
    config.teacher.path, config.teacher.layout = "llama3-70b", "tp2"
    run = PlannedRun.of(config, world_size=2, ranks_per_host=8, read=architecture)
    scaling = Scaling(
        runs=[run], rows=[row_on(run, dict.fromkeys(PHASES, 1.0))], links=CPU_LINKS, ranks_per_host=8
    )
    (teacher,) = [role for role in scaling.run_on(8).roles if role.name == "teacher"]
    assert teacher.layout.tp == 2 and teacher.layout.dp == 4 and teacher.arch == architecture("llama3-70b")
    config.teacher.devices = "0-1"
    with pytest.raises(ValueError, match="devices of their own"):
        replace(scaling, runs=[replace(run, config=config)]).run_on(8)
