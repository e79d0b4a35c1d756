"""Somebody with the port of a bridge, but without the run's token."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from parallel.bridge import Bridge
from parallel.parcels import Parcels
from tests.bridge_ends import TOKEN
from verl_megatron.separate.orders import order_key

FORGED = "was not written with this run's token"


class Touches:
    """An object that does something when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


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
