"""Preference pairs: rows, files and chat templates; settings and folders of the commands that read them."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation, Names
from tests.fuzz.data import BAD_PROMPTS, Program, dropping, of_files, with_row
from tests.fuzz.job import Job, clear
from tests.fuzz.tokenizers import TEMPLATES
from tests.fuzz.weights import ONE_LABEL, VALUE, as_it_is, make_folder, score_head, vocabulary_of

FILES = ("data.train", "data.validation")
PROGRAMS = DPO, REWARD = Program("dpo", FILES, "pairs"), Program("reward_model", FILES, "pairs")
Row = dict[str, Any]
END = "</s>"
ASKED = [{"role": "user", "content": "sort lemon fig"}]
SYSTEM = [{"role": "system", "content": "be short"}]


def turn(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


def model_of(program: Program) -> str:
    """Section of the model that a command trains."""
    return "actor" if program is DPO else "reward"


def as_chat(row: Row) -> Row:
    """The pair as messages, TRL's conversational form."""
    prompt = [{"role": "user", "content": row["prompt"]}]
    return {"prompt": prompt, "chosen": [turn(row["chosen"])], "rejected": [turn(row["rejected"])]}


def as_conversations(row: Row) -> Row:
    """Responses that repeat the conversation, TRL's form with an implicit prompt."""
    chat = as_chat(row)
    return {key: chat["prompt"] + chat[key] for key in ("chosen", "rejected")}


# ---- rows ------------------------------------------------------------------------------------------------

