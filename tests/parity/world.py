"""What the workers of this folder share. Importing it joins the world that torchrun started."""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import world
from tests.tiny import make_hf, write_hf
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import balance, micro_batches

T = TypeVar("T")
logging.disable_progress_bar()
device.initialize()


def thinned(layouts: Sequence[T], place: int, *, every: int) -> Sequence[T]:
    """Return every `every`-th layout for the family at `place` of a list, so that families share them all.

    With EVERY_LAYOUT in the environment, as in `tests/run.sh long`, each family gets all of them.
    """
    return layouts if os.environ.get("EVERY_LAYOUT") else layouts[place % every :: every]


def say(*what: object) -> None:
    if dist.get_rank() == 0:
        print(*what, flush=True)


def check(name: str, *, limit: float, **differences: float) -> None:
    """One line, and an end with an error if a difference on any rank is over the limit (NaN is)."""
    worst = (
        world()
        .all_max(
            torch.tensor(
                [math.inf if math.isnan(x) else x for x in differences.values()], dtype=torch.float64
            )
        )
        .tolist()
    )
    say(name, *(f"{key}={value:.1e}" for key, value in zip(differences, worst)))
    assert max(worst) <= limit, f"{name}: {dict(zip(differences, worst))} over {limit}"


def metrics_apart(got: Sequence[dict[str, float]], want: Sequence[dict[str, float]]) -> float:
    """The largest difference of a metric of any step, relative to it where it is above 1, as norms are."""
    pairs = [(a[key], b[key]) for a, b in zip(got, want, strict=True) for key in b]
    value, right = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return ((value - right).abs() / right.abs().clamp(min=1)).max().item()  # NaN if one is


def largest(values: Iterable[float]) -> float:
    """The largest value, NaN if one is."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def weights_apart(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest difference of an element, NaN if one is."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return largest((got[name] - want[name]).abs().max().item() for name in want)


def shared_folder() -> Path:
    """A new folder, the same on every rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def write_once(folder: Path, family: str, head: str = "ForCausalLM", **settings):
    """Every rank makes the same model and returns it; the first one writes it."""
    if dist.get_rank() == 0:
        write_hf(folder, family, head, **settings)
    dist.barrier()
    return make_hf(family, head, **settings)


def make_batch(vocab_size: int, *, seed: int = 1) -> RolloutBatch:
    """Eight samples of different lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(3, vocab_size, (count,), generator=generator).tolist()

    prompts, responses = (
        [draw(n) for n in (1, 5, 3, 9, 2, 30, 4, 6)],
        [draw(n) for n in (7, 1, 12, 4, 20, 40, 3, 9)],
    )
    return RolloutBatch.from_lists(list(range(8)), prompts, responses)


def share_of(batch: RolloutBatch, layout: Layout, budget: int) -> tuple[RolloutBatch, list[list[int]]]:
    """This rank's samples and micro-batches, as a role dispatches them."""
    if dist.get_rank() not in layout.ranks:
        return batch, []
    samples = balance(batch.lengths.tolist(), layout.dp)[layout.coordinates(dist.get_rank()).dp]
    mine = batch.select(torch.tensor(samples, dtype=torch.int64))
    micro = micro_batches(
        mine.lengths.tolist(), tokens_per_micro_batch=budget, multiple_of=layout.pp if layout.vpp > 1 else 1
    )
    return mine, micro


def sample_logits(model, batch: RolloutBatch) -> list[Tensor]:
    """A Hugging Face model's output [L, labels or vocabulary] for each sample alone, without padding."""
    return [model(ids[mask][None]).logits[0] for ids, mask in zip(batch.generated_ids, batch.attention_mask)]


def run_checks(checks: dict[str, Callable[[], None]], wanted: list[str]) -> None:
    """Run the named checks (none named: all) and leave the world."""
    for name in wanted or checks:
        checks[name]()
    say("all passed")
    dist.barrier()  # nobody takes its connections down while others still use them
    dist.destroy_process_group()
