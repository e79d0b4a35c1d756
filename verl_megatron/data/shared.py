"""Data sets that one rank of each host reads and the others of the host open."""

import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

from parallel import device
from parallel.rank_set import RankSet
from verl_megatron.data.formats.item_store import Handle
from verl_megatron.data.row_reader import RowReader

_POLL_S = 0.02
_number = itertools.count()  # the same on every rank: all of them begin to read in the same order


class OncePerHost:
    """Reads data on the first rank of each host, for all ranks of the host.

    A context, in which each rank makes the same calls in the same order. A rank that leaves it early, because
    it has found other problems, keeps none waiting. Ranks that share no process ids read by themselves.
    """

    def __init__(self, world: RankSet):
        rank, here = world.global_rank, device.ranks_per_host()
        self._is_reader = rank % here == 0
        name = f"data {next(_number)} of host {device.host_of(rank)}"
        self._store = world.store(name) if here > 1 else None
        self._calls = 0

    def __enter__(self) -> "OncePerHost":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_reader and self._store is not None:
            self._store.set("end", "1")

    def __call__(self, read: Callable[[], RowReader], tokenizer: Any) -> RowReader:
        """Return what `read` returns on the first rank of the host, with this rank's `tokenizer`.

        Raises:
            ValueError: that rank's.
        """
        if self._store is None:
            return read()
        key, self._calls = f"call {self._calls}", self._calls + 1
        answer = self._read(read, key) if self._is_reader else self._waited_for(key)
        if isinstance(answer, str):
            raise ValueError(answer)
        if isinstance(answer, RowReader):
            return answer
        return (answer and RowReader.opened(answer, tokenizer)) or read()

    def _read(self, read: Callable[[], RowReader], key: str) -> RowReader:
        """Read the data and say where they are, or what is wrong with them."""
        said: Handle | str | None = None
        try:
            data = read()
            said = data.share()
            return data
        except ValueError as error:
            said = str(error)
            raise
        finally:
            assert self._store is not None
            self._store.set(key, pickle.dumps(said))  # pyright: ignore[reportArgumentType]  # bytes as well

    def _waited_for(self, key: str) -> Handle | str | None:
        """Return what the first rank of the host has said; None if it leaves without a word."""
        assert self._store is not None
        while not self._store.check([key]):
            if self._store.check(["end"]) and not self._store.check([key]):
                return None
            time.sleep(_POLL_S)
        return pickle.loads(self._store.get(key))
