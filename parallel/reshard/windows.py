"""Assign transfers to windows: rounds of messages that fit into limited staging memory.

A window holds at most one message for each (source, destination) pair. Per rank it holds at most half of
`window_bytes`, because two consecutive windows share the staging memory:

    staging memory   | half A                         | half B                         |
    window 0           packed
    window 1                                            packed while window 0 is sent
    window 2           packed while window 1 is sent
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from parallel.reshard.transfer import Transfer, Window


class WindowPacker:
    """First-fit packer: the free staging memory of each rank in each window, in elements."""

    def __init__(self, capacity: int):
        """
        Args:
            capacity: elements that a rank may stage in one window.
        """
        self.capacity = capacity
        self.num_windows = 0
        self._min_free = max(1, capacity >> 8)  # a window with less counts as full
        self._used: dict[tuple[int, int], int] = defaultdict(int)  # by window and rank, elements
        self._full: dict[int, int] = defaultdict(int)  # by rank: a bit for each full window
        self._closed = 0  # a bit for each window that is closed to all ranks

    def open_windows(self, ranks: Collection[int], *, first: int = 0) -> Iterator[int]:
        """Yield the windows from `first` on that are full for none of `ranks`, without end."""
        passed = self._closed | (1 << first) - 1
        for rank in ranks:
            passed |= self._full[rank]
        while True:
            window = (~passed & passed + 1).bit_length() - 1  # the lowest bit that is not set
            yield window
            passed |= 1 << window

    def free(self, window: int, rank: int) -> int:
        """Return the elements that `rank` can still stage in `window`."""
        return self.capacity - self._used.get((window, rank), 0)

    def reserve(self, window: int, elements: Mapping[int, int]) -> None:
        """Reserve elements, by rank, in a window that has room for them."""
        self.num_windows = max(self.num_windows, window + 1)
        for rank, count in elements.items():
            self._used[window, rank] += count
            if self.free(window, rank) < self._min_free:
                self._full[rank] |= 1 << window

    def reserve_both_halves(self) -> int:
        """Reserve and return a window that uses all staging memory, between two empty ones.

        window        n - 1   |      n      |   n + 1
        staging       empty   | both halves |   empty
        """
        # The last window may be closed, and therefore empty, already.
        window = self.num_windows + (self._closed.bit_length() < self.num_windows)
        self._closed |= 7 << window >> 1
        self.num_windows = window + 2
        return window


class Windows:
    """Windows of messages in the order in which they are sent.

    A transfer goes to the first window with room on both of its ranks. What does not fit there is cut off by
    rows and goes to later windows.
    """

    def __init__(self, window_bytes: int, element_bytes: int):
        self.element_bytes = element_bytes
        self.windows: list[Window] = []
        self._packer = WindowPacker(window_bytes // 2 // element_bytes)

    def place(self, transfer: Transfer) -> None:
        """Assign `transfer` to windows.

        Raises:
            ValueError: half of the staging memory cannot hold one row.
        """
        num_rows, width = transfer.shape
        packer, pair = self._packer, (transfer.source_rank, transfer.destination_rank)
        if width > packer.capacity:
            need = 2 * width * self.element_bytes
            raise ValueError(
                f"window_bytes={2 * packer.capacity * self.element_bytes} cannot hold two rows of"
                f" {transfer.tensor}, {need} bytes; set it to {need} or more"
            )
        first = 0  # row
        for window in packer.open_windows(pair):
            rows = min(num_rows - first, min(packer.free(window, rank) for rank in pair) // width)
            if rows == 0:
                continue
            if window == len(self.windows):
                self.windows.append({})
            part = transfer if rows == num_rows else transfer.part(first, first + rows)
            self.windows[window].setdefault(pair, []).append(part)
            packer.reserve(window, dict.fromkeys(pair, rows * width))
            first += rows
            if first == num_rows:
                return
