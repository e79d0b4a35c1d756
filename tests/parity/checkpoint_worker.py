"""Training resumed from a checkpoint against uninterrupted training, on four ranks.

Under the layout it was saved with and under others.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.checkpoint import training_state as checkpoint
from parallel.checkpoint.background import Background
from parallel.checkpoint.optimizer_shards import optimizer_shards
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity.training import CLASSES, FIELDS, LOSSES, LR, experience, full_weights
from tests.parity.training_offload import same
from tests.parity.world import (
    check,
    largest,
    run_checks,
    say,
    share_of,
    shared_folder,
    weights_apart,
    write_once,
)
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.config import EngineConfig
from verl_megatron.roles.engine import Engine, EngineOptions

COMMON = {
    "clip_grad": 0.5,
    "adam_eps": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_steps": 1,
    "tokens_per_micro_batch": 64,
}


def make_engine(folder: Path, head: str, layout: Layout, *, seed: int = 1, **settings) -> Engine:
    engine = Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head=head,
        options=EngineOptions(config=EngineConfig(**COMMON, **settings), seed=seed),
    )
    engine.prepare_training(lr=LR, total_steps=6)
    return engine


def some_layout() -> Layout:
    """With data parallelism on two or four ranks, which GPU machines have."""
    ranks = world().ranks
    return Layout.parse({2: "tp1", 4: "tp2"}[len(ranks)], ranks)


def steps(engine: Engine, batch, count: int) -> None:
    mine, micro = share_of(batch, engine.layout, engine.config.tokens_per_micro_batch)
    for _ in range(count):
        engine.train_step(
            mine,
            micro,
            LOSSES[engine.head],
            fields=FIELDS[engine.head],
            scale=LossScale(int(batch.response_mask.sum())),
        )


def save(engine: Engine, folder: Path) -> dict:
    snapshot, told = engine.snapshot()
    snapshot.write(folder, world())
    return told


def bits(engine: Engine) -> list:
    """Everything a member holds: its own copies of the weights and what its optimizer keeps for them."""
    if not engine.groups.is_member:
        return []
    engine.gather_weights()
    parts = optimizer_shards(engine.chunks, engine.optimizer, engine.groups)
    held = []
    for one in parts:
        of_optimizer = [one.part(kind) for kind in (checkpoint.VALUE, *checkpoint.MOMENTS)]
        held.append((one.weight.data, one.start, *(part for part in of_optimizer if part is not None)))
    steps_taken = [
        float(one.inner.state.get(one.value, {}).get("step", 0)) for one in parts if one.inner is not None
    ]
    return [leaf for row in held for leaf in row] + steps_taken + [engine.scheduler.state_dict()]


ALL = (0, 1, 2, 3)
UNSHARDED, FULL = {"distributed_optimizer": False}, {"sharding": "full"}
CASES = (
    # head, family, saved under (layout, ranks, stage layers, settings), loaded under each of
    ("lm", "qwen2_tied_yarn", ("tp2pp2", ALL, (), {}), [
        ("pp2", ALL, (), {}), ("tp4", ALL, (), {}), ("tp2", (2, 3), (), UNSHARDED), ("pp2vpp2", ALL, (), {}),
    ]),
    ("lm", "qwen3", ("tp2", ALL, (), {}), [
        ("tp2pp2", (0, 2, 1, 3), (), {}), ("cp2tp2sp", ALL, (), {}), ("tp1", (1,), (), UNSHARDED),
        ("tp1", ALL, (), FULL),
    ]),
    ("lm", "qwen3", ("tp1", ALL, (), FULL), [
        ("tp1", (0, 2, 3), (), FULL), ("tp2", ALL, (), {}), ("tp1", (1,), (), UNSHARDED),
    ]),
    ("lm_token", "qwen2_tied_yarn", ("tp2pp2", ALL, (), {}), [
        ("tp2", (2, 3), (), UNSHARDED), ("pp2vpp2", ALL, (), {}),
    ]),
    ("token", "llama_tied_llama3", ("pp2", ALL, (1, 3), UNSHARDED), [
        ("tp2pp2", ALL, (), {}), ("tp1", (0, 1, 2), (), {}),
    ]),
)  # fmt: skip


def check_layouts() -> None:
    """A step after loading equals an uninterrupted one: bitwise under one layout, else to rounding."""
    folder = shared_folder()
    for number, (head, family, source, targets) in enumerate(CASES):
        path = folder / f"{head}_{family}"
        batch = experience(write_once(path, family, CLASSES[head]).config.vocab_size)
        text, ranks, stage_layers, settings = source
        going_on = make_engine(path, head, Layout.parse(text, ranks, stage_layers), **settings)
        steps(going_on, batch, 2)
        saved = save(going_on, folder / f"saved_{number}")
        held = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in bits(going_on)]
        steps(going_on, batch, 1)
        want, norms = full_weights(going_on), going_on.norms()

        again = make_engine(path, head, Layout.parse(text, ranks, stage_layers), seed=2, **settings)
        again.load(folder / f"saved_{number}", saved)
        assert same(bits(again), held), f"{head} {family} {source}: not the bits that were saved"
        steps(again, batch, 1)
        assert same(bits(again), bits(going_on)), f"{head} {family} {source}: other bits after a step"
        for text, ranks, stage_layers, settings in targets:
            other = make_engine(path, head, Layout.parse(text, ranks, stage_layers), seed=2, **settings)
            other.load(folder / f"saved_{number}", saved)
            steps(other, batch, 1)
            moved = weights_apart(full_weights(other), want)
            apart = largest(
                abs(found / norm - 1) for found, norm in zip(other.norms().values(), norms.values())
            )
            check(
                f"checkpoint {head} {family} {source[0]} on {text} {list(ranks)} {settings or ''}",
                limit=5e-6,
                weights=moved,
                norms=apart,
            )


def check_bfloat16() -> None:
    """Master weights come back bitwise, so do their bfloat16 roundings; before the first step, too."""
    folder = shared_folder()
    batch = experience(write_once(folder / "qwen3", "qwen3").config.vocab_size)
    layout = some_layout()
    for count in (0, 2):
        for distributed in (True, False):
            first = make_engine(
                folder / "qwen3", "lm", layout, dtype="bfloat16", distributed_optimizer=distributed
            )
            steps(first, batch, count)
            saved = save(first, folder / f"{count}_{distributed}")
            again = make_engine(
                folder / "qwen3", "lm", layout, dtype="bfloat16", distributed_optimizer=distributed, seed=2
            )
            steps(again, batch, 1 if count else 0)  # moments that are there are written over
            again.load(folder / f"{count}_{distributed}", saved)
            assert same(bits(again), bits(first)), f"{count} steps, distributed optimizer {distributed}"
            other = make_engine(
                folder / "qwen3", "lm", layout, dtype="bfloat16", distributed_optimizer=not distributed
            )
            other.load(folder / f"{count}_{distributed}", saved)
            mine, theirs = other.state_dict(), first.state_dict()
            assert mine["tensors"].keys() == theirs["tensors"].keys() and same(mine, theirs)
    say("bfloat16: equal bit by bit")


def check_background() -> None:
    """What a thread writes while training goes on is the state at the snapshot, every time."""
    folder = shared_folder()
    batch = experience(write_once(folder / "qwen3", "qwen3").config.vocab_size)
    layout, background = some_layout(), Background(world(), enabled=True)
    engine = make_engine(folder / "qwen3", "lm", layout)
    reserved = engine.reserve_copies()
    for number in range(2):
        steps(engine, batch, 1)
        (snapshot, told), held = (
            engine.snapshot(),
            [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in bits(engine)],
        )
        background.submit(
            lambda ranks, path=folder / f"saved_{number}", snapshot=snapshot: snapshot.write(path, ranks)
        )
        steps(engine, batch, 1)
        background.wait()
        again = make_engine(folder / "qwen3", "lm", layout, seed=2)
        again.load(folder / f"saved_{number}", told)
        assert same(bits(again), held) and not same(bits(engine), held)
    assert engine.copies.num_bytes == reserved > 0
    background.close()
    say("background: the state at the snapshot")


def check_format() -> None:
    """Megatron-Core's own reader takes the folder for one of its own, and finds the weights in it."""
    from megatron.core import dist_checkpointing  # only after parallel.device has prepared it

    folder = shared_folder()
    write_once(folder / "qwen3", "qwen3")
    engine = make_engine(folder / "qwen3", "lm", Layout.parse("tp2pp2", tuple(range(4))))
    told = save(engine, folder / "saved")
    found = dist_checkpointing.load_plain_tensors(str(folder / "saved"))
    want = full_weights(engine)["model.norm.weight"].flatten()
    assert torch.equal(found["decoder.final_layernorm.weight"], want) and not any(
        key.startswith("optimizer") for key in found
    )
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "saved/.metadata").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    dist.barrier()
    refused = False
    try:
        engine.load(folder / "saved", told)
    except ValueError as error:
        refused = "os.system" in str(error) or "posix.system" in str(error)
    assert world().all_max(torch.tensor([0.0 if refused else 1.0])).item() == 0, (
        "an index that runs a command was loaded"
    )
    say("format: read by Megatron-Core")


if __name__ == "__main__":
    run_checks(
        {
            "layouts": check_layouts,
            "bfloat16": check_bfloat16,
            "background": check_background,
            "format": check_format,
        },
        sys.argv[1:],
    )
