"""Numbers of `tools/reshard_plan.py` against the plan and against arithmetic, and what it refuses."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from parallel.reshard.in_place.planner import Sides, plan_in_place
from parallel.reshard.plan import Plan, compile_plan
from parallel.weights.rules import megatron_parameters, vllm_parameters
from parallel.weights.shapes import shape
from parallel.weights.shard import ShardedParameter
from tests.worlds import ROOT
from verl_megatron.commands.reshard_plan import run
from verl_megatron.planner.reshard.case import PlanCase, read_case
from verl_megatron.planner.reshard.memory import exchanging, megatron_addresses
from verl_megatron.planner.reshard.report import Rates, flows_of, report_of, table

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 512,
}


@pytest.fixture
def folder(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(shape("llama3-8b") | TINY))
    return str(tmp_path)


def planned(*, placed: bool = False, peer_memory: bool = False, **options) -> tuple[PlanCase, Plan, dict]:
    """With the usual order of ranks, unless `placed`."""
    case = read_case(**options).placed() if placed else read_case(**options)
    shards = case.shards()
    plan = compile_plan(
        source=shards[0],
        destination=shards[1],
        element_bytes=2,
        window_bytes=2**28,
        host_of=case.host_of,
        peer_memory=peer_memory,
    )
    return (
        case,
        plan,
        report_of(case, plan, flows_of(plan), shards, Rates(same_gpu=1e9, same_host=1e8, other_host=1e7)),
    )


def test_the_program_writes_numbers_and_a_picture(tmp_path):
    options = [
        "--hf",
        "llama3-8b",
        "--train",
        "tp2pp2",
        "--rollout",
        "tp4",
        "--json",
        str(tmp_path / "plan.json"),
        "--png",
        str(tmp_path / "plan.png"),
    ]
    run = subprocess.run(
        [sys.executable, ROOT / "tools/reshard_plan.py", *options],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert "llama3-8b: tp2pp2 -> 1 x tp4 on 4 ranks" in run.stdout and len(run.stdout.splitlines()) < 20
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "plan.json").read_text())
    assert {
        "received_bytes",
        "sent_bytes",
        "local_bytes",
        "lower_bound_bytes",
        "gather_all_bytes",
        "messages",
        "peak_extra_bytes",
    } <= report.keys()
    assert all(len(report[f"{what}_bytes"]) == 4 for what in ("received", "sent", "local"))
    assert (
        report["train_ranks"] == [0, 2, 1, 3]
        and report["rollout_ranks"] == [0, 1, 2, 3]
        and not report["peer_memory"]
    )
    # Each rank holds half of the quarter that it needs.
    quarter = report["gather_all_bytes"] / 3
    assert (
        report["lower_bound_bytes"] == max(report["received_bytes"]) == pytest.approx(quarter / 2, rel=1e-3)
    )
    assert report["peak_extra_bytes"] <= report["window_bytes"] == 2**28 and report["dtype"] == "bfloat16"


def test_options_reach_the_plan(folder, tmp_path, capsys):
    """In the plain order ranks 1 and 2 hold only norms of the quarter that they need."""
    path = tmp_path / "plan.json"
    given = [
        "--hf",
        folder,
        "--train",
        "tp2pp2",
        "--rollout",
        "tp4",
        "--json",
        str(path),
        "--rank-order",
        "plain",
    ]
    run(given)
    plain = json.loads(path.read_text())
    assert (
        plain["train_ranks"] == plain["rollout_ranks"] == [0, 1, 2, 3]
        and plain["messages"]
        and plain["peak_extra_bytes"]
    )
    assert max(plain["received_bytes"]) == pytest.approx(plain["gather_all_bytes"] / 3, rel=2e-2)
    run([*given, "--peer-memory"])
    peers = json.loads(path.read_text())
    assert (
        peers["peer_memory"]
        and peers["received_bytes"] == plain["received_bytes"]
        and not peers["messages"]
        and not peers["peak_extra_bytes"]
    )
    assert capsys.readouterr().out.count("as usual in Megatron; as usual in vLLM") == 2


@pytest.mark.parametrize("peer_memory", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_numbers_are_the_plans_and_add_up(folder, placed, peer_memory):
    case, plan, report = planned(
        hf=folder, train="tp2pp2", rollout="tp8", ranks=16, hosts=2, placed=placed, peer_memory=peer_memory
    )
    assert (case.train.dp, case.rollout.dp, case.ranks_per_host) == (4, 2, 8)
    assert report["messages"] == plan.messages == sum(len(window) for window in plan.windows)
    for what in ("received", "sent"):
        assert report[f"{what}_bytes"] == [getattr(plan, f"{what}_bytes")[rank] for rank in range(16)]
        assert report[f"{what}_bytes"] == [
            a + b for a, b in zip(report[f"{what}_same_host_bytes"], report[f"{what}_other_host_bytes"])
        ]
    assert (
        report["staged_bytes"] == [plan.staged_bytes[rank] for rank in range(16)]
        and report["peak_extra_bytes"] == plan.peak_extra_bytes
    )
    assert report["local_bytes"] == [plan.local_bytes[rank] for rank in range(16)]
    for distance, same in (("same", True), ("other", False)):
        between = [
            t
            for t in plan.transfers()
            if t.source_rank != t.destination_rank
            and same == (case.host_of(t.source_rank) == case.host_of(t.destination_rank))
        ]
        for way, side in (("sent", "source_rank"), ("received", "destination_rank")):
            sizes = [0] * 16
            for t in between:
                sizes[getattr(t, side)] += 2 * t.elements
            assert report[f"{way}_{distance}_host_bytes"] == sizes
    other = (
        sum(
            t.elements
            for t in plan.transfers()
            if case.host_of(t.source_rank) != case.host_of(t.destination_rank)
        )
        * 2
    )
    assert sum(report["sent_other_host_bytes"]) == sum(report["received_other_host_bytes"]) == other
    assert other and placed == (
        not any(report["received_same_host_bytes"])
    )  # a host has one stage, of which each rank can hold what it needs
    assert report["ratio_to_lower_bound"] == max(report["received_bytes"]) / plan.lower_bound_bytes >= 1


def test_seconds_follow_the_rates(folder):
    """One window and one busiest link: bytes over its rate, then packing and unpacking besides."""
    _, plan, report = planned(hf=folder, train="tp2pp2", rollout="tp4", ranks=4)
    busiest = max(max(report["received_bytes"]), max(report["sent_bytes"]))
    assert len(plan.windows) == 1
    assert report["seconds"]["overlapped"] == pytest.approx(busiest / 1e8)
    assert (
        busiest / 1e8
        < report["seconds"]["one_after_another"]
        <= busiest / 1e8 + (2 * busiest + max(report["local_bytes"])) / 1e9
    )
    _, _, apart = planned(hf=folder, train="tp2pp2", rollout="tp4", ranks=4, hosts=4)
    assert apart["seconds"]["overlapped"] == pytest.approx(busiest / 1e7)


def test_seconds_of_peers_memory(folder):
    """Copies on a GPU, then the busiest link, and nothing to pack."""
    _, _, report = planned(hf=folder, train="tp2pp2", rollout="tp4", ranks=4, peer_memory=True)
    busiest = max(max(report["received_bytes"]), max(report["sent_bytes"]))
    assert report["seconds"]["overlapped"] == pytest.approx(busiest / 1e8)
    assert report["seconds"]["one_after_another"] == pytest.approx(
        busiest / 1e8 + max(report["local_bytes"]) / 1e9
    )


def test_memory_of_equal_layouts(folder):
    """TP2 to TP2: all but QKV, whose order differs, can be shared; in place, one copy and staging suffice."""
    case, plan, report = planned(hf=folder, train="tp2", rollout="tp2")
    memory, copy = report["peak_memory"], report["local_bytes"][0]
    qkv = 4 * 2 * (8 + 2 * 8) * 8 // 2 * 64
    assert (
        case.ranks == 2
        and not any(report["received_bytes"])
        and report["seconds"]["overlapped"] == copy / 1e9
    )
    assert memory["larger_copy_bytes"] == copy
    assert memory["keep"]["bytes"] == 2 * copy and memory["share"]["bytes"] == copy + qkv
    assert memory["share"]["own_bytes"] == qkv and memory["swap"]["own_bytes"] == 0
    # Of 12 heads the first, of queries, and the last, of values, lie right.
    assert memory["swap"]["bytes"] == copy + qkv * 10 // 12 and 2 * qkv < plan.window_bytes


def test_memory_where_vllm_holds_more(folder):
    """TP4 to TP2: of the copy, twice as large, swap places half, up to a norm; share places only norms."""
    _, plan, report = planned(hf=folder, train="tp4", rollout="tp2", placed=True)
    memory, copy, norm = report["peak_memory"], report["peak_memory"]["larger_copy_bytes"], 2 * 64
    assert copy // 2 - 9 * norm < memory["swap"]["own_bytes"] <= copy // 2 + norm
    assert memory["share"]["own_bytes"] == copy - 9 * norm
    assert copy < memory["swap"]["bytes"] <= copy + norm + plan.window_bytes


@pytest.mark.parametrize(
    "train, rollout, ranks", [("tp2pp2", "tp4", 16), ("tp4", "tp2", 8), ("tp2", "tp4", 16)]
)
@pytest.mark.parametrize("placed", [False, True])
def test_replicas_that_exchange_stand_for_all(folder, train, rollout, ranks, placed):
    """As much own memory as with all ranks planned; where hosts cut groups differently, all are planned."""
    case, plan, report = planned(hf=folder, train=train, rollout=rollout, ranks=ranks, hosts=1, placed=placed)
    source, destination = case.shards()
    memory = {rank: megatron_addresses(source[rank], 2) for rank in source}
    sides = Sides(source=source, destination=destination, memory=memory, element_bytes=2)
    plans = plan_in_place(sides, in_place=True, window_bytes=2**28)
    planned_ranks = report["peak_memory"]["swap"]["planned_ranks"]
    assert (
        report["peak_memory"]["swap"]["own_bytes"] == max(plans.own_bytes(destination).values())
        and ranks % planned_ranks == 0
    )
    assert planned_ranks < ranks or not placed
    uneven = exchanging(source, destination, case.replicas(), lambda rank: rank // (planned_ranks + 1))
    assert uneven == list(range(ranks))


def test_many_ranks_that_exchange_are_not_planned(folder):
    case, plan, report = planned(hf=folder, train="tp8pp4", rollout="tp8", ranks=32)
    memory = report["peak_memory"]
    assert memory["swap"][
        "planned_ranks"
    ] == 0 and "at least, since where more than 16 ranks exchange" in table(report)
    assert memory["swap"]["bytes"] >= memory["larger_copy_bytes"] + plan.window_bytes


@pytest.mark.parametrize(
    "train, rollout, kv_heads",
    [("tp2", "tp4", 8), ("tp4", "tp2", 4), ("tp2pp2", "tp4", 2), ("tp4", "tp4", 4)],
)
def test_shared_memory_is_found_by_address(train, rollout, kv_heads, tmp_path):
    """By element: shared is a parameter at a constant distance from its values in one of Megatron's."""
    (tmp_path / "config.json").write_text(
        json.dumps(shape("llama3-8b") | TINY | {"num_key_value_heads": kv_heads})
    )
    case, _, report = planned(hf=str(tmp_path), train=train, rollout=rollout, placed=True)
    source, destination = case.shards()
    sizes = []
    for rank in range(case.ranks):
        held = {
            where: (number, at)
            for number, parameter in enumerate(source[rank])
            for where, at in places_of(parameter).items()
        }
        sizes.append(sum(math.prod(p.shape) for side in (source, destination) for p in side[rank]))
        for parameter in destination[rank]:
            places = places_of(parameter)
            assert len(places) == math.prod(parameter.shape)  # nothing is padded
            found = {
                (held[where][0], held[where][1] - at) if where in held else None
                for where, at in places.items()
            }
            sizes[-1] -= math.prod(parameter.shape) * (len(found) == 1 and None not in found)
        sizes[-1] = 2 * sizes[-1] + report["staged_bytes"][rank]
    assert report["peak_memory"]["share"]["bytes"] == max(sizes) < report["peak_memory"]["keep"]["bytes"]


