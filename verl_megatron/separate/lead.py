"""How far a window's rollout is ahead of training: as little as keeps training busy."""

SHORT = 0.02  # share of an iteration; training that lacks groups for longer wants a larger lead
GROWTH = 1 / 8  # of an iteration's groups, after an iteration that lacked some
SPARE = 1 / 4  # of an iteration's groups that may be complete before training wants them
MEMORY = 8  # iterations in which a group must have been left over, to be one too many


class Lead:
    """Groups that may be under way beyond those of the next iteration; the same on every rank.

    At least those of one iteration, so that both sides work at the same time, and at most those of
    `max_staleness` iterations. Without staleness there are none. It grows when too few groups were complete;
    a wait for the oldest, which must be taken, is none that more groups would shorten. It shrinks by the
    complete groups that each of the last iterations has left over, but for a few: so lengths and speeds may
    vary as they lately have without a wait.

    Args:
        wanted: groups of an iteration.
        max_staleness: iterations.
    """

    def __init__(self, wanted: int, *, max_staleness: int):
        self._wanted, self._least, self._most = wanted, wanted * min(1, max_staleness), wanted * max_staleness
        self._left: list[int] = []  # of the last iterations that were not short
        self.groups = self._least

    def restore(self, groups: int) -> None:
        """Go on with the lead of an earlier run, as far as it is allowed now."""
        self.groups = min(max(groups, self._least), self._most)

    def adapt(self, *, is_short: bool, left: int) -> None:
        """Follow an iteration's collection.

        Args:
            is_short: too few groups were complete for longer than `SHORT`, on any rank.
            left: groups that were complete and not taken.
        """
        if is_short:
            self._left = []
            self.restore(self.groups + max(1, round(self._wanted * GROWTH)))
            return
        self._left = [*self._left, left][-MEMORY:]
        if len(self._left) == MEMORY:
            surplus = max(0, min(self._left) - round(self._wanted * SPARE))
            before = self.groups
            self.restore(before - surplus)
            self._left = [each - (before - self.groups) for each in self._left]
