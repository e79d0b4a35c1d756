"""Optimizer steps under every layout against one rank and against plain PyTorch, on four ranks.

Letters: N tokens asked about in a sample.
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.offload import Residence, gradients, optimizer_tensors
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from parallel.weights.rules import hf_shapes
from tests.parity.pairs import check_pairs
from tests.parity.world import (
    check,
    make_batch,
    run_checks,
    sample_logits,
    say,
    share_of,
    shared_folder,
    write_once,
)
from verl_megatron.algorithms.losses import policy_loss, value_loss
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.algorithms.objectives import clip
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig, EngineConfig, ModelConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.residency import Residency
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.roles.role import make_role

FIELDS = {"lm": ("logprobs", "advantages", "ref_logprobs"), "token": ("values", "returns")}
CLASSES = {"lm": "ForCausalLM", "token": "ForTokenClassification"}
ALGORITHM = AlgorithmConfig(
    clip_ratio_low=0.2,
    clip_ratio_high=0.3,
    entropy_coef=0.01,
    kl_in="loss",
    kl_estimator="k3",
    cliprange_value=0.2,
)
KL_COEF, LR = 0.1, 3e-3


def gather_late(engine: Engine) -> None:
    """Gather what the other data-parallel ranks have updated; nothing to do with one optimizer for all."""
    before = (
        {key: tensor.clone() for key, tensor in engine.tensors.items()} if engine.groups.is_member else {}
    )
    engine.gather_weights()
    changed = (
        world()
        .all_max(
            torch.tensor(
                float(any(not torch.equal(engine.tensors[key], tensor) for key, tensor in before.items()))
            )
        )
        .item()
    )
    assert bool(changed) == (
        engine.config.distributed_optimizer and engine.layout.dp * engine.layout.cp > 1
    ), str(engine.layout)


def full_weights(engine: Engine) -> dict[str, Tensor]:
    """Hugging Face tensors put together from all ranks' shards; the same on every rank."""
    engine.gather_weights()
    mine = (
        [(p, engine.tensors[p.chunk, p.name]) for p in engine.parameters if p.owner]
        if engine.groups.is_member
        else []
    )
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    full = {
        name: torch.full(shape, torch.nan).view(shape[0], -1)
        for name, shape in hf_shapes(engine.arch, engine.head).items()
    }
    for parameter, tensor in (pair for part in gathered for pair in part):
        matrix = tensor.view(tensor.shape[0], -1)
        for block in parameter.blocks:
            height, width = block.rows[1] - block.rows[0], block.cols[1] - block.cols[0]
            full[block.tensor][slice(*block.rows), slice(*block.cols)] = matrix[
                block.row : block.row + height, block.col : block.col + width
            ]
    return full


def experience(vocab_size: int, *, logprobs_BT: Tensor | float = -4.0) -> RolloutBatch:
    """Samples with everything that the losses read; old and reference log-probs scatter around `logprobs_BT`."""
    batch = make_batch(vocab_size)
    generator = torch.Generator().manual_seed(5)

    def noise() -> Tensor:
        return torch.randn(batch.generated_ids.shape, generator=generator) * batch.response_mask

    batch.logprobs, batch.advantages, batch.ref_logprobs = (
        logprobs_BT + 0.3 * noise(),
        noise(),
        logprobs_BT + 0.3 * noise(),
    )
    batch.values, batch.returns = noise(), noise()
    return batch


def policy(outputs, micro):
    tokens = PolicyTokens.of(micro)
    return policy_loss(outputs["logprobs"], outputs["entropy"], tokens, clip.objective, ALGORITHM, KL_COEF)


def value(outputs, micro):
    return value_loss(outputs["values"], micro.fields["values"], micro.fields["returns"], ALGORITHM)


def train(
    folder: Path,
    head: str,
    layout: Layout,
    batch: RolloutBatch,
    options: EngineOptions,
    *,
    steps: int = 3,
):
    """Optimizer steps on all ranks' samples; the metrics of each and the weights afterwards."""
    arch = read_architecture(folder)
    engine = Engine(
        arch=arch,
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head=head,
        options=options,
    )
    engine.prepare_training(lr=LR, total_steps=6)
    mine, micro = share_of(batch, layout, options.config.tokens_per_micro_batch)
    history = []
    for _ in range(steps):
        sums = engine.train_step(
            mine,
            micro,
            policy if head == "lm" else value,
            fields=FIELDS[head],
            scale=LossScale(int(batch.response_mask.sum())),
        )
        history.append(sums.reduce(world()))
    gather_late(engine)
    return history, full_weights(engine)


