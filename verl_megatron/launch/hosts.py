"""Which ranks of which world are on which host, where a run has worlds of their own on several hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_megatron.config import SCORERS, TrainerConfig
from verl_megatron.model_specs import (
    find_world,
    has_worlds,
    named_devices,
    num_training_ranks,
    serving_worlds,
)

TRAIN = "train"  # name of the training world


@dataclass(frozen=True, kw_only=True)
class Part:
    """The ranks of a world on one host."""

    name: str  # of the world, as --role has it
    host: int
    hosts: range  # of the whole world
    local: range  # ranks, counted on this host

    @property
    def trains(self) -> bool:
        return self.name == TRAIN

    @property
    def is_alone(self) -> bool:
        """Whether all of the world is on this host."""
        return len(self.hosts) == 1


def worlds_of(config: TrainerConfig) -> dict[str, range]:
    """Return the ranks of each world of a separate run, by its name; the training world is the first."""
    serving = {each.name: range(each.ranks[0], each.ranks[-1] + 1) for each in serving_worlds(config)}
    return {TRAIN: range(num_training_ranks(config)), **serving}


def ranks_of_role(config: TrainerConfig, role: str) -> int:
    """Return how many ranks the world of a --role has, to be started alone.

    Raises:
        ValueError: the run has one world, or none of this name.
    """
    if not has_worlds(config):
        raise ValueError(
            f"--role {role}: this run has one world; leave it out, or name ranks after those that train in "
            f"rollout.devices, {', '.join(f'{name}.devices' for name in SCORERS)}"
        )
    return num_training_ranks(config) if role == TRAIN else len(find_world(config, role).ranks)


def place_worlds(config: TrainerConfig, *, world_size: int, ranks_per_host: int) -> list[Part]:
    """Return the parts of all worlds of a separate run, world by world.

    Args:
        world_size: ranks of all worlds.

    Raises:
        ValueError: the devices do not end with the last rank, or a world on several hosts shares one.
    """
    worlds, devices = worlds_of(config), named_devices(config)
    needed = max(ranks.stop for ranks in worlds.values())
    if needed != world_size:
        raise ValueError(
            f"{devices} makes a run of {needed} ranks, and {world_size} were asked for; change one of them"
        )
    return [part for name, ranks in worlds.items() for part in _parts(name, ranks, ranks_per_host, devices)]


def _parts(name: str, ranks: range, ranks_per_host: int, devices: str) -> Sequence[Part]:
    hosts = range(ranks.start // ranks_per_host, (ranks.stop - 1) // ranks_per_host + 1)
    if len(hosts) > 1 and (ranks.start % ranks_per_host or ranks.stop % ranks_per_host):
        raise ValueError(
            f"{devices}: ranks {ranks[0]}-{ranks[-1]} of the {name} world are on {len(hosts)} hosts of "
            f"{ranks_per_host} ranks and share one with another world; choose whole hosts, or a part of one"
        )
    first = ranks.start % ranks_per_host
    count = min(len(ranks), ranks_per_host)
    return [Part(name=name, host=host, hosts=hosts, local=range(first, first + count)) for host in hosts]
