"""A model's parallel layout as pure arithmetic, without torch.

Ranks are ordered as in Megatron: tp varies fastest, then cp, then dp, and pp slowest.
"""

import re
from dataclasses import dataclass
from itertools import product
from math import prod

from parallel.runtime.environment import MOST_RANKS
from parallel.runtime.refusal import counted, short_repr

AXES = ("tp", "cp", "dp", "pp")  # fastest first
_COMPACT = re.compile(r"(vpp|tp|pp|cp|dp)([0-9]{1,18})")
_PARTS = re.compile(rf"({_COMPACT.pattern}|sp|\s)+")
_RANKS = re.compile(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on each axis of a `Layout`."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a model's parallel axes and its world ranks (`len(ranks) == tp * cp * dp * pp`)."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1  # model chunks (virtual stages) per pipeline rank
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; empty: the same for all stages
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self):
        size = self.tp * self.cp * self.dp * self.pp
        if len(self.ranks) != size or len(set(self.ranks)) != size:
            raise ValueError(
                f"layout {self} needs {size} distinct ranks and was given {short_repr(list(self.ranks))}; "
                "change its sizes or its devices"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"layout {self} has virtual stages but one pipeline stage; use pp2 or more, or leave vpp out"
            )
        if self.stage_layers and len(self.stage_layers) != self.pp:
            raise ValueError(
                f"stage_layers={short_repr(list(self.stage_layers))} must name one number of layers for "
                f"each of the {self.pp} pipeline stages"
            )

    @classmethod
    def parse(cls, text: str, ranks: tuple[int, ...], stage_layers: tuple[int, ...] = ()) -> "Layout":
        """Parse the compact form: sizes in any order, "sp" for sequence parallelism.

        Without a dp size, dp is the number of `ranks` divided by the other sizes.

        >>> Layout.parse("tp2pp2sp", ranks=tuple(range(8))).dp
        2

        Raises:
            ValueError: an unknown part, a part named twice, or sizes that do not divide the number of ranks.
        """
        compact = text.lower()
        parts = _COMPACT.findall(compact)
        names = [name for name, _ in parts] + ["sp"] * compact.count("sp")
        if not names or not _PARTS.fullmatch(compact) or len(set(names)) < len(names):
            raise ValueError(
                f"layout {short_repr(text)} is not understood; write sizes such as tp2pp2, tp4cp2sp or "
                "tp2pp4vpp2"
            )
        sizes = {name: int(size) for name, size in parts}
        if 0 in sizes.values():
            raise ValueError(f'layout "{text}" has a size of 0; sizes start at 1')
        model = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
        if len(ranks) % model or sizes.get("dp", len(ranks) // model) != len(ranks) // model:
            need = model * sizes.get("dp", 1)
            multiple = "" if "dp" in sizes else " or a multiple"
            raise ValueError(
                f'layout "{text}" needs {counted(need, "rank")}{multiple} and has {len(ranks)}; '
                "change the layout or its devices"
            )
        sizes.setdefault("dp", len(ranks) // model)
        return cls(
            **sizes,
            sequence_parallel="sp" in names and sizes.get("tp", 1) > 1,
            stage_layers=tuple(stage_layers),
            ranks=tuple(ranks),
        )

    def __str__(self) -> str:
        sizes = "".join(
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "vpp", "cp", "dp")
            if getattr(self, name) > 1
        )
        return (sizes or "tp1") + ("sp" if self.sequence_parallel else "")

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of world rank `rank`; ValueError if it is not part of the layout."""
        index = self.ranks.index(rank)
        place: dict[str, int] = {}
        for axis in AXES:
            index, place[axis] = divmod(index, getattr(self, axis))
        return Coordinates(**place)

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return self.ranks[((pp * self.dp + dp) * self.cp + cp) * self.tp + tp]

    def group_ranks(self, *axes: str) -> list[list[int]]:
        """Return the world ranks of every group along `axes`, one list per group.

        Together the groups contain each rank of the layout once.
        """
        fixed = [axis for axis in reversed(AXES) if axis not in axes]
        spanned = [axis for axis in reversed(AXES) if axis in axes]
        groups: list[list[int]] = []
        for outer in product(*(range(getattr(self, axis)) for axis in fixed)):
            inner = product(*(range(getattr(self, axis)) for axis in spanned))
            groups.append(
                [self.rank_of(**dict(zip(fixed, outer)), **dict(zip(spanned, place))) for place in inner]
            )
        return groups

    def layers_of(self, num_layers: int) -> dict[tuple[int, int], range]:
        """Return the global layer indices of each (pipeline stage, virtual chunk).

        In Megatron's order: chunk by chunk, over all stages.

        Raises:
            ValueError: `num_layers` cannot be split this way.
        """
        stages = self.stage_layers or (num_layers // self.pp,) * self.pp
        if sum(stages) != num_layers:
            raise ValueError(
                f"{num_layers} layers do not split over pp={self.pp} as {list(stages)}; choose a pp that"
                f" divides them or set stage_layers (sum {num_layers})"
            )
        if not all(count > 0 for count in stages):
            raise ValueError(
                f"stages of {list(stages)} layers leave a pipeline stage without any; give each at least one,"
                " or choose a smaller pp"
            )
        if any(count % self.vpp for count in stages):
            raise ValueError(
                f"stages of {list(stages)} layers do not split into vpp={self.vpp} chunks; choose a vpp that"
                " divides each stage"
            )
        ranges: dict[tuple[int, int], range] = {}
        first = 0
        for chunk in range(self.vpp):
            for stage in range(self.pp):
                ranges[stage, chunk] = range(first, first + stages[stage] // self.vpp)
                first = ranges[stage, chunk].stop
        return ranges


def least_ranks(text: str) -> int:
    """Return the product of the sizes that a layout such as "tp2pp2" names, without virtual stages.

    Sizes that `Layout.parse` refuses count, too, so that a message has the right number.
    """
    sizes = _COMPACT.findall(text.lower())
    return prod(max(1, int(size)) for name, size in sizes if name != "vpp")


def last_rank(devices: str) -> int:
    """Return the largest number in a device list such as "0-3"; 0 if there is none."""
    return max(map(int, re.findall("[0-9]{1,9}", devices)), default=0)


def named_ranks(devices: str) -> tuple[int, ...]:
    """Return the ranks that a device list names, none if it is empty; errors as of `parse_devices`."""
    return parse_devices(devices, last_rank(devices) + 1) if devices else ()


def parse_devices(text: str, world_size: int) -> tuple[int, ...]:
    """Return the world ranks of a device list such as "0-3", "cuda:0-3,6" or "" for all of them.

    Raises:
        ValueError: not a list of ranks, ranks that do not increase, a rank named twice, or a rank outside
            the world.
    """
    if not text:
        return tuple(range(world_size))
    ranks: list[int] = []
    for part in text.replace("cuda:", "").split(","):
        match = _RANKS.fullmatch(part)
        if not match:
            raise ValueError(
                f"devices {short_repr(text)} is not understood at {short_repr(part)}; write ranks such as "
                "0-3 or cuda:0-3,6"
            )
        last = int(match[2] or match[1])
        if last >= MOST_RANKS:
            raise ValueError(
                f"devices {short_repr(text)} name rank {last}, and a run has at most {MOST_RANKS:,}; "
                "name ranks that it has"
            )
        if last >= world_size:  # before the range is expanded
            raise ValueError(
                f"devices {short_repr(text)} must name distinct ranks below the {world_size} that were "
                "started"
            )
        ranks += range(int(match[1]), last + 1)
    if ranks != sorted(ranks):  # torch sorts the ranks of a group, so Megatron would mix them up
        raise ValueError(f"devices {short_repr(text)} must name ranks in increasing order; write them so")
    if len(set(ranks)) != len(ranks) or not ranks:
        raise ValueError(
            f"devices {short_repr(text)} must name distinct ranks below the {world_size} that were started"
        )
    return tuple(ranks)