# Layout, ranks, layers of each stage, tokens of a micro-batch, settings.
LAYOUTS = [
    ("tp1", 1, (), 40, {}),
    ("tp1", 4, (), 64, {}),
    ("tp2pp2", 4, (), 64, {}),
    ("tp2pp2sp", 4, (), 64, {"recompute": "full"}),
    ("tp4sp", 4, (), 64, {}),
    ("pp2vpp2", 4, (), 64, {}),
    ("pp2", 4, (1, 3), 64, {"distributed_optimizer": False}),
    ("cp2tp2sp", 4, (), 64, {}),
    ("cp2", 4, (), 64, {"recompute": "selective"}),
]
DEEP = [
    ("pp4vpp2", 4, (), 64, {}),
    ("pp2vpp4", 2, (), 40, {}),
    ("tp2pp2vpp4sp", 4, (), 40, {}),
]  # micro-batches of many lengths go round


def check_layouts() -> None:
    """Losses, gradient norms and weights do not depend on layout, packing or the optimizer's sharding."""
    folder = shared_folder()
    for head, family, layers, layouts in (
        ("lm", "qwen2_tied_yarn", 4, LAYOUTS),
        ("lm", "qwen3", 4, LAYOUTS),
        ("token", "llama_tied_llama3", 4, LAYOUTS),
        ("lm", "qwen3", 8, DEEP),
    ):
        path = folder / f"{head}_{family}_{layers}"
        batch = experience(
            write_once(path, family, CLASSES[head], num_hidden_layers=layers).config.vocab_size
        )
        common = {"clip_grad": 0.5, "adam_eps": 1e-4, "lr_decay_style": "cosine", "lr_warmup_steps": 1}
        alone = EngineConfig(tokens_per_micro_batch=1000, distributed_optimizer=False, **common)
        want, weights = train(path, head, Layout(), batch, EngineOptions(config=alone, seed=1))
        for text, count, stage_layers, budget, extra in layouts:
            config = EngineConfig(tokens_per_micro_batch=budget, **common, **extra)
            layout = Layout.parse(text, tuple(range(count)), stage_layers)
            got, trained = train(path, head, layout, batch, EngineOptions(config=config, seed=1))
            metric = max(abs(a[key] - b[key]) for a, b in zip(got, want) for key in b)
            moved = max((trained[name] - weights[name]).abs().max().item() for name in weights)
            check(
                f"train {head} {family} {text} on {count} {extra or ''}",
                limit=5e-5,
                metrics=metric,
                weights=moved,
            )


# ---- the same in plain PyTorch ---------------------------------------------------------------------------


def plain_policy_loss(
    logits_NV: Tensor,
    labels_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    ref_N: Tensor,
    temperature: float,
) -> Tensor:
    """Sum over the tokens of PPO's clipped loss, the entropy bonus and the k3 penalty."""
    distribution = torch.distributions.Categorical(logits=logits_NV / temperature)
    logprob_N = distribution.log_prob(labels_N)
    ratio_N = torch.exp(logprob_N - old_N)
    clipped_N = torch.clamp(ratio_N, 0.8, 1.3)
    surrogate_N = (
        torch.where(ratio_N * advantages_N < clipped_N * advantages_N, ratio_N, clipped_N) * advantages_N
    )
    kl_N = torch.exp(ref_N - logprob_N) - 1 - (ref_N - logprob_N)
    return (-surrogate_N - 0.01 * distribution.entropy() + KL_COEF * kl_N).sum()


def plain_value_loss(value_N: Tensor, old_N: Tensor, return_N: Tensor) -> Tensor:
    """Sum over the tokens of half the squared error, the larger of the free and the limited one."""
    limited_N = torch.minimum(torch.maximum(value_N, old_N - 0.2), old_N + 0.2)
    return torch.stack([(value_N - return_N) ** 2, (limited_N - return_N) ** 2]).amax(0).sum() / 2


