"""Outputs and refusals of the scaling benchmark, and the runs that it starts."""

import json
import re
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel.weights.rules import hf_shapes
from parallel.weights.shapes import shape
from tests.scaled import case_on, scaling_of
from tests.worlds import ROOT
from tools.benchmark_scaling import by_size, main, numbers, parser, sizes_to_run
from tools.scaling.report import Report, markdown, write_csv, write_png
from tools.scaling.rows import (
    MEASURED,
    MODELLED,
    Row,
    at_best,
    described,
    disturbance,
    measured_row,
)
from tools.scaling.runs import Recipe, architecture, environment, layout_for
from verl_megatron.config import ModelConfig, TrainerConfig
from verl_megatron.planner import MACHINES, Case
from verl_megatron.planner.training import forward_flops

PHASES = (
    "reshard",
    "rollout",
    "return",
    "reward",
    "log_probs",
    "values",
    "advantages",
    "critic_update",
    "actor_update",
)


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


def case_on(ranks: int, layout: str, *, rollout: int = 1, prompts: int = 64, algorithm: str = "ppo") -> Case:
    config = TrainerConfig(
        actor=ModelConfig(path="llama3-8b", layout=layout), critic=ModelConfig(layout=layout)
    )
    config.algorithm.name, config.algorithm.num_mini_batches, config.rollout.tp = algorithm, 4, rollout
    config.data.prompts_per_iteration, config.data.max_prompt_tokens, config.rollout.max_tokens = (
        prompts,
        512,
        512,
    )
    config.algorithm.reuse_logprobs = False
    return Case.of(config, world_size=ranks, ranks_per_host=ranks, read=architecture)


def test_actor_and_reference_go_through_one_pipeline_together():
    alone = case_on(4, "pp4")
    with_reference = replace(
        alone, roles=(*alone.roles, replace(alone.actor, name="reference", trainable=False))
    )
    count = 4 * with_reference.micro_batches(with_reference.actor)[0]
    assert [bubbles_of(case)["log_probs"] for case in (with_reference, alone)] == pytest.approx(
        [3 / (2 * count + 3), 3 / (count + 3)]
    )
    assert (
        len({dealing_seconds(case, lambda rows, dp: 1.0) for case in (with_reference, alone)}) == 1
    )  # they take the same rows


def row_on(case: Case, seconds: dict[str, float], source: str = MEASURED) -> Row:
    return Row(source=source, seconds=seconds, **described(case))


def test_flops_are_two_for_each_weight_and_token_and_those_of_causal_pairs():
    case = case_on(4, "tp2pp2", prompts=8)
    arch, tokens = case.actor.arch, 8 * 1023
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    weights = arch.num_layers * (2 * queries + 2 * keys + 3 * arch.intermediate_size) * arch.hidden_size
    pairs = 8 * sum(position + 1 for position in range(1023))
    expected = (
        2 * weights * tokens
        + arch.num_layers * 4 * queries * pairs
        + 2 * 8 * 512 * arch.hidden_size * arch.vocab_size
    )
    assert forward_flops(case, case.actor) == pytest.approx(expected, rel=1e-3)
    row = row_on(case, dict.fromkeys(PHASES, 2.0))
    assert row.flops_per_s_gpu(("log_probs",)) == pytest.approx(expected / 2 / 4, rel=1e-3)
    assert row.flops_per_s_gpu(("actor_update",)) == pytest.approx(
        3 * expected / 2 / 4, rel=1e-3
    )  # a backward pass is twice a forward pass


def test_efficiency_is_one_for_a_linear_speed_up_and_the_ideal_leaves_out_what_is_no_work():
    one, four = case_on(1, "tp1", prompts=16), case_on(4, "tp1", prompts=64)
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
    staged = row_on(case_on(2, "pp2", prompts=32), seconds)
    bubbles = bubbles_of(case_on(2, "pp2", prompts=32))
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
    cases = [
        case_on(1, "tp1", prompts=16),
        case_on(2, "tp2", prompts=32),
        case_on(4, "tp2", prompts=64),
    ]  # dp 1, 1, 2
    terms = [terms_of(case, "actor_update") for case in cases]
    true = {"work": 0.25, "tensor": 0.01, "sync": 0.5}
    assert fit(terms, [predicted(true, each) for each in terms]) == pytest.approx(true)
    assert fit(terms[:1], [4.0]) == pytest.approx({"work": 0.25}), "one size tells of nothing else"
    assert all(constant >= 0 for constant in fit(terms, [4.0, 3.0, 2.0]).values())
    handed_over = [terms_of(case, "reshard") for case in cases]
    found = fit(handed_over, [1.0, 1.0, 1.0])
    assert [predicted(found, each) for each in handed_over] == pytest.approx([1.0, 1.0, 1.0])
    assert found["work"] == pytest.approx(1.0)