def places_of(parameter: ShardedParameter) -> dict[tuple[str, int, int], int]:
    """By tensor, row and column: the element's place in the parameter's memory."""
    width = math.prod(parameter.shape[1:])
    return {
        (block.tensor, row, col): (block.row + row - block.rows[0]) * width + block.col + col - block.cols[0]
        for block in parameter.blocks
        for row in range(*block.rows)
        for col in range(*block.cols)
    }


def test_ranks_and_hosts_by_default(folder):
    assert read_case(hf=folder, train="tp2pp2", rollout="tp8").ranks == 8
    case = read_case(hf="llama3-405b", train="tp8pp4vpp2", rollout="tp16", stage_layers=(32, 32, 32, 30))
    assert (case.ranks, case.hosts, case.train.vpp) == (32, 4, 2)
    assert read_case(hf="qwen2.5-7b", train="tp4", rollout="tp2dp4", ranks=8).rollout.dp == 4


REFUSED = [
    (["--hf", "no-such"], r"--hf no-such is neither .*llama3-70b"),
    (["--train", "tp3"], r"--train tp3\S*: tp=3 must divide the model's 32 attention heads; choose"),
    (["--rollout", "tp64"], r"--rollout tp64: tp=64 must divide"),
    (["--train", "tp2x"], r"--train tp2x .*not understood; write sizes"),
    (["--rollout", "tp2pp2"], r"--rollout tp2pp2 names more than tp and dp.*write tp2"),
    (["--ranks", "3"], r"--train tp2pp2 with --ranks 3: .*needs 4 ranks or a multiple"),
    (["--ranks", "many"], r"--ranks: 'many' is not accepted; write a whole number"),
    (["--ranks", "0"], r"--ranks: '0' is not accepted"),
    (["--train", "tp8pp100000"], r"--train tp8pp100000 .*800000 ranks, is more than the 16384"),
    (["--hosts", "3"], r"--hosts 3 must divide the 4 ranks; choose"),
    (["--stage-layers", "30,3"], r"--train tp2pp2: 32 layers do not split .*--stage-layers \(sum 32\)"),
    (["--other-host-rate", "-1"], r"--other-host-rate: '-1' is not accepted; write a number from 1"),
    (["--rank-order", "any"], "--rank-order: 'any' is not known; choose one of"),
    (["--dtype", "fp8"], "--dtype: 'fp8' is not known"),
    (
        ["--json", "/no/such/plan.json"],
        r"--json /no/such/plan.json cannot be written.*name a file in a folder that exists",
    ),
    (["--png", "plan.jpg"], r"--png plan.jpg must end in .png"),
]


