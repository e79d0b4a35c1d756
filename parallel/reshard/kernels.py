"""Triton kernels that copy, or checksum, thousands of strided rectangles in one launch.

Rectangles are cut into tiles beforehand (`tiles`), one Triton program per tile. A program reads its line of
the table and moves up to 16 KiB. With units of 16 bytes every load has 128 bits, masked or not. Rectangles
with another unit, and much narrower ones, need another compiled kernel, with one launch each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.reshard.checksum import COLUMN_FACTOR, ROW_FACTOR, checksum
from parallel.reshard.tiles import CHECKSUM, COPIED, COPY, SUMMED, Tiles, Tiling, checksum_tiles, copy_tiles

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPUs
    triton = None

# Letters: R rows, C columns, N rectangles, T tiles.


class Copies:
    """Many strided copies, prepared once and run repeatedly, each time in one launch per kind of tile."""

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        device: torch.device,
        groups: Sequence[int] | None = None,
        tiling: Tiling = COPY,
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
        self.device, self.tiling, self.pairs = device, tiling, list(pairs)
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
        self.by_torch = [pair for pair, copied in zip(self.pairs, by_kernel) if not copied]
        labels = groups if groups is not None else [0] * len(self.pairs)
        rectangles_N = [
            (*_rectangle(source), *_rectangle(destination)[:2], label)
            for (destination, source), label, copied in zip(self.pairs, labels, by_kernel, strict=True)
            if copied
        ]
        self.launches = [tiles.on(device) for tiles in copy_tiles(np.array(rectangles_N, COPIED), tiling)]

    @torch.no_grad()
    def run(self) -> None:
        """Run the copies on the current stream of `device`."""
        if self.by_torch:
            torch._foreach_copy_(
                [destination for destination, _ in self.by_torch], [source for _, source in self.by_torch]
            )
        if self.launches:
            with torch.cuda.device(self.device):
                for tiles in self.launches:
                    _launch_copy(tiles, self.tiling)


class Checksums:
    """`checksum.checksum` of many slices, prepared once and run repeatedly."""

    def __init__(self, slices: Sequence[Tensor], *, device: torch.device, tiling: Tiling = CHECKSUM):
        """Cut the slices into tiles. The tensors are referenced and must keep their addresses.

        Args:
            slices: [R, C] each, of any dtype of 1, 2, 4 or 8 bytes, strided as those of `Copies`.

        Raises:
            ValueError: columns are not dense.
            ImportError: `device` is a GPU and there is no Triton.
        """
        _require_triton(device)
        self.device, self.tiling, self.slices, self.launches = device, tiling, list(slices), []
        _require_dense_columns(*self.slices)
        if device.type != "cpu":
            rectangles_N = [
                (*_rectangle(slice_RC), slice_RC.element_size(), index)
                for index, slice_RC in enumerate(self.slices)
            ]
            self.launches = [
                tiles.on(device) for tiles in checksum_tiles(np.array(rectangles_N, SUMMED), tiling)
            ]

    @torch.no_grad()
    def run(self) -> Tensor:
        """Return the checksums [len(slices)], int64 on `device`, computed on its current stream."""
        sums_N = torch.zeros(len(self.slices), dtype=torch.int64, device=self.device)
        if self.device.type == "cpu":
            return torch.stack([checksum(slice_RC) for slice_RC in self.slices]) if self.slices else sums_N
        with torch.cuda.device(self.device):
            for tiles in self.launches:
                _launch_checksum(tiles, self.tiling, sums_N)
        return sums_N


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
        STAGES: tl.constexpr,
        CACHE: tl.constexpr,
        EVICT: tl.constexpr,
        ROW_FACTOR: tl.constexpr,
        COLUMN_FACTOR: tl.constexpr,
    ):
        """Add one tile's part of the checksum to its slice's sum.

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


def _launch_copy(tiles: Tiles, tiling: Tiling) -> None:
    kernel: Any = copy_kernel  # indexed by its grid, which Triton's types do not say
    kernel[(len(tiles.table),)](tiles.table, **_constants(tiles, tiling))


def _launch_checksum(tiles: Tiles, tiling: Tiling, sums_N: Tensor) -> None:
    factors = dict(ROW_FACTOR=ROW_FACTOR, COLUMN_FACTOR=COLUMN_FACTOR)
    kernel: Any = checksum_kernel
    kernel[(len(tiles.table),)](
        tiles.table, sums_N, STAGES=tiling.stages, **factors, **_constants(tiles, tiling)
    )


def _constants(tiles: Tiles, tiling: Tiling) -> dict[str, object]:
    """Return the compile-time constants of a kernel."""
    return dict(
        LANES=tiles.unit // tiles.element,
        ELEMENT=getattr(tl, f"int{8 * tiles.element}"),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        CACHE=tiling.cache_modifier,
        EVICT=tiling.eviction_policy,
        num_warps=tiling.num_warps,
    )
