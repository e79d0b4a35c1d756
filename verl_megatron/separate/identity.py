"""Proof that the rollout generates with the weights that training has published.

With each version, every training rank tells a fingerprint of the slices that it sends, one number for each
rank of the rollout. These compare the sum with what vLLM holds, after they have generated and before samples
are sent: parts that were left out, weights of another version, or memory that has changed end the run.
"""

import pickle
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.bridge import Bridge
from parallel.reshard.checksum_verifier import Fingerprint, ReshardError
from parallel.reshard.kernels import Checksums
from parallel.reshard.resolve import resolve_slices
from parallel.reshard.transport import Parameters
from parallel.reshard.versions import VersionedReshard

KEPT = 4  # syncs; a rank of the rollout is at most two behind the one that is published


class PublishedWeights:
    """Tells the fingerprints of this training rank's snapshots.

    Args:
        versions: the training side of the exchange.
    """

    def __init__(self, bridge: Bridge, versions: VersionedReshard):
        self._bridge, slices = bridge, versions.resharder.slices
        self._fingerprint = Fingerprint(slices.transfers, slices.reads, bridge.serving_ranks)
        self._told: list[int] = []
        self._last: tuple[int, Tensor] | None = None  # version and fingerprint
        self.is_unchanged = False  # whether the last two versions have one fingerprint on this rank

    def tell(self, sync: int, *, version: int) -> None:
        """Tell the fingerprint of the snapshot that has just been published by a weight sync."""
        fingerprint, last = self._fingerprint.run(), self._last
        self._bridge.put(_key(sync, self._bridge.rank), pickle.dumps((version, fingerprint)))
        self.is_unchanged = last is not None and last[0] != version and bool((last[1] == fingerprint).all())
        self._last = version, fingerprint
        self._told.append(sync)
        if len(self._told) > KEPT:
            self._bridge.drop(_key(self._told.pop(0), self._bridge.rank))


class ServedWeights:
    """Compares what this rank of the rollout serves with what was published.

    fp8 weights are not what was published. Their part of the fingerprint is taken from the back buffer when
    they are adopted, and counts as long as their own bits stay as they were written then.

    Args:
        versions: the rollout side of the exchange.
        target: vLLM's parameters that hold what is published.
        converted: [R, C] each, the others.
    """

    def __init__(
        self,
        bridge: Bridge,
        versions: VersionedReshard,
        target: Parameters,
        converted: Sequence[Tensor] = (),
    ):
        self._bridge = bridge
        plan, transport = versions.resharder.plan, versions.resharder.transport
        slices = resolve_slices(plan, {}, versions.back | target, transport)
        served, arrived = {}, {}
        for number, write in slices.writes.items():
            is_served = slices.transfers[number].destination[:2] in target
            (served if is_served else arrived)[number] = write
        self._served = Fingerprint(slices.transfers, served, bridge.serving_ranks)
        self._arrived = Fingerprint(slices.transfers, arrived, bridge.serving_ranks)
        device = converted[0].device if converted else torch.device("cpu")
        self._converted = Checksums(converted, device=device)
        none = torch.zeros(0, dtype=torch.int64)
        self._adopted = none, none  # checksums of what was made of the last version, and what arrived of it
        self._place = list(bridge.serving_ranks).index(bridge.rank)
        self._published: dict[int, tuple[int, int]] = {}  # version and fingerprint by sync

    def record(self) -> None:
        """Record what arrived and what was made of it; an argument of `VersionedReshard.adopt`."""
        self._adopted = self._converted.run(), self._arrived.run()

    def _held(self) -> int | None:
        """Return the fingerprint of what vLLM holds; None if adopted weights have changed since."""
        checksums, arrived = self._adopted
        if not torch.equal(self._converted.run(), checksums):
            return None
        return int((self._served.run() + arrived)[self._place])

    def expect(self, sync: int) -> None:
        """Read version and fingerprint of a weight sync that this rank has adopted."""
        told: list[tuple[int, Tensor]] = [
            pickle.loads(self._bridge.value(_key(sync, rank))) for rank in range(self._bridge.num_training)
        ]
        fingerprint = torch.stack([part for _, part in told]).sum(0)[self._place]
        self._published[sync] = told[0][0], int(fingerprint)
        for known in sorted(self._published)[:-KEPT]:
            del self._published[known]

    def check(self, sync: int, purpose: str) -> None:
        """Check that this rank holds the version of a weight sync.

        Args:
            purpose: what was generated with it, for the message.

        Raises:
            ReshardError: it holds other weights.
        """
        held = self._held()
        version, expected = self._published[sync]
        if held == expected:
            return
        others = [version for version, known in self._published.values() if known == held]
        found = f"those of version {others[0]}" if others else "of no version that was published"
        raise ReshardError(
            f"rollout rank {self._place} generated {purpose} with wrong weights: they should be those of "
            f"version {version} and are {found}; the samples are not used"
        )


def _key(sync: int, rank: int) -> str:
    return f"weights/{sync}/{rank}"
