"""A bridge's address, and worlds that end while both connect; all else in end_to_end/test_separate.py."""

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parallel.bridge import Bridge, BridgeLostError, losing
from parallel.layout import Layout
from parallel.reshard.plan import compile_plan
from parallel.reshard.staged import StagedParameters
from parallel.reshard.transport import Transport
from parallel.reshard.versions import VersionedReshard
from parallel.sealed_store import ADDRESS, TOKEN, given_address
from tests.distributed.reshard_worker import UNTIED, filled, rollout_shards, train_shards, whole_tensors
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import ServingWorld
from verl_megatron.separate import weights
from verl_megatron.separate.link import RolloutLink


@pytest.mark.parametrize(
    ("address", "token", "words"),
    [
        ("", "secret", f"{ADDRESS} is not set"),
        ("host:29400", "", f"{TOKEN} is not set"),
        ("host", "secret", f"{ADDRESS}='host' is no address; write HOST:PORT"),
        (":29400", "secret", "is no address"),
        ("host:0", "secret", "is no address"),
        ("host:65536", "secret", "is no address"),
        ("host:x", "secret", "is no address"),
        ("host:" + "9" * 5000, "secret", "is no address"),
    ],
)
def test_other_addresses_are_refused(address, token, words, monkeypatch):
    monkeypatch.setenv(ADDRESS, address)
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ValueError, match=r"; ") as refused:
        given_address()
    assert words in str(refused.value) and len(str(refused.value)) < 400


SOURCE = train_shards(UNTIED, Layout.parse("tp1", ranks=(0,)))
DESTINATION = rollout_shards(UNTIED, 1, ranks=range(1, 2))
PLAN = compile_plan(source=SOURCE, destination=DESTINATION, element_bytes=4, window_bytes=200)
NOT_STAGED = StagedParameters(shapes={}, write=lambda values: None)


def connect(bridge: Bridge) -> VersionedReshard:
    """This end's part of the exchange of weights."""
    config, dtype = TrainerConfig(), torch.float32
    shards = [*SOURCE.values(), *DESTINATION.values()][bridge.rank]
    tensors = filled(shards, whole_tensors(UNTIED), 0, dtype)
    if bridge.rank == 1:
        engine = cast(Any, SimpleNamespace(tensors=tensors))
        return weights.receive_versions(config, bridge, PLAN, cast(Any, None), engine, dtype)[0]
    source = cast(Any, SimpleNamespace(arch=None, shards=SOURCE, tensors=tensors))
    return weights.send_versions(config, bridge, source, dtype)


@pytest.mark.parametrize("left", [0, 1])
def test_a_world_that_ends_while_both_connect_is_lost(ends, left, monkeypatch):
    monkeypatch.setattr(weights, "plan_of", lambda *_: PLAN)
    monkeypatch.setattr(weights, "target_of", lambda engine, *_: (engine.tensors, NOT_STAGED))
    monkeypatch.setattr(weights, "vllm_shards", lambda *_: DESTINATION)
    _, bridges = ends

    def end() -> None:
        """Connect, and end."""
        bridges[1 - left].group("weights")
        bridges[1 - left].abandon()
        gc.collect()  # closes the connections

    with ThreadPoolExecutor(1) as other:
        ended = other.submit(end)
        with pytest.raises(BridgeLostError, match="connecting: "):
            connect(bridges[left])
        ended.result()


def test_a_world_with_other_settings_is_refused_by_name(ends):
    _, (training, rollout) = ends
    training.agree_on({"rollout.top_p": "1.0", "run.seed": "1", "reward.function": '"match"'})
    rollout.agree_on({"rollout.top_p": "1.0", "run.seed": "1", "reward.function": '"match"'})
    with pytest.raises(ValueError, match="start both worlds with the same") as refused:
        rollout.agree_on({"rollout.top_p": "0.9", "run.seed": "1"})
    assert 'reward.function=unknown is "match" there, rollout.top_p=0.9 is 1.0 there' in str(refused.value)


@pytest.mark.parametrize("operation", ["all_sum", "all_max"])
def test_a_collective_with_a_world_that_has_ended_says_so(ends, operation):
    """torch.distributed's own would raise a ValueError: it does not know the group."""
    _, (training, rollout) = ends
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(rollout.group, "weights")
        group = training.group("weights")
        ended.result()
    del ended
    rollout.abandon()
    gc.collect()  # closes the connections
    transport = Transport(
        dtype=torch.float32, group=group, device=torch.device("cpu"), ranks=training.ranks, verify="all"
    )
    with pytest.raises(RuntimeError, match="Connection|closed|reset"):
        getattr(transport, operation)(torch.ones(1, dtype=torch.int64))


def test_an_error_of_this_rank_alone_lets_all_ranks_notice(ends):
    _, (training, rollout) = ends
    link = object.__new__(RolloutLink)
    link.bridge, link.served_by = training, ServingWorld(name="rollout", ranks=(1,))
    with pytest.raises(torch.OutOfMemoryError):
        raise link._lost(torch.OutOfMemoryError("of 80 GiB"))
    rollout.check()
    assert "has ended (a window is broken)" in str(link._lost(RuntimeError("a window is broken\nat ...")))
    with pytest.raises(BridgeLostError, match="a window is broken"):
        rollout.check()


def test_too_little_memory_is_not_taken_for_a_lost_world():
    with pytest.raises(torch.OutOfMemoryError), losing("connecting"):
        raise torch.OutOfMemoryError("of 80 GiB")
