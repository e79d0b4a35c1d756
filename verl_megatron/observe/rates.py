"""Which rollout replicas are slow: tokens a second of each, beside the others."""

from collections import Counter
from collections.abc import Mapping
from statistics import median

from parallel.rank_set import RankSet
from verl_megatron.observe.metrics import Sums

SLOW = 0.5  # of the others' median
IN_A_ROW = 3  # iterations, before a replica is named: one may by chance get few samples


class Rates:
    """Tokens that replicas have made on each rank's behalf, and the seconds which they took.

    Args:
        world: all training ranks.
    """

    def __init__(self, world: RankSet):
        self._world = world
        self._made: dict[str, tuple[float, float]] = {}  # tokens and seconds by name, since the last review
        self._slow_for: Counter[str] = Counter()  # iterations in a row

    def add(self, name: str, *, tokens: float, seconds: float) -> None:
        """Add what a replica has made."""
        known = self._made.get(name, (0.0, 0.0))
        self._made[name] = known[0] + tokens, known[1] + seconds

    def review(self, sums: Sums) -> None:
        """Compare the replicas' rates since the last review, and name slow ones. Collective."""
        made: dict[str, tuple[float, float]] = {}
        for part in self._world.all_gather_object(self._made):
            made |= part  # a replica's samples belong to one rank
        self._made = {}
        rates = {name: tokens / seconds for name, (tokens, seconds) in made.items() if seconds > 0}
        if len(rates) < 2:
            return
        shares = {name: rate / (_others(rates, name) or rate or 1.0) for name, rate in rates.items()}
        sums.add("async/slowest_replica", min(shares.values()), 1)
        for name, share in sorted(shares.items()):
            self._slow_for[name] = self._slow_for[name] + 1 if share < SLOW else 0
            if self._slow_for[name] == IN_A_ROW and self._world.is_first:
                own, others = f"{rates[name]:,.0f} tokens/s", f"{_others(rates, name):,.0f}"
                print(
                    f"warning: {name} makes {own}, the others {others}: look at its host and at what else "
                    "runs there",
                    flush=True,
                )


def _others(rates: Mapping[str, float], name: str) -> float:
    """Return the median rate of the other replicas."""
    return median(rate for other, rate in rates.items() if other != name)
