"""Cases of `verl-megatron reshard-plan`: a model with two layouts on some hosts, read from the options."""

import re
from dataclasses import dataclass, replace
from math import lcm, prod
from pathlib import Path

from parallel.layout import Layout
from parallel.placement import place
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import megatron_shards, vllm_shards
from parallel.weights.shapes import SHAPES, shape
from parallel.weights.shard import Shards

HOST_RANKS = 8  # per host, unless --hosts is given
MAX_RANKS = 2**14


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A model with its two layouts and its hosts."""

    model: str
    arch: Architecture
    train: Layout
    rollout: Layout
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        return len(self.train.ranks)

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def shards(self) -> tuple[Shards, Shards]:
        """Return every rank's shards in Megatron and in vLLM.

        Raises:
            ValueError: a layout does not split the model; names the option.
        """
        option = f"--train {self.train}"
        try:
            source = megatron_shards(self.arch, self.train, spec="te")
            option = f"--rollout {self.rollout}"
            return source, vllm_shards(self.arch, self.rollout)
        except ValueError as error:
            raise ValueError(f"{option}: {error}".replace("stage_layers", "--stage-layers")) from None

    def replicas(self) -> list[list[int]]:
        """Return the ranks of every replica of Megatron's model, and of vLLM's."""
        train, rollout = self.train, self.rollout
        return train.group_ranks("tp", "pp") + rollout.group_ranks("tp")

    def placed(self) -> "PlanCase":
        """Return the case with the rank order that moves the fewest bytes; ValueError as for `shards`."""
        self.shards()  # raises with the option's name if a layout does not split the model
        train, rollout = place(self.arch, self.train, self.rollout, ranks_per_host=self.ranks_per_host)
        return replace(self, train=train, rollout=rollout)


def read_case(
    *,
    hf: str,
    train: str,
    rollout: str,
    ranks: int | None = None,
    hosts: int | None = None,
    stage_layers: tuple[int, ...] = (),
) -> PlanCase:
    """Parse the options.

    Args:
        ranks: None: the smallest number that fits both layouts.
        hosts: None: 8 ranks per host.

    Raises:
        ValueError: names the option, its value and a valid replacement.
    """
    if hf not in SHAPES and not Path(hf).is_dir():
        raise ValueError(
            f"--hf {hf} is neither a folder nor a built-in shape; give a folder with a config.json or one of "
            f"{', '.join(SHAPES)}"
        )
    arch = Architecture.from_hf(shape(hf), source=hf) if hf in SHAPES else read_architecture(hf)
    layouts = {}
    smallest = lcm(_num_ranks(train), _num_ranks(rollout))
    if (ranks or smallest) > MAX_RANKS:
        subject = (
            f"--ranks {ranks}" if ranks else f"--train {train} with --rollout {rollout}, {smallest} ranks,"
        )
        raise ValueError(f"{subject} is more than the {MAX_RANKS} that a plan may have; choose fewer")
    world = tuple(range(ranks or smallest))
    for option, text, stages in (("--train", train, stage_layers), ("--rollout", rollout, ())):
        try:
            layouts[option] = Layout.parse(text, ranks=world, stage_layers=stages)
        except ValueError as error:
            raise ValueError(f"{option} {text} with --ranks {len(world)}: {error}") from None
    if layouts["--rollout"].tp * layouts["--rollout"].dp != len(world):
        raise ValueError(
            f"--rollout {rollout} names more than tp and dp, and vLLM's replicas are split by tp only; write "
            f"tp{layouts['--rollout'].tp}"
        )
    if hosts and len(world) % hosts:
        raise ValueError(
            f"--hosts {hosts} must divide the {len(world)} ranks; choose a divisor or another --ranks"
        )
    return PlanCase(
        hf,
        arch,
        layouts["--train"],
        layouts["--rollout"],
        len(world) // hosts if hosts else min(HOST_RANKS, len(world)),
    )


def _num_ranks(text: str) -> int:
    """Return the number of ranks of a layout's named sizes; `Layout.parse` checks whether it is a layout."""
    return max(1, prod(int(size) for size in re.findall(r"(?<!v)[tpcd]p(\d+)", text.lower())))
