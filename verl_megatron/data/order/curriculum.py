"""A curriculum: sources of prompts are drawn more often while the samples of their prompts differ in score.

A prompt whose samples are all right or all wrong gives no group-relative advantage. The variance of the
scores of a prompt's samples, p (1 - p) for right and wrong ones, is its learnability (Foster et al. 2025,
Learning to Reason at the Frontier of Learnability). Here it is averaged over each source, as Wang et al.
(2025, DUMP) do with advantages: single prompts come back too rarely.
"""

import heapq
import math
import random
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.data.columns import value_at
from verl_megatron.data.formats.sources import parts_of
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.order.mixture import shares_of

FILES = "files"  # data.curriculum: the paths of data.train are the sources
MOST_SOURCES = 1000
SHOWN = 5
FLOOR = 0.1  # of its weight without a curriculum, which a source keeps
MEMORY = 64  # groups: what is older than so many of its own fades in the means of a source
LEARNT = ("weight", "groups", "score", "variance", "varied")  # of a source, from its samples' scores
PRIOR = 4  # groups of the largest variance that each source is credited with


class SourceIndex:
    """The source of each prompt: the path that it is from, or its value of a column.

    Args:
        by: `files`, or the name of a column; dots go into objects.
        path: data.train.
    """

    def __init__(self, by: str, path: str):
        self.by, self._path = by, path
        self.names: dict[str, int] = {}  # source -> its number
        self.of_prompt = array("I")
        self.problem = ""  # the first clause about a value that is no name of a source

    @cached_property
    def _files(self) -> list[str]:
        """Different names of the paths of data.train: as short as they may be."""
        paths = [part.path for part in parts_of(self._path)]
        for names in ([Path(path).name for path in paths], paths):
            if len(set(names)) == len(names):
                return names
        return [f"{at}: {path}" for at, path in enumerate(paths, 1)]

    def add(self, row: Mapping[str, Any], part: int) -> None:
        """Add the next prompt, with its row and the number of the path of data.train that it is from."""
        value = self._files[part] if self.by == FILES else value_at(row, self.by)
        if not isinstance(value, str | int | float | bool | None):
            wrong = f"is {short_repr(value)} in a row; name a column of texts or numbers"
            self.problem = self.problem or wrong
            value = None
        if (name := "" if value is None else str(value)) not in self.names:
            if len(self.names) == MOST_SOURCES:
                self.problem = self.problem or (
                    f"has more than {MOST_SOURCES} values; name a column whose values many rows share"
                )
                name = next(iter(self.names))
            self.names.setdefault(name, len(self.names))
        self.of_prompt.append(self.names[name])

    def why_not(self, *, is_whole: bool) -> str:
        """Return why there are no sources to choose between, as an error; empty if there are.

        Args:
            is_whole: all prompts have been added.
        """
        if self.problem:
            return f"data.curriculum={short_repr(self.by)} {self.problem}"
        is_one_file = self.by == FILES and len(self._files) == 1
        if not is_one_file and (len(self.names) > 1 or not is_whole):
            return ""
        if self.by == FILES:
            return (
                f"data.curriculum=files chooses between the paths of data.train={short_repr(self._path)}, "
                "and only one has prompts; name several, or a column such as data_source"
            )
        (name,) = self.names or [""]
        has = f"have the value {short_repr(name)} there" if name else "have nothing there"
        return (
            f"data.curriculum={short_repr(self.by)} is neither files nor a column to choose by: all rows of "
            f"data.train {has}; name a column with several values"
        )

    @property
    def note(self) -> str:
        """What a run says of its sources."""
        by = f"data.curriculum={short_repr(self.by)[1:-1]}"
        if not any(self.names):
            return f"{by}: none of the rows read has anything there"
        shown = ", ".join(short_repr(name) for name in islice(self.names, SHOWN))
        more = ", ..." * (len(self.names) > SHOWN)
        return f"{by}: sources of prompts: {len(self.names)}, {shown}{more}"

    def members(self) -> list[array]:
        """Return the prompts of each source, in their order."""
        found = [array("I") for _ in self.names]
        for prompt, source in enumerate(self.of_prompt):
            found[source].append(prompt)
        return found


