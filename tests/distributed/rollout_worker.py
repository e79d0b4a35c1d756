"""Processes of test_rollout.py: `rollout_worker.py FOLDER`.

One process writes the samples that a world of four has to reproduce.
"""

import json
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import rollout_engines as engines
from tests.distributed.rollout_alone import alone
from tests.processes import eventually
from verl_megatron.rollout.vllm import Colocation, VLLMActor


def check_samples(actor, mine, expected, expected_logprobs):
    """Each sample is some replica's, with the tokens and log-probabilities that one rank alone gives it."""
    taken = [None] * dist.get_world_size()
    dist.all_gather_object(taken, {sample.sample_id: sample.token_ids for sample in mine})
    taken = [taken[rank] for rank in actor.ranks]
    for place, samples in enumerate(taken):
        assert samples == taken[place - place % actor.tp]
    owners = taken[:: actor.tp]
    assert sorted(sample for samples in owners for sample in samples) == list(range(32))
    for sample in mine:
        assert sample.token_ids == expected[str(sample.sample_id)]
        torch.testing.assert_close(
            torch.tensor(sample.logprobs),
            torch.tensor(expected_logprobs[str(sample.sample_id)]),
            rtol=0,
            atol=1e-4,
        )
    return [len(samples) for samples in owners]


def shards_of(actor):
    """Weights of each tensor-parallel slot, on every rank."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name: tensor.clone() for name, tensor in actor.weight_target().items()})
    return [held[rank] for rank in actor.ranks[: actor.tp]]


def check_refused_options():
    """While an engine in the usual order is open."""
    wrong = {
        (2, 0, 1, 3): r"must increase, and \[2, 0\]",
        (0, 1, 2, 2): "each of the world's 4 ranks once",
        (0, 1): "4 ranks once",
        (0, 2, 1, 3): "close it first",
    }
    for ranks, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            engines.actor_of("a", 2, colocation=Colocation(ranks=ranks))


def check_shared(shards, expected, expected_logprobs):
    """An engine with another order of ranks, most of it in our memory, generates what the others do."""
    ranks = (0, 2, 1, 3)
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight is \(7, 7\) torch.float32, .* parameter is \("
    ):
        small = Colocation(shared_weights={"model.embed_tokens.weight": torch.zeros(7, 7)})
        engines.actor_of("a", 2, colocation=small)
    weights = shards[ranks.index(dist.get_rank()) % 2]
    kept = {"model.norm.weight", "model.layers.1.self_attn.o_proj.weight"}
    assert kept < weights.keys()
    shared = {name: engines.seven(tensor) for name, tensor in weights.items() if name not in kept}
    actor = engines.actor_of("a", 2, colocation=Colocation(ranks=ranks, shared_weights=shared))
    assert (actor.replica, actor.tp_rank, actor.is_owner) == {
        0: (0, 0, True),
        2: (0, 1, False),
        1: (1, 0, True),
        3: (1, 1, False),
    }[dist.get_rank()]
    held = actor.weight_target()
    assert held.keys() == weights.keys() and all((tensor == 7).all() for tensor in shared.values()), (
        "they were written to"
    )
    addresses = {tensor.data_ptr() for tensor in shared.values()}
    assert all(held[name].data_ptr() not in addresses and held[name].abs().max() < 0.01 for name in kept)
    for name, tensor in weights.items():
        (held[name] if name in kept else shared[name]).copy_(tensor)
    finished = []
    samples = actor.generate(engines.REQUESTS, engines.SAMPLING, on_finish=finished.append)
    shares = check_samples(actor, samples, expected, expected_logprobs)
    assert len(finished) == (shares[actor.replica] if actor.is_owner else 0), shares
    held = actor.weight_target()
    assert all(held[name].data_ptr() == tensor.data_ptr() for name, tensor in shared.items())
    actor.close()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in shared.items())


def world():
    os.environ.update(engines.TORCHRUN)
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())  # ranks whose generators differ, as a trainer's do
    expected, expected_logprobs = json.loads((engines.folder / "alone.json").read_text())
    before = engines.process_state()
    actor = engines.actor_of("a", 2, colocation=Colocation(shared_weights={}))
    assert engines.process_state() == before
    with pytest.raises(ValueError, match=r"rollout.tp=3 must divide the number of ranks that generate, 4"):
        VLLMActor(engines.folder / "a", 3)
    source = engines.actor_of("a", 2)
    engines.write_all(actor, source)
    source.close()
    shards = shards_of(actor)
    check_refused_options()
    assert (actor.replica, actor.num_replicas, actor.tp_rank) == (
        dist.get_rank() // 2,
        dist.get_world_size() // 2,
        dist.get_rank() % 2,
    )
    finished = []
    samples = actor.generate(engines.REQUESTS, engines.SAMPLING, on_finish=finished.append)
    shares = check_samples(actor, samples, expected, expected_logprobs)
    assert len(finished) == (shares[actor.replica] if actor.is_owner else 0), shares

    store = dist.distributed_c10d._get_default_store()

    def waits(sample):
        assert eventually(lambda: store.add("finished by the other", 0) == 24, within_s=120)

    on_finish = (waits, lambda _: store.add("finished by the other", 1))[actor.replica]
    samples = actor.generate(engines.REQUESTS, engines.SAMPLING, on_finish=on_finish)
    assert check_samples(actor, samples, expected, expected_logprobs) == [8, 24]
    assert engines.tokens_of(actor.generate(engines.REQUESTS[:6], engines.SAMPLING, shared=False)) == {
        str(sample): expected[str(sample)] for sample in range(6)
    }
    assert engines.process_state() == before
    assert not any(
        store.check([f"verl_megatron/samples/{i}"]) or store.check([f"verl_megatron/samples/{i}/finished"])
        for i in range(4)
    )
    actor.close()
    check_shared(shards, expected, expected_logprobs)
    for tp in (4, 1):  # more ranks than key-value heads; four replicas
        actor = engines.actor_of("a", tp, config=engines.FOLLOWING)  # its ranks agree on how many at once
        check_samples(actor, actor.generate(engines.REQUESTS, engines.SAMPLING), expected, expected_logprobs)
        actor.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == 4


if __name__ == "__main__":
    alone() if engines.TORCHRUN["WORLD_SIZE"] == "1" else world()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - engines.STARTED:.1f} s: all rollout checks passed", flush=True)
    dist.destroy_process_group()
