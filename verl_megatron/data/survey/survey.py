"""What a run would read of its data files, in numbers and examples."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, PairDataConfig, SFTDataConfig
from verl_megatron.data.columns import Columns
from verl_megatron.data.formats.sources import DataFile, find_files
from verl_megatron.data.pairs import READERS
from verl_megatron.data.prompts import Demonstration
from verl_megatron.data.row_reader import RowReader
from verl_megatron.data.survey.characters import CharacterTokenizer
from verl_megatron.data.tokenizer import Tokenizer

EXAMPLES = 3
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

DataSection = DataConfig | SFTDataConfig | PairDataConfig
Survey = dict[str, Any]  # plain values, as JSON has them


def first_row(path: str) -> tuple[list[DataFile], dict[str, Any]]:
    """Return the files that `path` names and their first row; ValueError if there is none."""
    try:
        files = find_files(path)
    except ValueError as error:
        raise ValueError(f"data file {short_repr(path)[1:-1] or short_repr(path)} {error}") from None
    for file in files:
        for _, row in file.rows():
            return files, row
    raise ValueError(f"data file {path} has no rows; write some")


def kind_of(row: dict[str, Any]) -> type[DataSection]:
    """Return the class of the data section that rows such as `row` are for."""
    if "chosen" in row and "rejected" in row:
        return PairDataConfig
    columns = Columns(DataConfig(), row)
    prompt = columns.get(row, "prompt_key")
    is_answered = bool(prompt and isinstance(prompt, list) and _ends_in_answer(prompt))
    has_truth = columns.get(row, "answer_key") is not None
    if not has_truth and (is_answered or "response" in row or "completion" in row):
        return SFTDataConfig
    return DataConfig


def _ends_in_answer(prompt: list[Any]) -> bool:
    return isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant"


def survey(config: DataSection, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> Survey:
    """Read `config.train` as a run does and describe it.

    Rows over the limit are left out and counted; `refused` is the error of a run that keeps them in.

    Raises:
        ValueError: as in the readers of a run (`READERS`).
    """
    reader = READERS[type(config)]
    dataset = reader(config.train, tokenizer, replace(config, overlong="drop"), vocab_size=vocab_size)
    _, row = first_row(config.train)
    limit = f"data.{dataset.limit_name}={dataset.limit}"
    found = _common(dataset, Columns(config, row), row) | {
        "rows": len(dataset) + dataset.dropped,
        "kept": len(dataset),
        "limit": limit,
        "too_long": {
            "rows": dataset.dropped,
            "first": [{"row": place, "length": length} for place, length in dataset.dropped_first],
        },
        "answers_cut_off": dataset.cut,
        "weights": [{"weight": weight, "rows": count} for weight, count in dataset.shares],
        "tokens": quantiles(dataset.lengths),
        "tokens_with_loss": sum(sum(_has_loss(item)) for item in dataset if isinstance(item, Demonstration)),
        "all_tokens": sum(dataset.lengths),
        "duplicates": _duplicates(dataset),
        "examples": [
            {"row": dataset.place(index)} | _example(item, tokenizer)
            for index, item in enumerate(islice(dataset, EXAMPLES))
        ],
        "refused": _no_curriculum(dataset),
    }
    if dataset.dropped and config.overlong == "error":
        place, length = dataset.dropped_first[0]
        found["refused"] = f"{place}: {dataset.too_long(length)}"
    return found


def survey_rows(config: DataSection) -> Survey:
    """Describe `config.train` without a tokenizer: rows, columns and lengths of the prompts in characters.

    Raises:
        ValueError: a row cannot be read, or lacks what the settings name.
    """
    tokenizer, reader = CharacterTokenizer(), READERS[type(config)]
    endless: dict[str, Any] = {reader.limit_name: sys.maxsize}
    dataset = reader(config.train, tokenizer, replace(config, **endless))
    _, row = first_row(config.train)
    return _common(dataset, Columns(config, row), row) | {
        "rows": len(dataset),
        "characters": quantiles([len(tokenizer.decode(item.prompt_token_ids)) for item in dataset]),
        "examples": list(islice(_first_values(dataset.files, config), EXAMPLES)),
        "refused": _no_curriculum(dataset),
    }


def _first_values(files: list[DataFile], config: DataSection) -> Iterator[dict[str, Any]]:
    """Yield the values of rows that the settings name, as they stand in the file."""
    wanted = (
        ("chosen_key", "rejected_key") if isinstance(config, PairDataConfig) else ("prompt_key", "answer_key")
    )
    for file in files:
        columns = None
        for number, row in file.rows():
            columns = columns or Columns(config, row)
            values = {
                name.removesuffix("_key"): columns.get(row, name)
                for name, key in columns.keys.items()
                if key and name in wanted
            }
            yield {"row": f"{file.path}, {file.unit} {number}"} | values


def _no_curriculum(dataset: RowReader) -> str:
    index = getattr(dataset, "source_index", None)
    return "" if index is None else index.why_not(is_whole=True)


def _common(dataset: RowReader, columns: Columns, row: dict[str, Any]) -> Survey:
    """Describe files and columns; `row` is the first."""
    return {
        "files": [{"path": file.path, "format": file.kind} for file in dataset.files],
        "notes": dataset.column_notes,
        "data_sources": _shares(getattr(dataset, "sources", {})),
        "columns": {f"data.{name}": key for name, key in columns.keys.items()},
        "recognized": columns.note,
        "all_columns": list(row),
    }


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Return some quantiles of lengths by name; empty without lengths."""
    ordered = sorted(lengths)
    return (
        {f"{share:.0%}": ordered[round(share * (len(ordered) - 1))] for share in QUANTILES} if ordered else {}
    )


