"""Ranks simulated in one process, for functions whose only communication is `all_sum`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Ranks:
    """Runs a function once per simulated rank; each call of `all_sum` returns the sum over the ranks.

    Each pass records what the ranks put into one more collective. The last pass sees true sums everywhere.

    Args:
        parts: the function's first argument on each rank.
    """

    def __init__(self, parts: Sequence[Any]):
        self.parts = parts

    def run(self, function: Callable[[Any, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
        """Return `function(part, all_sum)` of every rank; all ranks must take part in every collective."""
        sums: list[Tensor] = []
        while True:
            records, results = [], []
            for part in self.parts:
                record: list[Tensor] = []

                def all_sum(x: Tensor, record: list[Tensor] = record) -> Tensor:
                    record.append(x)
                    return sums[len(record) - 1] if len(record) <= len(sums) else x

                results.append(function(part, all_sum))
                records.append(record)
            assert len({len(record) for record in records}) == 1, "all ranks take part in every collective"
            if len(sums) == len(records[0]):
                return results
            sums.append(sum(record[len(sums)] for record in records))
