"""Mean scores of the samples of each data_source.

Letters: B samples on this rank.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_megatron.data.columns import source_of
from verl_megatron.observe.metrics import SOURCE, Sums

MOST = 20  # sources with a metric of their own
NONE, OTHER = "none", "other"  # metrics of rows without a source, and of all further sources
MOST_LETTERS = 80


class Sources:
    """The sources that have a metric: those with most rows.

    Args:
        counts: rows by their data_source, of each data file.
        always: report a single source, too.
    """

    def __init__(self, counts: Iterable[Mapping[str, int]] = (), *, always: bool = False):
        total: Counter[str] = Counter()
        for part in counts:
            total.update(part)
        names = sorted(total, key=lambda source: (-total[source], source))
        self._numbers = {source: number for number, source in enumerate(names[:MOST])}
        self._labels = [label_of(source) for source in names[:MOST]] + [OTHER] * (len(names) > MOST)
        self._reported = len(names) > 1 or (always and bool(names))

    def numbers(self, rows: Iterable[Mapping[str, Any]]) -> Tensor | None:
        """Return the source of each row, [B] int64; None if no source is reported."""
        if not self._reported:
            return None
        found = [self._numbers.get(source_of(row), len(self._numbers)) for row in rows]
        return torch.tensor(found, dtype=torch.int64)

    def add(self, sums: Sums, prefix: str, scores_B: Tensor, source_B: Tensor | None) -> None:
        """Add the scores to the means PREFIX/source/NAME."""
        if source_B is None:
            return
        for number, label in enumerate(self._labels):
            chosen_B = source_B == number
            sums.add(f"{prefix}/{SOURCE}/{label}", scores_B[chosen_B].sum(), int(chosen_B.sum()))


def label_of(source: str) -> str:
    """Return the name of a source in metrics: printable, and not too long."""
    cut = source[:MOST_LETTERS] + "..." * (len(source) > MOST_LETTERS)
    return "".join(letter if letter.isprintable() else "?" for letter in cut) or NONE
