"""Resharding between hand-written shards on four ranks (gloo or NCCL), bit by bit against whole tensors."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from parallel import device
from parallel.export import ShardedModel, export_folder
from parallel.layout import Layout
from parallel.rank_set import rank_set, world
from parallel.reshard.checksum_verifier import SAMPLE, ReshardError
from parallel.reshard.execute import Resharder
from parallel.reshard.in_place.addresses import addresses_of, views_at
from parallel.reshard.in_place.planner import Sides, plan_in_place
from parallel.reshard.plan import compile_plan, matrix_shape
from parallel.reshard.transport import Parameters, Transport
from parallel.weights.rules import hf_shapes, megatron_parameters
from parallel.weights.shard import ShardedParameter
from tests.tiny import tiny_architecture
from tests.toy_shards import Toy, layouts_of, megatron_like, vllm_like

Shards = dict[int, list[ShardedParameter]]
UNTIED, TIED = Toy(), Toy(tied=True, groups=1, vocab=41)
ARCH = tiny_architecture("qwen2", num_layers=4, head_dim=6, vocab_size=101)
EVERYONE = (0, 1, 2, 3)


def whole_tensors(toy: Toy) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=random) for name, shape in toy.shapes().items()}


def filled(
    parameters: list[ShardedParameter], tensors: dict[str, Tensor], padding: float, dtype: torch.dtype
) -> dict[tuple[int, str], Tensor]:
    local = {}
    for p in parameters:
        local[p.chunk, p.name] = torch.full(p.shape, padding, dtype=dtype, device=device.device())
        for b in p.blocks:
            part = tensors[b.tensor].view(matrix_shape(tensors[b.tensor].shape))[
                slice(*b.rows), slice(*b.cols)
            ]
            matrix = local[p.chunk, p.name].view(matrix_shape(p.shape))
            matrix[b.row : b.row + part.shape[0], b.col : b.col + part.shape[1]] = part.to(dtype)
    return local


def make(
    sides: tuple[Shards, Shards],
    toy: Toy,
    *,
    dtypes=(torch.float32, torch.float32),
    window_bytes=2**20,
    verify="all",
    kind=Resharder,
):
    """Return a resharder from the toy's tensors, with NaN for padding, to a destination full of NaN.

    Args:
        sides: the shards of the source and of the destination, as `dtypes`.
    """
    (source, destination), (source_dtype, dtype) = sides, dtypes
    rank, tensors = dist.get_rank(), whole_tensors(toy)
    plan = compile_plan(
        source=source, destination=destination, element_bytes=dtype.itemsize, window_bytes=window_bytes
    )
    given = filled(source.get(rank, []), tensors, torch.nan, source_dtype)
    target = {
        key: torch.full_like(value, torch.nan)
        for key, value in filled(destination.get(rank, []), tensors, 0, dtype).items()
    }
    transport = Transport(dtype=dtype, group=world().device_group, device=device.device(), verify=verify)
    resharder = kind(plan, given, target, transport)
    return resharder, given, target, filled(destination.get(rank, []), tensors, 0, dtype)


def check(source: Shards, destination: Shards, toy: Toy, **options) -> None:
    resharder, given, target, expected = make((source, destination), toy, **options)
    for factor in (1, 2):  # the same resharder serves every sync
        report = resharder.run()
        for key, value in expected.items():
            assert torch.equal(target[key], value * factor), (dist.get_rank(), key)
        for value in given.values():
            value *= 2
    received = resharder.plan.received_bytes.get(dist.get_rank(), 0)
    assert (
        report.bytes_received == received
        and report.checked_slices == len(resharder.verifier.transfers)
        and report.seconds > 0
    )


def train_shards(toy: Toy, layout: Layout) -> Shards:
    return {rank: megatron_like(toy, layout, rank) for rank in layout.ranks}


def rollout_shards(toy: Toy, tp: int, ranks=range(4)) -> Shards:
    return {rank: vllm_like(toy, tp, rank % tp) for rank in ranks}


def every_layout_both_ways() -> None:
    for toy in (UNTIED, TIED):
        for layout in layouts_of(4, layers=toy.layers):
            for tp in (1, 2, 4):
                check(train_shards(toy, layout), rollout_shards(toy, tp), toy)
                check(rollout_shards(toy, tp), train_shards(toy, layout), toy)


def disjoint_ranks() -> None:
    layout = Layout.parse("pp2", ranks=(0, 1))
    for toy in (UNTIED, TIED):
        check(train_shards(toy, layout), rollout_shards(toy, 2, ranks=(2, 3)), toy, window_bytes=400)
        check(rollout_shards(toy, 2, ranks=(2, 3)), train_shards(toy, layout), toy)
    # Ranks 0 and 2 only take part in the verification.
    check(train_shards(UNTIED, Layout(ranks=(3,))), rollout_shards(UNTIED, 1, ranks=(1,)), UNTIED)


def small_windows_and_cast() -> None:
    layout = Layout.parse("tp2pp2", ranks=(0, 1, 2, 3))
    check(train_shards(UNTIED, layout), rollout_shards(UNTIED, 4), UNTIED, window_bytes=200)
    check(
        train_shards(UNTIED, layout),
        rollout_shards(UNTIED, 4),
        UNTIED,
        window_bytes=200,
        dtypes=(torch.float32, torch.bfloat16),
    )
    check(
        rollout_shards(TIED, 2),
        train_shards(TIED, layout),
        TIED,
        window_bytes=200,
        dtypes=(torch.bfloat16, torch.bfloat16),
    )


class Corrupting(Resharder):
    """A transport that flips a bit of rank 2's embedding after it arrived."""

    def move(self) -> None:
        super().move()
        if self.rank == 2:
            self.target[0, "embed"].view(torch.int32)[3, 5] ^= 1


