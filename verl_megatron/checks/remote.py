"""Model paths that are hub names or URLs, replaced by local folders before anything is looked at."""

from dataclasses import fields

from parallel.runtime.refusal import short_repr
from parallel.weights.remote.models import is_remote, local_folder
from verl_megatron.checks.problems import refuse
from verl_megatron.config import SupervisedConfig, TrainerConfig


def fetch_models(config: TrainerConfig | SupervisedConfig) -> list[str]:
    """Replace the paths of models that are hub names or URLs; return a note for each.

    Raises:
        ValueError: lists all models that cannot be fetched.
    """
    problems, notes = [], []
    for field in fields(config):
        section = getattr(config, field.name)
        path = getattr(section, "path", "")
        if not isinstance(path, str) or not is_remote(path):  # wrong types are reported by other checks
            continue
        try:
            section.path = local_folder(path)
            notes.append(f"{field.name}.path={short_repr(path)} is {section.path}")
        except ValueError as error:
            problems.append(f"{field.name}.path={short_repr(path)}: {error}")
    refuse(problems)
    return notes
