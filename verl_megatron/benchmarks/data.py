"""Time and memory to start on many prompts, each number in a process of its own: `benchmark data`."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from parallel.runtime.refusal import REFUSED
from verl_megatron.benchmarks.options.data import parser, read_options
from verl_megatron.benchmarks.output import status_bytes, versions, write_csv

MIB = 1 << 20
NAMES = ("Ada", "Ben", "Chen", "Dana", "Eve", "Farid", "Gita", "Hugo", "Ines", "Jun")
THINGS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pencils", "stamps", "tickets")
SENTENCES = (
    "{name} has {a} {thing} and buys {b} more at the market.",
    "Every day for {a} days {name} gives {b} {thing} away.",
    "A box holds {a} {thing}, and there are {b} boxes in the house.",
    "After {a} hours of work {name} is paid {b} dollars and spends half of it on {thing}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table and of the CSV."""

    prompts: int
    tokens: int
    read_s: float
    cpu_s: float
    draw_s: float
    peak_mib: float


def question(number: int) -> dict:
    """Return a row in verl's columns; the number determines it."""
    rng = random.Random(number)
    story = " ".join(
        rng.choice(SENTENCES).format(
            name=rng.choice(NAMES), thing=rng.choice(THINGS), a=rng.randrange(2, 99), b=rng.randrange(2, 99)
        )
        for _ in range(rng.randint(3, 6))
    )
    return {
        "data_source": f"set-{number % 5}",
        "prompt": [{"role": "user", "content": f"{story} How many {rng.choice(THINGS)} are left?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(rng.randrange(1000))},
        "extra_info": {"index": number},
    }


def write_prompts(path: Path, count: int) -> None:
    """Write that many rows, unless the file is there with as many."""
    done = path.with_suffix(".count")
    if path.exists() and done.exists() and int(done.read_text()) >= count:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    rows = map(question, range(count))
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    else:
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    done.write_text(str(count))


def write_parquet(path: Path, rows: Iterator[dict]) -> None:
    """Write rows as a table, in batches."""
    import pyarrow as pa
    from pyarrow import parquet

    writer = None
    while part := list(islice(rows, 20_000)):
        table = pa.Table.from_pylist(part)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def measured(path: Path, model: str, count: int) -> Row:
    """Read the first `count` prompts and draw from them, in this process."""
    from verl_megatron.config import DataConfig
    from verl_megatron.data.prompts import PromptDataset, TrainingPrompts
    from verl_megatron.data.tokenizer import load_tokenizer

    config, tokenizer = DataConfig(train=str(path), max_prompt_tokens=4096), load_tokenizer(model)
    PromptDataset(path, tokenizer, config, max_rows=8)  # imports what reading needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before, began, cpu_s = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    data = PromptDataset(path, tokenizer, config, max_rows=count)
    read_s, began, cpu_s = time.perf_counter() - began, time.perf_counter(), time.process_time() - cpu_s
    TrainingPrompts(data, data.cursor(seed=1)).draw(min(256, count))
    return Row(
        prompts=len(data),
        tokens=sum(data.lengths),
        read_s=read_s,
        cpu_s=cpu_s,
        draw_s=time.perf_counter() - began,
        peak_mib=(status_bytes("VmHWM") - before) / MIB,
    )


def rows_of(path: Path, model: str, counts: Sequence[int]) -> list[Row]:
    """Measure each number of prompts in a process of its own.

    Raises:
        ValueError: one of them failed.
    """
    rows = []
    for count in counts:
        command = [
            sys.executable,
            "-m",
            "verl_megatron",
            "benchmark",
            "data",
            str(path.parent),
            "--model",
            model,
        ]
        command += ["--prompts", str(count), "--format", path.suffix[1:], "--only"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode == REFUSED:
            sys.exit(REFUSED)  # it has said why
        if ended.returncode:
            raise ValueError(f"{count} prompts could not be read; the error is above")
        rows.append(Row(**json.loads(ended.stdout.splitlines()[-1])))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the table for a terminal."""
    lines = [
        f"{'prompts':>11}{'tokens':>14}{'read s':>9}{'of cores':>10}{'first draw s':>14}{'peak MiB':>10}"
    ]
    for row in rows:
        lines.append(
            f"{row.prompts:>11,}{row.tokens:>14,}{row.read_s:>9.1f}{row.cpu_s:>10.1f}"
            f"{row.draw_s:>14.2f}{row.peak_mib:>10,.0f}"
        )
    return "\n".join(lines)


def counts_of(text: str) -> list[int]:
    """Return numbers of prompts, separated by commas."""
    counts = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(",")]
    if not all(0 < count <= 100_000_000 for count in counts):
        raise ValueError(f"--prompts {text} is no list of numbers from 1 to 100000000, such as 10000,1000000")
    return counts


def main() -> None:
    options = read_options()
    path = options.folder / f"prompts.{options.format}"
    try:
        counts = counts_of(options.prompts)
        write_prompts(path, max(counts))
        if options.only:
            print(json.dumps(asdict(measured(path, options.model, counts[-1]))))
            return
        rows = rows_of(path, options.model, counts)
    except ValueError as error:
        parser().error(str(error))
    except OSError as error:
        parser().error(f"FOLDER {options.folder}: {error.strerror}; name one that can be written")
    print(table(rows))
    if options.csv:
        write_csv(options.csv, {"model": options.model, "format": options.format} | versions(), rows)


if __name__ == "__main__":
    main()