@pytest.mark.parametrize("changed, message", REFUSED, ids=[" ".join(changed) for changed, _ in REFUSED])
def test_refusals_are_one_line_with_a_remedy(changed, message, capsys):
    given = {"--hf": "llama3-8b", "--train": "tp2pp2", "--rollout": "tp4"} | dict([changed])
    with pytest.raises(SystemExit) as stopped:
        run([f"{option}={value}" for option, value in given.items()])
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == "" and len(captured.err.splitlines()) == 1
    assert re.search(message, captured.err), captured.err


def test_a_folder_without_config_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(["--hf", str(tmp_path), "--train", "tp2", "--rollout", "tp2"])
    assert "config.json does not exist" in capsys.readouterr().err


def test_shards_are_those_of_the_map(folder):
    case = read_case(hf=folder, train="tp2pp2", rollout="tp2", ranks=8)
    source, destination = case.shards()
    for rank in range(8):
        assert source[rank] == megatron_parameters(case.arch, case.train, rank, spec="te")
        assert destination[rank] == vllm_parameters(case.arch, 2, rank % 2)
    case = read_case(hf=folder, train="tp2pp2", rollout="tp4", ranks=4).placed()
    source, destination = case.shards()
    for rank, (tp, pp) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        assert source[rank] == megatron_parameters(
            case.arch, replace(case.train, ranks=tuple(range(4))), pp * 2 + tp, spec="te"
        )
        assert destination[rank] == vllm_parameters(case.arch, 4, rank)


def test_a_70b_plan_for_1024_ranks_fits_in_memory(tmp_path):
    path = tmp_path / "plan.json"
    options = [
        "--hf",
        "llama3-70b",
        "--train",
        "tp8pp8",
        "--rollout",
        "tp8",
        "--ranks",
        "1024",
        "--hosts",
        "128",
        "--json",
        str(path),
    ]
    process = subprocess.Popen(
        [sys.executable, ROOT / "tools/reshard_plan.py", *options], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0 and usage.ru_maxrss < 2 * 2**20  # KiB: 2 GiB, a third of which is used
    report = json.loads(path.read_text())
    replicas, model, norms = (
        128,
        2 * 70_553_706_496,
        2 * (2 * 80 + 1) * 8192,
    )  # norms are on each rank of a replica
    assert sum(report["received_bytes"]) + sum(report["local_bytes"]) == replicas * (model + 7 * norms)
    assert max(report["received_bytes"]) == report["lower_bound_bytes"] < report["gather_all_bytes"] / 8
    assert report["peak_extra_bytes"] <= report["window_bytes"]
