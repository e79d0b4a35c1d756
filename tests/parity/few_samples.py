"""Iterations with fewer samples than data-parallel ranks, against the same iterations on one rank."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity.training import CLASSES, LR, full_weights
from tests.parity.world import check, metrics_apart, shared_folder, weights_apart, write_once
from verl_megatron.algorithms.kl import FixedKL
from verl_megatron.config import AlgorithmConfig, EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.collector import DataCollector
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.learner import Learner
from verl_megatron.observe.metrics import PhaseTimer, Sums
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.roles.role import Role

SIZES = ((2, 2), (8, 2), (3, 1), (2, 1))  # samples and mini-batches of each iteration
# Layout, ranks, settings of the engine; PPO first, GRPO from its second half on.
CASES = (
    ("tp1", 4, {}),
    ("pp2", 4, {}),
    ("pp2vpp2", 4, {}),
    ("tp1", 4, {"shared_prompts": True}),
    ("tp2sp", 4, {}),
    ("cp2", 4, {}),
    ("tp1", 3, {"sharding": "full"}),
    ("tp1", 2, {"distributed_optimizer": False}),
)


def samples_of(vocab_size: int, count: int) -> RolloutBatch:
    """The first of eight samples, two of each prompt, with scores and the sampler's log-probs."""
    generator = torch.Generator().manual_seed(1)

    def draw(*counts: int) -> list[list[int]]:
        return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in counts]

    prompts, responses = draw(5, 1, 9, 3), draw(7, 1, 12, 4, 20, 40, 3, 9)
    logprobs = [[-4.0] * len(response) for response in responses]
    batch = RolloutBatch.from_lists(list(range(8)), [prompts[b // 2] for b in range(8)], responses, logprobs)
    batch.group_id, batch.rewards = batch.sample_id // 2, torch.tensor([1.0, 0.0] * 4)
    return batch.select(torch.arange(count))


def role_of(folder: Path, head, layout: Layout, config: EngineConfig) -> Role:
    path, groups = folder / head, ProcessGroups(layout, world())
    options = EngineOptions(config=config, seed=1)
    engine = Engine(arch=read_architecture(path), folder=str(path), groups=groups, head=head, options=options)
    engine.prepare_training(lr=LR, total_steps=8)
    return Role(engine, DataCollector(layout, world()))


def train(
    folder: Path, heads: dict[str, str], layout: Layout, config: AlgorithmConfig, engine: EngineConfig
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of each iteration, and the actor's weights after the last one."""
    learner = Learner(
        roles := {name: role_of(folder, head, layout, engine) for name, head in heads.items()},
        config=config,
        max_tokens=40,
        kl=FixedKL(0.0),
        residency=SimpleNamespace(enter_training=lambda engine: None),
        clock=PhaseTimer(),
    )
    vocab_size, history = roles["actor"].engine.arch.vocab_size, []
    for step, (count, mini_batches) in enumerate(SIZES, 1):
        own = torch.tensor(list(range(world().rank, count, world().size)), dtype=torch.int64)
        batch = samples_of(vocab_size, count).select(own)
        table = SampleTable.gather(
            batch, world(), num_mini_batches=mini_batches, shared_prompts=engine.shared_prompts
        )
        history.append(learner.learn(batch, table, Sums(), step=step))
    return history, full_weights(roles["actor"].engine)


def check_few_samples() -> None:
    """Every rank takes part in all collectives of passes, steps and weights, whatever samples it has."""
    folder = shared_folder()
    for head, family in (("lm", "qwen3"), ("token", "llama_tied_llama3")):
        write_once(folder / head, family, CLASSES[head], num_hidden_layers=4)
    common = {"tokens_per_micro_batch": 64, "adam_eps": 1e-4, "clip_grad": 0.5}
    for number, name in enumerate(("ppo", "grpo")):
        heads = {"actor": "lm"} | ({"critic": "token"} if name == "ppo" else {})
        config = AlgorithmConfig(name=name, objective="clip", normalizer="token_mean")
        alone = EngineConfig(distributed_optimizer=False, **common)
        want, weights = train(folder, heads, Layout(), config, alone)
        for text, count, extra in CASES[number::2]:
            layout = Layout.parse(text, tuple(range(count)))
            got, trained = train(folder, heads, layout, config, EngineConfig(**common, **extra))
            metric = metrics_apart(got, want)
            moved = weights_apart(trained, weights)
            what = f"few samples {name} {text} on {count} {extra or ''}"
            check(what, limit=2e-5, metrics=metric, weights=moved)