# What no response is, in a row of strings or of messages.
BAD_RESPONSES: tuple[Any, ...] = (
    *(None, 3, 2.5, True, [], {}, ["a"], {"text": "a"}, [[]], [None], ["role", "assistant"], [3]),
    *("", " ", "\n\t", "\ud800", "a\udfffb", END, f"a{END}b", [turn(END)], [turn(f"a{END}b")]),
    *([turn(None)], [turn(3)], [turn("")], [turn(" ")], [turn(["a"])], [turn({"text": "a"})], turn("a")),
    *([turn("\ud800")], [turn("a"), turn("b")], [turn("a"), *ASKED], ASKED, SYSTEM, [*ASKED, *ASKED]),
    *([{"role": "assistant"}], [{"content": "a"}], [{"role": None, "content": "a"}]),
    *([turn("a", tool_calls=[{"name": "f"}])], [turn("a", reasoning_content="b")]),
    *([{"role": "tool", "content": "a"}], [turn([{"type": "image", "url": "a"}])]),
    *(["a", turn("b")], [None, turn("b")], [[], turn("b")], [{}, turn("b")], [turn("a"), "b"]),
)
FINE_RESPONSES: tuple[Any, ...] = (
    *("apple fig", "ü ☃ 😀", "a\nb", "a\u2028b", " a ", "\\", f"a{END}", "a\0b"),
    *([turn("a")], [turn("a", name="x")], [turn([{"type": "text", "text": "a"}])]),
)
Change = Callable[[Row], Row]
# What a row becomes, and what its refusal names besides file and line.
WRONG: dict[str, tuple[Change, str]] = {
    "the same text twice": (lambda row: row | {"rejected": row["chosen"]}, "same"),
    "the same tokens twice": (lambda row: row | {"rejected": row["chosen"] + END}, "same"),
    "the same turn twice": (lambda row: (c := as_chat(row)) | {"rejected": c["chosen"]}, "same"),
    "the same turn and text": (lambda row: as_chat(row) | {"rejected": row["chosen"]}, "same"),
    "one conversation": (lambda row: (c := as_conversations(row)) | {"rejected": c["chosen"]}, "same"),
    "no responses": (lambda row: {"prompt": row["prompt"]}, "chosen"),
    "no prompt": (lambda row: {key: row[key] for key in ("chosen", "rejected")}, "prompt"),
    "TRL's unpaired form": (lambda row: {"prompt": "a", "completion": row["chosen"], "label": 1}, "chosen"),
    "a demonstration": (lambda row: {"prompt": row["prompt"], "response": row["chosen"]}, "chosen"),
    "a list of responses": (lambda row: row | {"rejected": [row["rejected"]] * 3}, "rejected"),
    "a text prompt and turns": (lambda row: as_chat(row) | {"prompt": row["prompt"]}, "prompt"),
    "a text prompt and one turn": (lambda row: row | {"chosen": [turn("a")]}, "prompt"),
    "two prompts": (lambda row: as_conversations(row) | {"rejected": [*ASKED, turn("a")]}, "different"),
    "another prompt": (lambda row: as_conversations(row) | {"prompt": "another"}, "prompt"),
    "a conversation and a text": (lambda row: as_conversations(row) | {"chosen": row["chosen"]}, "prompt"),
    "an answer and texts": (lambda row: row | {"prompt": [*ASKED, turn("a")]}, "assistant"),
    "an answer and turns": (lambda row: as_chat(row) | {"prompt": [*ASKED, turn("a")]}, "assistant turn"),
    "a prompt of special tokens": (lambda row: row | {"prompt": "<s>"}, "prompt"),
    "an empty prompt": (lambda row: row | {"prompt": ""}, "prompt"),
    "a deep column": (lambda row: row | {"meta": deep(300)}, "levels"),
    "half a pair in a column": (lambda row: row | {"meta": ["\ud800"]}, "surrogate"),
    "a column that is no number": (lambda row: row | {"score": float("nan")}, "number"),
}
FINE: dict[str, Change] = {
    "turns": as_chat,
    "conversations": as_conversations,
    "conversations and prompt": lambda row: as_conversations(row) | {"prompt": as_chat(row)["prompt"]},
    "conversations and question": lambda row: as_conversations(row) | {"prompt": row["prompt"]},
    "conversations and no prompt": lambda row: as_conversations(row) | {"prompt": None},
    "a chat and texts": lambda row: row | {"prompt": [*SYSTEM, *as_chat(row)["prompt"]]},
    "several turns": lambda row: as_chat(row) | {"prompt": [*ASKED, turn("fig lemon"), *ASKED]},
    "further columns": lambda row: row | {"score_chosen": 0.5, "messages": ASKED, "ü": {"a": [None]}},
}
OPEN: dict[str, Change] = {
    "a blank of difference": lambda row: row | {"rejected": row["chosen"] + " "},
    "a long integer": lambda row: row | {"score": 10**4000},
}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def row_case(job: Job, rng: random.Random, what: str, change: Change, expected: str, names: Names) -> Case:
    """A run on a file with one changed row."""
    path, line = with_row(job, rng, change, sample="pairs")
    named = (str(path), f"line {line}", *names) if expected == REFUSED else names
    return rng.choice(PROGRAMS).case(job, rng, what, path, expected=expected, names=named)


def changed(
    job: Job, rng: random.Random, *, what: str, change: Change, expected: str, names: Names = ()
) -> Case:
    return row_case(job, rng, what, change, expected, names)


def response(job: Job, rng: random.Random, *, value: Any, expected: str) -> Case:
    """One response of a pair, of texts or of messages; messages answer messages."""
    key = rng.choice(("chosen", "rejected"))
    chat = rng.random() < 0.5 or (expected == ACCEPTED and not isinstance(value, str))

    def change(row: Row) -> Row:
        return (as_chat(row) if chat else row) | {key: value}

    names: Names = ((f"'{key}'", "surrogate"),) if expected == REFUSED else ()
    return row_case(job, rng, f"{key}={value!a} {'of messages' * chat}", change, expected, names)


def prompt(job: Job, rng: random.Random, *, value: Any) -> Case:
    names: Names = (("'prompt'", "surrogate"),)
    return row_case(job, rng, f"prompt={value!a}", lambda row: row | {"prompt": value}, REFUSED, names)


def missing(job: Job, rng: random.Random) -> Case:
    key, null = rng.choice(("prompt", "chosen", "rejected")), rng.random() < 0.5

    def change(row: Row) -> Row:
        return row | {key: None} if null else {name: row[name] for name in row if name != key}

    return row_case(job, rng, f"{key} is {'null' if null else 'missing'}", change, REFUSED, (f"'{key}'",))


