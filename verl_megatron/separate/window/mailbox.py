"""What training has put into the store for a replica, read beside decoding."""

import pickle
import threading
from collections import deque
from dataclasses import dataclass

from parallel.bridge import Bridge
from verl_megatron.separate.orders import STOP, StreamOrder, fetch_key, order_key

LOOK_S = 0.01  # between two looks at the store
LAST_S = 1.0  # for the last look


@dataclass(frozen=True, kw_only=True)
class Mail:
    """What a replica should do."""

    orders: list[StreamOrder]  # new ones, in their order
    asked: bytes | None  # for the next reply: value of its `fetch_key`
    is_over: bool  # the training world has ended


class Mailbox:
    """Looks at the store on a thread of its own: a look takes milliseconds, as long as a decoding step.

    Orders and replies are numbered from 0.

    Args:
        replica: of this world.
    """

    def __init__(self, bridge: Bridge, replica: int):
        self._bridge, self._replica = bridge.beside(), replica
        self._orders: deque[StreamOrder] = deque()
        self._num_orders = self._num_replies = 0
        self._asked: tuple[int, bytes] | None = None  # number of the reply, and the key's value
        self._is_over = False
        self._error: Exception | None = None
        self._closes = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    def take(self) -> Mail:
        """Return what has come since the last call.

        Raises:
            BridgeLostError: the training world has ended by a fault.
            ValueError: somebody without the run's token has written to the store.
        """
        if self._error is not None:
            raise self._error
        orders = [self._orders.popleft() for _ in range(len(self._orders))]
        asked = self._asked
        is_next = asked is not None and asked[0] == self._num_replies
        return Mail(orders=orders, asked=asked[1] if asked and is_next else None, is_over=self._is_over)

    def reply(self) -> int:
        """Return the number of the reply to the question that has been asked, and expect the next one."""
        number, self._num_replies = self._num_replies, self._num_replies + 1
        return number

    def close(self) -> None:
        """End the thread; a look that is under way is waited for a moment."""
        self._closes.set()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        try:
            while not self._closes.is_set() and not self._is_over:
                self._look()
                self._closes.wait(LOOK_S)
        except Exception as error:  # raised where the replica looks
            self._error = error

    def _look(self) -> None:
        number = self._num_replies
        order, asked, stop = self._bridge.found(
            order_key(self._num_orders), fetch_key(self._replica, number), STOP
        )
        if order is not None:
            self._num_orders += 1
            self._orders.append(pickle.loads(order))
        if asked is not None:
            self._asked = number, asked
        self._is_over = stop is not None
