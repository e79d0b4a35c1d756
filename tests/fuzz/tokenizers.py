"""Tokenizer files: garbage, absent, without an end of sequence, or of more tokens than the model has."""

import json
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.job import Job, clear

FILES = ("tokenizer.json", "tokenizer_config.json")
GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a list": lambda content: b"[]",
    "a number": lambda content: b"3",
    "null": lambda content: b"null",
    "binary": lambda content: bytes(range(256)) * 8,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "deep": lambda content: b"[" * 50_000 + b"]" * 50_000,
    "a Git LFS pointer": lambda content: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 14460\n"
    ),
}
TEMPLATES = (
    "{{ nothing.at.all }}",
    "{% for %}",
    "{{ 1 / 0 }}",
    "{% if true %}",
    "{{ raise_exception('no') }}",
    "{{ messages[9]['content'] }}",
    "{{ ''.__class__.__mro__ }}",
)
MESSAGES = [{"role": "user", "content": "sort lemon fig"}]
# Changes of a file's content, and what has to come of them.
CHANGES: dict[str, tuple[str, Callable[[dict], Any], str]] = {
    "no end of sequence": (
        "tokenizer_config.json",
        lambda config: {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"},
        EITHER,  # the model's own files may name one, which ends a rollout
    ),
    "null for the end of sequence": (
        "tokenizer_config.json",
        lambda config: config | {"eos_token": None, "extra_special_tokens": []},
        EITHER,  # some classes have one of their own
    ),
    "an end of sequence that is a list": (
        "tokenizer_config.json",
        lambda config: config | {"eos_token": ["</s>"]},
        REFUSED,
    ),
    "an end of sequence that is a number": (
        "tokenizer_config.json",
        lambda config: config | {"eos_token": 2},
        REFUSED,
    ),
    "an unknown class": (
        "tokenizer_config.json",
        lambda config: config | {"tokenizer_class": "NoSuchTokenizer"},
        EITHER,
    ),
    "a number for a class": ("tokenizer_config.json", lambda config: config | {"tokenizer_class": 3}, EITHER),
    "code of its own": (
        "tokenizer_config.json",
        lambda config: config | {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}},
        EITHER,
    ),
    "a text for a length": (
        "tokenizer_config.json",
        lambda config: config | {"model_max_length": "long"},
        EITHER,
    ),
    "no model": (
        "tokenizer.json",
        lambda content: {key: value for key, value in content.items() if key != "model"},
        REFUSED,
    ),
    "a model of an unknown type": (
        "tokenizer.json",
        lambda content: content | {"model": content["model"] | {"type": "Nothing"}},
        REFUSED,
    ),
    "a list for a vocabulary": (
        "tokenizer.json",
        lambda content: content | {"model": content["model"] | {"vocab": [1, 2]}},
        REFUSED,
    ),
    "an empty vocabulary": (
        "tokenizer.json",
        lambda content: content | {"model": content["model"] | {"vocab": {}, "merges": []}},
        EITHER,
    ),
    "merges of nothing": (
        "tokenizer.json",
        lambda content: content | {"model": content["model"] | {"merges": [["no", "thing"]]}},
        REFUSED,
    ),
}


def _added(number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": f"<extra_{number}>"} | flags


def mutations() -> list[Mutation]:
    found: list[Mutation] = [
        partial(garbage, file=file, what=what, make=make) for file in FILES for what, make in GARBAGE.items()
    ]
    found += [
        partial(changed, what=what, file=file, change=change, expected=expected)
        for what, (file, change, expected) in CHANGES.items()
    ]
    found += [partial(template, text=text) for text in TEMPLATES]
    found += [
        partial(no_file, what=what, make=make)
        for what, make in {
            "a pipe": os.mkfifo,
            "a folder": os.mkdir,
            "a link to itself": lambda path: path.symlink_to(path.name),
        }.items()
    ]
    return found + [absent, no_template, spare] + [flipped] * 4 + [beyond] * 2


def _refused(job: Job, what: str, *more: str, expected: str = REFUSED) -> Case:
    names = () if expected != REFUSED else ((str(job.model()), "actor.path"), ("token", "template", "vocab"))
    return Case(
        name=what, expected=expected, names=names, act=job.dry_run(f"actor.path={job.model()}", *more)
    )


def garbage(job: Job, rng: random.Random, *, file: str, what: str, make: Callable[[bytes], bytes]) -> Case:
    path = job.model() / file
    job.write(path, make(path.read_bytes()))
    return _refused(job, f"{file} is {what}")


def changed(
    job: Job, rng: random.Random, *, what: str, file: str, change: Callable[[dict], Any], expected: str
) -> Case:
    path = job.model() / file
    job.write(path, change(json.loads(path.read_text())))
    return _refused(job, f"{file} has {what}", expected=expected)


def no_file(job: Job, rng: random.Random, *, what: str, make: Callable) -> Case:
    file = rng.choice(FILES)
    clear(job.model() / file)
    make(job.model() / file)
    return _refused(job, f"{file} is {what}", expected=EITHER)  # tokenizer.model may stand in


def beyond(job: Job, rng: random.Random) -> Case:
    """More tokens than the model has, as an unused one for padding: only data that has them is refused."""
    path, is_used = job.model() / "tokenizer.json", rng.random() < 0.5
    content = json.loads(path.read_text())
    job.write(path, content | {"added_tokens": content["added_tokens"] + list(map(_added, range(384, 400)))})
    data = job.write_rows([row | {"prompt": f"a<extra_390>{row['prompt']}"} for row in job.rows("train")])
    more = [f"data.train={data}"] * is_used
    what = f"tokens that the model has not, {'and' if is_used else 'not'} in the data"
    return _refused(job, what, *more, expected=REFUSED if is_used else ACCEPTED)


def absent(job: Job, rng: random.Random) -> Case:
    for path in job.model().glob("tokenizer*"):
        path.unlink()
    return _refused(job, "no tokenizer files", expected=EITHER)  # a plan needs none


def template(job: Job, rng: random.Random, *, text: str) -> Case:
    """A chat template that fails matters to prompts that are messages, and to no others."""
    job.write(job.model() / "chat_template.jinja", text)
    if is_text := rng.random() < 0.3:
        return _refused(job, f"template {text} and prompts that are texts", expected=EITHER)
    data = job.write_rows([row | {"prompt": MESSAGES} for row in job.rows("train")])
    expected = EITHER if "__class__" in text or is_text else REFUSED
    return _refused(job, f"template {text}", f"data.train={data}", expected=expected)


def no_template(job: Job, rng: random.Random) -> Case:
    (job.model() / "chat_template.jinja").unlink()
    data = job.write_rows([row | {"prompt": MESSAGES} for row in job.rows("train")])
    return _refused(job, "no template for messages", f"data.train={data}")


def spare(job: Job, rng: random.Random) -> Case:
    """Files that nothing reads."""
    for name in (
        "README.md",
        "tokenizer.model",
        "generation_config.json",
        "pytorch_model.bin",
        "special_tokens_map.json.bak",
    ):
        job.write(job.model() / name, b"" if name != "generation_config.json" else b"{}")
    return Case(
        name="empty files that nothing needs", expected=ACCEPTED, act=job.dry_run(f"actor.path={job.model()}")
    )


def flipped(job: Job, rng: random.Random) -> Case:
    path = job.model() / rng.choice(FILES)
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    content[at] = rng.randrange(256)
    job.write(path, bytes(content))
    return _refused(job, f"byte {at} of {path.name} is {content[at]}", expected=EITHER)
