"""Checks of the model folders against their roles and against each other, before anything is built."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallel import device
from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import FAMILIES, HEADS, TABLE, Architecture, read_architecture, read_config
from parallel.weights.files import CheckpointFolder, has_weights
from parallel.weights.json_files import is_count, read_object, reason_of
from parallel.weights.rules import Head, hf_shapes
from parallel.weights.values import check_tied, not_finite
from verl_megatron.config import SupervisedConfig, TrainerConfig
from verl_megatron.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from verl_megatron.model_specs import models_apart, models_of
from verl_megatron.rollout.vllm_cpu import HEAD_SIZES

SERVED = "; or serve it with verl-megatron reward-server, which reads the texts with its own tokenizer"

# Folder and head of each role that has a folder. The first one has the tokenizer: the actor, or the model
# that a supervised run trains.
Roles = Mapping[str, tuple[str, Head]]
SCORE = ("score.weight", "score.bias")


@dataclass
class Findings:
    """Problems of the folders, and notes to print."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def roles_of(config: TrainerConfig | SupervisedConfig) -> Roles:
    """Return the folders of a run; a critic without a folder starts from the actor's.

    The reference uses the actor's. A value head on the actor's trunk may have a folder.
    """
    roles: dict[str, tuple[str, Head]] = {}
    for spec in (*models_of(config), *models_apart(config)):
        if spec.name != "reference":
            roles[spec.name] = (spec.model.path, spec.exports[spec.name])
        if spec.head == "lm_token" and isinstance(config, TrainerConfig) and config.critic.path:
            roles["critic"] = (config.critic.path, "token")
    return roles


def inspect_folders(roles: Roles, *, rollout: bool, dry: bool = False, new_score: bool = False) -> Findings:
    """Return problems and notes of the folders.

    Reads the headers of weight files, and values only of tied heads.

    Args:
        rollout: vLLM serves the actor.
        dry: plan only: skip absent weights and tokenizers, and limits of vLLM on this machine.
        new_score: a reward model without a score head gets a new one.
    """
    findings, architectures, broken = Findings(), {}, set()
    for name, (path, head) in roles.items():
        if path in broken:  # already reported
            continue
        try:
            arch = read_architecture(path)
            if dry and not has_weights(path):
                architectures[name] = arch
                continue
            check_reading(path, arch)
            architectures[name] = arch
            if new := check_weights(path, head, new_score=new_score):
                values = "drawn from run.seed" if head == "sequence" else "all zeros"
                findings.notes.append(
                    f"{name}.path={path} has no {' and no '.join(new)}: the {name} starts with a new one, "
                    f"{values}"
                )
        except ValueError as error:
            findings.problems.append(f"{name}.path={short_repr(path)}: {error}")
            broken.add(path)
    if (first := next(iter(roles))) in architectures:
        path, arch = roles[first][0], architectures[first]
        findings.problems += _check_vocabularies(roles, architectures, dry=dry)
        said = _check_served(path, arch, here=not dry) if rollout else []
        findings.problems += [f"actor.path={short_repr(path)}: {problem}" for problem in said]
    return findings


def find_not_finite(roles: Roles, dtypes: Sequence[torch.dtype], *, place: int = 0, of: int = 1) -> list[str]:
    """Return the tensors with non-finite values in one of `dtypes`.

    Reads every `of`-th tensor of each folder, from `place` on, so that `of` ranks share the work and the
    caller combines their results. The folders must have passed `inspect_folders`.
    """
    problems = []
    for path, head in dict.fromkeys(roles.values()):
        with CheckpointFolder(path) as files:
            names = sorted(files.names & hf_shapes(read_architecture(path), head).keys())
            problems += not_finite(files, names[place::of], dtypes)
    return list(dict.fromkeys(problems))


def check_weights(folder: str, head: Head, *, new_score: bool = False) -> list[str]:
    """Check a folder's weights against its config.json and its head; reads values only of a tied head.

    Args:
        new_score: a reward model may lack its head.

    Returns:
        Missing tensors of the head, which will be initialised.

    Raises:
        ValueError: a file is missing or broken, a tensor is missing, unknown or of another shape, a reward
            model has no head, or a tied model has a separate head that it does not use.
    """
    arch = read_architecture(folder)
    with CheckpointFolder(folder) as files:
        needed = {"token": SCORE, "sequence": SCORE[:1]}.get(head, ())
        new = [name for name in needed if name not in files.names]
        if head == "sequence" and new and not new_score:
            stem = FAMILIES[arch.model_type].stem
            raise ValueError(
                f"{folder} has no {SCORE[0]}, so as a reward model it would give every sample 0; "
                f"name the folder of a {stem}{HEADS[head]} with one label"
            )
        claimed = [
            name for name in read_config(folder).get("architectures") or [] if name.endswith("Classification")
        ]
        if SCORE[0] in new and (claimed or len(new) < len(needed)):
            raise ValueError(
                f"{folder} has no {SCORE[0]}, which its {claimed[0] if claimed else SCORE[1]} needs; "
                "copy its weights again from their source"
            )
        files.check_shapes(hf_shapes(arch, head), optional=set(new))
        if head == "lm" and arch.tied:
            check_tied(files)
    return new


