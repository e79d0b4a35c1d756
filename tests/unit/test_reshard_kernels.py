"""Tables of tiles are expanded by hand, and the kernels run in Triton's interpreter where there is Triton."""

import numpy as np
import pytest
import torch

from parallel.reshard import kernels
from parallel.reshard.checksum import BITS, checksum
from parallel.reshard.kernels import Checksums, Copies
from parallel.reshard.tiles import CHECKSUM, COPIED, COPY, SUMMED, Tiling, _spread, checksum_tiles, copy_tiles
from tests.gpu.kernels_check import SMALL, Memory
from tests.interpreter import needs_triton, run_interpreted

# Letters: R rows, C columns, N rectangles, T tiles.

CPU = torch.device("cpu")


def copied(pairs, labels=None):
    return np.array(
        [
            (*kernels._rectangle(source), *kernels._rectangle(destination)[:2], label)
            for (destination, source), label in zip(pairs, labels or [0] * len(pairs))
        ],
        COPIED,
    )


def summed(slices):
    return np.array(
        [
            (*kernels._rectangle(slice_RC), slice_RC.element_size(), slot)
            for slot, slice_RC in enumerate(slices)
        ],
        SUMMED,
    )


def expand_copy(launches, memory: Memory) -> np.ndarray:
    """Do what the tables say, byte by byte; returns how often each byte was written."""
    data, base, written = (
        memory.bytes.numpy(),
        memory.bytes.data_ptr(),
        np.zeros(len(memory.bytes), dtype=np.int64),
    )
    for tiles in launches:
        for source, destination, source_stride, destination_stride, rows, cols in tiles.table.tolist():
            assert (
                (source | destination) % tiles.unit == 0
                and 0 < rows <= tiles.rows
                and 0 < cols * tiles.unit <= tiles.columns * tiles.element
            )
            for row in range(rows):
                read, write = (
                    source - base + row * source_stride * tiles.unit,
                    destination - base + row * destination_stride * tiles.unit,
                )
                data[write : write + cols * tiles.unit] = data[read : read + cols * tiles.unit]
                written[write : write + cols * tiles.unit] += 1
    return written


def expand_checksum(launches, count: int, memory: Memory, tiling: Tiling) -> torch.Tensor:
    """Do what the tables say, with the formula for each tile."""
    sums_N, base = torch.zeros(count, dtype=torch.int64), memory.bytes.data_ptr()
    for tiles in launches:
        lanes = tiles.unit // tiles.element
        for address, stride, rows, cols, first_row, first_col, slot in tiles.table.tolist():
            assert (
                address % tiles.unit == 0
                and 0 < rows <= tiles.rows * tiling.steps
                and 0 < cols * lanes <= tiles.columns
            )
            bits_RC = memory.view(
                address - base, (rows, cols * lanes), stride * lanes, BITS[tiles.element]
            ).to(torch.int64)
            weight_R = (torch.arange(first_row + 1, first_row + 1 + rows) * kernels.ROW_FACTOR) | 1
            weight_C = (torch.arange(first_col + 1, first_col + 1 + cols * lanes) * kernels.COLUMN_FACTOR) | 1
            sums_N[slot] += (bits_RC * weight_R[:, None] * weight_C).sum()
    return sums_N


