"""Signs of life over a bridge's store, and what a supervisor makes of their absence."""

import contextlib
import socket
import threading
import time

import pytest
import torch.distributed as dist

from parallel import pulse
from parallel.bridge import LEFT, PATIENCE, SIGNS, STARTED, WORLDS
from parallel.pulse import Listener, Pulse
from parallel.runtime import store as stores
from parallel.sealed_store import SealedStore
from verl_megatron.launch import lookout
from verl_megatron.launch.lookout import Lookout, Seen

TOKEN = "a secret of the run"


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(pulse, "INTERVAL_S", 0.02)
    monkeypatch.setattr(pulse, "SILENCE_S", 0.1)
    monkeypatch.setattr(lookout, "TRY_S", 30.0)
    return stores.serve(stores.LOCAL, one_host=True)


def store_of(served: dist.TCPStore) -> SealedStore:
    client = dist.TCPStore(stores.LOCAL, served.port, is_master=False)
    return SealedStore(client, TOKEN, "bridge/")


def looks(listener: Listener, store: SealedStore, seconds: float) -> dict[int, float]:
    """What the listener has found after looking for some seconds, or as soon as it finds something."""
    end = time.monotonic() + seconds
    while not (silent := listener.silent(store)) and time.monotonic() < end:
        time.sleep(0.01)
    return silent


def test_a_rank_that_stops_counting_is_found_and_the_others_are_not(served):
    store = store_of(served)
    first, second = Pulse(store, 3), Pulse(store, 4)
    listener = Listener((3, 4), 0.4)
    assert not looks(listener, store, 1.0)
    second.stop()
    (found,) = (silent := looks(listener, store, 5.0))
    assert found == 4 and 0.5 < silent[4] < 3
    first.stop()


def test_only_time_in_which_one_looks_counts(served):
    listener, store = Listener((3,), 0.4), store_of(served)
    assert not listener.silent(store)
    time.sleep(1.0)  # in an update
    assert not listener.silent(store)
    assert looks(listener, store, 5.0)
    assert not looks(Listener((3,), 0), store, 0.6), "0 waits for ever"


def test_a_supervisor_hears_which_start_was_given_up_and_tells_ends(served):
    looking = Lookout(f"{stores.LOCAL}:{served.port}", TOKEN)
    assert looking.look("rollout:1", 0) == Seen()
    part = store_of(served).part("rollout:1")
    part.add(WORLDS, 1)
    part.put(f"{STARTED}/1", "4")
    assert looking.look("rollout:1", 4) == Seen(has_joined=True)
    part.put("gone/1", "no sign of life")
    assert looking.look("rollout:1", 4) == Seen(has_joined=True, was_given_up=True)
    assert looking.look("rollout:1", 5) == looking.look("rollout:0", 4) == Seen()
    part.add(WORLDS, 1)  # it is started again
    part.put(f"{STARTED}/2", "5")
    assert looking.look("rollout:1", 4) == Seen() and not looking.look("rollout:1", 5).was_given_up
    looking.tell_end("rollout:1", 4, "too late")
    assert part.get("gone/2") is None
    looking.tell_end("rollout:1", 5, "it has ended")
    assert part.get("gone/2") == b"it has ended"


def test_a_supervisor_hears_when_all_training_ranks_are_silent(served):
    looking, signs = Lookout(f"{stores.LOCAL}:{served.port}", TOKEN), store_of(served).part(SIGNS)

    def silence(seconds: float) -> float:
        end = time.monotonic() + seconds
        while not (silent_s := looking.silence_of_training()) and time.monotonic() < end:
            time.sleep(0.01)
        return silent_s

    assert not silence(0.0), "training has not come yet"
    signs.put(PATIENCE, "2 0.2")
    first, second = Pulse(signs, 0), Pulse(signs, 1)
    assert not silence(1.0)
    first.stop()
    assert not silence(1.0), "the other notices it"
    second.stop()
    assert silence(60.0) > 0.2
    assert not looking.silence_of_training(), "others follow"
    signs.put(f"{LEFT}/1", "")
    assert not silence(1.0), "it has ended well"


def test_a_supervisor_without_a_training_world_goes_on():
    looking = Lookout(f"{stores.LOCAL}:1", TOKEN)
    assert not looking.silence_of_training()
    looking.tell_end("rollout", 0, "it has ended")
    assert looking.look("rollout", 0) == Seen()


def test_a_store_that_ends_while_it_is_asked_leaves_no_stack_of_torch(capfd):
    listener = stores.listen(stores.LOCAL, 0, one_host=True)
    port = listener.getsockname()[1]

    def ends() -> None:
        """Take both connections of a client, the second of which waits for an answer, and end."""
        for _ in range(2):
            listener.accept()
        listener.close()

    end = threading.Thread(target=ends, daemon=True)
    end.start()
    with pytest.raises((OSError, RuntimeError)):
        stores.connect(stores.LOCAL, port, within_s=0.5)
    with contextlib.suppress(OSError):  # the second connection, if torch's time was over before
        socket.create_connection((stores.LOCAL, port), 1).close()
    end.join(30)
    assert capfd.readouterr().err == ""
