"""Two ranks of hosts that have counted other numbers of attempts, as torchrun's agents do.

Argument: a folder.
"""

import os
import sys
from datetime import timedelta

from parallel import device
from parallel.rank_set import world
from parallel.runtime.watchdog import Watchdog


def main(folder: str) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    device.COLLECTIVE_TIMEOUT = timedelta(seconds=30)
    device.initialize()
    ranks = world()
    with Watchdog(60, folder, ranks) as watchdog:
        ranks.barrier()
        assert watchdog._store.check([f"rank/{rank}" for rank in ranks.ranks]), "the other does not report"
        ranks.barrier()
    print("met")


if __name__ == "__main__":
    main(sys.argv[1])
