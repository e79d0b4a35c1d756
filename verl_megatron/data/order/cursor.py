"""The position in a data set: which items are drawn next."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from verl_megatron.data.order.mixture import Share, digest_of, order_of, permutation


class PromptCursor:
    """Draws prompt indices epoch by epoch.

    Each epoch is a permutation determined by (seed, epoch), so the position is two integers. With `shares`,
    weights of several sources, an epoch has as many prompts of each as its weight says (`mixture`).

    Args:
        data: `digest` of the prompts; 0: unknown.
    """

    def __init__(
        self,
        *,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        shares: Sequence[Share] = (),
        data: int = 0,
    ):
        assert num_prompts > 0
        self.data = data
        self.shares = list(shares)
        self.mixture = digest_of(self.shares)
        self.num_prompts = num_prompts
        self.seed = seed
        self.shuffle = shuffle
        self._go_to(epoch=0, position=0)

    def _go_to(self, *, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        if self.shares:
            self._order = order_of(self.shares, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            return
        self._order = permutation(self.num_prompts, f"{self.seed}/{epoch}" if self.shuffle else None)

    def draw(self, count: int) -> list[int]:
        """Return the next `count` prompt indices; a new epoch starts where one ends."""
        drawn: list[int] = []
        while len(drawn) < count:
            if self.position == self.num_prompts:
                self._go_to(epoch=self.epoch + 1, position=0)
            part = self._order[self.position : self.position + count - len(drawn)]
            self.position += len(part)
            drawn += part
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` resumes exactly."""
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }
        return state | {name: value for name in ("mixture", "data") if (value := getattr(self, name))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`.

        Raises:
            ValueError: it was saved with other prompts, seed, shuffle, weights or curriculum.
        """
        self._check(state)
        self._go_to(epoch=state["epoch"], position=state["position"])

    # ---- orders ahead of time: a fork draws, and the cursor follows as the samples are collected

    def fork(self) -> "PromptCursor":
        """Return an independent cursor at the same position."""
        return copy(self)

    def progress(self) -> dict[str, Any]:
        """Plain values with which `advance` brings another cursor of the same prompts to this position."""
        return self.state_dict()

    def advance(self, progress: Mapping[str, Any]) -> None:
        """Go to the position of `progress`; ValueError as of `load_state_dict`."""
        self.load_state_dict(progress)

    def learn(self, other: "PromptCursor") -> None:
        """Take over what `other` knows of scores, which here is nothing."""

    def _check(self, state: Mapping[str, Any]) -> None:
        for name in ("num_prompts", "seed", "shuffle"):
            if state[name] != int(getattr(self, name)):
                raise ValueError(
                    f"the saved data position has {name}={state[name]}, this run {int(getattr(self, name))};"
                    " resume with the same data, run.seed and data.shuffle"
                )
        if self.data != (saved := state.get("data") or self.data) and self.data:  # older states have none
            raise ValueError(
                f"the saved data position is of other rows: they have the digest {saved:012x}, those of "
                f"data.train {self.data:012x}; resume with the same data, in the same order"
            )
        if state.get("mixture", 0) != self.mixture:
            raise ValueError(
                "the saved data position is of other weights in data.train or another data.curriculum, or of "
                "none; resume with the same data.train and data.curriculum"
            )
