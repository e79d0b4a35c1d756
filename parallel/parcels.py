"""Python objects from rank to rank of a bridge."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from parallel.bridge import Bridge, losing


class Parcels:
    """Sends objects from rank to rank of a bridge. Collective to construct.

    A parcel is announced in the store, and sent once its receiver asks for it: both sides wait for the store
    alone. Parcels are sealed with the run's token, and opened before they are unpickled.
    """

    def __init__(self, bridge: Bridge, name: str):
        self._bridge, self._name, self._group = bridge, name, bridge.group(name)
        self._receiver = ThreadPoolExecutor(1, name)

    def send(self, value: Any, *, to: int, label: str) -> None:
        """Send an object; returns when it has been received.

        Raises:
            BridgeLostError: the other world has ended.
        """
        key = self._key(label, self._bridge.rank, to)
        sealed = self._bridge.store.seal(key, pickle.dumps(value))
        payload = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
        self._bridge.put(key, str(len(payload)).encode())
        self._bridge.take(f"{key}/wanted")  # may take long; waiting inside `send` could not be interrupted
        with losing("sending samples"):
            self._group.send([payload], to, 0).wait()

    def receive(self, *, source: int, label: str) -> Any:
        """Wait for the object with this label, and return it. Objects of a rank come in its order.

        Raises:
            BridgeLostError: the other world has ended.
            ValueError: somebody without the run's token has sent it.
        """
        key = self._key(label, source, self._bridge.rank)
        length = int(self._bridge.take(key))
        self._bridge.put(f"{key}/wanted", b"")
        payload: Tensor = torch.empty(length, dtype=torch.uint8)
        with losing("receiving samples"):
            # gloo completes a receive in `wait` alone, which cannot be interrupted
            received = self._receiver.submit(lambda: self._group.recv([payload], source, 0).wait())
            while not received.done():
                self._bridge.check()
                self._bridge.pause()
            received.result()
        return pickle.loads(self._bridge.store.unseal(key, payload.numpy().tobytes()))

    def _key(self, label: str, source: int, to: int) -> str:
        return f"{self._name}/{label}/{source}/{to}"
