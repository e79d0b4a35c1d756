"""What a run does with `data.curriculum`: scores go to the cursor, weights come back, and metrics say both.

Letters: B samples on this rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Real
from typing import Any, Protocol

from parallel.rank_set import RankSet
from parallel.runtime.refusal import RefusalError, short_repr
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.curriculum import CurriculumCursor, Source, variance_weights
from verl_megatron.observe.metrics import Sums
from verl_megatron.observe.sources import MOST, OTHER, label_of

Hook = Callable[[list[Source]], Mapping[str, float]]  # sources of prompts -> weight of each, by name


class Scored(Protocol):
    """A sampler, here or of other worlds."""

    scores_of_group: list[list[float]]  # of each prompt of the last collection; empty: the batch has them all

    @property
    def world(self) -> RankSet: ...


class Curriculum:
    """The weights of the sources of prompts, after each collection. Collective over the sampler's world.

    Args:
        sampler: which collects the prompts of `cursor`.
        hook: gives the weights, on the first rank; None: `variance_weights`.
        with_greedy: the last sample of each prompt is greedy, and its score is left out.
    """

    def __init__(
        self,
        cursor: CurriculumCursor,
        sampler: "Scored",
        *,
        hook: Hook | None = None,
        with_greedy: bool = False,
    ):
        self._cursor, self._sampler, self._hook, self._with_greedy = cursor, sampler, hook, with_greedy
        by_weight = sorted(cursor.sources, key=lambda source: -source.given)
        labels = {source.name: label_of(source.name) for source in by_weight[:MOST]}
        self._labels = [labels.get(source.name, OTHER) for source in cursor.sources]

    def follow(self, batch: RolloutBatch, sums: Sums) -> None:
        """Draw the next prompts by the scores of these samples, as they are before any penalty.

        Args:
            batch: all samples of the last collection that this rank owns.
            sums: receives the weights by which their prompts were drawn.

        Raises:
            RefusalError: on every rank, if the hook fails or gives no weights.
        """
        world, sources = self._sampler.world, self._cursor.sources
        if world.is_first:
            total: dict[str, float] = {}
            for source, label in zip(sources, self._labels):
                total[label] = total.get(label, 0.0) + source.weight
            for label, weight in total.items():
                sums.add(f"data/weight/{label}", weight, 1)
        self._cursor.observe(self._sampler.scores_of_group or self._scores(batch))
        if self._hook is None:
            return self._cursor.weigh(variance_weights(sources))
        answer = world.broadcast_object(weights_by(self._hook, sources) if world.is_first else None)
        if isinstance(answer, str):
            raise RefusalError(answer)
        self._cursor.weigh(answer)

    def _scores(self, batch: RolloutBatch) -> list[list[float]]:
        """Return the scores of each prompt's samples, by number; the same on every rank and layout."""
        columns = (batch.required("group_id"), batch.sample_id, batch.required("rewards"))
        own = list(zip(*(column.tolist() for column in columns), strict=True))
        scores: dict[int, list[float]] = {}
        for group, _, score in sorted(chain.from_iterable(self._sampler.world.all_gather_object(own))):
            scores.setdefault(group, []).append(score)
        kept = slice(-1) if self._with_greedy else slice(None)
        return [scores[group][kept] for group in sorted(scores)]


def weights_by(hook: Hook, sources: Sequence[Source]) -> list[float] | str:
    """Return the weights that a hook gives the sources, in their order; or what is wrong with them."""
    name = f"curriculum={short_repr(getattr(hook, '__qualname__', type(hook).__qualname__))}"
    try:
        answer: Any = hook([replace(source) for source in sources])
    except Exception as error:  # any type: it is the user's code
        return f"{name} raised {type(error).__name__}: {short_repr(str(error))}; mend the function"
    names = [source.name for source in sources]
    if not isinstance(answer, Mapping) or answer.keys() != set(names):
        return (
            f"{name} returned {short_repr(answer)}; return a dict with a weight for each source, "
            f"{short_repr(names)}"
        )
    wrong = [one for one in names if not _is_weight(answer[one])]
    if wrong:
        return (
            f"{name} gave {short_repr(wrong[0])} the weight {short_repr(answer[wrong[0]])}; "
            "return a finite number from 0 on"
        )
    weights = [float(answer[one]) for one in names]
    return weights if any(weights) else f"{name} gave all sources the weight 0; give one of them more"


def _is_weight(value: Any) -> bool:
    try:
        return isinstance(value, Real) and 0 <= float(value) < math.inf
    except OverflowError:  # an integer that is no float
        return False
