"""GPU residency of the rollout engine and of training state.

Only this module puts the rollout engine to sleep and wakes it, or offloads training state and loads it back.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from parallel.reshard.execute import ReshardReport

Tag = Literal["weights", "kv_cache"]  # memory of the rollout engine that sleeps


class Trainable(Protocol):
    """A trainable model whose training-only state can be offloaded."""

    def offload_async(self, what: str) -> None:
        """Start to offload the training-only state."""
        ...

    def wait_offload(self, *, for_others: bool = True) -> None:
        """Wait for the offload to finish."""
        ...

    def onload_async(self) -> None:
        """Start to load it back."""
        ...


class Sleeper(Protocol):
    """The memory interface of a rollout engine."""

    def sleep(self) -> None: ...
    def wake(self, tag: Tag) -> None: ...
    def has_room(self, tag: Tag) -> bool: ...


class InPlaceSync(Protocol):
    """Weight sync into the rollout engine, and back where its weights alias the trained model's memory."""

    def run(self, meanwhile: Callable[[], None]) -> ReshardReport: ...
    def restore(self) -> bool: ...


class Residency:
    """State machine: either the rollout engine has the GPU, or training has it. Collective over the world.

    Args:
        trainable: the trainable models.
        offload: `reshard.offload`: the state of models that is offloaded, and when.
        sleeps: whether the rollout engine frees its GPU memory during training.
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
        self._is_stale = True  # the engine's weights are not up to date

    def enter_rollout(self) -> ReshardReport:
        """Give the engine the GPU and sync the weights if they are stale; return the report of the sync."""
        self._generates = True
        if not self._is_stale:
            return ReshardReport()
        self._offload_all()  # if not started yet
        if not self._engine.has_room("weights"):
            self._wait_offload()
        self._engine.wake("weights")
        report = self._sync.run(meanwhile=self._wake_kv_cache)
        self._is_stale = False
        return report

    def enter_training(self, trained: Trainable | None = None) -> None:
        """Give the GPU to training: restore the models' weights and put the engine to sleep if it can.

        Args:
            trained: the model to update next. Its training state starts to load; that of the others is
                offloaded.
        """
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
        """Mark the engine's weights as stale after updates, and start to offload training-only state."""
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
