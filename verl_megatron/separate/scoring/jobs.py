"""What training asks of a scoring world, and where its samples go.

A job is one model's pass over all samples of an iteration or of validation. Every training rank tells the
lengths of the samples that it owns; from these both worlds make the same table, which says what each rank of
the model works on. So samples go from their owner to the ranks that work on them, and results come back.
"""

from dataclasses import dataclass

from torch import Tensor

from parallel.layout import Layout
from verl_megatron.data.sample_table import SampleTable


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model's pass over samples."""

    name: str  # of this job alone
    model: str  # name of the role
    outputs: tuple[str, ...]  # of its head: "logprobs" or "values"
    last_token: bool  # results of the last token alone
    num_mini_batches: int
    shared_prompts: bool

    def table_of(self, columns: list[Tensor]) -> SampleTable:
        """Return the table of the samples, from the columns of all training ranks."""
        return SampleTable.join(
            columns, num_mini_batches=self.num_mini_batches, shared_prompts=self.shared_prompts
        )


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Results of the samples that one training rank owns, from one data-parallel index of the model."""

    sample_id: Tensor  # [W] int64
    outputs: dict[str, Tensor]  # by name: [W, T] float32, 0 outside the response
    seconds: float  # that the model has computed


def workers_of(layout: Layout, dp: int) -> list[int]:
    """Return the ranks of a model that get the samples of a data-parallel index."""
    return [rank for rank in layout.ranks if layout.coordinates(rank).dp == dp]


def answering_rank(layout: Layout, dp: int) -> int:
    """Return the rank of a model that has the results of a data-parallel index: first of the last stage."""
    return layout.rank_of(pp=layout.pp - 1, dp=dp)


# ---- keys of the store -------------------------------------------------------------------------------------


def job_key(number: int) -> str:
    """Key of the job that training has asked for as `number`, from 0."""
    return f"job/{number}"


def turn_key(turn: int) -> str:
    """Key of the job that the scoring world does in its turn, from 0."""
    return f"turn/{turn}"


def columns_key(job: str, rank: int) -> str:
    """Key of what a training rank tells of its samples of a job."""
    return f"columns/{job}/{rank}"


def scores_label(job: str) -> str:
    """Label of the parcels with results."""
    return f"{job}/scores"
