"""Optimizer steps under every layout against one rank and against plain PyTorch, on four ranks.

Letters: N tokens asked about in a sample.
"""

import sys

from parallel.layout import Layout
from tests.parity.few_samples import check_few_samples
from tests.parity.full_sharding import check_full_sharding
from tests.parity.pairs import check_pairs
from tests.parity.plain_training import check_plain
from tests.parity.shared_prompts import check_shared_prompts
from tests.parity.shared_trunk import check_shared_trunk
from tests.parity.training import CLASSES, experience, train
from tests.parity.training_offload import check_offload, check_turns
from tests.parity.world import (
    check,
    metrics_apart,
    run_checks,
    shared_folder,
    thinned,
    weights_apart,
    write_once,
)
from verl_megatron.config import EngineConfig
from verl_megatron.roles.engine import EngineOptions

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
        ("lm", "qwen2_tied_yarn", 4, thinned(LAYOUTS, 0, every=2)),
        ("lm", "qwen3", 4, thinned(LAYOUTS, 1, every=2)),
        ("token", "llama_tied_llama3", 4, thinned(LAYOUTS, 0, every=2)),
        ("lm_token", "qwen2_tied_yarn", 4, thinned(LAYOUTS, 1, every=2)),
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
            metric = metrics_apart(got, want)
            moved = weights_apart(trained, weights)
            check(
                f"train {head} {family} {text} on {count} {extra or ''}",
                limit=5e-5,
                metrics=metric,
                weights=moved,
            )


if __name__ == "__main__":
    run_checks(
        {
            "layouts": check_layouts,
            "full_sharding": check_full_sharding,
            "plain": check_plain,
            "shared_trunk": check_shared_trunk,
            "shared_prompts": check_shared_prompts,
            "offload": check_offload,
            "turns": check_turns,
            "pairs": check_pairs,
            "few_samples": check_few_samples,
        },
        sys.argv[1:],
    )
