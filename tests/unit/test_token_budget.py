"""Token budgets that follow the free memory."""

import math
from typing import Any

import pytest
import torch

from tests.one_rank import ONE_RANK
from verl_megatron.data.packing import USED_SHARE
from verl_megatron.roles.token_budget import LongestRows, TokenBudget, _peak_bytes

MIB = 1 << 20
ROWS = LongestRows(prompt_tokens=100, response_tokens=156, count=64)


class Memory:
    """A device on which a pass takes `fixed` + `slope` x tokens bytes; it fails like one that is full."""

    def __init__(self, *, room: float, slope: float, fixed: float = 0.0, cp: int = 1):
        self.room, self.slope, self.fixed, self.cp = room, slope, fixed, cp
        self.passes: list[int] = []

    def needed(self, tokens: float) -> float:
        return self.fixed + self.slope * tokens

    def run(self, count: int) -> float:
        tokens = math.ceil(count * ROWS.length / self.cp)
        self.passes.append(tokens)
        if self.needed(tokens) > self.room:
            raise MemoryError(f"{tokens} tokens do not fit")
        return self.needed(tokens)

    def budget(self, world: Any = ONE_RANK, rows: LongestRows = ROWS) -> TokenBudget:
        return TokenBudget(world, 8192, rows, cp=self.cp, free=lambda: self.room, run=self.run)


@pytest.mark.parametrize("fixed", [0, 50 * MIB, 500 * MIB])
@pytest.mark.parametrize("room", [900, 1500, 3000, 8000])
@pytest.mark.parametrize("cp", [1, 2])
def test_the_budget_uses_the_room_and_no_probe_is_too_large(room, fixed, cp):
    memory = Memory(room=room * MIB, slope=MIB, fixed=fixed, cp=cp)
    budget = memory.budget()
    budget.fit()
    assert budget.is_fitted and memory.needed(budget.tokens) <= memory.room
    if memory.passes[-1] > ROWS.length / cp:  # two probes tell what is fixed
        wanted = (memory.room * USED_SHARE - fixed) / MIB
        assert budget.tokens == pytest.approx(wanted, rel=0.01)
    assert len(memory.passes) <= 6 and memory.passes == sorted(set(memory.passes))


def test_no_micro_batch_is_larger_than_what_there_is():
    memory = Memory(room=1e15, slope=MIB)
    budget = memory.budget()
    budget.fit()
    assert budget.tokens == ROWS.length * ROWS.count == max(memory.passes)


def test_rows_that_fill_the_memory_go_one_by_one():
    memory = Memory(room=300 * MIB, slope=MIB)
    budget = memory.budget()
    said = budget.fit()
    assert memory.passes == [256] and budget.tokens == int(300 * USED_SHARE)
    assert "up to 240 tokens" in said and "1.00 MiB a token" in said


def test_the_rank_with_the_least_memory_decides():
    class TwoRanks:
        """The other rank has a quarter of this one's room, and takes twice the memory."""

        def all_max(self, x):
            return torch.maximum(x, x / 4 if x < 0 else x * 2)

    memory = Memory(room=8000 * MIB, slope=MIB)
    budget = memory.budget(TwoRanks())
    budget.fit()
    assert budget.tokens == pytest.approx(8000 / 4 * USED_SHARE / 2, rel=0.01)


def test_it_follows_what_others_take_of_the_memory():
    memory = Memory(room=4000 * MIB, slope=MIB)
    budget = memory.budget()
    budget.fit()
    whole = budget.tokens
    memory.room = 3900 * MIB
    assert not budget.review() and budget.tokens == whole  # within the margin
    memory.room = 1000 * MIB
    assert budget.review() and budget.tokens == 1000 * USED_SHARE
    memory.room = 4000 * MIB
    assert not budget.review() and budget.tokens == whole
    memory.room = 0
    assert budget.review() and budget.tokens == 1  # every row goes alone


def test_a_pass_on_a_cpu_is_measured_by_what_it_saves():
    x = torch.ones(1000, requires_grad=True)
    with _peak_bytes() as peak:
        y = (x.exp().exp() * 2).sum()
        y.backward()
    assert peak() == 2 * 4000  # the outputs of both exponentials
    with _peak_bytes() as peak:
        for _ in range(3):
            x.exp().sum().backward()  # what one has freed is not counted again
    assert peak() == 4000
