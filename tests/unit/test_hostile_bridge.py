"""Somebody with the port of a bridge, but without the run's token."""

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from parallel.bridge import Bridge
from parallel.parcels import Parcels
from parallel.runtime import store as stores
from parallel.sealed_store import SealedStore
from verl_megatron.separate.orders import order_key

TOKEN = "a secret of the run"
FORGED = "was not written with this run's token"


class Touches:
    """An object that does something when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def ends(monkeypatch) -> Iterator[tuple[dist.TCPStore, list[Bridge]]]:
    """The intruder's connection to the store, and both ends of a bridge that has been joined."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
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


def parcels_of(bridges: list[Bridge]) -> list[Parcels]:
    with ThreadPoolExecutor(2) as both:
        return list(both.map(lambda bridge: Parcels(bridge, "samples"), bridges))


def test_it_finds_the_token_nowhere(ends):
    intruder, (training, rollout) = ends
    sender, receiver = parcels_of([training, rollout])
    training.put(order_key(0), b"order")
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(sender.send, {"reward": 1.0}, to=1, label="0")
        assert receiver.receive(source=0, label="0") == {"reward": 1.0}
        sent.result()
    keys = intruder.list_keys()
    assert any(order_key(0) in key for key in keys)
    for key in keys:
        assert TOKEN not in key and TOKEN.encode() not in intruder.get(key)


def test_what_it_writes_is_not_unpickled(ends, tmp_path):
    intruder, (training, rollout) = ends
    harm = pickle.dumps(Touches(str(tmp_path / "touched")))
    training.put(order_key(0), b"order")
    (key,) = (key for key in intruder.list_keys() if key.endswith(order_key(0)))
    genuine = intruder.get(key)
    for forged in (harm, genuine[:32] + harm, b"", genuine + b"x"):
        intruder.set(key, forged)  # pyright: ignore[reportArgumentType]  # bytes as well
        with pytest.raises(ValueError, match=f"{order_key(0)} {FORGED}"):
            pickle.loads(rollout.value(order_key(0)))
    intruder.set(key.replace(order_key(0), order_key(1)), genuine)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=FORGED):
        rollout.has(order_key(1))
    assert not (tmp_path / "touched").exists()


def test_what_it_sends_in_the_place_of_a_rank_is_not_unpickled(ends, tmp_path):
    _, bridges = ends
    receiver, impostor = parcels_of(bridges)
    payload = torch.frombuffer(
        bytearray(b"\0" * 32 + pickle.dumps(Touches(str(tmp_path / "touched")))), dtype=torch.uint8
    )
    bridges[1].put("samples/0/1/0", str(len(payload)))
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(lambda: impostor._group.send([payload], 0, 0).wait())
        with pytest.raises(ValueError, match=f"samples/0/1/0 {FORGED}"):
            receiver.receive(source=1, label="0")
        sent.result()
    assert not (tmp_path / "touched").exists()
