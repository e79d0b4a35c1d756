"""`data check`: what a run would read of a data file."""

import json
from typing import Any, cast

from parallel.runtime.refusal import short_repr
from verl_megatron.launch.options import Options

HELP = """\
Shows what a run would read of FILE, a .jsonl, .parquet, .arrow, .csv or .tsv file, a folder of shards, or
several, separated by commas: formats and columns, the first three prompts exactly as the model sees them,
their answers, lengths in tokens, which rows are too long, duplicates, data sources and their shares.
Of demonstrations it shows which tokens have a loss.
--model, a Hugging Face folder, applies its chat template and tokenizer. Without it there are no tokens.

Settings are those of the run, such as data.prompt_key=question data.max_prompt_tokens=512.
Exit status 2: a run would refuse the data; the error says why.
"""
EXAMPLES = (
    "outputs/toy/train.jsonl --model outputs/toy/model",
    "questions.parquet --kind prompts data.prompt_key=question --json",
)
KINDS = {"prompts": "train", "sft": "sft", "pairs": "dpo"}  # command whose settings apply
TITLES = {"prompts": "prompts", "sft": "demonstrations", "pairs": "preference pairs"}
QUANTILES = {"0%": "least", "50%": "median", "100%": "most"}  # names of some
INSTEAD = {"data.train": "FILE", "data.validation": "FILE", "actor.path": "--model"}
SHOWN_ROWS = 3  # of those that are left out
SHOWN_TEXT = 4000  # characters of a text in an example


def run(arguments: list[str]) -> int:
    """Run a subcommand; there is one."""
    if not arguments or arguments[0] in ("-h", "--help"):
        parser().print_help()
        return 0 if arguments else 2
    if arguments[0] != "check":
        raise ValueError(
            f"data {short_repr(arguments[0])} is no command; write verl-megatron data check FILE"
        )
    return check(arguments[1:])


def parser() -> Options:
    options = Options(prog="verl-megatron data check", description=HELP, examples=EXAMPLES)
    options.add_argument("file", metavar="FILE", help="data file, folder of shards, or several with commas")
    options.add_argument(
        "--model", default="", metavar="FOLDER", help="Hugging Face folder with the tokenizer"
    )
    options.add_argument("--kind", choices=KINDS, help="what the rows are for (default: by their columns)")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument(
        "settings", nargs="*", default=[], metavar="SECTION.SETTING=VALUE", help="of the run's section data"
    )
    return options


def check(arguments: list[str]) -> int:
    """Print the survey of a data file.

    Raises:
        ValueError: a run would refuse the settings or the data.
    """
    given = parser().parse_intermixed_args(arguments)
    if more := [word for word in given.settings if "=" not in word]:
        raise ValueError(f"{short_repr(more[0])} is no setting; several files are one argument, with commas")
    kind, found = _survey(given.file, given.model, given.kind, given.settings)
    print(json.dumps({"kind": kind} | found, indent=2, default=str) if given.json else _text(kind, found))
    if found["refused"]:
        raise ValueError(found["refused"])
    return 0


