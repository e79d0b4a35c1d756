"""Sealed values, and the rendezvous of hosts that share a secret."""

import pickle
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from parallel.runtime import launch
from parallel.runtime.seal import seal, unseal


def test_a_value_is_read_under_its_name_with_its_token():
    sealed = seal("key", b"value", "token")
    assert unseal("key", sealed, "token") == b"value"
    for name, value, token in (
        ("other", sealed, "token"),
        ("key", sealed, "other"),
        ("key", sealed + b"x", "token"),
        ("key", b"", "token"),
        ("key", b"value", "token"),
    ):
        with pytest.raises(ValueError, match=f"{name} was not written with this run's token"):
            unseal(name, value, token)


class Touches:
    """An object that does something when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_hosts_that_do_not_know_the_secret_cannot_join(tmp_path):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    plain = C10dRendezvousBackend(store, "run")
    backend = launch._sealed(plain, "secret")
    assert backend.get_state() is None
    state, token, was_set = backend.set_state(b"one")
    assert state == b"one" and was_set and backend.get_state() == (b"one", token)
    state, newer, was_set = backend.set_state(b"two", token)
    assert state == b"two" and was_set
    state, _, was_set = backend.set_state(b"three", token)  # another host was faster
    assert state == b"two" and not was_set
    with pytest.raises(RendezvousStateError, match="not written with this run's token"):
        launch._sealed(plain, "another").get_state()
    plain.set_state(pickle.dumps(Touches(str(tmp_path / "touched"))), newer)
    with pytest.raises(RendezvousStateError, match="not written with this run's token"):
        backend.get_state()
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("bridge", "is_local"),
    [("", True), ("127.0.0.1:1", True), ("localhost:1", True), ("worker-0:1", False), ("10.0.0.1:1", False)],
)
def test_worlds_on_other_hosts_are_reached_beyond_the_loopback(bridge, is_local, monkeypatch):
    from parallel import device

    monkeypatch.setenv(device.BRIDGE, bridge)
    assert device._is_bridge_local() == is_local