def corruption_is_named() -> None:
    layout = Layout.parse("tp2", ranks=(0, 1))
    sides = train_shards(UNTIED, layout), rollout_shards(UNTIED, 2, ranks=(2, 3))
    for verify, syncs in (("all", 1), ("sample", SAMPLE)):
        resharder, _, target, _ = make(sides, UNTIED, verify=verify, kind=Corrupting)
        resharder.target = target
        error = first_error(resharder.run, syncs)
        assert "1 of" in error and "embed rows 0-20 columns 0-8 from rank 0 to rank 2" in error, error
        # The flipped bit is in the mantissa: no NaN gives it away.
        assert target.get((0, "embed"), torch.zeros(1)).isfinite().all()
    resharder, _, target, _ = make(sides, UNTIED, verify="none", kind=Corrupting)
    resharder.target = target
    assert resharder.run().checked_slices == 0


def first_error(run: Callable, syncs: int) -> str:
    for _ in range(syncs):
        try:
            run()
        except ReshardError as error:
            return str(error)
    raise AssertionError(f"{syncs} syncs found nothing on rank {dist.get_rank()}")


def a_sample_covers_every_slice() -> None:
    sides = train_shards(UNTIED, Layout.parse("tp2pp2", ranks=(0, 1, 2, 3))), rollout_shards(UNTIED, 2)
    resharder, _, _, _ = make(sides, UNTIED, verify="sample")
    assert sum(resharder.run().checked_slices for _ in range(SAMPLE)) == len(resharder.verifier.transfers)


def different_plans_are_refused() -> None:
    layout = Layout.parse("tp4", ranks=(0, 1, 2, 3))
    sides = train_shards(UNTIED, layout), rollout_shards(UNTIED, 2)
    try:
        make(sides, UNTIED, window_bytes=1000 if dist.get_rank() else 2000)
    except ValueError as error:
        assert "different reshard plans" in str(error)
    else:
        raise AssertionError("not noticed")


def in_place() -> None:
    """One copy: the destination's parameters in the source's memory, out and back, by messages."""
    for toy, name, tp, in_place in product(
        (UNTIED, TIED), ("tp2pp2", "pp2dp2", "tp4"), (2, 4), (True, False)
    ):
        layout = Layout.parse(name, ranks=(0, 2, 1, 3))
        source, destination, rank, tensors = (
            train_shards(toy, layout),
            rollout_shards(toy, tp),
            dist.get_rank(),
            whole_tensors(toy),
        )
        given = filled(source[rank], tensors, 0, torch.float32)
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, addresses_of(given))
        sides = Sides(
            source=source, destination=destination, memory=dict(enumerate(everyone)), element_bytes=4
        )
        plans = plan_in_place(sides, in_place=in_place, window_bytes=2**16)
        target = {
            (p.chunk, p.name): torch.full(p.shape, torch.nan, device=device.device())
            for p in destination[rank]
        }
        target |= views_at(plans.addresses[rank], destination[rank], given, torch.float32)
        transport = Transport(
            dtype=torch.float32, group=world().device_group, device=device.device(), verify="all"
        )
        to_rollout = Resharder(plans.to_rollout, given, target, transport)
        to_train = Resharder(plans.to_train, target, given, transport) if plans.to_train else None
        expected = filled(destination[rank], tensors, 0, torch.float32)
        trained = filled(source[rank], tensors, 0, torch.float32)
        for factor in (1, 2):
            to_rollout.run()
            assert_filled(target, expected, factor, (toy, name, tp, in_place))
            if to_train:
                to_train.run()
            assert_filled(given, trained, factor, (toy, name, tp, in_place))
            double(given)


