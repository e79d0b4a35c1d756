"""Both ends of a bridge in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist

from parallel.bridge import Bridge
from parallel.runtime import store as stores
from parallel.sealed_store import SealedStore

TOKEN = "a secret of the run"


@contextmanager
def bridge_ends() -> Iterator[tuple[dist.TCPStore, list[Bridge]]]:
    """Serve a store; yield a connection to it, and the ends of a bridge between one rank and another.

    Gloo takes the interface that GLOO_SOCKET_IFNAME names.
    """
    served = stores.serve(stores.LOCAL, one_host=True)

    def end(rank: int) -> Bridge:
        client = dist.TCPStore(stores.LOCAL, served.port, is_master=False)
        root = SealedStore(client, TOKEN, "bridge/").part("rollout")
        return Bridge(
            own=cast(Any, None),
            name="rollout",
            num_training=1,
            num_serving=1,
            rank=rank,
            number=0,
            root=root,
            store=root.part("0"),
            wait=lambda: None,
        )

    yield dist.TCPStore(stores.LOCAL, served.port, is_master=False), [end(0), end(1)]