def check_reading(folder: str, arch: Architecture) -> None:
    """Check that transformers (and so vLLM) can read config.json, and reads the same sizes.

    Raises:
        ValueError: it cannot, or a size differs.
    """
    from transformers import AutoConfig  # slow import

    path = Path(folder) / "config.json"
    with _quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # type checks of transformers raise all kinds of errors
            raise ValueError(
                f"{path} cannot be read by transformers ({reason_of(error)}); "
                "correct it or copy it again from its source"
            ) from None
    read = {key: (getattr(config, key, None), getattr(arch, name)) for key, (name, _, _) in TABLE.items()}
    if wrong := [
        f"{key}={short_repr(theirs)} and not {ours}"
        for key, (theirs, ours) in read.items()
        if theirs is not None and theirs != ours
    ]:
        raise ValueError(
            f"{path} is read otherwise by transformers ({', '.join(wrong)}); give these keys explicitly"
        )


def _check_served(folder: str, arch: Architecture, *, here: bool) -> list[str]:
    """Return what prevents vLLM from serving the actor; with `here` also on this machine."""
    wanted = FAMILIES[arch.model_type].stem + HEADS["lm"]
    problems = []
    if wanted not in (names := read_config(folder).get("architectures") or []):
        problems.append(
            f"vLLM serves a {wanted}, and config.json has architectures={short_repr(names)}; "
            f'set it to ["{wanted}"]'
        )
    if here and not device.is_gpu() and arch.head_dim not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        problems.append(
            f"vLLM's attention on CPUs has no heads of size {arch.head_dim} (head_dim); it has {sizes}: "
            "use such a model, or GPUs"
        )
    try:
        problems += _check_stops(folder, arch)
    except ValueError as error:
        problems.append(str(error))
    return problems


def _check_stops(folder: str, arch: Architecture) -> list[str]:
    """Check the end-of-sequence ids that vLLM reads from generation_config.json, else from config.json."""
    path = Path(folder) / "generation_config.json"
    if path.exists():
        from transformers import GenerationConfig

        settings = read_object(path)
        with _quiet_transformers():
            try:
                GenerationConfig.from_pretrained(folder, local_files_only=True)
            except Exception as error:
                raise ValueError(
                    f"{path} cannot be read by transformers ({reason_of(error)}); "
                    "correct it or copy it again from its source"
                ) from None
    else:
        path, settings = Path(folder) / "config.json", read_config(folder)
    ids = settings.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if all(is_count(token) and token < arch.vocab_size for token in listed):
        return []
    return [
        f"{path} has eos_token_id={short_repr(ids)}, which is no token or list of tokens below "
        f"vocab_size={arch.vocab_size}; correct it"
    ]


def _check_vocabularies(roles: Roles, architectures: Mapping[str, Architecture], *, dry: bool) -> list[str]:
    """Check that critic and reward model share the actor's token ids, which they get unchanged."""
    first = next(iter(roles))
    path, actor = roles[first][0], architectures[first]
    problems, tokenizer = [], None
    if not dry or has_tokenizer(path):
        try:
            tokenizer = load_tokenizer(path)
            problems += _check_end(tokenizer, f"{first}.path={short_repr(path)}", actor)
        except ValueError as error:
            problems.append(f"{first}.path={short_repr(path)}: {error}")
    for name, arch in architectures.items():
        other = roles[name][0]
        if Path(other).resolve() == Path(path).resolve():
            continue
        remedy = SERVED if name == "reward" else ""
        if arch.vocab_size < actor.vocab_size:
            problems.append(
                f"{name}.path={short_repr(other)} has vocab_size={arch.vocab_size}, "
                f"and the actor generates tokens below its vocab_size={actor.vocab_size};"
                " use a model of the actor's vocabulary, or widen this one with transformers' "
                f"resize_token_embeddings({actor.vocab_size}){remedy}"
            )
        if tokenizer is not None and has_tokenizer(other):
            try:
                where = f"{name}.path={short_repr(other)}"
                found = _compare(tokenizer, load_tokenizer(other), actor.vocab_size, where)
                problems += [problem + remedy for problem in found]
            except ValueError as error:
                problems.append(f"{name}.path={short_repr(other)}: {error}")
    return problems


def _check_end(tokenizer: Tokenizer, where: str, arch: Architecture) -> list[str]:
    end = tokenizer.hf.eos_token_id
    if end is None or end < arch.vocab_size:
        return []
    return [
        f"{where}: its tokenizer ends responses with token {end}, "
        f"and the model has vocab_size={arch.vocab_size};"
        " use the model's own tokenizer"
    ]


def _compare(actor: Tokenizer, other: Tokenizer, num_ids: int, where: str) -> list[str]:
    """Report tokens of the actor that have another id or none in `other`; `other` may have more."""
    ours, theirs = actor.hf.get_vocab(), other.hf.get_vocab()
    wrong = sorted(
        (token_id, token)
        for token, token_id in ours.items()
        if token_id < num_ids and theirs.get(token) != token_id
    )
    if not wrong:
        return []
    token_id, token = wrong[0]
    return [
        f"{where}: its tokenizer is not the actor's: {len(wrong)} of the actor's {len(ours)} tokens have "
        "another id here, the first being"
        f" {short_repr(token)}, {token_id} for the actor and {theirs.get(token, 'none')} here; "
        "use a model with the actor's tokenizer, or take the"
        " tokenizer's files out of this folder if its ids mean the same"
    ]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress transformers' warnings, which every rank would print."""
    from transformers.utils import logging

    level: Any = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
