"""Rows of a supervised run: responses that are none, and rows that are too long together."""

import random
from functools import partial
from typing import Any

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.data import BAD_PROMPTS, FINE_PROMPTS, SFT, dropping, line_names, with_row
from tests.fuzz.job import Job

BAD_RESPONSES: tuple[Any, ...] = (
    None,
    3,
    2.5,
    True,
    [],
    ["a"],
    {},
    {"text": "a"},
    "\ud800",
    [{"role": "assistant", "content": "a"}],
    [[]],
)
FINE_RESPONSES: tuple[Any, ...] = ("apple fig", "ü ☃ 😀", "a\nb", "a\u2028b", " a ")
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def mutations() -> list[Mutation]:
    found: list[Mutation] = [
        partial(of_a_row, key="response", value=value, expected=REFUSED) for value in BAD_RESPONSES
    ]
    found += [partial(of_a_row, key="prompt", value=value, expected=REFUSED) for value in BAD_PROMPTS]
    found += [partial(of_a_row, key="response", value=value, expected=ACCEPTED) for value in FINE_RESPONSES]
    found += [partial(of_a_row, key="prompt", value=value, expected=ACCEPTED) for value in FINE_PROMPTS]
    return found + [missing] * 3 + [too_long] * 3 + [assistant_last] * 2 + [empty, none_left]


def of_a_row(job: Job, rng: random.Random, *, key: str, value: Any, expected: str) -> Case:
    path, line = with_row(job, rng, lambda row: row | {key: value}, sample="sft")
    names = line_names(path, line) if expected == REFUSED else ()
    return SFT.case(job, rng, f"{key}={value!a}", path, expected=expected, names=names)


def missing(job: Job, rng: random.Random) -> Case:
    key = rng.choice(("prompt", "response"))
    row = with_row(
        job, rng, lambda row: {name: value for name, value in row.items() if name != key}, sample="sft"
    )
    return SFT.refused_row(job, rng, f"no {key}", row, word=key)


def too_long(job: Job, rng: random.Random) -> Case:
    key = rng.choice(("prompt", "response"))
    row = with_row(job, rng, lambda row: row | {key: "fig " * 100}, sample="sft")
    return SFT.refused_row(job, rng, f"a {key} of 100 words", row, word="max_tokens")


def none_left(job: Job, rng: random.Random) -> Case:
    path = job.write_rows([row | {"response": "fig " * 100} for row in job.rows("sft")])
    return dropping(SFT).case(
        job,
        rng,
        "all too long, overlong=drop",
        path,
        expected=REFUSED,
        names=(str(path),),
    )


def assistant_last(job: Job, rng: random.Random) -> Case:
    """An answer in the prompt beside a response: one of them is not what was meant, and it is said."""
    path, _ = with_row(job, rng, lambda row: row | {"prompt": TURNS}, sample="sft")
    return SFT.case(
        job,
        rng,
        "a prompt that ends in an answer",
        path,
        expected=EITHER,
        names=("assistant",),
    )


def empty(job: Job, rng: random.Random) -> Case:
    path, _ = with_row(job, rng, lambda row: row | {"response": ""}, sample="sft")
    return SFT.case(job, rng, "an empty response", path, expected=EITHER)