def too_long(job: Job, rng: random.Random) -> Case:
    key, words = rng.choice(("prompt", "chosen", "rejected")), rng.choice((100, 5000, 2_000_000))
    changed_row = {key: "fig " * words}
    what = f"{key} of {words} words"
    return row_case(job, rng, what, lambda row: row | changed_row, REFUSED, ("max_tokens",))


def dropped(job: Job, rng: random.Random) -> Case:
    """Pairs that are too long by one of their responses, some or all of them."""
    rows, key, is_all = job.rows("pairs"), rng.choice(("prompt", "chosen", "rejected")), rng.random() < 0.5
    long = [row | {key: "fig " * 100} for row in rows]
    path = job.write_rows(long + rows * (not is_all))
    names: Names = (str(path), "max_tokens") if is_all else ("left out",)
    what, expected = f"{key} too long, overlong=drop", REFUSED if is_all else ACCEPTED
    return dropping(rng.choice(PROGRAMS)).case(job, rng, what, path, expected=expected, names=names)


def few(job: Job, rng: random.Random) -> Case:
    """Fewer pairs than a step has."""
    path = job.write_rows(job.rows("pairs")[:1])
    return rng.choice(PROGRAMS).case(job, rng, "one pair", path, expected=ACCEPTED)


# ---- settings --------------------------------------------------------------------------------------------

OF_BOTH = (
    ("data.chosen_key=rejected", REFUSED, ("data.chosen_key", "data.rejected_key")),
    ("data.prompt_key=chosen", REFUSED, ("data.prompt_key", "data.chosen_key")),
    ("data.rejected_key=prompt", REFUSED, ("data.prompt_key", "data.rejected_key")),
    ("data.chosen_key=", REFUSED, ("data.chosen_key",)),
    ("data.prompt_key=", REFUSED, ("data.prompt_key",)),
    ("data.chosen_key=Chosen", REFUSED, ("data.chosen_key", "Chosen")),
    ("data.rejected_key=rejected_response", REFUSED, ("data.rejected_key", "rejected_response")),
    ("data.chosen_key=rejected data.rejected_key=chosen", ACCEPTED, ()),
    ("data.response_key=chosen", REFUSED, ("data.response_key", "chosen_key")),
    ("data.samples_per_step=8", REFUSED, ("data.samples_per_step", "pairs_per_step")),
    ("data.max_prompt_tokens=64", REFUSED, ("data.max_prompt_tokens", "max_tokens")),
    ("data.pairs_per_step=0", REFUSED, ("data.pairs_per_step",)),
    ("data.pairs_per_step=1", REFUSED, ("data.pairs_per_step=1", "layout")),
    ("data.pairs_per_step=100000000", REFUSED, ("data.pairs_per_step",)),
    ("data.max_tokens=1", REFUSED, ("data.max_tokens",)),
    ("data.max_tokens=2", REFUSED, ("data.max_tokens=2", "line 1")),
    ("data.max_tokens=100000", REFUSED, ("data.max_tokens=100000", "positions")),
    ("data.validation=", REFUSED, ("run.validate_interval", "data.validation")),
    ("data.validation= run.validate_interval=0", ACCEPTED, ()),
    ("data.train=/no/such.jsonl", REFUSED, ("data.train",)),
    ("run.keep_best_k=1 run.save_interval=3", REFUSED, ("run.keep_best_k", "run.validate_interval")),
    ("run.keep_best_k=1 run.save_interval=20", ACCEPTED, ()),
    ("algorithm.kl_coef=0.1", REFUSED, ("algorithm is no section",)),
    ("rollout.tp=2", REFUSED, ("rollout is no section",)),
    ("reference.path=model", REFUSED, ("reference is no section",)),
)
LOSSES = ("dpo", "hinge", "IPO", "sigmoid_norm", "kto_pair", "null", "''", "[sigmoid,ipo]", "robust")
OF_DPO = (
    *((f"dpo.loss={name}", REFUSED, ("dpo.loss",)) for name in LOSSES),
    *((f"dpo.beta={beta}", REFUSED, ("dpo.beta",)) for beta in ("0", "-0.1", "inf", "nan", "1e9", "null")),
    *((f"dpo.label_smoothing={e}", REFUSED, ("dpo.label_smoothing",)) for e in ("0.5", "-0.1", "1", "nan")),
    ("dpo.loss=ipo dpo.label_smoothing=0.1", REFUSED, ("dpo.label_smoothing=0.1", "dpo.loss")),
    ("dpo.loss=ipo dpo.label_smoothing=0", ACCEPTED, ()),
    ("dpo.beta=1000 dpo.label_smoothing=0.499", ACCEPTED, ()),
    ("dpo.reference_free=true", REFUSED, ("dpo.reference_free", "no setting")),
    ("dpo.lr=1e-3", REFUSED, ("dpo.lr", "no setting")),
    ("reward.path=model", REFUSED, ("reward is no section",)),
    ("critic.layout=tp2", REFUSED, ("critic is no section",)),
)
OF_REWARD = (
    ("dpo.beta=0.1", REFUSED, ("dpo is no section",)),
    ("actor.path=model", REFUSED, ("actor is no section",)),
    ("reward.function=match", REFUSED, ("reward.function", "no setting")),
    ("reward.workers=2", REFUSED, ("reward.workers", "no setting")),
    ("reward.num_labels=2", REFUSED, ("reward.num_labels", "no setting")),
    ("reward.layout=tp3", REFUSED, ("reward.layout",)),
    ("reward.path=", REFUSED, ("reward.path",)),
)


