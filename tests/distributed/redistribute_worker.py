"""Four ranks exchange samples and objects, together and as two sets of two, as one process computes it.

So they do with losses of samples that are spread over context-parallel ranks.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch.testing import assert_close

from parallel.layout import Layout
from parallel.rank_set import RankSet, agree, rank_set, world
from parallel.redistribute import exchange_samples
from parallel.runtime.preemption import Preemption
from parallel.runtime.refusal import RefusalError
from verl_megatron.algorithms.losses import policy_loss
from verl_megatron.algorithms.objectives import OBJECTIVES
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.collector import DataCollector
from verl_megatron.data.micro_batch import TokenSplit, pack

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)


def samples_of(rank: int) -> dict[str, torch.Tensor]:
    """Rank 1 holds no samples; trailing sizes differ over ranks."""
    generator = torch.Generator().manual_seed(rank)
    count = (5, 0, 3, 8)[rank]
    tensors = {
        str(dtype): torch.randint(0, 2, (count, 2 + rank), generator=generator).to(dtype) for dtype in DTYPES
    }
    tensors["scalar"] = torch.randn(count, generator=generator)
    tensors["cube"] = torch.randn(count, 4 - rank, 1 + rank, generator=generator)
    tensors["nothing"] = torch.zeros(count, 0)
    return tensors


def targets(rank: int, sample: int, world: int) -> list[int]:
    return [r for r in range(world) if (rank * 7 + sample * 3) >> r & 1]  # none, one or several


def check_exchange(ranks: RankSet) -> None:
    rank, world = ranks.rank, ranks.size
    mine = samples_of(rank)
    count = len(mine["scalar"])
    received = exchange_samples(mine, [targets(rank, sample, world) for sample in range(count)], ranks)
    everything = [samples_of(source) for source in range(world)]
    assert list(received) == list(mine)
    for name in mine:
        shapes = [part[name].shape[1:] for part in everything]
        width = [max(sizes) for sizes in zip(*shapes)]
        expected = []
        for source, part in enumerate(everything):
            for sample, value in enumerate(part[name]):
                if rank in targets(source, sample, world):
                    padded = torch.zeros(width, dtype=value.dtype)
                    padded[tuple(slice(size) for size in value.shape)] = value
                    expected.append(padded)
        assert received[name].dtype == mine[name].dtype
        assert_close(received[name], torch.stack(expected), rtol=0, atol=0)


def check_membership(everyone: RankSet, halves: list[RankSet]) -> None:
    rank = dist.get_rank()
    assert everyone.ranks == (0, 1, 2, 3) and everyone.rank == everyone.global_rank == rank
    assert [ranks.ranks for ranks in halves] == [(1, 3), (0, 2)], "in increasing order"
    assert [ranks.is_member for ranks in halves] == [rank in (1, 3), rank in (0, 2)]
    assert [ranks.is_first for ranks in halves] == [rank == 1, rank == 0]
    assert rank_set((1, 3)) == halves[0], "the groups are made once"


def check_operations(ranks: RankSet) -> None:
    """Every rank of the set gives its global rank, or 10 to that power."""
    mine = ranks.global_rank
    assert ranks.ranks[ranks.rank] == mine and ranks.size == len(ranks.ranks)
    powers = torch.tensor([10.0**mine, -mine], dtype=torch.float64)
    assert ranks.all_sum(powers).tolist() == [sum(10.0**r for r in ranks.ranks), -sum(ranks.ranks)]
    assert ranks.all_max(powers).tolist() == [10.0 ** ranks.ranks[-1], -ranks.ranks[0]]
    assert powers.tolist() == [10.0**mine, -mine], "what was given is left alone"
    assert ranks.union([f"of {mine}", "of all"]) == [
        f"of {ranks.ranks[0]}",
        "of all",
        *(f"of {rank}" for rank in ranks.ranks[1:]),
    ]
    assert ranks.all_gather_object({"rank": mine}) == [{"rank": rank} for rank in ranks.ranks]
    assert ranks.gather_object(mine) == (list(ranks.ranks) if ranks.is_first else None)
    assert ranks.broadcast_object(mine) == ranks.ranks[0]
    assert ranks.broadcast_object(mine, src=1) == ranks.ranks[1]
    ranks.barrier()
    counter = ranks.store("counter")
    counter.add("members", 1)
    ranks.barrier()
    assert counter.add("members", 0) % ranks.size == 0, "other sets have keys of their own"

    def check() -> int:
        if ranks.rank == 1:
            raise ValueError("a wrong setting")
        return mine

    try:
        agree(check, ranks)
    except RefusalError as error:
        assert str(error).startswith(f"a wrong setting (rank {ranks.ranks[1]} on ")
    else:
        raise AssertionError("all ranks fail if one does")
    assert agree(lambda: mine, ranks) == mine


def check_preemption(ranks: RankSet) -> None:
    """Of two sets only the one whose rank has received SIGTERM ends."""
    with Preemption(grace_s=60) as preemption:
        assert not preemption.requested(ranks)
        if ranks.global_rank == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption._asked.wait(timeout=30)
        assert preemption.requested(ranks) == (3 in ranks.ranks)


def make_samples(ids: list[int]) -> RolloutBatch:
    """Sample r is its own number in every place, with 1 + r % 3 prompt tokens and r % 5 response tokens."""
    batch = RolloutBatch.from_lists(
        ids,
        [[r] * (1 + r % 3) for r in ids],
        [[100 + r] * (r % 5) for r in ids],
        [[-float(r)] * (r % 5) for r in ids],
    )
    batch.rewards = batch.sample_id.float() / 2
    return batch


def check_collector(ranks: RankSet, layout: Layout) -> None:
    """Samples reach the role and results return, with owners on ranks 1 and 3 only, in shuffled order."""
    num_samples, rank = 13, ranks.global_rank
    owner_of_sample = torch.tensor([1 if r % 3 else ranks.size - 1 for r in range(num_samples)])
    dp_of_sample = torch.tensor([(r * r) % layout.dp for r in range(num_samples)])
    owned = make_samples([r for r in reversed(range(num_samples)) if owner_of_sample[r] == ranks.rank])
    collector = DataCollector(layout, ranks)
    fields = collector.to_role(owned, dp_of_sample)
    dispatched = RolloutBatch(**fields)
    mine = [
        r
        for r in range(num_samples)
        if rank in layout.ranks and dp_of_sample[r] == layout.coordinates(rank).dp
    ]
    expected = make_samples(mine)
    assert fields.keys() == expected.tensors().keys()
    for name, value in expected.tensors().items():
        found = fields[name][:, : value.size(1)] if value.dim() > 1 else fields[name]
        assert_close(found, value, rtol=0, atol=0)
        assert value.dim() == 1 or not fields[name][:, value.size(1) :].any(), "what lies behind is padding"
    some = collector.to_role(owned, dp_of_sample, ("rewards", "values"))
    assert some.keys() == {"sample_id", "rewards"} and torch.equal(some["rewards"], expected.rewards)

    answers = rank in layout.ranks and layout.coordinates(rank).pp == layout.pp - 1
    logprobs = torch.where(
        dispatched.response_mask,
        dispatched.sample_id[:, None] * 100.0 + torch.arange(dispatched.generated_ids.size(1)),
        0.0,
    )
    values = {"logprobs": logprobs, "twice": 2 * logprobs} if answers else None
    returned = collector.to_owner(("twice", "logprobs"), values, dispatched.sample_id, owner_of_sample, owned)
    assert_close(returned["twice"], 2 * returned["logprobs"], rtol=0, atol=0)
    assert_close(
        returned["logprobs"],
        torch.where(
            owned.response_mask,
            owned.sample_id[:, None] * 100.0 + torch.arange(owned.generated_ids.size(1)),
            0.0,
        ),
        rtol=0,
        atol=0,
    )


def loss_gradient(
    batch: RolloutBatch,
    samples: list[int],
    config: AlgorithmConfig,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Gradient of the loss's token sum in the log-probs [B, T] of this context-parallel rank's tokens."""
    cp, cp_rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    fields = ("logprobs", "advantages", "rollout_logprobs")
    micro = pack(batch, samples, fields=fields, split=TokenSplit(cp=cp, cp_rank=cp_rank))
    noise_BT = torch.randn(batch.generated_ids.shape, generator=torch.Generator().manual_seed(7))
    logprobs_BT = (batch.logprobs + 0.2 * noise_BT).requires_grad_()
    tokens = PolicyTokens.of(micro, num_samples=len(batch), cp_group=cp_group)
    logprobs_N = logprobs_BT[micro.sample, micro.offset]
    loss_N, _ = policy_loss(logprobs_N, None, tokens, OBJECTIVES[config.objective], config, 0.0)
    return torch.autograd.grad(loss_N.sum(), logprobs_BT)[0]


