"""Tables of tiles: rectangles cut into the parts that one program of a kernel copies or checksums.

Lengths in a table are counted in units: the largest power of two up to 16 bytes that divides all of a
rectangle's addresses, strides and widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

# Letters: R rows, C columns, N rectangles, T tiles.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Tile size of a program and options of its loads. Sizes are powers of two, row_bytes at least 256."""

    rows: int = 8
    row_bytes: int = 2048
    steps: int = 1  # blocks of rows that a checksum program processes one after the other
    stages: int = 1  # software pipelining: how many of these steps are loaded ahead
    num_warps: int = 4
    cache_modifier: str = ""  # of the loads; PTX's names: "", ".ca", ".cg", ".cv"
    eviction_policy: str = ""  # "", "evict_first", "evict_last"


COPY = Tiling()
CHECKSUM = Tiling(steps=4)
SPLITS = (1, 4, 16)  # factors by which a tile may be taller and narrower
VECTOR = 16  # bytes of the widest load
# Addresses, strides, widths and element sizes in bytes.
COPIED = np.dtype(
    [
        (name, np.int64)
        for name in ("source", "source_stride", "rows", "width", "destination", "destination_stride", "label")
    ]
)
SUMMED = np.dtype([(name, np.int64) for name in ("address", "stride", "rows", "width", "element", "index")])


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


def copy_tiles(rectangles_N: np.ndarray, tiling: Tiling) -> list[Tiles]:
    """Return the launches that copy rectangles of dtype COPIED.

    A line of a table: both addresses [bytes], both row strides [units], rows, columns [units].
    """
    flat_N = _flatten(rectangles_N, tiling)
    unit_N = _unit(flat_N, ("source", "destination", "source_stride", "destination_stride", "width"))
    launches = []
    for unit, split, chosen_N in _classes(unit_N, _split(flat_N, _row_bytes(unit_N, tiling), tiling)):
        part_N, rows, element = flat_N[chosen_N], tiling.rows * split, min(unit, 8)
        columns = tiling.row_bytes // 8 // split
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


def checksum_tiles(rectangles_N: np.ndarray, tiling: Tiling) -> list[Tiles]:
    """Return the launches that checksum rectangles of dtype SUMMED.

    A line of a table: address [bytes], row stride [units], rows, columns [units], first row, first column,
    index of the slice.
    """
    rectangles_N = _settled(rectangles_N, "stride")
    element_N = rectangles_N["element"]
    wide_N = _unit(rectangles_N, ("address", "stride", "width")) == VECTOR
    unit_N, row_bytes_N = (
        np.where(wide_N, VECTOR, element_N),
        np.where(wide_N, tiling.row_bytes, _row_bytes(element_N, tiling)),
    )
    launches = []
    # Unit and element size together are the key of a class; an element has less than VECTOR bytes.
    for sizes, split, chosen_N in _classes(
        unit_N * VECTOR + element_N, _split(rectangles_N, row_bytes_N, tiling)
    ):
        unit, element = divmod(sizes, VECTOR)
        part_N, rows, columns = (
            rectangles_N[chosen_N],
            tiling.rows * split,
            int(row_bytes_N[chosen_N[0]]) // element // split,
        )
        of_T, row_T, col_T, tile_rows_T, tile_cols_T = _cut(
            part_N["rows"], part_N["width"] // unit, rows * tiling.steps, columns * element // unit
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
                part_T["index"],
            ],
            axis=1,
        )
        launches.append(Tiles(torch.from_numpy(table_TF), unit, element, rows, columns))
    return launches


def _settled(rectangles_N: np.ndarray, *strides: str) -> np.ndarray:
    """Drop empty rectangles; set the meaningless stride of a single row to 0."""
    rectangles_N = rectangles_N[rectangles_N["rows"] * rectangles_N["width"] > 0]
    for stride in strides:
        rectangles_N[stride] *= rectangles_N["rows"] > 1
    return rectangles_N


def _flatten(rectangles_N: np.ndarray, tiling: Tiling) -> np.ndarray:
    """Reshape rectangles that are dense on both sides to rows as wide as a tile, plus a remainder.

    Most tiles are then full.
    """
    rows_N, width_N = rectangles_N["rows"], rectangles_N["width"]
    dense_N = (rows_N == 1) | (
        (rectangles_N["source_stride"] == width_N) & (rectangles_N["destination_stride"] == width_N)
    )
    body_N = rectangles_N[dense_N]
    body_N["width"] *= body_N["rows"]
    row_bytes_N = _row_bytes(_unit(body_N, ("source", "destination", "width")), tiling)
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


def _row_bytes(unit_N: np.ndarray, tiling: Tiling) -> np.ndarray:
    """Return the row width of a tile in bytes: the same number of elements, of at most 8 bytes, per class."""
    return tiling.row_bytes // 8 * np.minimum(unit_N, 8)


def _split(rectangles_N: np.ndarray, row_bytes_N: np.ndarray, tiling: Tiling) -> np.ndarray:
    """Return the factor of SPLITS for each rectangle: the largest with which it is still one tile wide."""
    split_N = np.ones(len(rectangles_N), dtype=np.int64)
    for split in SPLITS:
        split_N[(rectangles_N["width"] * split <= row_bytes_N) & (rectangles_N["rows"] > tiling.rows)] = split
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
