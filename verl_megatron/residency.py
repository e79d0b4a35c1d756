"""What lies on the GPU and when: the only place that puts the rollout engine to sleep, wakes it, and moves training state off and on."""

from collections.abc import Callable, Sequence
from typing import Protocol

from parallel.reshard.execute import ReshardReport


class Trainable(Protocol):
    """A model that is trained: what only training needs of it can leave the GPU."""

    def offload_async(self, what: str) -> None:
        """Begin to move it off the GPU."""
        ...

    def wait_offload(self, *, for_others: bool = True) -> None:
        """Wait until what is leaving has left."""
        ...

    def onload_async(self) -> None:
        """Begin to bring it back."""
        ...


class Sleeper(Protocol):
    """A rollout engine, as far as its memory goes."""

    def sleep(self) -> None: ...
    def wake(self, tag: str) -> None: ...
    def has_room(self, tag: str) -> bool: ...


class InPlaceSync(Protocol):
    """Moves weights into the rollout engine, and back where they lie over the trained model's."""

    def run(self, meanwhile: Callable[[], None]) -> ReshardReport: ...
    def restore(self) -> bool: ...


class Residency:
    """One state machine: either the rollout engine has the GPU, or training has it. Collective over the world.

    Args:
        trainable: the models that are trained.
        offload: what of them leaves the GPU while they are not trained: none, grads, optimizer, all.
        sleeps: whether the rollout engine gives its memory back while training.
    """

    def __init__(
        self,
        engine: Sleeper,
        sync: InPlaceSync,
        trainable: Sequence[Trainable],
        *,
        offload: str,
        sleeps: bool,
    ):
        self.offload = offload
        self._engine, self._sync, self._trainable, self._sleeps = engine, sync, tuple(trainable), sleeps
        self._generates = False
        self._is_stale = True  # the engine's weights are not the trained model's

    def enter_rollout(self) -> ReshardReport:
        """The engine has the GPU and the present weights; what had to move for that. Nothing if it has them already."""
        self._generates = True
        if not self._is_stale:
            return ReshardReport()
        self._offload_all()  # where it has not begun
        if not self._engine.has_room("weights"):
            self._wait_offload()
        self._engine.wake("weights")
        report = self._sync.run(meanwhile=self._wake_kv_cache)
        self._is_stale = False
        return report

    def enter_training(self, trained: Trainable | None = None) -> None:
        """The models have their weights again, the engine gives its memory back where it can, and what training `trained` needs begins to
        come back while that of the others leaves."""
        if self._generates:
            self._generates = False
            self._is_stale |= self._sync.restore()
            if self._sleeps:
                self._engine.sleep()
                self._is_stale = True
        if trained is None:
            return
        for model in self._trainable:
            if model is not trained:
                model.offload_async(self.offload)
                model.wait_offload(for_others=False)
        trained.onload_async()

    def mark_weights_stale(self) -> None:
        """After updates: the engine's weights are old, and what only training needs may begin to leave the GPU."""
        self._is_stale = True
        self._offload_all()

    def _offload_all(self) -> None:
        for model in self._trainable:
            model.offload_async(self.offload)

    def _wait_offload(self) -> None:
        for model in self._trainable:
            model.wait_offload()

    def _wake_kv_cache(self) -> None:
        self._wait_offload()
        self._engine.wake("kv_cache")