@pytest.mark.parametrize("tiling", [COPY, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("seed", range(4))
def test_tiles_copy_each_byte_once_and_no_other(seed, tiling):
    memory = Memory(seed=seed, size=2**21, device=CPU)
    pairs = [memory.pair() for _ in range(60)]
    expected = memory.after(pairs)
    written = expand_copy(
        copy_tiles(copied(pairs, labels=[number % 3 for number in range(60)]), tiling), memory
    )
    assert torch.equal(memory.bytes, expected)
    assert written.max() == 1 and written.sum() == sum(
        destination.numel() * destination.element_size() for destination, _ in pairs
    )


@pytest.mark.parametrize("tiling", [CHECKSUM, SMALL], ids=["default", "small"])
def test_tiles_sum_to_the_checksum(tiling):
    memory = Memory(seed=5, size=2**21, device=CPU)
    pairs = [memory.pair() for _ in range(60)]
    slices = [source for _, source in pairs if source.numel()]
    assert torch.equal(
        expand_checksum(checksum_tiles(summed(slices), tiling), len(slices), memory, tiling),
        torch.stack([checksum(s) for s in slices]),
    )


def test_aligned_rectangles_take_one_launch_of_full_tiles():
    pairs = [
        (torch.empty(64, 2048, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.bfloat16)[:, 2048:])
        for _ in range(3)
    ]
    pairs += [(torch.empty(24, 1000), torch.empty(24, 1000))]  # dense: flattened, whatever its width
    (tiles,) = copy_tiles(copied(pairs), COPY)
    sizes = tiles.table[:, 4] * tiles.table[:, 5] * tiles.unit
    assert (tiles.unit, tiles.element) == (16, 8) and (
        sizes == COPY.rows * COPY.row_bytes
    ).sum() == 3 * 64 * 4096 // 16384 + 24 * 4000 // 16384
    assert len(sizes) == 3 * 16 + 5 + 2  # the dense one ends with 7 rows of a tile and a part of a row


def test_a_vector_as_a_column_is_one_row_and_narrow_columns_get_tall_tiles():
    vector, strided = torch.empty(4096, 1), torch.empty(4096, 2)[:, :1]
    (tiles,) = copy_tiles(copied([(vector, vector)]), COPY)
    assert tiles.unit == 16 and tiles.table[:, 4:].tolist() == [[8, 128]]
    (tiles,) = copy_tiles(copied([(vector, strided)]), COPY)
    assert tiles.unit == 4 and tiles.rows == 128 and tiles.columns == 16 and len(tiles.table) == 32


def test_labels_proceed_together():
    label_T = np.array([0] * 50 + [1] * 20 + [7] * 30)
    order_T = _spread(label_T)
    assert sorted(order_T) == list(range(100))
    for label in (0, 1, 7):
        of_label = label_T[order_T] == label
        assert (np.diff(order_T[of_label]) > 0).all()
        share = of_label.cumsum() - of_label.sum() * np.arange(1, 101) / 100
        assert abs(share).max() <= 1.5


def test_a_large_table_names_every_byte_once():
    rectangles_N = np.zeros(10_000, COPIED)
    (
        rectangles_N["rows"],
        rectangles_N["width"],
        rectangles_N["source_stride"],
        rectangles_N["destination_stride"],
    ) = 192, 4096, 4096, 8192
    rectangles_N["source"], rectangles_N["destination"] = (
        np.arange(10_000) * 2**20,
        2**40 + np.arange(10_000) * 2**21,
    )
    rectangles_N["label"] = np.arange(10_000) % 8
    (tiles,) = copy_tiles(rectangles_N, COPY)
    assert (
        len(tiles.table) == 10_000 * 48 == len(tiles.table[:, 1].unique())
        and (tiles.table[:, 4] * tiles.table[:, 5]).sum() * 16 == 10_000 * 192 * 4096
    )


def test_copies_and_checksums_on_a_cpu():
    source = torch.randn(6, 10)
    wide, cast, column = torch.zeros(6, 20), torch.zeros(6, 10, dtype=torch.bfloat16), torch.zeros(6, 1)
    copies = Copies(
        [(wide[:, 5:15], source), (cast, source), (column, source[:, 3:4])], device=CPU, groups=[0, 1, 1]
    )
    sums = Checksums([wide[:, 5:15], cast, column], device=CPU)
    for _ in range(2):  # replayed: what the tensors hold by then
        source.normal_()
        copies.run()
        assert (
            torch.equal(wide[:, 5:15], source)
            and torch.equal(cast, source.bfloat16())
            and torch.equal(column, source[:, 3:4])
        )
        assert not wide[:, :5].any() and not wide[:, 15:].any()
        assert sums.run().tolist() == [
            checksum(source).item(),
            checksum(cast).item(),
            checksum(column).item(),
        ]
    Copies([], device=CPU).run()
    assert Checksums([], device=CPU).run().shape == (0,)


def test_refusals():
    with pytest.raises(ValueError, match=r"from \(2, 3\) to \(3, 2\)"):
        Copies([(torch.empty(3, 2), torch.empty(2, 3))], device=CPU)
    with pytest.raises(ValueError, match="shorter"):
        Copies([(torch.empty(3, 2), torch.empty(3, 2))] * 2, device=CPU, groups=[0])
    for build in (lambda t: Copies([(t, t)], device=CPU), lambda t: Checksums([t], device=CPU)):
        with pytest.raises(ValueError, match="columns must be dense"):
            build(torch.empty(3, 2).T)


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    run_interpreted(__file__)


def interpret():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    memory = Memory(seed=11, size=2**19, device=CPU)
    pairs = [memory.pair() for _ in range(30)]
    expected = memory.after(pairs)
    for tiles in copy_tiles(copied(pairs), SMALL):
        kernels._launch_copy(tiles, SMALL)
    assert torch.equal(memory.bytes, expected)
    slices = [source for _, source in pairs if source.numel()]
    sums_N = torch.zeros(len(slices), dtype=torch.int64)
    for tiles in checksum_tiles(summed(slices), SMALL):
        kernels._launch_checksum(tiles, SMALL, sums_N)
    assert torch.equal(sums_N, torch.stack([checksum(slice_RC) for slice_RC in slices]))


if __name__ == "__main__":
    interpret()
    print("interpreted")