@dataclass(kw_only=True, slots=True)
class Source:
    """A source of prompts and what is known of the scores of its samples.

    Means are over its prompts with at least two samples; a prompt counts less, the more have followed.
    """

    name: str
    prompts: int  # in data.train
    given: float  # share of the prompts that it would have without a curriculum
    weight: float  # its present share
    drawn: int = 0  # prompts, since the run began
    groups: float = 0.0  # prompts that the means are over, with older ones counted less; at most MEMORY
    score: float = 0.0  # mean score of the samples
    variance: float = 0.0  # mean variance of the scores of a prompt's samples
    varied: float = 0.0  # share of prompts whose samples differ in score

    def see(self, scores: Sequence[float]) -> None:
        """Take the scores of a prompt's samples into the means; those of fewer than two are left out."""
        count = len(scores)
        if count < 2 or not all(map(math.isfinite, scores)):
            return
        mean, is_varied = math.fsum(scores) / count, max(scores) > min(scores)
        # Divided by n - 1: its mean does not depend on the number of samples.
        variance = math.fsum((score - mean) ** 2 for score in scores) / (count - 1) if is_varied else 0.0
        self.groups = self.groups * (1 - 1 / MEMORY) + 1
        for name, value in (("score", mean), ("variance", variance), ("varied", float(is_varied))):
            so_far = getattr(self, name)
            setattr(self, name, so_far + (value - so_far) / self.groups)


def variance_weights(sources: Sequence[Source]) -> list[float]:
    """Return weights proportional to each source's given weight and the mean variance of its prompts' scores.

    The variance is relative to that of the source with the largest one, and never counts below FLOOR. Each
    source is credited with PRIOR prompts of the largest variance, so that a few prompts decide nothing.
    Without any variance the weights are the given ones.
    """
    largest = max((source.variance for source in sources if source.groups), default=0.0)
    if not largest:
        return [source.given for source in sources]
    weights = []
    for source in sources:
        seen = source.groups * (source.variance / largest)
        weights.append(source.given * max(FLOOR, (seen + PRIOR) / (source.groups + PRIOR)))
    return weights