def plain_loss(model, batch: RolloutBatch, head: str, temperature: float) -> Tensor:
    """Mean over all response tokens."""
    total = torch.zeros(())
    for b, logits in enumerate(sample_logits(model, batch)):
        asked = batch.response_mask[b].nonzero().squeeze(1)
        known = [getattr(batch, name)[b, asked] for name in FIELDS[head]]
        if head == "lm":
            total = total + plain_policy_loss(
                logits[asked - 1], batch.generated_ids[b, asked], *known, temperature
            )
        else:
            total = total + plain_value_loss(logits[asked - 1, 0], *known)
    return total / batch.response_mask.sum()


def plain_steps(
    model, batch: RolloutBatch, head: str, config: EngineConfig, temperature: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms of two AdamW steps, and the weights afterwards."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=tuple(config.adam_betas), eps=config.adam_eps)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        plain_loss(model, batch, head, temperature).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, config.clip_grad).item())
        optimizer.step()
    return norms, {name: p.detach().view(len(p), -1) for name, p in model.named_parameters()}


def initial_logprobs(model, batch: RolloutBatch, temperature: float) -> Tensor:
    """[B, T]: what the model says of each token but the first."""
    logprobs_BT = torch.zeros(batch.generated_ids.shape)
    with torch.no_grad():
        for b, logits in enumerate(sample_logits(model, batch)):
            ids = batch.generated_ids[b, 1 : len(logits)]
            logprobs_BT[b, 1 : len(logits)] = (
                torch.log_softmax(logits[:-1] / temperature, -1).gather(1, ids[:, None]).squeeze(1)
            )
    return logprobs_BT


def check_plain() -> None:
    """Two steps of the engine are two steps of autograd and torch.optim.AdamW on the Hugging Face model."""
    folder, temperature = shared_folder(), 0.7
    config = EngineConfig(tokens_per_micro_batch=64, clip_grad=0.5, adam_eps=1e-4, weight_decay=0.1)
    for head, family in (("lm", "qwen2_tied_yarn"), ("lm", "qwen3"), ("token", "llama_tied_llama3")):
        path = folder / f"{head}_{family}"
        model = write_once(path, family, CLASSES[head])
        batch = make_batch(model.config.vocab_size)
        batch = experience(
            model.config.vocab_size,
            logprobs_BT=initial_logprobs(model, batch, temperature) if head == "lm" else 0.0,
        )
        norms, want = plain_steps(model, batch, head, config, temperature)
        assert min(norms) > config.clip_grad, "the gradients have to be clipped, or clipping is not compared"
        for text, count in (("tp1", 1), ("tp2pp2", 4)):
            options = EngineOptions(config=config, seed=1, temperature=temperature)
            history, weights = train(
                path, head, Layout.parse(text, tuple(range(count))), batch, options, steps=2
            )
            kind = "policy" if head == "lm" else "critic"
            clipped = history[0][f"{kind}/clip_fraction"]
            assert 0.05 < clipped < 0.95, f"both branches of the clip have to be taken: {clipped}"
            norm = max(abs(step[f"{kind}/grad_norm"] - x) / x for step, x in zip(history, norms))
            moved = max((weights[name] - want[name]).abs().max().item() for name in want)
            say(f"gradient norms {norms}, clipped {clipped:.2f}")
            check(f"plain {head} {family} {text} on {count}", limit=1e-5, weights=moved, relative_norm=norm)


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
    folder: Path, layout: Layout, batch: RolloutBatch, config: EngineConfig, away: tuple[tuple[str, ...], ...]
) -> Engine:
    """As many steps as `away` has entries; each names what is released, in turn, after its step."""
    engine = Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head="lm",
        options=EngineOptions(config=config, seed=1),
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
        away = engine.offload.device_bytes + engine.idle_gradients.device_bytes
        refuses_no_number(engine, *share_of(batch, layout, 64))
        say(
            f"offload {family} {layout} {extra}: {away} bytes away, {engine.offload.host_bytes} of "
            f"them on the host, equal bit by bit"
        )


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
                train_steps=6,
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


if __name__ == "__main__":
    run_checks(
        {
            "layouts": check_layouts,
            "plain": check_plain,
            "offload": check_offload,
            "turns": check_turns,
            "pairs": check_pairs,
        },
        sys.argv[1:],
    )
