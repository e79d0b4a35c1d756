"""Token budgets of micro-batches that follow the memory that training leaves free.

Probes of growing size measure what a token takes; the free memory is divided by it. On a GPU a probe's peak
is the allocator's; on a CPU it is that of the tensors saved for the backward pass.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import device
from parallel.offload import missing_moments_bytes
from parallel.rank_set import RankSet
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.data.packing import USED_SHARE
from verl_megatron.roles.engine import Engine
from verl_megatron.roles.heads import Outputs
from verl_megatron.roles.schedule import pack_all, run_schedule

_GROWTH = 6  # largest step from one probe to the next
_NEAR = 0.75  # the last probe is at least this share of the budget
_TOLERANCE = 0.08  # changes of the budget below this share are left alone; smaller than 1 - USED_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRows:
    """The longest rows that the settings allow, and how many a data-parallel rank gets in a mini-batch."""

    prompt_tokens: int
    response_tokens: int
    count: int

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        return self.length * self.count

    def batch(self, count: int, *, vocab_size: int) -> RolloutBatch:
        """Return `count` such rows; their tokens are spread over the vocabulary."""
        rows = [self._tokens_of(row, vocab_size) for row in range(count)]
        return RolloutBatch.from_lists(
            list(range(count)),
            [row[: self.prompt_tokens] for row in rows],
            [row[self.prompt_tokens :] for row in rows],
        )

    def _tokens_of(self, row: int, vocab_size: int) -> list[int]:
        return [(row * self.length + at) * 7919 % vocab_size for at in range(self.length)]


@dataclass(frozen=True, slots=True)
class Probe:
    """The memory of a pass over micro-batches of one size, on the rank where it took most."""

    tokens: int  # of a micro-batch, per context-parallel rank
    num_bytes: float


class TokenBudget:
    """The token budget of a model's micro-batches, per context-parallel rank; `tokens` is the current one.

    Methods are collective over `world`.

    Args:
        tokens: the budget before `fit`.
        rows: the longest rows; one of them is the first probe, and all of them are the largest micro-batch.
        cp: context-parallel ranks, which share the tokens of a row.
        free: returns the bytes that activations may take on this rank; infinite without the model.
        run: takes a number of `rows`, runs a pass over micro-batches of them and returns the peak bytes of
            its activations on this rank; 0 without the model.
    """

    def __init__(
        self,
        world: RankSet,
        tokens: int,
        rows: LongestRows,
        *,
        cp: int = 1,
        free: Callable[[], float],
        run: Callable[[int], float],
    ):
        self.world, self.tokens, self.rows, self.cp = world, tokens, rows, cp
        self._free, self._run = free, run
        self._fixed = self._slope = 0.0  # bytes of a pass: fixed + slope x tokens

    @property
    def is_fitted(self) -> bool:
        return self._slope > 0

    def fit(self) -> str:
        """Measure and set the budget; return what to say of it. Call it with all training state loaded."""
        room = self._room()
        probes = [self._probe(1)]
        while (count := self._next(probes, room)) is not None:
            probes.append(self._probe(count))
        self._fixed, self._slope = _line(probes)
        self.tokens = self._fitting(room)
        return (
            f"micro-batches of up to {self.tokens:,} tokens; activations have {room / 2**30:.1f} GiB "
            f"and take {self._slope / 2**20:.2f} MiB a token (probes of up to {probes[-1].tokens:,})"
        )

    def review(self) -> bool:
        """Follow the free memory; return whether the budget is lower now."""
        fitting = self._fitting(self._room())
        is_lower = fitting < self.tokens * (1 - _TOLERANCE)
        if is_lower or fitting > self.tokens * (1 + _TOLERANCE):
            self.tokens = fitting
        return is_lower

    def _room(self) -> float:
        """Bytes for activations on the rank with the fewest."""
        return -float(self.world.all_max(torch.tensor(-self._free(), dtype=torch.float64)))

    def _probe(self, count: int) -> Probe:
        peak = torch.tensor(self._run(count), dtype=torch.float64)
        return Probe(self._tokens_of(count), max(float(self.world.all_max(peak)), 1.0))

    def _next(self, probes: list[Probe], room: float) -> int | None:
        """Rows of the next probe; None if the last one is near the budget that the probes give."""
        last = probes[-1].tokens
        fixed, slope = _line(probes)
        goal = min((room * USED_SHARE - fixed) / slope, self._tokens_of(self.rows.count))
        if last >= _NEAR * goal:
            return None
        count = int(min(goal, last * _GROWTH) * self.cp / self.rows.length)
        return count if self._tokens_of(count) > last else None

    def _fitting(self, room: float) -> int:
        """Return the tokens that fit, at least one row of any length and at most all rows."""
        tokens = (room * USED_SHARE - self._fixed) / self._slope
        return int(max(min(tokens, self._tokens_of(self.rows.count)), 1))

    def _tokens_of(self, count: int) -> int:
        return math.ceil(self.rows.length * count / self.cp)


def _line(probes: list[Probe]) -> tuple[float, float]:
    """Return the bytes of no tokens and of a token, from the last two probes."""
    last = probes[-1]
    if len(probes) > 1 and last.num_bytes > probes[-2].num_bytes:
        slope = (last.num_bytes - probes[-2].num_bytes) / (last.tokens - probes[-2].tokens)
        fixed = last.num_bytes - slope * last.tokens
        if fixed >= 0:
            return fixed, slope
    return 0.0, last.num_bytes / last.tokens


def budget_of_updates(engine: Engine, rows: LongestRows) -> TokenBudget:
    """Return the budget of updates of a trainable model."""
    return TokenBudget(
        engine.groups.world,
        engine.config.tokens_per_micro_batch,
        rows,
        cp=engine.layout.cp,
        free=lambda: _free_bytes(engine),
        run=lambda count: _pass_bytes(engine, rows, count),
    )


def _free_bytes(engine: Engine) -> float:
    if not engine.groups.is_member:
        return math.inf
    engine.onload_async()  # takes its memory at once
    engine.idle_gradients.onload_async()
    beside = 0 if engine.steps_only else missing_moments_bytes(engine.optimizer)
    return device.free_memory_bytes() - beside


def _pass_bytes(engine: Engine, rows: LongestRows, count: int) -> float:
    """Run forward and backward passes whose gradients are 0; return the peak bytes of their activations."""
    if not engine.groups.is_member:
        return 0.0
    layout = engine.layout
    in_flight = layout.pp * (2 if layout.vpp > 1 else 1)
    batch = rows.batch(count, vocab_size=engine.arch.vocab_size)
    packed = pack_all(engine, batch, [list(range(count))] * in_flight)
    engine.onload_async()
    engine.idle_gradients.onload_async()
    engine.idle_gradients.wait()

    def no_loss(_: Engine, outputs: Outputs, micro: MicroBatch):
        total = torch.stack([value.sum() for value in outputs.values()]).sum() * 0.0
        return total, torch.zeros((), dtype=torch.int, device=total.device), None

    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    with _peak_bytes() as peak:
        run_schedule([engine], packed, no_loss, forward_only=False)
    return peak()


@contextlib.contextmanager
def _peak_bytes() -> Iterator[Callable[[], float]]:
    """Measure what the block allocates; call the result after it."""
    if device.is_gpu():
        device.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: float(torch.cuda.max_memory_allocated() - before)
        return
    saved: Counter[int] = Counter()  # times that a storage is saved
    held = most = 0

    def save(x: Tensor) -> Tensor:
        nonlocal held, most
        storage = x.untyped_storage()
        held += 0 if saved[storage.data_ptr()] else storage.nbytes()
        saved[storage.data_ptr()] += 1
        most = max(most, held)
        return x

    def restore(x: Tensor) -> Tensor:
        nonlocal held
        storage = x.untyped_storage()
        saved[storage.data_ptr()] -= 1
        held -= 0 if saved[storage.data_ptr()] else storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, restore):
        yield lambda: float(most)