def given(job: Job, rng: random.Random, *, program: Program | None, entry: tuple[str, str, Names]) -> Case:
    text, expected, names = entry
    program = program or rng.choice(PROGRAMS)
    what = f"{program.name}: {text}"
    return Case(
        name=what, expected=expected, names=names, act=job.dry_run(*text.split(), program=program.name)
    )


# ---- folders ---------------------------------------------------------------------------------------------

TWO_LABELS = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}


def value_head(tensors: dict[str, Any]) -> dict[str, Any]:
    scored = score_head(1)(tensors)
    return scored | {"score.bias": scored["score.weight"][:, 0].clone()}


# Folder, the program that trains it, tensors, changes of config.json, what has to come of it and names.
FOLDERS = (
    ("a language model", REWARD, as_it_is, {}, ACCEPTED, ("reward starts with a new one",)),
    (
        "a language model with labels",
        REWARD,
        as_it_is,
        TWO_LABELS,
        ACCEPTED,
        ("reward starts with a new one",),
    ),
    ("a score model", REWARD, score_head(1), ONE_LABEL, ACCEPTED, ()),
    ("of two labels", REWARD, score_head(2), ONE_LABEL | TWO_LABELS, REFUSED, (("score", "label"),)),
    ("of two labels, called one", REWARD, score_head(2), ONE_LABEL, REFUSED, (("score", "label"),)),
    ("of one label, called two", REWARD, score_head(1), ONE_LABEL | TWO_LABELS, EITHER, ()),
    ("a value model", REWARD, value_head, VALUE, REFUSED, ("score.bias",)),
    ("a score model without a score", REWARD, score_head(0), ONE_LABEL, REFUSED, (("score", "head"),)),
    ("of fewer tokens", REWARD, vocabulary_of(320), {"vocab_size": 320}, REFUSED, (("vocab", "token"),)),
    ("of fewer tokens", DPO, vocabulary_of(320), {"vocab_size": 320}, REFUSED, (("vocab", "token"),)),
    ("a score model", DPO, score_head(1), ONE_LABEL, REFUSED, (("lm_head", "head"),)),
    ("a value model", DPO, value_head, VALUE, REFUSED, (("lm_head", "head", "score"),)),
    ("of short samples", DPO, as_it_is, {"max_position_embeddings": 32}, REFUSED, ("data.max_tokens=64",)),
    ("another architecture", DPO, as_it_is, {"model_type": "gpt2"}, REFUSED, ("model_type",)),
)


def folder(job: Job, rng: random.Random, *, entry: tuple) -> Case:
    what, program, spoil, config, expected, names = entry
    path = f"{model_of(program)}.path"
    if expected == REFUSED:
        names = ((path, str(job.folder), "data.max_tokens"), *names)
    act = job.dry_run(f"{path}={make_folder(job, spoil, config)}", program=program.name)
    return Case(name=f"{path}: {what}", expected=expected, names=names, act=act)


