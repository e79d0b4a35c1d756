"""What `engine.sharding=full` refuses, and the planner's search with it."""

from pathlib import Path

import pytest

from tests.job_files import write_job
from tests.unit.test_checks import good
from verl_megatron.checks.settings import check_config


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