def scaling_of(
    layouts=("tp1", "tp2", "tp2pp2"),
    *,
    links=MACHINES["h200"],
    strong: bool = False,
    host: int = 8,
    prompts: int = 256,
) -> Scaling:
    """Three sizes whose seconds have work, tensor-parallel exchange and a term of log2 n."""
    cases = [
        case_on(n, layout, rollout=min(n, 2), prompts=prompts if strong else prompts * n // 4)
        for n, layout in zip((1, 2, 4), layouts)
    ]
    rows = []
    for case in cases:
        seconds = {}
        for phase in PHASES:
            terms = terms_of(case, phase)
            seconds[phase] = (
                0.02 * terms["work"] + 1e-4 * min(terms.get("tensor", 0.0), 100) + 0.01 * terms["sync"]
            )
        rows.append(row_on(case, seconds))
    return Scaling(cases=cases, rows=rows, links=links, ranks_per_host=host, strong=strong)


def test_more_gpus_are_never_more_efficient_than_fewer():
    scaling = scaling_of()
    rows, ended = scaling.model(16_384, lambda case: {})
    assert [row.gpus for row in rows] == [2**power for power in range(3, 15)] and not ended
    assert all(
        row.source == MODELLED and row.rows == 64 * row.gpus and row.seconds.keys() == {*PHASES, DEALING}
        for row in rows
    )
    for smaller, larger in zip([scaling.rows[-1], *rows], rows):
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
    cases = [case_on(n, layout, rollout=min(2, n), prompts=64 * n) for n, layout in layouts.items()]
    rows = [row_on(case, planner_of(machine)(case)) for case in cases]
    modelled, _ = Scaling(cases=cases, rows=rows, links=machine, ranks_per_host=8).model(
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
    case = case_on(measured, "tp1", prompts=16 * measured)
    scaling = Scaling(
        cases=[case], rows=[row_on(case, dict.fromkeys(PHASES, 1.0))], links=CPU_LINKS, ranks_per_host=host
    )
    rows, ended = scaling.model(64, lambda case: {})
    assert [(row.gpus, row.rows) for row in rows] == [(gpus, 16 * gpus) for gpus in expected]
    assert ended == (
        "" if expected else "up to --to 64 no more than 4 GPUs are both a multiple of 4 and whole hosts of 72"
    )


def test_slower_links_between_hosts_slow_what_crosses_them_only():
    fast, slow = (
        scaling_of(links=replace(MACHINES["h200"], other_host_rate=rate)).model(64, lambda case: {})[0]
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
    case = case_on(4, "tp1", prompts=64)
    elements = sum(case.actor.elements)
    assert gradient_seconds(case, case.actor, CPU_LINKS) == pytest.approx(
        4 * elements * (4 + 2) * 3 / 4 / 2e9
    )  # four steps
    assert gradient_seconds(case_on(1, "tp1"), case_on(1, "tp1").actor, CPU_LINKS) == 0.0


def test_the_same_rows_on_more_gpus_take_less_time_until_there_are_too_few():
    rows, ended = scaling_of(strong=True, prompts=256).model(16_384, lambda case: {})
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


def test_dealing_is_timed_while_quick_and_in_proportion_beyond():
    deal = Dealing(lambda lengths, dp: time.sleep(len(lengths) * dp * 1e-6))
    found = [deal(1000, dp) for dp in (20, 200, 600, 6000)]
    assert found[0] == pytest.approx(0.02, rel=0.5) and found[3] == pytest.approx(6.0, rel=0.5)


def test_planned_seconds_and_what_is_modelled_stand_in_every_output(tmp_path):
    scaling = scaling_of()
    rows, _ = scaling.model(16, lambda case: {"rollout": 7.125})
    report = Report(
        title="title", device="device", rows=[*scaling.rows, *rows], peak_flops=989e12, notes=["a note"]
    )
    text = markdown(report)
    assert (
        text.count("| measured |") == 6
        and text.count("| modelled |") == 4
        and "MFU, updates" in text
        and "7.12 / " in text
    )
    write_csv(tmp_path / "rows.csv", report)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines] == ["source", *[MEASURED] * 3, *[MODELLED] * 2]
    write_png(tmp_path / "rows.png", report)
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    on_cpu = markdown(replace(report, peak_flops=None))
    assert "MFU" not in on_cpu and "TFLOP/s a rank" in on_cpu


def test_responses_of_other_lengths_are_no_measurement(tmp_path):
    row = {"step": 1, "time/rollout_s": 1.0, "rollout/response_tokens_mean": 511.5}
    (tmp_path / "metrics.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    with pytest.raises(ValueError, match=r"\[511.5\] tokens on average and not 512"):
        measured_row(case_on(1, "tp1"), tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="run at least two"):
        measured_row(case_on(1, "tp1"), tmp_path, {})


def test_iterations_that_differ_are_told():
    row = Row(source=MEASURED, seconds={"rollout": 3.0, "log_probs": 1.0}, **described(case_on(2, "tp1")))
    assert disturbance(row) == ""  # modelled: no iterations
    assert disturbance(replace(row, ranges={"rollout": (2.95, 3.05), "log_probs": (0.95, 1.05)})) == ""
    text = disturbance(replace(row, ranges={"rollout": (2.8, 3.9), "log_probs": (0.95, 1.2)}))
    assert text.startswith("on 2 ranks rollout took from 2.80 to 3.90 s")


def test_efficiency_at_best_takes_the_shortest_time_of_each_phase():
    """Two ranks do twice the rows of one: in 3 s where that takes 2.7, each at best."""
    one = Row(
        source=MEASURED,
        seconds={"rollout": 5.0},
        ranges={"rollout": (2.0, 9.0), "log_probs": (0.7, 0.8)},
        **described(case_on(1, "tp1")),
    )
    two = replace(
        one, gpus=2, tokens=2 * one.tokens, ranges={"rollout": (2.25, 2.3), "log_probs": (0.75, 0.8)}
    )
    assert at_best([one, two]).endswith("efficiency is 100.0% on 1, 90.0% on 2.")


def test_an_interrupted_measurement_does_not_wait_to_save(monkeypatch):
    monkeypatch.delenv("GRACE_S", raising=False)
    assert float(environment(2)["GRACE_S"]) <= 1  # seconds from SIGTERM to the end of a rank
    monkeypatch.setenv("GRACE_S", "60")
    assert environment(2)["GRACE_S"] == "60"


def test_arguments_are_read_and_refused():
    assert by_size("1:tp1,4:tp2pp2") == {1: "tp1", 4: "tp2pp2"} and numbers("4,1,2") == [1, 2, 4]
    for wrong in (
        ["--gpus", "1,1"],
        ["--gpus", "0"],
        ["--layouts", "tp1"],
        ["--rollout", "1:x"],
        ["--steps", "0"],
        ["--host-gbps", "-1"],
    ):
        with pytest.raises(SystemExit):
            parser().parse_args(["--recipe", "ppo_toy_cpu", "--gpus", "1", *wrong])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "no_such"], "--recipe no_such is no .yaml or .sh file; name one, or one of "),
        (["--recipe", "sft_toy_cpu", "actor.path=x"], "sft_toy_cpu.yaml is supervised fine-tuning"),
        (["--recipe", "grpo_8b"], "grpo_8b.yaml names no model; add actor.path=DIR"),
        (["--recipe", "ppo_toy_cpu", "--steps", "1"], "--steps 1 leaves nothing to measure"),
        (
            ["--recipe", "ppo_toy_cpu", "--rollout", "8:2"],
            "--rollout speaks of 8 ranks, which --gpus does not name",
        ),
        (["--recipe", "ppo_toy_cpu", "actor.lay=tp1"], "actor.lay is no setting"),
        (["--recipe", "ppo_toy_cpu", "lr"], "'lr' is no setting; write SECTION.SETTING=VALUE"),
        (
            ["--recipe", "ppo_toy_cpu", "data.max_prompt_tokens=-3"],
            "error: data.max_prompt_tokens=-3 lies outside [1, 1000000000]; choose a value inside",
        ),
        (
            ["--recipe", "ppo_toy_cpu", "rollout.tp=0"],
            "error: rollout.tp=0 lies outside [1, 131072]; choose a value inside",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["--gpus", "1,2", "--out", str(tmp_path), *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/x/y"])
def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path, capsys, out):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["--recipe", "ppo_toy_cpu", "--gpus", "1", "--out", str(tmp_path / out)])
    expected = rf"error: --out {tmp_path / out} cannot be written \([\w ]+\); name another folder\n"
    assert ended.value.code == 2 and re.fullmatch(expected, capsys.readouterr().err)


def tiny_model(folder: Path, **more) -> Path:
    """A model folder without weights and tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape("llama3-1b", layers=4) | more))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt-tokens", "100000"],
            "on 1 ranks: data.max_prompt_tokens=100000 and rollout.max_tokens=8 make samples of 100008 tokens",
        ),
        (["actor.layout=tp0"], 'layout "tp0" has a size of 0'),
    ],
)
def test_sizes_are_checked_before_prompts_are_made(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "--recipe",
                "ppo_toy_cpu",
                "--gpus",
                "1",
                "--out",
                str(out),
                f"actor.path={tiny_model(tmp_path / 'model')}",
                *arguments,
            ]
        )
    assert ended.value.code == 2 and message in capsys.readouterr().err and not out.exists()


def test_runs_train_on_the_prompts_that_are_made_last(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("tools.benchmark_scaling.make_prompts", lambda path, *_, **__: made.append(path))
    given = [
        "--recipe",
        "ppo_toy_cpu",
        "--gpus",
        "1,2",
        "--out",
        str(tmp_path / "out"),
        f"actor.path={tiny_model(tmp_path / 'model')}",
        "reward.function=match",
    ]
    sizes = sizes_to_run(parser().parse_args(given))
    assert made == [tmp_path / "out/prompts.jsonl"] and {size.settings["data.train"] for size in sizes} == {
        str(made[0])
    }


def test_random_weights_without_room_are_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "tools")  # where the tool finds its neighbours
    make_random = import_module("make_random")
    out, needed = tmp_path / "out", 2 * sum(map(prod, hf_shapes(architecture("llama3-8b")).values()))
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(free=needed - 1) if path.is_dir() else None
    )
    with pytest.raises(SystemExit) as ended:
        make_random.main([str(out)])
    expected = (
        f"error: {out}/model has {needed - 1:,} bytes free and the random weights need "
        f"{needed:,}; name another OUT (in recipes SCRATCH) or fewer --layers\n"
    )
    assert ended.value.code == 2 and capsys.readouterr().err == expected and not out.exists()
    with pytest.raises(SystemExit):
        make_random.main([str(out), "--layers", "1", "--prompt-tokens", "0"])
    assert "error: --prompt-tokens 0 must be from 1 to " in capsys.readouterr().err and not out.exists()
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"1")
    make_random.check_room(out, shape("llama3-8b"))  # an earlier call's file is written over


def test_a_script_is_read_from_its_dry_run(tmp_path, monkeypatch):
    """The model is a published shape, and every size has the recipe's layout made smaller."""
    monkeypatch.delenv("MODEL", raising=False)
    given = parser().parse_args(
        [
            "--recipe",
            "llama3_8b_grpo.sh",
            "--gpus",
            "1,4",
            "--prompts",
            "32",
            "--out",
            str(tmp_path),
            "actor.layout=tp2sp",
            "rollout.tp=2",
        ]
    )
    sizes = sizes_to_run(given)
    assert [
        (str(size.case.actor.layout), size.case.replicas, size.case.samples, size.case.packed_tokens)
        for size in sizes
    ] == [("tp1", 1, 64, 1023), ("tp2dp2sp", 2, 256, 1023)]
    assert (
        sizes[0].case.actor.arch == architecture("llama3-8b")
        and Recipe.find("llama3_8b_grpo").path.suffix == ".sh"
    )
    assert "data.train" not in sizes[0].settings and sizes[0].settings["run.resume"] == "never"