class CurriculumCursor(PromptCursor):
    """Draws prompt indices source by source, by weights that may change after each iteration.

    Over any number of prompts a source has its share of them to within about one prompt. It is drawn in
    permutations of its own, each determined by the seed, the source and the permutation's number.

    Args:
        index: the source of each prompt.
        given: weight of each source without a curriculum; empty: its number of prompts.
        data: `digest` of the prompts; 0: unknown.
    """

    def __init__(
        self,
        index: SourceIndex,
        given: Sequence[float] = (),
        *,
        seed: int,
        shuffle: bool = True,
        data: int = 0,
    ):
        self._members, self._of_prompt = index.members(), index.of_prompt
        counts = [len(members) for members in self._members]
        shares = shares_of(given or counts)
        self.sources = [
            Source(name=name, prompts=count, given=share, weight=share)
            for name, count, share in zip(index.names, counts, shares, strict=True)
        ]
        self._credits = [0.0] * len(counts)  # prompts that each source is short of; their sum is about 0
        self._permutations: dict[
            int, tuple[int, array[int]]
        ] = {}  # by source: number and present permutation
        self.recent: list[int] = []  # sources of the prompts drawn since `observe`, in order
        super().__init__(num_prompts=len(index.of_prompt), seed=seed, shuffle=shuffle, data=data)
        self.mixture = zlib.crc32(repr([index.by, *zip(index.names, counts, shares)]).encode()) or 1

    def _go_to(self, *, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position

    def draw(self, count: int) -> list[int]:
        """Return the next `count` prompt indices."""
        number = self.epoch * self.num_prompts + self.position  # of the first
        drawn: list[tuple[float, int, int]] = []
        for source, places in enumerate(self._places(count)):
            drawn += [((at + 0.5) / places, source, self._next(source)) for at in range(places)]
        drawn.sort()
        if self.shuffle:
            random.Random(f"{self.seed}/{number}").shuffle(drawn)
        self.recent += [source for _, source, _ in drawn]
        self.epoch, self.position = divmod(number + count, self.num_prompts)
        return [prompt for _, _, prompt in drawn]

    def _places(self, count: int) -> list[int]:
        """Return how many of the next `count` prompts are of each source."""
        places, queue = [0] * len(self.sources), []
        for at, source in enumerate(self.sources):
            self._credits[at] = self._credits[at] + source.weight * count if source.weight else 0.0
            if source.weight:
                queue.append((-self._credits[at], at))
        heapq.heapify(queue)
        for _ in range(count):
            at = queue[0][1]
            places[at] += 1
            self._credits[at] -= 1
            heapq.heapreplace(queue, (-self._credits[at], at))
        return places

    def _next(self, at: int) -> int:
        """Return the next prompt of a source."""
        source, members = self.sources[at], self._members[at]
        cycle, place = divmod(source.drawn, len(members))
        if self._permutations.get(at, (-1,))[0] != cycle:
            order = members[:]
            if self.shuffle:
                random.Random(f"{self.seed}/{at}/{cycle}").shuffle(order)
            self._permutations[at] = cycle, order
        source.drawn += 1
        return self._permutations[at][1][place]

    def source_of(self, prompt: int) -> int:
        """Return the number of a prompt's source."""
        return self._of_prompt[prompt]

    def observe(self, scores: Iterable[Sequence[float]]) -> None:
        """Take the scores of the samples of each prompt drawn since the last call, in their order."""
        for source, of_prompt in zip(self.recent, scores, strict=True):
            self.sources[source].see(of_prompt)
        self.recent = []

    def weigh(self, weights: Sequence[float]) -> None:
        """Draw by these weights from now on; they are finite, at least 0, and one of them is above."""
        for source, share in zip(self.sources, shares_of(weights), strict=True):
            source.weight = share

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` resumes exactly."""
        state: dict[str, list] = {"credits": list(self._credits)}
        for name in ("drawn", *LEARNT):
            state[name] = [getattr(source, name) for source in self.sources]
        return super().state_dict() | {"curriculum": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; ValueError as of `PromptCursor`."""
        super().load_state_dict(state)
        saved = dict(state["curriculum"])
        self._credits, self.recent = list(saved.pop("credits")), []
        for name, values in saved.items():
            for source, value in zip(self.sources, values, strict=True):
                setattr(source, name, value)

    def fork(self) -> "CurriculumCursor":
        """Return an independent cursor at the same position, with the same weights."""
        other = copy(self)
        other.sources = [replace(source) for source in self.sources]
        other._credits, other._permutations, other.recent = list(self._credits), {}, []
        return other

    def progress(self) -> dict[str, Any]:
        """Plain values for `advance`, with the sources of the prompts drawn since the last call."""
        drawn = [source.drawn for source in self.sources]
        state = {"credits": list(self._credits), "drawn": drawn, "recent": self.recent}
        self.recent = []
        return super().state_dict() | {"curriculum": state}

    def advance(self, progress: Mapping[str, Any]) -> None:
        """Go to the position of `progress`, whose prompts `observe` then takes the scores of."""
        super().load_state_dict(progress)
        state = progress["curriculum"]
        self._credits, self.recent = list(state["credits"]), list(state["recent"])
        for source, drawn in zip(self.sources, state["drawn"], strict=True):
            source.drawn = drawn

    def learn(self, other: PromptCursor) -> None:
        """Take over the weights of `other`, and what it knows of scores."""
        assert isinstance(other, CurriculumCursor)
        for source, known in zip(self.sources, other.sources, strict=True):
            for name in LEARNT:
                setattr(source, name, getattr(known, name))
