"""A rank that a launcher started: sums over the world, reports its place, does what its argument says.

With --dry-run it accepts any settings. `fail_once`: rank 0 of the first attempt fails before the sum.
`hang`: waits for SIGTERM, reports it and ends.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def main(mode: str) -> None:
    if "hang" in mode:
        last = b"asked to end: %d\n" % os.getpid()
        signal.signal(signal.SIGTERM, lambda *_: (os.write(1, last), os._exit(0)))
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if "fail_once" in mode and rank == attempt == 0:
        os._exit(7)
    total = torch.tensor([2.0**rank])
    dist.all_reduce(total)
    known = " ".join(
        f"{name}={os.environ.get(name)}"
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_ADDR", "MODEL")
    )
    sys.stdout.write(
        f"sum {total.item():.0f} of {dist.get_world_size()} attempt {attempt} {known} pid={os.getpid()}\n"
    )  # in one write
    sys.stdout.flush()
    while "hang" in mode:
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--dry-run" not in sys.argv:
        main(sys.argv[1])
