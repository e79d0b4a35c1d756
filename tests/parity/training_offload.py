"""Training with memory given up between steps: gradients and optimizer state offloaded, models in turns."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.offload import Residence, gradients, optimizer_tensors
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity.training import CLASSES, FIELDS, LR, experience, policy, value
from tests.parity.world import (
    say,
    share_of,
    shared_folder,
    write_once,
)
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.config import EngineConfig, ModelConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.residency import Residency
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.roles.role import Training, make_role
from verl_megatron.roles.token_budget import LongestRows

# ---- memory given up between steps -----------------------------------------------------------------------


def leaves_of(value) -> list:
    """What nested lists and dictionaries hold, in order."""
    if isinstance(value, dict | list):
        return [
            leaf
            for part in (value.values() if isinstance(value, dict) else value)
            for leaf in leaves_of(part)
        ]
    return [value]


def same(a, b) -> bool:
    """Whether two nested values hold the same numbers, bit by bit."""
    pairs = list(zip(leaves_of(a), leaves_of(b), strict=True))
    return all(
        x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs
    )


def step_away(engine: Engine, what: str, mine: RolloutBatch, micro: list[list[int]]) -> None:
    """Release `what`, infer without it and begin to bring it back."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in engine.tensors.values()}
    state = [
        tensor
        for tensor in optimizer_tensors(engine.optimizer)
        if tensor.untyped_storage().data_ptr() not in weights
    ]
    moved = (gradients(engine.chunks) if what in ("grads", "all") else []) + (
        state if what in ("optimizer", "all") else []
    )
    before = engine.infer(mine, micro)  # gathers the new weights layer by layer
    engine.gather_weights()
    engine.offload_async(what)
    engine.wait_offload()
    assert (
        Residence.ON_HOST in (engine.offload.residence, engine.idle_gradients.residence)
        and moved
        and not any(tensor.untyped_storage().nbytes() for tensor in moved)
    )
    assert same(engine.infer(mine, micro), before)
    engine.onload_async()


def steps_apart(
    folder: Path,
    layout: Layout,
    batch: RolloutBatch,
    config: EngineConfig,
    away: tuple[tuple[str, ...], ...],
    *,
    steps_only: bool = False,
) -> Engine:
    """As many steps as `away` has entries; each names what is released, in turn, after its step."""
    engine = Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head="lm",
        options=EngineOptions(config=config, seed=1, steps_only=steps_only),
    )
    engine.prepare_training(lr=LR, total_steps=6)
    mine, micro = share_of(batch, layout, config.tokens_per_micro_batch)
    for released in away:
        engine.train_step(
            mine, micro, policy, fields=FIELDS["lm"], scale=LossScale(int(batch.response_mask.sum()))
        )
        for what in released:
            step_away(engine, what, mine, micro)
    return engine


def refuses_no_number(engine: Engine, mine: RolloutBatch, micro: list[list[int]]) -> None:
    """A loss that is no number is named on every rank."""
    try:
        engine.train_step(
            mine,
            micro,
            lambda outputs, micro: (math.nan * outputs["logprobs"], Sums()),
            fields=(),
            scale=LossScale(1),
        )
    except ValueError as error:
        assert "policy/grad_norm is nan" in str(error) and "lower actor.lr" in str(error)
    else:
        raise AssertionError("a step was taken along a gradient that is no number")


def check_offload() -> None:
    """Steps with gradients and optimizer state offloaded between are bitwise the same; so are checkpoints."""
    folder, bf16 = shared_folder(), {"dtype": "bfloat16"}
    split = "tp2pp2" if dist.get_world_size() == 4 else "pp2"  # GPU machines may have two
    for family, text, extra in (
        ("qwen3", "tp1", bf16),
        ("qwen3", split, bf16),
        ("qwen2_tied_yarn", "pp2vpp2", {"dtype": "float32"}),
        ("qwen3", "tp2sp", {"dtype": "float32"}),
    ):
        path = folder / family
        batch = experience(write_once(path, family).config.vocab_size)
        layout = Layout.parse(text, tuple(range(dist.get_world_size())))
        config = EngineConfig(
            tokens_per_micro_batch=64, distributed_optimizer=text in ("tp1", "pp2vpp2"), **extra
        )
        want = steps_apart(path, layout, batch, config, ((), ())).state_dict()
        engine = steps_apart(path, layout, batch, config, (("all",), ("grads", "optimizer")))
        engine.offload_async("all")
        engine.wait_offload()
        assert same(engine.state_dict(), want) and engine.offload.residence is Residence.ON_DEVICE, (
            f"{family} {text} {extra}"
        )
        check_away_but_for_steps(path, layout, batch, config, want)
        away = engine.offload.device_bytes + engine.idle_gradients.device_bytes
        refuses_no_number(engine, *share_of(batch, layout, 64))
        say(
            f"offload {family} {layout} {extra}: {away} bytes away, {engine.offload.host_bytes} of "
            f"them on the host, equal bit by bit"
        )


def check_away_but_for_steps(
    folder: Path, layout: Layout, batch: RolloutBatch, config: EngineConfig, want: dict
) -> None:
    """With steps_only, two steps leave the same state, which is off the GPU but for them."""
    engine = steps_apart(folder, layout, batch, config, ((), ("grads",)), steps_only=True)
    weights = {tensor.untyped_storage().data_ptr() for tensor in engine.tensors.values()}
    storages = [tensor.untyped_storage() for tensor in optimizer_tensors(engine.optimizer)]
    state = [storage for storage in storages if storage.data_ptr() not in weights]
    for _ in range(2):
        assert same(engine.state_dict(), want) and state
        assert engine.offload.residence is Residence.ON_HOST
        for storage in state:
            assert not storage.nbytes()
        engine.onload_async()  # as before passes


def check_turns() -> None:
    """Actor and critic alternate with only one's gradients and optimizer state on the device."""
    folder, layout = shared_folder(), Layout.parse("tp1", tuple(range(dist.get_world_size())))
    batch = experience(write_once(folder / "actor", "qwen3").config.vocab_size)
    write_once(folder / "critic", "qwen3", CLASSES["token"])
    mine, micro = share_of(batch, layout, 64)
    learnt = {}
    for what in ("none", "all"):
        options = EngineOptions(config=EngineConfig(tokens_per_micro_batch=64), seed=1)
        models = {name: ModelConfig(path=str(folder / name), lr=LR) for name in ("actor", "critic")}
        roles = {
            name: make_role(
                model,
                ProcessGroups(layout, world()),
                arch=read_architecture(model.path),
                head=head,
                options=options,
                training=Training(steps=6, rows=LongestRows(prompt_tokens=4, response_tokens=4, count=8)),
            )
            for (name, model), head in zip(models.items(), ("lm", "token"))
        }
        residency = Residency(
            None, None, [role.engine for role in roles.values()], offload=what, sleeps=False
        )
        for name, other in (("critic", "actor"), ("actor", "critic")) * 2:
            residency.enter_training(roles[name].engine)
            idle, engine = roles[other].engine, roles[name].engine
            assert ({idle.offload.residence, idle.idle_gradients.residence} == {Residence.ON_HOST}) == (
                what == "all"
            ), (what, other)
            loss = policy if name == "actor" else value
            engine.train_step(
                mine, micro, loss, fields=FIELDS[engine.head], scale=LossScale(int(batch.response_mask.sum()))
            )
        learnt[what] = []
        for role in roles.values():
            residency.enter_training(role.engine)
            learnt[what].append(role.engine.state_dict())
    assert same(learnt["all"], learnt["none"])
    say("turns: equal bit by bit")
