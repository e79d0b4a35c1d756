"""Micro-batches whose groups share their prompts, under several layouts, against rows on one rank."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity.training import FIELDS, LOSSES, LR, full_gradients, with_experience
from tests.parity.world import check, shared_folder, thinned, write_once
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.config import EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.roles.engine import Engine, EngineOptions

CLASSES = {
    "lm": "ForCausalLM",
    "token": "ForTokenClassification",
    "lm_token": "ForCausalLM",
    "sequence": "ForSequenceClassification",
}
LAYOUTS = [
    ("tp1", 1, (), {}),
    ("tp2sp", 2, (), {"recompute": "selective"}),
    ("tp1", 4, (), {}),
    ("tp2pp2sp", 4, (), {"recompute": "full"}),
    ("pp2vpp2", 4, (), {}),
    ("tp4", 4, (), {}),
    ("pp2", 4, (1, 3), {}),
]
BUDGET = 40  # less than the largest group, so that it is cut
# Tokens of a prompt and of its responses: a group of one, a prompt of one token, responses of one token.
GROUPS = [(9, (7, 1, 12, 4)), (5, (6,)), (1, (3, 8)), (20, (9, 2, 5, 11)), (6, (1, 1, 1)), (3, (4, 4))]


def grouped(vocab_size: int) -> RolloutBatch:
    """Samples of `GROUPS`, dealt out one from each group after the other."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(3, vocab_size, (count,), generator=generator).tolist()

    prompts = [draw(tokens) for tokens, _ in GROUPS]
    rows = [(turn, group, n) for group, (_, counts) in enumerate(GROUPS) for turn, n in enumerate(counts)]
    rows.sort()
    batch = RolloutBatch.from_lists(
        list(range(len(rows))), [prompts[group] for _, group, _ in rows], [draw(n) for *_, n in rows]
    )
    batch.group_id = torch.tensor([group for _, group, _ in rows])
    return batch


def run_once(
    folder: Path, head, layout: Layout, batch: RolloutBatch, config: EngineConfig
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
    """Results of a forward pass of all samples [B, T], metrics of a step, and its gradients."""
    groups = ProcessGroups(layout, world())
    engine = Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=groups,
        head=head,
        options=EngineOptions(config=config, seed=1),
    )
    mini_batch = range(len(batch))
    table = SampleTable(
        batch.lengths,
        batch.response_mask.sum(1),
        torch.zeros_like(batch.sample_id),
        batch.required("group_id"),
        [mini_batch],
        prompt_B=batch.prompt_lengths if config.shared_prompts else None,
    )
    mine, micro = batch, []
    if groups.is_member:
        place = layout.coordinates(dist.get_rank()).dp
        mine = batch.select((table.assign(layout.dp) == place).nonzero().squeeze(1))
        (micro,) = table.micro_batches(
            mine.sample_id,
            tokens_per_micro_batch=config.tokens_per_micro_batch,
            multiple_of=layout.pp if layout.vpp > 1 else 1,
        )
    results = gathered(engine.infer(mine, micro, last_token=head == "sequence"), mine, batch)
    if head == "sequence":  # a frozen reward model
        return results, {}, {}
    engine.prepare_training(lr=LR, total_steps=2)
    scale = LossScale(int(batch.response_mask.sum()))
    sums = engine.train_step(mine, micro, LOSSES[head], fields=FIELDS[head], scale=scale)
    return results, sums.reduce(world()), full_gradients(engine)


def gathered(results: dict[str, Tensor] | None, mine: RolloutBatch, batch: RolloutBatch) -> dict[str, Tensor]:
    """Results of all samples, from the ranks that have them."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, None if results is None else (mine.sample_id, results))
    found: dict[str, Tensor] = {}
    for sample_id, part in filter(None, parts):
        for name, values in part.items():
            found.setdefault(name, torch.full(batch.generated_ids.shape, torch.nan))[sample_id] = values
    return found


def check_shared_prompts() -> None:
    """Results, metrics and gradients are those of rows, each with a prompt of its own."""
    folder = shared_folder()
    for number, (head, family) in enumerate(
        (
            ("lm", "qwen2_tied_yarn"),
            ("lm", "qwen3"),
            ("token", "llama_tied_llama3"),
            ("lm_token", "qwen2_tied_yarn"),
            ("sequence", "llama_tied_llama3"),
        )
    ):
        path = folder / f"{head}_{family}"
        model = write_once(path, family, CLASSES[head], num_hidden_layers=4)
        batch = with_experience(grouped(model.config.vocab_size))
        common = {"clip_grad": 0.0, "distributed_optimizer": False}
        rows = EngineConfig(tokens_per_micro_batch=1000, **common)
        want = run_once(path, head, Layout(), batch, rows)
        assert want[0] and (head == "sequence" or want[2])
        for text, count, stage_layers, extra in thinned(LAYOUTS, number, every=3):
            layout = Layout.parse(text, tuple(range(count)), stage_layers)
            config = EngineConfig(tokens_per_micro_batch=BUDGET, shared_prompts=True, **common, **extra)
            got = run_once(path, head, layout, batch, config)
            results, metrics, gradients = (apart(a, b) for a, b in zip(got, want, strict=True))
            losses = map(losses_of, (got[1], want[1]))
            what = f"shared prompts {head} {family} {text} on {count} {extra or ''}"
            check(what, limit=1e-6, loss=apart(*losses), gradients=gradients)
            # Values are small sums of large terms, and ratios are powers of e.
            check(what, limit=5e-6, results=results, metrics=metrics)


def losses_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.endswith("/loss")}


def apart(found: Mapping, wanted: Mapping) -> float:
    """Largest difference of two tables of the same names, relative where numbers are above 1."""
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    worst = 0.0
    for name, values in wanted.items():
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (found[name], values))
        worst = max(worst, float(((a - b) / b.abs().clamp(min=1)).abs().max()))
    return worst