def without_tokenizer(job: Job, rng: random.Random) -> Case:
    """A plan needs no tokenizer; a broken one is refused."""
    program, broken = rng.choice(PROGRAMS), rng.random() < 0.5
    for path in job.model().glob("tokenizer*"):
        job.write(path, "[") if broken else path.unlink()
    path = f"{model_of(program)}.path"
    expected = REFUSED if broken else EITHER
    act = job.dry_run(f"{path}={job.model()}", program=program.name)
    names = ("tokenizer",) if broken else ()
    what = f"{path}: {'a broken' if broken else 'no'} tokenizer"
    return Case(name=what, expected=expected, names=names, act=act)


def own_output(job: Job, rng: random.Random) -> Case:
    """The trained model is written where it is read from, or where there is something else."""
    program, source = rng.choice(PROGRAMS), rng.random() < 0.5
    section = model_of(program)
    more = [f"{section}.path={job.model(f'out/{section}')}"] if source else []
    if not source:
        job.write(f"out/{section}", "a file")
    act = job.dry_run(*more, program=program.name)
    return Case(name=f"{section} in the output", expected=REFUSED, names=("run.output_dir",), act=act)


# ---- chat templates --------------------------------------------------------------------------------------

TURNS = "{% for m in messages %}{{ m['role'] + ':' + PART + '\n' }}{% endfor %}"
GENERATE = "{% if add_generation_prompt %}assistant:{% endif %}"
BAD_TEMPLATES = (
    *(template for template in TEMPLATES if "__class__" not in template),
    *("a constant", "", " ", "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**11 }}"),
    TURNS.replace("PART", "m['content'].upper()") + GENERATE,
    TURNS.replace("PART", "m['role']") + GENERATE,
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
    TURNS.replace("PART", "m['content'][:2]") + GENERATE,
    TURNS.replace("PART", "m['content']") + "{% if add_generation_prompt %}model:{% endif %}",
    "{{ messages|length }}" + TURNS.replace("PART", "m['content']") + GENERATE,
)


def template(job: Job, rng: random.Random, *, text: str | None) -> Case:
    """A template that fails, or none, matters to pairs of messages and to no others."""
    program = rng.choice(PROGRAMS)
    clear(path := job.model() / "chat_template.jinja")
    if text is not None:
        job.write(path, text)
    is_chat, form = rng.random() < 0.8, rng.choice((as_chat, as_conversations))
    data = job.write_rows([form(row) if is_chat else row for row in job.rows("pairs")])
    settings = (f"{model_of(program)}.path={job.model()}", f"data.train={data}")
    return Case(
        name=f"template {text!r} and {form.__name__ if is_chat else 'texts'}",
        expected=REFUSED if is_chat else EITHER,
        names=("template",) if is_chat else (),
        act=job.dry_run(*settings, program=program.name),
    )


def mutations() -> list[Mutation]:
    found: list[Mutation] = [
        partial(changed, what=what, change=change, expected=REFUSED, names=(word,))
        for what, (change, word) in WRONG.items()
    ]
    for table, expected in ((FINE, ACCEPTED), (OPEN, EITHER)):
        found += [
            partial(changed, what=what, change=change, expected=expected) for what, change in table.items()
        ]
    found += [partial(response, value=value, expected=REFUSED) for value in BAD_RESPONSES]
    found += [partial(response, value=value, expected=ACCEPTED) for value in FINE_RESPONSES]
    found += [partial(prompt, value=value) for value in BAD_PROMPTS]
    found += of_files(programs=PROGRAMS)
    for program, table in ((None, OF_BOTH), (DPO, OF_DPO), (REWARD, OF_REWARD)):
        found += [partial(given, program=program, entry=entry) for entry in table]
    found += [partial(folder, entry=entry) for entry in FOLDERS]
    found += [partial(template, text=text) for text in (None, *BAD_TEMPLATES)]
    return found + [missing, too_long, dropped] * 4 + [without_tokenizer, own_output] * 2 + [few]
