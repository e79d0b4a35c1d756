"""The parts of a reshard plan as plain data.

A transfer copies one rectangle of a Hugging Face tensor from a source to a destination parameter. Both
parameters are viewed as matrices [rows, columns]; a position is the rectangle's upper left corner (*) in one:

    source parameter       Hugging Face tensor       destination parameter
    (source_rank)          (rows x cols)             (destination_rank)

    +----------+           +----------------+        +----------------+
    |          |           |                |        |*#######        |
    |*#######  |           |                |        | #######        |
    | #######  |           |        ####### |        |                |
    +----------+           |        ####### |        |                |
                           +----------------+        +----------------+
"""

from dataclasses import dataclass

Position = tuple[int, str, int, int]  # model chunk, parameter, first row, first column


@dataclass(frozen=True, slots=True)
class Transfer:
    """The copy of one rectangle of a Hugging Face tensor between two parameters, of two ranks or of one."""

    tensor: str
    rows: tuple[int, int]  # half-open, in the Hugging Face tensor
    cols: tuple[int, int]
    source_rank: int  # world ranks
    destination_rank: int
    source: Position
    destination: Position

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])

    def part(self, start: int, stop: int) -> "Transfer":
        """Return the transfer of rows `start` to `stop` alone, counted from this transfer's first row."""
        chunk, name, row, col = self.source
        source = (chunk, name, row + start, col)
        chunk, name, row, col = self.destination
        destination = (chunk, name, row + start, col)
        rows = (self.rows[0] + start, self.rows[0] + stop)
        ranks = self.source_rank, self.destination_rank
        return Transfer(self.tensor, rows, self.cols, *ranks, source, destination)

    def __str__(self) -> str:
        return (
            f"{self.tensor} rows {self.rows[0]}-{self.rows[1]} columns {self.cols[0]}-{self.cols[1]}"
            f" from rank {self.source_rank} to rank {self.destination_rank}"
        )


@dataclass(frozen=True, slots=True)
class Padding:
    """A rectangle of a destination parameter that no Hugging Face tensor covers; it is filled with zeros."""

    rank: int
    chunk: int
    name: str
    rows: tuple[int, int]  # half-open, in the parameter
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


# (source rank, destination rank): the transfers of one message
Window = dict[tuple[int, int], list[Transfer]]
