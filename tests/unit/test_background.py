"""Jobs in order, in a thread or at once; a world of one rank is enough to see the order."""

import threading
import time

import pytest

from parallel.checkpoint.background import Background
from tests.unit.test_checkpoint import world  # noqa: F401 (a fixture)


@pytest.mark.parametrize("enabled", [False, True])
def test_jobs_are_done_in_order(world, enabled):  # noqa: F811
    background, done = Background(world, enabled=enabled), []
    for number in range(3):
        background.submit(
            lambda ranks, number=number: (
                time.sleep(0.02 * (2 - number)),
                done.append((number, threading.current_thread() is threading.main_thread())),
            )
        )
    background.wait()
    assert done == [(number, not enabled) for number in range(3)]
    background.close()


def test_the_first_error_stops_the_rest_and_is_raised_where_it_is_waited_for(world):  # noqa: F811
    background, done = Background(world, enabled=True), []

    def fail(ranks) -> None:
        raise OSError("no room")

    background.submit(fail)
    background.submit(lambda ranks: done.append(1))
    with pytest.raises(OSError, match="no room"):
        background.wait()
    assert not done
    background.submit(lambda ranks: done.append(2))
    background.close()
    assert done == [2]
