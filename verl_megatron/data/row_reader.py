"""Rows of data files as items to train on: what all kinds of data sets have in common."""

import contextlib
import gc
import hashlib
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, cast

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, PairDataConfig, SFTDataConfig
from verl_megatron.data.columns import Columns
from verl_megatron.data.formats.item_store import Handle, ItemStore
from verl_megatron.data.formats.json_lines import name_of
from verl_megatron.data.formats.sources import JSON, DataFile, find_files, parts_of
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.order.mixture import Share, places_of
from verl_megatron.data.tokenizer import Tokenizer

SLOW_S = 3  # seconds after which there is a progress bar
CHUNK_ROWS, CHUNK_CHARACTERS = 512, 1 << 20  # tokenized together
AHEAD = 2  # chunks that wait to be tokenized, so that no core waits for the next one
SHOWN = 10  # rows that are left out, of which the places are kept

Chunk = list[tuple[int, dict]]  # numbers and rows
Parsed = tuple[Any, int]  # an item, or None, and its tokens
Begun = deque[tuple[Chunk, Future | None]]  # chunks that are being encoded while later ones are read


class RowReader(Sequence):
    """Rows of the data files that are within the token limit, in their order.

    `lengths` has the tokens of each, `columns` the keys of the file read last. `digest` is a number, from 1
    on, that other values in the rows, or another order, hardly have.

    Args:
        path: what `data.train` says: a file, a folder, or several, separated by commas.
        vocab_size: of the model; token ids must be below it. None: unknown.
        max_rows: number of rows to read at most of each path that `path` names. None: all.
    """

    limit_name: str  # the setting that limits the tokens of a row

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer,
        config: DataConfig | SFTDataConfig | PairDataConfig,
        *,
        vocab_size: int | None = None,
        max_rows: int | None = None,
    ):
        if config.overlong not in ("error", "drop"):
            raise ValueError(f"data.overlong={short_repr(config.overlong)} is unknown; choose error or drop")
        if not config.prompt_key:
            raise ValueError("data.prompt_key is empty; name the key of a row's prompt")
        self.path, self._tokenizer, self._vocab_size = path, tokenizer, vocab_size
        self._config: Any = config
        self.columns: Columns
        self.dropped = 0  # rows that are too long
        self.dropped_first: list[tuple[str, str]] = []  # place and length of the first of them
        self.cut = 0  # prompts whose trailing assistant turns were removed
        self.is_whole = True  # all rows were looked at
        self._is_table = False  # the file read last has columns
        self.limit: int = getattr(config, self.limit_name)
        self._items, self.lengths = ItemStore(), array("I")
        self._numbers, self._starts = array("I"), []  # row of each item; items before each file
        self._recognized: dict[str, list[str]] = {}  # paths by what was recognized of their columns
        try:
            self.files = find_files(str(path))
        except ValueError as error:
            raise ValueError(f"data file {name_of(path)} {error}") from None
        left, part, digest = max_rows, 0, hashlib.sha256()
        with _no_collection():
            for file in self.files:
                if file.part != part:
                    left, part = max_rows, file.part
                read = self._read(file, left, digest)
                left = None if left is None else left - read
                self.is_whole = self.is_whole and left != 0
        self._items.flush()
        self.digest = int(digest.hexdigest()[:12], 16) or 1
        self.shares = self._shares()
        if not self._items and self.is_whole:  # otherwise later rows may be short enough
            why = (
                f"all {self.dropped} rows are longer than data.{self.limit_name}={self.limit}; raise it"
                if self.dropped
                else "it has no rows; write some"
            )
            raise ValueError(f"data file {path} gives nothing to read: {why}")

    def share(self) -> Handle:
        """Return what another process of this host needs to open these rows while they are open here."""
        own = ("_items", "_tokenizer")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return self._items.share((type(self), state))

    @staticmethod
    def opened(handle: Handle, tokenizer: Tokenizer) -> "RowReader | None":
        """Return rows that another process of this host shares; None where they cannot be opened."""
        found = ItemStore.opened(handle)
        if found is None:
            return None
        items, (kind, state) = found
        rows = kind.__new__(kind)
        rows.__dict__.update(state, _items=items, _tokenizer=tokenizer)
        return rows

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]

    @property
    def notes(self) -> list[str]:
        """User messages about columns, and about the parts of the files that were left out."""
        limit = f"data.{self.limit_name}={self.limit}"
        dropped = f"{self.path}: {self.dropped} rows longer than {limit} left out (data.overlong=drop)"
        cut = (
            f"{self.path}: {self.cut} prompts ended in an assistant turn, which is an answer and was cut off"
        )
        return self.column_notes + [dropped] * bool(self.dropped) + [cut] * bool(self.cut)

    @property
    def column_notes(self) -> list[str]:
        """User messages about columns that were recognized or are not read."""
        named = {note: list(paths) for note, paths in self._recognized.items()}
        for file in self.files:
            for note in file.notes:
                named.setdefault(note, []).append(file.path)
        return [f"{paths[0]}{' and others' * (len(paths) > 1)}: {note}" for note, paths in named.items()]

    def cursor(self, *, seed: int) -> PromptCursor:
        """Return a cursor over these rows, at their beginning."""
        return PromptCursor(
            num_prompts=len(self),
            seed=seed,
            shuffle=self._config.shuffle,
            shares=self.shares,
            data=self.digest,
        )

    def _shares(self) -> list[Share]:
        """Return the weights of the named paths with the items of each; empty without weights."""
        parts = parts_of(str(self.path))
        if len(parts) == 1 or parts[0].weight is None:
            return []
        counts = [0] * len(parts)
        for file, start, end in zip(self.files, self._starts, [*self._starts[1:], len(self)]):
            counts[file.part] += end - start
        for part, count in zip(parts, counts):
            if not count and self.is_whole:
                raise ValueError(f"data file {part.path} has a weight and no rows to train on; leave it out")
        shares = [(cast(float, part.weight), count) for part, count in zip(parts, counts)]
        if self.is_whole:
            places_of(shares)
        return shares

    def _read(self, file: DataFile, most: int | None, digest: "hashlib._Hash") -> int:
        """Add the rows of a file, `most` of them at most, and to `digest`; return how many there were."""
        read, begun = 0, Begun()
        self._is_table = file.kind != JSON
        self._starts.append(len(self))
        with ThreadPoolExecutor(1, thread_name_prefix="encode") as thread:
            try:
                for chunk in _chunks(_shown(islice(file.rows(), most), file.path), digest):
                    if not read:
                        self._recognize(chunk[0][1], file)
                    read += len(chunk)
                    begun.append(self._start(chunk, thread))
                    if len(begun) > AHEAD:
                        self._finish_first(file, begun)
            except ValueError:  # what is wrong with a row comes before what is wrong with later ones
                self._finish_all(file, begun)
                raise
            self._finish_all(file, begun)
        if not read and most != 0 and len(self.files) > 1:
            raise ValueError(f"data file {file.path} has no rows; leave it out or copy it again")
        return read

    def _recognize(self, first: dict, file: DataFile) -> None:
        self.columns = Columns(self._config, first, hint=file.hint, unread=file.unread)
        if self.columns.note:
            self._recognized.setdefault(self.columns.note, []).append(file.path)

    def _start(self, chunk: Chunk, thread: ThreadPoolExecutor) -> tuple[Chunk, Future | None]:
        """Begin to parse rows as a whole; no future if that fails or the kind of rows does not do it."""
        try:
            encode = self._begin([row for _, row in chunk]) if len(chunk) > 1 else None
        except ValueError:
            encode = None
        return chunk, encode and thread.submit(encode)

    def _finish(self, file: DataFile, chunk: Chunk, whole: Future | None) -> None:
        """Add the rows of a chunk; where the whole has an error, one by one, up to the one that has it."""
        parsed: Iterable[Parsed] = ()
        with contextlib.suppress(ValueError):
            parsed = whole.result() if whole is not None else ()
        for (number, row), one in zip_longest(chunk, parsed):
            try:
                self._add(one or self._parse(row), file, number)
            except ValueError as error:
                raise ValueError(f"{file.path}, {file.unit} {number}: {error}") from None

    def _finish_first(self, file: DataFile, begun: Begun) -> None:
        """Add the rows of the first chunk; if one of them is wrong, it stays the first."""
        self._finish(file, *begun[0])
        begun.popleft()

    def _finish_all(self, file: DataFile, begun: Begun) -> None:
        while begun:
            self._finish_first(file, begun)

    def place(self, index: int) -> str:
        """Return file and row of an item, such as "train.jsonl, line 3"."""
        file = self.files[bisect_right(self._starts, index) - 1]
        return f"{file.path}, {file.unit} {self._numbers[index]}"

    def _add(self, parsed: Parsed, file: DataFile, number: int) -> None:
        item, length = parsed
        if item is not None and length <= self.limit:
            self._items.append(item)
            self.lengths.append(length)
            self._numbers.append(number)
            return
        length_said = f"{length} tokens" if item is not None else f"at least {length} tokens"
        if self._config.overlong != "drop":
            raise ValueError(self.too_long(length_said))
        self.dropped += 1
        if len(self.dropped_first) < SHOWN:
            self.dropped_first.append((f"{file.path}, {file.unit} {number}", length_said))

    def too_long(self, length: str) -> str:
        """Return the error of a row of that length, such as "300 tokens"."""
        return (
            f"{length}, more than data.{self.limit_name}={self.limit};"
            " raise the limit or set data.overlong=drop"
        )

    def _parse(self, row: dict) -> Parsed:
        """Return a row's item and token count; no item if its character count alone exceeds the limit."""
        raise NotImplementedError

    def _begin(self, rows: list[dict]) -> Callable[[], list[Parsed]] | None:
        """Return what gives `_parse` of several rows and may run in another thread; None: one by one."""
        return None

    @contextlib.contextmanager
    def _column(self, setting: str) -> Iterator[None]:
        """Name the column in what is wrong with a value of a table."""
        try:
            yield
        except ValueError as error:
            if not self._is_table:
                raise
            raise ValueError(f"column {short_repr(self.columns.keys[setting])}: {error}") from None

    def _fewest_tokens(self, *texts: str) -> int:
        """Lower bound of the texts' tokens: tokenizing 10 MB only to find it too long takes seconds."""
        return sum(map(len, texts)) // self._tokenizer.longest_token

    def _encoded(self, before: str, behind: str, *, is_chat: bool) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and of the response to it."""
        tokenizer = self._tokenizer
        if is_chat:
            ids, response_ids = tokenizer.encode_chat(before, behind)
        else:
            ids = tokenizer.encode_text(before, is_chat=False)
            response_ids = tokenizer.encode_response(behind)
        self._check_tokens(ids + response_ids)
        return ids, response_ids

    def _check_tokens(self, ids: list[int]) -> None:
        if self._vocab_size is not None and max(ids) >= self._vocab_size:
            raise ValueError(
                f"the tokenizer in {self._tokenizer.hf.name_or_path} gives token {max(ids)},"
                f" and the model has vocab_size={self._vocab_size}; use the model's own tokenizer"
            )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Let the garbage collector rest: with the many objects of a run's imports it takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _chunks(rows: Iterator[tuple[int, dict]], digest: "hashlib._Hash") -> Iterator[Chunk]:
    """Yield the rows in lists of limited size; those before an error come before it."""
    chunk: Chunk = []
    characters = 0
    try:
        for number, row in rows:
            chunk.append((number, row))
            values: list[str] = []
            _collect(row, values)
            text = "\0".join(values)
            digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
            characters += len(text)
            if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    except ValueError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def _collect(value: dict | list, found: list[str]) -> None:
    """Add the texts in a value, and what else it holds as Python writes it."""
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, str):
            found.append(inner)
        elif isinstance(inner, dict) or (isinstance(inner, list) and inner and not isinstance(inner[0], int)):
            _collect(inner, found)
        else:
            found.append(repr(inner))


def _shown(rows: Iterator[tuple[int, dict]], path: str) -> Iterator[tuple[int, dict]]:
    """Yield the rows, with a progress bar on the first rank's terminal once they take a while."""
    from tqdm import tqdm

    disable = None if os.environ.get("RANK", "0") == "0" else True  # None: where stderr is no terminal
    name = short_repr(Path(path).name)[1:-1]
    return iter(tqdm(rows, desc=f"reading {name}", unit=" rows", delay=SLOW_S, leave=False, disable=disable))
