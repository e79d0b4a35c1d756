"""What `engine.sharding=full` refuses, and the planner's search with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from parallel.layout import Layout
from parallel.placement import place
from parallel.reshard.plan import compile_plan
from parallel.weights.row_shards import row_shards
from parallel.weights.rules import megatron_shards, vllm_shards
from tests.job_files import write_job
from tests.planned import H200, actor_alone, run_config
from tests.unit.test_checks import good
from verl_megatron.checks.settings import check_config
from verl_megatron.launch.dry_run import training_plan
from verl_megatron.planner.activations import gathered_bytes
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRole
from verl_megatron.planner.weight_sync import moved_bytes, publish_seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(actor__layout="tp2pp2"), "engine.sharding=full: actor.layout='tp2pp2' has tp=2 and pp=2"),
        (dict(actor__layout="cp2"), "actor.layout='cp2' has cp=2"),
        (dict(reshard__mode="swap"), "reshard.mode=swap"),
        (dict(engine__dynamic_batching=True), "engine.dynamic_batching=True with engine.sharding=full"),
        (
            dict(engine__distributed_optimizer=False),
            "engine.distributed_optimizer=False with engine.sharding=full",
        ),
        (dict(engine__dtype="fp8"), "engine.dtype=fp8 with engine.sharding=full"),
        (dict(algorithm__name="ppo", critic__share_trunk=True), "critic.share_trunk=true with engine"),
    ],
)
def test_what_full_sharding_cannot_do_is_refused_by_name(folder, changes, words):
    changes = dict(actor__layout="tp1", critic__layout="tp1", engine__sharding="full") | changes
    problems = check_config(good(folder, **changes), world_size=4)
    assert any(words in problem for problem in problems), problems


def test_full_sharding_is_accepted(folder):
    config = good(folder, actor__layout="tp1", critic__layout="tp1", engine__sharding="full")
    assert check_config(config, world_size=4) == []


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (4, 1), (4, 2), (4, 4), (8, 2)])
def test_moved_bytes_are_those_of_the_plan_between_rows_and_vllms_shards(ranks, tp):
    run = actor_alone(run_config("tp1", rollout=tp, sharding="full"), ranks)
    served, arch = Layout.parse(f"tp{tp}", tuple(range(ranks))), run.actor.arch
    train, serving = place(arch, run.actor.layout, served, ranks_per_host=8)
    plan = compile_plan(
        source=row_shards(megatron_shards(arch, train, spec="te"), train),
        destination=vllm_shards(arch, serving),
        element_bytes=2,
        window_bytes=2**28,
        host_of=lambda rank: 0,
        peer_memory=False,
    )
    # The formula leaves out which rows of a matrix are where.
    assert moved_bytes(run) == pytest.approx(max(plan.received_bytes.values(), default=0), rel=0.1)
    assert run.resharding_crosses_hosts is False
    assert actor_alone(run.config, 16).resharding_crosses_hosts


def test_a_rank_sends_a_rollout_world_its_own_rows():
    def planned(sharding: str):
        config = run_config("tp1", rollout=1, sharding=sharding)
        config.rollout.devices = "4-5"
        run = actor_alone(config, 4)
        return plan_memory(run, H200).kinds[0].phases["actor_update"]["versions"], publish_seconds(run, H200)

    for whole, rows in zip(planned("replicated"), planned("full")):
        assert rows == pytest.approx(whole / 4)


def test_a_dry_run_moves_rows_by_messages(monkeypatch):
    """float32 rows are rounded on their way, so no rank reads another's memory."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    def said(sharding: str) -> str:
        settings = {
            "actor": {"path": "llama3-1b"},
            "critic": {"layout": "tp1"},
            "engine": {"sharding": sharding},
            "reward": {"function": "exact"},
        }
        return next(line for line in training_plan(settings).splitlines() if line.startswith("reshard.mode="))

    assert ", 0 messages" in said("replicated")
    rows = said("full")
    assert ", 0 messages" not in rows and "busiest rank receives 1767.8 MiB" in rows  # 3/4 of 1.2 billion


def test_an_embedding_that_is_tied_to_no_head_is_not_gathered_with_one():
    config = run_config("tp1", sharding="full", model="llama3-1b")
    run = actor_alone(config, 4)
    untied = replace(run.actor.arch, tied=False)
    critic, other = (
        PlannedRole.of(name="critic", arch=arch, layout=run.actor.layout, head="token", trainable=True)
        for arch in (run.actor.arch, untied)
    )
    assert critic.arch.tied and critic.elements == other.elements
    assert gathered_bytes(run, critic, backward=True) == gathered_bytes(run, other, backward=True)
