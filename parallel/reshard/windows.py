"""Assign transfers to windows: rounds of messages that fit into limited staging memory.

A window holds at most one message for each (source, destination) pair. Per rank it holds at most half of
`window_bytes`, because two consecutive windows share the staging memory:

    staging memory   | half A                         | half B                         |
    window 0           packed
    window 1                                            packed while window 0 is sent
    window 2           packed while window 1 is sent
"""

from collections import defaultdict

from parallel.reshard.transfer import Transfer, Window


class Windows:
    """First-fit assignment: a transfer goes to the first window with room on both of its ranks.

    A transfer that does not fit as a whole is cut by rows, and the rest goes to later windows.
    """

    def __init__(self, window_bytes: int, element_bytes: int):
        self.capacity = window_bytes // 2 // element_bytes  # elements of one window, per rank
        self.crumb = max(1, self.capacity >> 8)  # smallest free piece: a window with less counts as full
        self.element_bytes = element_bytes
        self.windows: list[Window] = []
        self.used: dict[int, list[int]] = {}  # by rank and window, elements
        self.full: dict[int, int] = defaultdict(int)  # by rank: a bit for each window without room

    def place(self, transfer: Transfer) -> None:
        num_rows, width = transfer.shape
        if width > self.capacity:
            need = 2 * width * self.element_bytes
            raise ValueError(
                f"window_bytes={2 * self.capacity * self.element_bytes} cannot hold two rows of"
                f" {transfer.tensor}, {need} bytes; set it to {need} or more"
            )
        pair = giver, taker = transfer.source_rank, transfer.destination_rank
        given, taken = self._used(giver), self._used(taker)
        full, row = self.full[giver] | self.full[taker], 0
        while row < num_rows:
            window = (~full & full + 1).bit_length() - 1  # the lowest bit that is not set
            if window == len(self.windows):
                self.windows.append({})
                for used in self.used.values():
                    used.append(0)
            rows = min(num_rows - row, (self.capacity - max(given[window], taken[window])) // width)
            if rows:
                self.windows[window].setdefault(pair, []).append(
                    transfer if rows == num_rows else transfer.part(row, row + rows)
                )
                row += rows
                for rank, used in ((giver, given), (taker, taken)):
                    used[window] += rows * width
                    if self.capacity - used[window] < self.crumb:
                        self.full[rank] |= 1 << window
            full |= 1 << window

    def _used(self, rank: int) -> list[int]:
        return self.used.get(rank) or self.used.setdefault(rank, [0] * len(self.windows))
