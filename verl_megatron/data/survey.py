"""What a run would read of its data files, in numbers and examples."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.config import DataConfig, PairDataConfig, SFTDataConfig
from verl_megatron.data.chat import check_form, split_answer
from verl_megatron.data.columns import Columns
from verl_megatron.data.formats.sources import DataFile, find_files
from verl_megatron.data.pairs import READERS
from verl_megatron.data.prompts import Demonstration
from verl_megatron.data.row_reader import RowReader
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
    found = _common(dataset.files, Columns(config, row), row) | {
        "rows": len(dataset) + dataset.dropped,
        "kept": len(dataset),
        "notes": dataset.column_notes,
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
        "data_sources": _shares(getattr(item, "extra", {}).get("data_source") for item in dataset),
        "examples": [
            {"row": dataset.place(index)} | _example(item, tokenizer)
            for index, item in enumerate(islice(dataset, EXAMPLES))
        ],
        "refused": "",
    }
    if dataset.dropped and config.overlong == "error":
        place, length = dataset.dropped_first[0]
        found["refused"] = f"{place}: {dataset.too_long(length)}"
    elif (index := getattr(dataset, "source_index", None)) is not None:
        found["refused"] = index.why_not(is_whole=True)
    return found


def survey_rows(config: DataSection) -> Survey:
    """Describe `config.train` without a tokenizer: rows, columns and lengths of the prompts in characters.

    Raises:
        ValueError: a row cannot be read, or lacks what the settings name.
    """
    files, row = first_row(config.train)
    rows, lengths, sources, examples = 0, [], Counter(), []
    first = Columns(config, row)
    is_paired = isinstance(config, PairDataConfig)
    wanted = ("chosen_key", "rejected_key") if is_paired else ("prompt_key", "answer_key")
    needed = [name for name, key in first.keys.items() if key and name in wanted]
    for file in files:
        columns = None
        for number, row in file.rows():
            columns = columns or Columns(config, row, hint=file.hint, unread=file.unread)
            try:
                values = {name.removesuffix("_key"): columns.value(row, name) for name in needed}
                prompt, _ = split_answer(values["chosen" if is_paired else "prompt"])
                if not isinstance(prompt, str):
                    check_form(prompt)
            except ValueError as error:
                raise ValueError(f"{file.path}, {file.unit} {number}: {error}") from None
            rows += 1
            lengths.append(_characters(prompt))
            sources[row.get("data_source")] += 1
            if len(examples) < EXAMPLES:
                examples.append({"row": f"{file.path}, {file.unit} {number}"} | values)
    return _common(files, first, row) | {
        "rows": rows,
        "notes": [note for file in files for note in file.notes],
        "characters": quantiles(lengths),
        "data_sources": _shares(sources.elements()),
        "examples": examples,
        "refused": "",
    }


def _common(files: list[DataFile], columns: Columns, row: dict[str, Any]) -> Survey:
    """Describe files and columns."""
    return {
        "files": [{"path": file.path, "format": file.kind} for file in files],
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


def _shares(sources: Iterable[Any]) -> dict[str, int]:
    """Return the rows of each data source, most first; empty if the rows name none."""
    counts = Counter(source if isinstance(source, str) else None for source in sources)
    named = {source: count for source, count in counts.most_common() if source is not None}
    return named | ({"(none)": counts[None]} if named and counts[None] else {})


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


def _characters(prompt: Any) -> int:
    if isinstance(prompt, list):
        return sum(len(str(message.get("content", ""))) for message in prompt if isinstance(message, dict))
    return len(str(prompt))


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
