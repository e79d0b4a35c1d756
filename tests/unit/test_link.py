"""What the link to a rollout world leaves in the store of a long run."""

from types import SimpleNamespace

from verl_megatron.separate.link import RolloutLink
from verl_megatron.separate.orders import Reply, StreamOrder, cursor_key, fetch_key, order_key
from verl_megatron.separate.window.mailbox import Mailbox

NOTHING = Reply(groups=[], sums={}, interrupted=0, aborted_tokens=0, idle_s=0.0, busy_s=0.0)


class Bridge:
    """The store of a bridge from training rank 0 to two replicas."""

    rank, serving_ranks = 0, range(1, 3)

    def __init__(self):
        self.values = {}

    def put(self, key, value):
        self.values[key] = value

    def drop(self, key):
        self.values.pop(key, None)

    def found(self, *keys):
        return [self.values.get(key) for key in keys]

    def beside(self):
        return self


def link_of(bridge, receive):
    link = object.__new__(RolloutLink)
    link.bridge, link._tp, link._num_orders, link._num_fetches = bridge, 1, 0, 0
    link._parcels, link._version_of = SimpleNamespace(receive=receive), {1: 0}
    return link


def test_questions_for_samples_do_not_pile_up():
    """A run that waits asks ten times a second, for weeks."""
    bridge = Bridge()
    mailboxes = [Mailbox(bridge, replica) for replica in range(2)]
    asked = []

    def receive(*, source, label):
        mailbox = mailboxes[source - 1]
        while (mail := mailbox.take()).asked is None:
            pass
        asked.append(mail.asked)
        assert label == f"reply/{mailbox.reply()}"
        return NOTHING

    link = link_of(bridge, receive)
    try:
        for number in range(20):
            assert link.fetch([0, 1], waits=number % 2 == 0) == [NOTHING] * 2
    finally:
        for mailbox in mailboxes:
            mailbox.close()
    assert asked == [b"waits", b"waits", b"", b""] * 10
    assert len(bridge.values) == 2 * 4 and fetch_key(0, 19) in bridge.values


def test_orders_whose_samples_have_been_received_leave_the_store():
    bridge = Bridge()
    link = link_of(bridge, None)
    for _ in range(10):
        number = link.give(StreamOrder(block=None, sync=0, indices=()))
        bridge.put(cursor_key(number), b"where the next order draws from")
        assert order_key(number) in bridge.values
        link.forget(number)
    assert not bridge.values