def assert_filled(found: Parameters, expected: Parameters, factor: int, where: tuple) -> None:
    """All tensors have the bits of the expected ones, times a power of two."""
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    wrong = [key for key, value in expected.items() if not torch.equal(found[key], factor * value)]
    assert not wrong, (where, dist.get_rank(), wrong)


def double(weights: Parameters) -> None:
    """An optimizer step: every weight but zeros changes, in place."""
    for tensor in weights.values():
        tensor *= 2


def exported(
    layout: Layout, *, head="lm", tied=False, dtype=torch.float32, max_file_bytes=2**30
) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Export random weights; return on every rank the files' names, their tensors and the expected ones."""
    arch = replace(ARCH, tied=tied)
    random = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=random) for name, shape in hf_shapes(arch, head).items()}
    rank, folder = dist.get_rank(), [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=device.device())
    template, target = Path(folder[0], "template"), Path(folder[0], "new", "model")
    if rank == 0:
        template.mkdir()
        (template / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
        (template / "tokenizer.json").write_text("{}")
        target.mkdir(parents=True)
        for leftover in (
            "model.safetensors",
            "model-00001-of-00099.safetensors",
            "model.safetensors.index.json",
        ):
            (target / leftover).write_text("of an earlier export")
    ranks = rank_set(layout.ranks)
    dist.barrier()
    if rank in layout.ranks:
        parameters_of = {
            other: megatron_parameters(arch, layout, other, spec="local", head=head) for other in layout.ranks
        }
        source = filled(parameters_of[rank], tensors, torch.nan, torch.float32)
        model = ShardedModel(arch=arch, head=head, dtype=dtype, tensors=source, shards=parameters_of)
        export_folder(model, target, template_folder=template, ranks=ranks, max_file_bytes=max_file_bytes)
    dist.barrier()
    held = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return (
        sorted(path.name for path in target.iterdir()),
        held,
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
    )


def export_equals_the_whole_tensors() -> None:
    cases = [
        {"layout": Layout.parse("tp2pp2", ranks=EVERYONE), "tied": True},
        {
            "layout": Layout.parse("tp2", ranks=EVERYONE),
            "max_file_bytes": 4000,
            "dtype": torch.bfloat16,
        },  # more files than ranks
        {
            "layout": Layout.parse("pp2vpp2", ranks=(3, 1)),
            "max_file_bytes": 20000,
        },  # the other ranks do not take part
        {"layout": Layout.parse("pp4", ranks=EVERYONE), "head": "token"},
    ]
    for case in cases:
        files, held, expected = exported(**case)
        assert held.keys() == expected.keys()
        assert all(
            held[name].dtype == value.dtype and torch.equal(held[name], value)
            for name, value in expected.items()
        )
        assert ("lm_head.weight" in held) == (not case.get("tied") and case.get("head") is None)
        assert {"config.json", "tokenizer.json"} <= set(files)
        count = sum(name.endswith(".safetensors") for name in files)
        assert (
            ("model.safetensors" in files and "model.safetensors.index.json" not in files)
            if count == 1
            else "model.safetensors.index.json" in files
        )
        assert ("max_file_bytes" in case) == (count > 1)


CHECKS = [
    every_layout_both_ways,
    disjoint_ranks,
    small_windows_and_cast,
    in_place,
    corruption_is_named,
    a_sample_covers_every_slice,
    different_plans_are_refused,
    export_equals_the_whole_tensors,
]

if __name__ == "__main__":
    device.initialize()
    for each in CHECKS:
        each()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all reshard checks passed")
    dist.destroy_process_group()