def check_context_parallel_loss(rank: int) -> None:
    """Two context-parallel ranks that hold parts of samples have the gradient that one rank has.

    The other two have no samples. A sample has no response, and one a token that only one rank holds.
    """
    cp_groups = [rank_set(ranks).cpu_group for ranks in ((0, 1), (2, 3))]
    samples = [] if rank > 1 else [4, 0, 3, 1, 5, 2]
    lengths, generator = [9, 0, 1, 17, 4, 30], torch.Generator().manual_seed(3)
    batch = RolloutBatch.from_lists(
        list(range(6)), [[1] * (2 + n % 3) for n in lengths], [[2] * n for n in lengths]
    )
    for name in ("logprobs", "advantages", "rollout_logprobs"):
        noise_BT = torch.randn(batch.generated_ids.shape, generator=generator)
        setattr(batch, name, 0.3 * noise_BT.double() * batch.response_mask)
    for objective in ("gspo", "gspo_token", "clip"):
        for level in ("token", "sequence", "geometric"):
            config = AlgorithmConfig(
                objective=objective, correction="truncate", correction_level=level, correction_high=1.2
            )
            expected_BT = loss_gradient(batch, samples, config)
            found_BT = loss_gradient(batch, samples, config, cp_group=cp_groups[rank // 2])
            parts_BT = found_BT.clone()
            dist.all_reduce(parts_BT, group=cp_groups[rank // 2])
            assert_close(parts_BT, expected_BT, rtol=1e-9, atol=1e-12)
            assert rank > 1 or (parts_BT.any() and (found_BT != parts_BT).any()), "samples lie on both ranks"


def main() -> None:
    dist.init_process_group("gloo")
    everyone, halves = world(), [rank_set((3, 1)), rank_set((0, 2))]
    (half,) = [ranks for ranks in halves if ranks.is_member]
    check_membership(everyone, halves)
    duplicates = [ranks.duplicate() for ranks in halves]
    for ranks in (everyone, half, *(ranks for ranks in duplicates if ranks.is_member)):
        check_operations(ranks)
        check_exchange(ranks)
    check_preemption(half)
    for text, ranks in (
        ("tp2pp2", (0, 1, 2, 3)),
        ("pp2", (0, 1, 2, 3)),
        ("tp1", (0, 1, 2, 3)),
        ("cp2tp2", (0, 1, 2, 3)),
        ("tp2", (2, 0)),
        ("tp1", (1,)),
    ):
        check_collector(everyone, Layout.parse(text, ranks))
    check_collector(half, Layout.parse("tp2", half.ranks))
    check_collector(half, Layout.parse("tp1", half.ranks[1:]))
    check_context_parallel_loss(everyone.rank)
    print(f"rank {everyone.rank} agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
