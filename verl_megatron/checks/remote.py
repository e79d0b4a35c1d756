"""Model paths that are hub names or URLs, replaced by local folders before anything is looked at."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields

from parallel.runtime.refusal import short_repr
from parallel.weights.remote.models import is_remote, local_folder, shown, version_of
from verl_megatron.checks.problems import refuse
from verl_megatron.config import SupervisedConfig, TrainerConfig
from verl_megatron.model_specs import has_critic


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """A model that was given by a hub name or a URL."""

    given: str  # the setting, such as "actor.path='Qwen/Qwen2.5-0.5B'"
    folder: str
    version: str  # the same wherever the same files were fetched
    host: str

    def __str__(self) -> str:
        return f"{self.given} is {self.folder}"


def fetch_models(config: TrainerConfig | SupervisedConfig) -> list[FetchedModel]:
    """Replace the paths of models that are hub names or URLs, and return these.

    Raises:
        ValueError: lists all models that cannot be fetched.
    """
    problems, models = [], []
    is_read = not isinstance(config, TrainerConfig) or has_critic(config.algorithm.name)
    for field in fields(config):
        if field.name == "critic" and not is_read:
            continue
        section = getattr(config, field.name)
        path = getattr(section, "path", "")
        if not isinstance(path, str) or not is_remote(path):  # wrong types are reported by other checks
            continue
        given = f"{field.name}.path={short_repr(shown(path))}"
        try:
            section.path = local_folder(path)
            version = version_of(path, section.path)
            models.append(
                FetchedModel(given=given, folder=section.path, version=version, host=socket.gethostname())
            )
        except ValueError as error:
            problems.append(f"{given}: {error}")
    refuse(problems)
    return models


def different_versions(models_by_rank: Sequence[Sequence[FetchedModel]]) -> list[str]:
    """Return a problem for each model that some hosts have in another version than the first rank's."""
    problems = []
    for first, *others in zip(*models_by_rank):
        if other := next((model for model in others if model.version != first.version), None):
            problems.append(
                f"{first.given} is not the same on all hosts: {first.folder} on {first.host}, and "
                f"{other.folder} on {other.host} is of another version; name a revision, as "
                "OWNER/NAME@REVISION, or remove the older one from that host's cache"
            )
    return problems
