"""Triton kernels that copy, or checksum, thousands of strided rectangles in one launch.

Rectangles are cut into tiles beforehand, one Triton program per tile. A table of tiles is kept in GPU memory;
a program reads its line of the table and moves up to 16 KiB. Lengths in a table are counted in units: the
largest power of two up to 16 bytes that divides all of a rectangle's addresses, strides and widths. With
units of 16 bytes every load has 128 bits, masked or not. Rectangles with another unit, and much narrower
ones, need another compiled kernel, with one launch each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.reshard.checksum import COLUMN_FACTOR, ROW_FACTOR, checksum

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPUs
    triton = None

# Letters: R rows, C columns, N rectangles, T tiles.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Tile size of a program and options of its loads. Sizes are powers of two, row_bytes at least 256."""

    rows: int = 8
    row_bytes: int = 2048
    steps: int = 1  # blocks of rows that a checksum program processes one after the other
    stages: int = 1  # software pipelining: how many of these steps are loaded ahead
    num_warps: int = 4
    cache_modifier: str = ""  # of the loads; PTX's names: "", ".ca", ".cg", ".cv"
    eviction_policy: str = ""  # "", "evict_first", "evict_last"


COPY = Tuning()
CHECKSUM = Tuning(steps=4)
SPLITS = (1, 4, 16)  # factors by which a tile may be taller and narrower
VECTOR = 16  # bytes of the widest load
# Addresses, strides, widths and element sizes in bytes.
COPIED = np.dtype(
    [
        (name, np.int64)
        for name in ("source", "source_stride", "rows", "width", "destination", "destination_stride", "label")
    ]
)
SUMMED = np.dtype([(name, np.int64) for name in ("address", "stride", "rows", "width", "element", "slot")])


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one launch."""

    table: Tensor  # int64 [T, fields of a line]
    unit: int  # bytes; the unit of lengths along a row
    element: int  # bytes of a loaded value
    rows: int  # rows that a program holds at a time
    columns: int  # elements of a row that a program holds at a time

    def on(self, device: torch.device) -> "Tiles":
        return replace(self, table=self.table.to(device))


class Copies:
    """Many strided copies, prepared once and run repeatedly, each time in one launch per kind of tile."""

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        device: torch.device,
        groups: Sequence[int] | None = None,
        tuning: Tuning = COPY,
    ):
        """Cut the rectangles into tiles. The tensors are referenced and must keep their addresses.

        Args:
            pairs: (destination, source), both [R, C]: destinations on `device`, sources readable from it,
                including IPC tensors of other GPUs. Rows may be strided, columns are dense (any stride where
                C is 1). A pair of two dtypes is cast, outside the kernel. Destinations must not overlap one
                another or any source.
            groups: a label for each pair, its source rank; the tiles of each label are spread evenly over
                the launch.

        Raises:
            ValueError: the shapes of a pair differ, columns are not dense, or `groups` and `pairs` differ in
                length.
            ImportError: `device` is a GPU and there is no Triton.
        """
        _require_triton(device)
        self.device, self.tuning, self.pairs = device, tuning, list(pairs)
        for destination, source in self.pairs:
            if destination.shape != source.shape:
                raise ValueError(
                    f"a copy from {tuple(source.shape)} to {tuple(destination.shape)}; both must have the"
                    " same shape"
                )
            _require_dense_columns(destination, source)
        by_kernel = [
            device.type != "cpu" and destination.dtype == source.dtype for destination, source in self.pairs
        ]
        self.others = [pair for pair, taken in zip(self.pairs, by_kernel) if not taken]
        labels = groups if groups is not None else [0] * len(self.pairs)
        rectangles_N = [
            (*_rectangle(source), *_rectangle(destination)[:2], label)
            for (destination, source), label, taken in zip(self.pairs, labels, by_kernel, strict=True)
            if taken
        ]
        self.launches = [tiles.on(device) for tiles in copy_tiles(np.array(rectangles_N, COPIED), tuning)]

    @torch.no_grad()
    def run(self) -> None:
        """Run the copies on the current stream of `device`."""
        if self.others:
            torch._foreach_copy_(
                [destination for destination, _ in self.others], [source for _, source in self.others]
            )
        if self.launches:
            with torch.cuda.device(self.device):
                for tiles in self.launches:
                    _launch_copy(tiles, self.tuning)


class Checksums:
    """`checksum.checksum` of many slices, prepared once and run repeatedly."""

    def __init__(self, slices: Sequence[Tensor], *, device: torch.device, tuning: Tuning = CHECKSUM):
        """Cut the slices into tiles. The tensors are referenced and must keep their addresses.

        Args:
            slices: [R, C] each, of any dtype of 1, 2, 4 or 8 bytes, strided as those of `Copies`.

        Raises:
            ValueError: columns are not dense.
            ImportError: `device` is a GPU and there is no Triton.
        """
        _require_triton(device)
        self.device, self.tuning, self.slices, self.launches = device, tuning, list(slices), []
        _require_dense_columns(*self.slices)
        if device.type != "cpu":
            rectangles_N = [
                (*_rectangle(slice_RC), slice_RC.element_size(), slot)
                for slot, slice_RC in enumerate(self.slices)
            ]
            self.launches = [
                tiles.on(device) for tiles in checksum_tiles(np.array(rectangles_N, SUMMED), tuning)
            ]

    @torch.no_grad()
    def run(self) -> Tensor:
        """Return the checksums [len(slices)], int64 on `device`, computed on its current stream."""
        sums_N = torch.zeros(len(self.slices), dtype=torch.int64, device=self.device)
        if self.device.type == "cpu":
            return torch.stack([checksum(slice_RC) for slice_RC in self.slices]) if self.slices else sums_N
        with torch.cuda.device(self.device):
            for tiles in self.launches:
                _launch_checksum(tiles, self.tuning, sums_N)
        return sums_N


# ---- Tables of tiles -------------------------------------------------------------------------------


def copy_tiles(rectangles_N: np.ndarray, tuning: Tuning) -> list[Tiles]:
    """Return the launches that copy rectangles of dtype COPIED.

    A line of a table: both addresses [bytes], both row strides [units], rows, columns [units].
    """
    flat_N = _flatten(rectangles_N, tuning)
    unit_N = _unit(flat_N, ("source", "destination", "source_stride", "destination_stride", "width"))
    launches = []
    for unit, split, chosen_N in _classes(unit_N, _split(flat_N, _row_bytes(unit_N, tuning), tuning)):
        part_N, rows, element = flat_N[chosen_N], tuning.rows * split, min(unit, 8)
        columns = tuning.row_bytes // 8 // split
        of_T, row_T, col_T, tile_rows_T, tile_cols_T = _cut(
            part_N["rows"], part_N["width"] // unit, rows, columns * element // unit
        )
        part_T = part_N[of_T]
        addresses = [
            part_T[end] + row_T * part_T[f"{end}_stride"] + col_T * unit for end in ("source", "destination")
        ]
        strides = [part_T[f"{end}_stride"] // unit for end in ("source", "destination")]
        table_TF = np.stack([*addresses, *strides, tile_rows_T, tile_cols_T], axis=1)
        launches.append(
            Tiles(torch.from_numpy(table_TF[_spread(part_T["label"])]), unit, element, rows, columns)
        )
    return launches


def checksum_tiles(rectangles_N: np.ndarray, tuning: Tuning) -> list[Tiles]:
    """Return the launches that checksum rectangles of dtype SUMMED.

    A line of a table: address [bytes], row stride [units], rows, columns [units], first row, first column,
    slot.
    """
    rectangles_N = _settled(rectangles_N, "stride")
    element_N = rectangles_N["element"]
    wide_N = _unit(rectangles_N, ("address", "stride", "width")) == VECTOR
    unit_N, row_bytes_N = (
        np.where(wide_N, VECTOR, element_N),
        np.where(wide_N, tuning.row_bytes, _row_bytes(element_N, tuning)),
    )
    launches = []
    # Unit and element size together are the key of a class; an element has less than VECTOR bytes.
    for sizes, split, chosen_N in _classes(
        unit_N * VECTOR + element_N, _split(rectangles_N, row_bytes_N, tuning)
    ):
        unit, element = divmod(sizes, VECTOR)
        part_N, rows, columns = (
            rectangles_N[chosen_N],
            tuning.rows * split,
            int(row_bytes_N[chosen_N[0]]) // element // split,
        )
        of_T, row_T, col_T, tile_rows_T, tile_cols_T = _cut(
            part_N["rows"], part_N["width"] // unit, rows * tuning.steps, columns * element // unit
        )
        part_T = part_N[of_T]
        address_T = part_T["address"] + row_T * part_T["stride"] + col_T * unit
        table_TF = np.stack(
            [
                address_T,
                part_T["stride"] // unit,
                tile_rows_T,
                tile_cols_T,
                row_T,
                col_T * unit // element,
                part_T["slot"],
            ],
            axis=1,
        )
        launches.append(Tiles(torch.from_numpy(table_TF), unit, element, rows, columns))
    return launches


def _require_triton(device: torch.device) -> None:
    if device.type != "cpu" and triton is None:
        raise ImportError(
            "the reshard's kernels are Triton's, which is not installed here; install the `triton` that your"
            " torch names (CUDA builds of torch bring it)"
        )


def _require_dense_columns(*tensors: Tensor) -> None:
    for tensor_RC in tensors:
        if tensor_RC.shape[1] > 1 and tensor_RC.stride(1) != 1:
            raise ValueError(
                f"a slice of shape {tuple(tensor_RC.shape)} has strides {tensor_RC.stride()}; its columns"
                " must be dense"
            )


def _rectangle(tensor_RC: Tensor) -> tuple[int, int, int, int]:
    """Return (address, row stride, rows, width), in bytes except the rows."""
    (rows, cols), size = tensor_RC.shape, tensor_RC.element_size()
    return tensor_RC.data_ptr(), tensor_RC.stride(0) * size, rows, cols * size


def _settled(rectangles_N: np.ndarray, *strides: str) -> np.ndarray:
    """Drop empty rectangles; set the meaningless stride of a single row to 0."""
    rectangles_N = rectangles_N[rectangles_N["rows"] * rectangles_N["width"] > 0]
    for stride in strides:
        rectangles_N[stride] *= rectangles_N["rows"] > 1
    return rectangles_N


def _flatten(rectangles_N: np.ndarray, tuning: Tuning) -> np.ndarray:
    """Reshape rectangles that are dense on both sides to rows as wide as a tile, plus a remainder.

    Most tiles are then full.
    """
    rows_N, width_N = rectangles_N["rows"], rectangles_N["width"]
    dense_N = (rows_N == 1) | (
        (rectangles_N["source_stride"] == width_N) & (rectangles_N["destination_stride"] == width_N)
    )
    body_N = rectangles_N[dense_N]
    body_N["width"] *= body_N["rows"]
    row_bytes_N = _row_bytes(_unit(body_N, ("source", "destination", "width")), tuning)
    rest_N = body_N.copy()
    body_N["rows"] = body_N["width"] // row_bytes_N
    body_N["width"] = body_N["source_stride"] = body_N["destination_stride"] = row_bytes_N
    rest_N["rows"], rest_N["width"] = 1, rest_N["width"] % row_bytes_N
    for end in ("source", "destination"):
        rest_N[end] += body_N["rows"] * row_bytes_N
    return _settled(
        np.concatenate([rectangles_N[~dense_N], body_N, rest_N]), "source_stride", "destination_stride"
    )


def _unit(rectangles_N: np.ndarray, fields: Sequence[str]) -> np.ndarray:
    """Return the largest power of two up to VECTOR that divides all fields: the lowest bit set in any."""
    bits_N = np.bitwise_or.reduce([rectangles_N[name] for name in fields]) | VECTOR
    return bits_N & -bits_N


def _row_bytes(unit_N: np.ndarray, tuning: Tuning) -> np.ndarray:
    """Return the row width of a tile in bytes: the same number of elements, of at most 8 bytes, per class."""
    return tuning.row_bytes // 8 * np.minimum(unit_N, 8)


def _split(rectangles_N: np.ndarray, row_bytes_N: np.ndarray, tuning: Tuning) -> np.ndarray:
    """Return the factor of SPLITS for each rectangle: the largest with which it is still one tile wide."""
    split_N = np.ones(len(rectangles_N), dtype=np.int64)
    for split in SPLITS:
        split_N[(rectangles_N["width"] * split <= row_bytes_N) & (rectangles_N["rows"] > tuning.rows)] = split
    return split_N


def _classes(kind_N: np.ndarray, split_N: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """Return (kind, split, indices of rectangles) for each combination that occurs, the widest kind first."""
    pairs = sorted(set(zip(kind_N.tolist(), split_N.tolist())), key=lambda pair: (-pair[0], pair[1]))
    return [(kind, split, np.flatnonzero((kind_N == kind) & (split_N == split))) for kind, split in pairs]


def _cut(rows_N: np.ndarray, cols_N: np.ndarray, block_rows: int, block_cols: int) -> tuple[np.ndarray, ...]:
    """Return for each tile [T]: its rectangle's index, first row and column there, rows and columns."""
    across_N = -(-cols_N // block_cols)
    tiles_N = -(-rows_N // block_rows) * across_N
    of_T = np.repeat(np.arange(len(rows_N)), tiles_N)
    place_T = np.arange(len(of_T)) - np.repeat(np.cumsum(tiles_N) - tiles_N, tiles_N)
    row_T, col_T = place_T // across_N[of_T] * block_rows, place_T % across_N[of_T] * block_cols
    return (
        of_T,
        row_T,
        col_T,
        np.minimum(rows_N[of_T] - row_T, block_rows),
        np.minimum(cols_N[of_T] - col_T, block_cols),
    )


def _spread(label_T: np.ndarray) -> np.ndarray:
    """Return an order that spreads the tiles of each label evenly; within a label the order is kept."""
    by_label_T = np.argsort(label_T, kind="stable")
    _, first_L, count_L = np.unique(label_T[by_label_T], return_index=True, return_counts=True)
    share_T = np.empty(len(label_T))
    share_T[by_label_T] = (np.arange(len(label_T)) - np.repeat(first_L, count_L) + 0.5) / np.repeat(
        count_L, count_L
    )
    return np.argsort(share_T, kind="stable")


# ---- Kernels ---------------------------------------------------------------------------------------


if triton:

    @triton.jit
    def copy_kernel(
        table,
        LANES: tl.constexpr,
        ELEMENT: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        CACHE: tl.constexpr,
        EVICT: tl.constexpr,
    ):
        """Copy one tile. A unit is LANES elements."""
        line = table + tl.program_id(0).to(tl.int64) * 6
        # The compiler sees multiples of LANES, so it loads LANES elements at once in spite of the mask.
        source_stride, destination_stride, cols = (
            tl.load(line + 2) * LANES,
            tl.load(line + 3) * LANES,
            tl.load(line + 5) * LANES,
        )
        row_R1, col_1C = tl.arange(0, ROWS).to(tl.int64)[:, None], tl.arange(0, COLUMNS)[None, :]
        inside_RC = (row_R1 < tl.load(line + 4)) & (col_1C < cols)
        source_RC = _pointer(line, ELEMENT, LANES) + row_R1 * source_stride + col_1C
        destination_RC = _pointer(line + 1, ELEMENT, LANES) + row_R1 * destination_stride + col_1C
        value_RC = tl.load(source_RC, mask=inside_RC, cache_modifier=CACHE, eviction_policy=EVICT)
        tl.store(destination_RC, value_RC, mask=inside_RC)

    @triton.jit
    def checksum_kernel(
        table,
        sums,
        LANES: tl.constexpr,
        ELEMENT: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        CACHE: tl.constexpr,
        EVICT: tl.constexpr,
        STAGES: tl.constexpr,
        ROW_FACTOR: tl.constexpr,
        COLUMN_FACTOR: tl.constexpr,
    ):
        """Add one tile's part of the checksum to its slot.

        A column is summed before the column weights are applied: one product per element.
        """
        line = table + tl.program_id(0).to(tl.int64) * 7
        stride, rows, cols = tl.load(line + 1) * LANES, tl.load(line + 2), tl.load(line + 3) * LANES
        first_row, first_col = tl.load(line + 4), tl.load(line + 5)
        start = _pointer(line, ELEMENT, LANES)
        row_R, col_C = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, COLUMNS)
        total_C = tl.zeros([COLUMNS], dtype=tl.int64)
        for above in tl.range(0, rows, ROWS, num_stages=STAGES):
            inside_RC = (above + row_R < rows)[:, None] & (col_C < cols)[None, :]
            value_RC = tl.load(
                start + ((above + row_R) * stride)[:, None] + col_C[None, :],
                mask=inside_RC,
                other=0,
                cache_modifier=CACHE,
                eviction_policy=EVICT,
            )
            weight_R = ((first_row + above + row_R + 1) * ROW_FACTOR) | 1
            total_C += tl.sum(value_RC.to(tl.int64) * weight_R[:, None], axis=0)
        weight_C = ((first_col + col_C + 1) * COLUMN_FACTOR) | 1
        tl.atomic_add(sums + tl.load(line + 6), tl.sum(total_C * weight_C, axis=0), sem="relaxed")

    @triton.jit
    def _pointer(line, ELEMENT: tl.constexpr, LANES: tl.constexpr):
        """Return the pointer in a field of the table, aligned to LANES elements."""
        address = tl.multiple_of(tl.load(line), LANES * (ELEMENT.primitive_bitwidth // 8))
        return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), LANES * (ELEMENT.primitive_bitwidth // 8))


def _launch_copy(tiles: Tiles, tuning: Tuning) -> None:
    kernel: Any = copy_kernel  # Triton's launch, which types do not know
    kernel[(len(tiles.table),)](tiles.table, **_constants(tiles, tuning))


def _launch_checksum(tiles: Tiles, tuning: Tuning, sums_N: Tensor) -> None:
    kernel: Any = checksum_kernel
    factors = dict(ROW_FACTOR=ROW_FACTOR, COLUMN_FACTOR=COLUMN_FACTOR)
    kernel[(len(tiles.table),)](
        tiles.table, sums_N, STAGES=tuning.stages, **factors, **_constants(tiles, tuning)
    )


def _constants(tiles: Tiles, tuning: Tuning) -> dict[str, object]:
    """Return the compile-time constants of a kernel."""
    return dict(
        LANES=tiles.unit // tiles.element,
        ELEMENT=getattr(tl, f"int{8 * tiles.element}"),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        CACHE=tuning.cache_modifier,
        EVICT=tuning.eviction_policy,
        num_warps=tuning.num_warps,
    )
