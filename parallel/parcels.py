"""Python objects from rank to rank of a bridge."""

import io
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.bridge import POLL_S, Bridge, losing

LAST_S = 5.0  # for a send that has begun
NARROW = torch.iinfo(torch.int32)


@dataclass(frozen=True, kw_only=True)
class _Parcel:
    """An object that was announced."""

    key: str
    to: int
    payload: Tensor  # uint8


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: torch would write an archive for each of them."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.device.type != "cpu" or obj.dtype == torch.bfloat16:
            return NotImplemented
        return _tensor_of, (_narrowed(obj).numpy(), obj.dtype)


def _narrowed(x: Tensor) -> Tensor:
    """Return int64 values as int32 if they fit: token ids do."""
    if x.dtype != torch.int64 or not x.numel():
        return x.detach()
    low, high = x.aminmax()
    return x.to(torch.int32) if NARROW.min <= low and high <= NARROW.max else x


def _tensor_of(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values).to(dtype)


def dumps(value: Any) -> bytes:
    """Return a pickle of an object; tensors of the CPU are in it as quickly readable arrays."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class Outbox:
    """A thread that goes on with what waits for other ranks, in whatever order they are ready."""

    def __init__(self):
        self._steps: list[Callable[[], bool]] = []
        self._error: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, step: Callable[[], bool]) -> None:
        """Call a function again and again until it returns True."""
        self._steps.append(step)

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; what waits is not done any more."""
        self._is_closed = True
        self._thread.join(LAST_S)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for step in list(self._steps):
                    if step():
                        self._steps.remove(step)
                time.sleep(POLL_S)
        except Exception as error:  # of the run; raised where somebody waits
            self._error = error


class Parcels:
    """Sends objects from rank to rank of a bridge. Collective to construct.

    A parcel is announced in the store, and sent once its receiver asks for it: both sides wait for the store
    alone. Parcels are sealed with the run's token, and opened before they are unpickled.
    """

    def __init__(self, bridge: Bridge, name: str):
        self._bridge, self._name, self._group = bridge, name, bridge.group(name)
        self._receiver = ThreadPoolExecutor(1, name)
        self.receive_s = 0.0  # for which the last object, once announced, was on its way to this rank

    def send(self, value: Any, *, to: int, label: str) -> None:
        """Send an object; returns when it has been received.

        Raises:
            BridgeLostError: the other world has ended.
        """
        parcel = self._announce(value, to=to, label=label)
        while not self._deliver(parcel):  # may take long; waiting inside `send` could not be interrupted
            self._bridge.pause()

    def post(self, outbox: Outbox, value: Any, *, to: int, label: str) -> None:
        """Send an object in the background, whenever it is asked for; errors as of `send`."""
        outbox.add(partial(self._deliver, self._announce(value, to=to, label=label)))

    def _announce(self, value: Any, *, to: int, label: str) -> _Parcel:
        key = self._key(label, self._bridge.rank, to)
        sealed = self._bridge.store.seal(key, dumps(value))
        payload = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
        self._bridge.put(key, str(len(payload)).encode())
        return _Parcel(key=key, to=to, payload=payload)

    def _deliver(self, parcel: _Parcel) -> bool:
        """Send a parcel if its receiver asks for it; return whether that is done."""
        wanted = f"{parcel.key}/wanted"
        if not self._bridge.has(wanted):
            return False
        self._bridge.drop(wanted)
        with losing("sending samples"):
            self._group.send([parcel.payload], parcel.to, 0).wait()
        return True

    def receive(self, *, source: int, label: str) -> Any:
        """Wait for the object with this label, and return it. Objects of a rank come in its order.

        Raises:
            BridgeLostError: the other world has ended.
            ValueError: somebody without the run's token has sent it.
        """
        key = self._key(label, source, self._bridge.rank)
        length = int(self._bridge.take(key))
        begin = time.perf_counter()
        self._bridge.put(f"{key}/wanted", b"")
        payload: Tensor = torch.empty(length, dtype=torch.uint8)
        with losing("receiving samples"):
            # gloo completes a receive in `wait` alone, which cannot be interrupted
            received = self._receiver.submit(lambda: self._group.recv([payload], source, 0).wait())
            while not received.done():
                self._bridge.check()
                self._bridge.pause()
            received.result()
        value = pickle.loads(self._bridge.store.unseal(key, payload.numpy().tobytes()))
        self.receive_s = time.perf_counter() - begin
        return value

    def has_come(self, *, source: int, label: str) -> bool:
        """Whether `receive` need not wait for the sender; errors as of `receive`."""
        return self._bridge.has(self._key(label, source, self._bridge.rank))

    def _key(self, label: str, source: int, to: int) -> str:
        return f"{self._name}/{label}/{source}/{to}"