def _survey(file: str, model: str, kind: str | None, settings: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the kind of rows and their survey."""
    from verl_megatron.data.survey.survey import first_row, kind_of, survey, survey_rows

    kind = kind or _kind_of(kind_of(first_row(file)[1]))
    config = _data_section(kind, file, settings)
    if not model:
        return kind, survey_rows(config)
    from parallel.weights.architecture import read_architecture
    from parallel.weights.remote.models import is_remote, local_folder
    from verl_megatron.data.tokenizer import load_tokenizer

    try:
        folder = local_folder(model, weights=False) if is_remote(model) else model
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"--model {short_repr(model)}: {error}") from None
    return kind, survey(config, tokenizer, vocab_size=read_architecture(folder).vocab_size)


def _kind_of(section: type) -> str:
    from verl_megatron.config import SCHEMAS

    return next(kind for kind, name in KINDS.items() if type(cast(Any, SCHEMAS[name]()).data) is section)


def _data_section(kind: str, file: str, settings: list[str]) -> Any:
    """Return the data section that the settings make; ValueError for wrong ones."""
    from verl_megatron.checks.limits import check_values
    from verl_megatron.checks.overrides import structured
    from verl_megatron.checks.problems import refuse
    from verl_megatron.config import SCHEMAS
    from verl_megatron.launch.command_line import settings_of

    values = settings_of(settings)[1] if settings else {}
    schema = SCHEMAS[KINDS[kind]]
    data = values.setdefault("data", {})
    for name, instead in INSTEAD.items():
        section, _, setting = name.partition(".")
        if isinstance(given := values.get(section), dict) and setting in given:
            raise ValueError(f"{name} is an argument of its own, {instead}; leave the setting out")
    if not isinstance(data, dict):
        raise ValueError(f"data={short_repr(data)} is no section with settings; give them one by one")
    data["train"] = file
    config = structured(values, schema)
    unread = [
        f"{section}.{name}={short_repr(value)}"
        for section, given in values.items()
        if section != "data"
        for name, value in given.items()
    ]
    refuse([f"{setting} is not read; leave it out" for setting in unread])
    refuse(check_values(config))
    return cast(Any, config).data


# ---- text ------------------------------------------------------------------------------------------------


def _text(kind: str, found: dict[str, Any]) -> str:
    files = found["files"]
    formats = ", ".join(sorted({file["format"] for file in files}))
    lines = [
        f"{files[0]['path']}{f' and {len(files) - 1} more' * (len(files) > 1)}: {formats}, {TITLES[kind]}"
    ]
    lines += [f"  {name}: {_one_line(key)}" for name, key in found["columns"].items() if key]
    lines.append(f"  columns: {', '.join(map(_one_line, found['all_columns'][:30]))}")
    lines += [f"note: {_one_line(note)}" for note in found["notes"]]
    kept = f", {found['kept']:,} kept" if "kept" in found else ""
    lines.append(f"rows: {found['rows']:,}{kept}")
    if "too_long" in found:
        lines += _left_out(found)
    for number, one in enumerate(found.get("weights", []), start=1):
        lines.append(f"  path {number}: {one['rows']:,} rows, weight {one['weight']:g}")
    for unit in ("tokens", "characters"):
        if values := found.get(unit):
            of = "of a prompt" if kind == "prompts" or unit == "characters" else "of a row"
            named = [f"{QUANTILES.get(share, share)} {count:,}" for share, count in values.items()]
            lines.append(f"{unit} {of}: {', '.join(named)}")
    if with_loss := found.get("tokens_with_loss"):
        share = with_loss / found["all_tokens"]
        lines.append(f"tokens with loss: {with_loss:,} of {found['all_tokens']:,} ({share:.1%})")
    if sources := found["data_sources"]:
        lines.append("data sources:")
        lines += [
            f"  {_one_line(name)}: {count:,} ({count / sum(sources.values()):.1%})"
            for name, count in list(sources.items())[:30]
        ]
    for example in found["examples"]:
        lines += _example(example)
    if "tokens" not in found:
        lines.append("--model FOLDER shows the chat template applied, lengths in tokens and what is too long")
    return "\n".join(lines)


def _left_out(found: dict[str, Any]) -> list[str]:
    long, twice = found["too_long"], found["duplicates"]
    lines = [f"  too long ({found['limit']}): {long['rows']:,}"]
    lines += [f"    {_one_line(one['row'])}: {one['length']}" for one in long["first"][:SHOWN_ROWS]]
    lines.append(f"  duplicates, kept: {twice['rows']:,}")
    return lines + [f"    {_one_line(one['row'])}, as {_one_line(one['as'])}" for one in twice["first"]]


def _example(example: dict[str, Any]) -> list[str]:
    lines = [f"---- {_one_line(example['row'])} ----"]
    if spans := example.get("spans"):  # all that a demonstration's other values have
        for span in spans:
            lines.append(f"{'loss' if span['loss'] else 'no loss'} ({span['tokens']:,} tokens):")
            lines.append(_printable(span["text"]))
        return lines
    for name, value in example.items():
        if isinstance(value, dict) and value.keys() == {"tokens", "text"}:
            lines += [f"{name} ({value['tokens']:,} tokens):", _printable(value["text"])]
        elif name != "row":
            lines.append(f"{name}: {short_repr(value, limit=500)}")
    return lines


def _one_line(text: Any) -> str:
    return _printable(str(text)).replace("\n", "\\n")


def _printable(text: str) -> str:
    """Return a file's text with control characters escaped, line breaks kept, cut if it is very long."""
    cut = text[:SHOWN_TEXT] + f"... ({len(text):,} characters)" * (len(text) > SHOWN_TEXT)
    return "".join(
        letter
        if letter.isprintable() or letter == "\n"
        else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in cut
    )