def _shares(sources: Mapping[str, int]) -> dict[str, int]:
    """Return the rows of each data source, most first; empty if the rows name none."""
    named = {source: count for source, count in Counter(sources).most_common() if source}
    unnamed = sources.get("", 0)
    return named | ({"(none)": unnamed} if named and unnamed else {})


def _duplicates(dataset: RowReader) -> dict[str, Any]:
    """Return how many items repeat an earlier one, token for token, and the first of them."""
    seen: dict[int, int] = {}
    count, first = 0, []
    for index, item in enumerate(dataset):
        tokens = tuple(tuple(getattr(item, name)) for name in item.__slots__ if name.endswith("token_ids"))
        earlier = seen.setdefault(hash(tokens), index)
        if earlier != index:
            count += 1
            if len(first) < EXAMPLES:
                first.append({"row": dataset.place(index), "as": dataset.place(earlier)})
    return {"rows": count, "first": first}


def _example(item: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the texts of an item's tokens, special ones included, their number, and what the reward gets.

    Of a demonstration, `spans` are its tokens in order, with or without loss.
    """
    shown: dict[str, Any] = {
        name.removesuffix("_token_ids"): _decoded(getattr(item, name), tokenizer)
        for name in item.__slots__
        if name.endswith("_token_ids")
    }
    if hasattr(item, "answer"):
        shown |= {"answer": item.answer, "extra": item.extra}
    if isinstance(item, Demonstration):
        shown["spans"] = list(_spans(item, tokenizer))
    return shown


def _spans(item: Demonstration, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    tokens = zip(_has_loss(item), item.prompt_token_ids + item.response_token_ids)
    for has_loss, span in groupby(tokens, key=itemgetter(0)):
        yield {"loss": has_loss} | _decoded([token for _, token in span], tokenizer)


def _decoded(ids: list[int], tokenizer: Tokenizer) -> dict[str, Any]:
    return {"tokens": len(ids), "text": tokenizer.hf.decode(ids)}


def _has_loss(item: Demonstration) -> list[bool]:
    """Return of each token of prompt and response whether the loss counts it."""
    response = item.is_target or [True] * len(item.response_token_ids)
    return [False] * len(item.prompt_token_ids) + response
