"""Four gloo ranks of which one dies during a reshard; the others report what they saw and fail.

Arguments: the rank that dies, and where: "window" (between its first and second window), "posted" (messages
of its second window are under way) or "verify" (its windows are done, others wait for its checksums).
"""

import os
import signal
import sys

import torch.distributed as dist

from parallel.layout import Layout
from parallel.reshard.execute import Resharder
from tests.distributed.reshard_worker import make, rollout_shards, train_shards
from tests.toy_shards import Toy

LARGE = Toy(vocab=4096, hidden=128, head_dim=16, ffn=512)  # 7 MiB in float32
WINDOW_BYTES = 2**18


class Dying(Resharder):
    """Ends its process, as the kernel ends one that takes too much memory."""

    where: str

    def _post(self, number: int):
        if self.where == "window" and number == 1:
            die()
        messages = super()._post(number)
        if self.where == "posted" and number == 1:
            die()
        return messages

    def move(self) -> None:
        super().move()
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    dist.init_process_group("gloo")  # Megatron-Core, which takes longest to import, has no part in this
    victim, where = int(sys.argv[1]), sys.argv[2]
    dies = dist.get_rank() == victim
    layout = Layout.parse("tp2pp2", ranks=(0, 1, 2, 3))
    resharder, *_ = make(
        (train_shards(LARGE, layout), rollout_shards(LARGE, 4)),
        LARGE,
        window_bytes=WINDOW_BYTES,
        kind=Dying if dies else Resharder,
    )
    resharder.where = where
    print(f"rank {dist.get_rank()} starts with {len(resharder.plan.windows)} windows", flush=True)
    try:
        resharder.run()
    except Exception as error:
        print(f"rank {dist.get_rank()} got {type(error).__name__}: {error}", flush=True)
        raise
