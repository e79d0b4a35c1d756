"""A value head on the actor's trunk against a critic of its own and against plain PyTorch.

Letters: N tokens asked about in a sample, H hidden size.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity.plain_training import initial_logprobs, plain_policy_loss, plain_value_loss
from tests.parity.training import CLASSES, FIELDS, LR, VALUE_COEF, experience, train
from tests.parity.world import (
    check,
    largest,
    make_batch,
    say,
    share_of,
    shared_folder,
    weights_apart,
    write_once,
)
from verl_megatron.config import CriticConfig, EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.roles.engine import Engine, EngineOptions

VALUE_LR = 1e-2
LAYOUTS = [("tp1", 1), ("tp1", 4), ("tp2pp2", 4), ("tp4sp", 4), ("pp2vpp2", 4), ("cp2tp2sp", 4)]


def check_shared_trunk() -> None:
    """Values and gradients of a value head on the actor's trunk, and the export of both models."""
    folder = shared_folder()
    for family in ("qwen2_tied_yarn", "qwen3"):
        actor = write_once(folder / family, family, num_hidden_layers=4)
        write_once(folder / f"{family}_critic", family, CLASSES["token"], num_hidden_layers=4)
        vocab_size = actor.config.vocab_size
        batch = experience(vocab_size, logprobs_BT=initial_logprobs(actor, make_batch(vocab_size), 1.0))
        if actor.config.tie_word_embeddings:
            _check_values(folder, family, batch)
            _check_detached(folder / family, batch, folder / f"{family}_critic")
        _check_plain(folder, family, actor, batch)


def options_of(critic: CriticConfig, **settings) -> EngineOptions:
    config = EngineConfig(tokens_per_micro_batch=64, adam_eps=1e-4, weight_decay=0.1, **settings)
    return EngineOptions(config=config, seed=1, critic=critic)


def _engine(folder: Path, head, text: str, count: int, critic: CriticConfig) -> Engine:
    layout = Layout.parse(text, tuple(range(count)))
    return Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head=head,
        options=options_of(critic),
    )


def _check_values(folder: Path, family: str, batch: RolloutBatch) -> None:
    """Values and log-probs of one pass have the bits of the passes of two exported models."""
    critic = CriticConfig(path=str(folder / f"{family}_critic"), trunk_gradient=False)
    for number, (text, count) in enumerate(LAYOUTS):
        both = _engine(folder / family, "lm_token", text, count, critic)
        mine, micro = share_of(batch, both.layout, 64)
        together = both.infer(mine, micro)
        for head in ("lm", "token"):
            exported = folder / f"{family}_{head}_{number}"
            both.export(exported, template=str(folder / family), head=head)
            dist.barrier()  # ranks outside the layout read it, too
            alone = _engine(exported, head, text, count, CriticConfig()).infer(mine, micro)
            if alone is not None:
                assert together is not None
                for name, values in alone.items():
                    assert values.abs().max() > 0.1 or not len(values), name
                    assert torch.equal(values, together[name]), (family, text, name)
        say(f"shared trunk {family} {text} on {count}: log-probs and values equal bit by bit")


def _check_detached(actor: Path, batch: RolloutBatch, critic: Path) -> None:
    """Without its gradient the value head changes no bit of the actor.

    Sums go over at most two ranks: the order in which more of them sum depends on the buckets.
    """
    settings = CriticConfig(path=str(critic), trunk_gradient=False, lr=VALUE_LR)
    for text in ("tp2", "tp2pp2", "pp2tp2sp"):
        layout = Layout.parse(text, (0, 1, 2, 3))
        _, alone = train(actor, "lm", layout, batch, options_of(CriticConfig(), clip_grad=0.0))
        _, beside = train(actor, "lm_token", layout, batch, options_of(settings, clip_grad=0.0))
        assert all(torch.equal(beside[name], tensor) for name, tensor in alone.items()), text
        say(f"shared trunk {actor.name} {text}: the actor is the same without the value head")


class _Both(torch.nn.Module):
    """A Hugging Face language model with a linear value head on its last hidden states."""

    def __init__(self, actor, critic):
        super().__init__()
        self.actor, self.score = actor, critic.score

    def loss(self, batch: RolloutBatch) -> Tensor:
        """Mean over all response tokens of policy and value loss."""
        total = torch.zeros(())
        for b in range(len(batch)):
            ids = batch.generated_ids[b][batch.attention_mask[b]][None]
            hidden_NH = self.actor.model(ids).last_hidden_state[0]
            logits_NV, values_N = self.actor.lm_head(hidden_NH), self.score(hidden_NH)[:, 0]
            asked = batch.response_mask[b].nonzero().squeeze(1)
            known = [getattr(batch, name)[b, asked] for name in FIELDS["lm_token"]]
            labels = batch.generated_ids[b, asked]
            total = total + plain_policy_loss(logits_NV[asked - 1], labels, *known[:3], 1.0)
            total = total + VALUE_COEF * plain_value_loss(values_N[asked - 1], *known[3:])
        return total / batch.response_mask.sum()


def _check_plain(folder: Path, family: str, actor, batch: RolloutBatch) -> None:
    """Two steps of the engine are two steps of torch.optim.AdamW, with a learning rate for the head."""
    critic = write_once(folder / f"{family}_plain", family, CLASSES["token"], num_hidden_layers=4)
    config = options_of(CriticConfig(), clip_grad=0.5).config
    model = _Both(actor, critic)
    names = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [parameter],
                "lr": VALUE_LR if name.startswith("score") else LR,
                "weight_decay": config.weight_decay * (parameter.ndim > 1),
            }
            for name, parameter in names.items()
        ],
        betas=tuple(config.adam_betas),
        eps=config.adam_eps,
    )
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(names.values(), config.clip_grad).item())
        optimizer.step()
    want = {name.removeprefix("actor."): p.detach().view(len(p), -1) for name, p in names.items()}
    settings = CriticConfig(path=str(folder / f"{family}_critic"), lr=VALUE_LR)
    for text, count in LAYOUTS if actor.config.tie_word_embeddings else LAYOUTS[2:4]:
        layout = Layout.parse(text, tuple(range(count)))
        options = options_of(settings, clip_grad=0.5)
        history, weights = train(folder / family, "lm_token", layout, batch, options, steps=2)
        norm = largest(abs(step["policy/grad_norm"] / x - 1) for step, x in zip(history, norms))
        moved = weights_apart(weights, want)
        check(f"shared trunk {family} {text} on {count}", limit=1e-5, weights=moved, relative_norm=norm)
