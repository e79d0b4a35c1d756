"""Four ranks exchange samples; every result is compared with what one process computes from all samples."""

import torch
import torch.distributed as dist
from torch.testing import assert_close

from parallel.layout import Layout
from parallel.redistribute import exchange_samples
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.collector import DataCollector

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


def check_exchange(rank: int, world: int) -> None:
    mine = samples_of(rank)
    count = len(mine["scalar"])
    received = exchange_samples(mine, [targets(rank, sample, world) for sample in range(count)], None)
    everything = [samples_of(source) for source in range(world)]
    assert list(received) == list(mine)
    for name in mine:
        width = [max(part[name].shape[d] for part in everything) for d in range(1, mine[name].dim())]
        expected = []
        for source, part in enumerate(everything):
            for sample, value in enumerate(part[name]):
                if rank in targets(source, sample, world):
                    padded = torch.zeros(width, dtype=value.dtype)
                    padded[tuple(slice(size) for size in value.shape)] = value
                    expected.append(padded)
        assert received[name].dtype == mine[name].dtype
        assert_close(received[name], torch.stack(expected), rtol=0, atol=0)


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


def check_collector(rank: int, world: int, layout: Layout) -> None:
    """Samples reach the role and results return, with owners on ranks 1 and 3 only, in shuffled order."""
    num_samples = 13
    owner_of_sample = torch.tensor([1 if r % 3 else 3 for r in range(num_samples)])
    dp_of_sample = torch.tensor([(r * r) % layout.dp for r in range(num_samples)])
    owned = make_samples([r for r in reversed(range(num_samples)) if owner_of_sample[r] == rank])
    collector = DataCollector(layout, rank=rank)
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


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    check_exchange(rank, world)
    for text, ranks in (
        ("tp2pp2", (0, 1, 2, 3)),
        ("pp2", (0, 1, 2, 3)),
        ("tp1", (0, 1, 2, 3)),
        ("cp2tp2", (0, 1, 2, 3)),
        ("tp2", (2, 0)),
        ("tp1", (1,)),
    ):
        check_collector(rank, world, Layout.parse(text, ranks))
    print(f"rank {rank} agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
