"""What all ranks of a run, on whatever host and in whatever world, have been started with alike."""

import json
import re
from collections.abc import Mapping
from typing import Any

from parallel.rank_set import RankSet, agree
from parallel.runtime.refusal import short_repr
from verl_megatron.checks.limits import check_types
from verl_megatron.checks.problems import refuse
from verl_megatron.config import PATHS, SupervisedConfig, TrainerConfig
from verl_megatron.config.section import as_dict
from verl_megatron.lifecycle.secrets import masked_value


def agree_on_settings(config: Any, ranks: RankSet) -> None:
    """Refuse ranks that were started with other settings than the first one. Collective.

    Settings of wrong types are left to other checks.

    Raises:
        RefusalError: names the settings.
    """
    here = {} if check_types(config) else agreed_settings(config)
    first = ranks.broadcast_object(here)
    agree(lambda: refuse(different_settings(first, here)), ranks)


def agree_on_data(data: Mapping[str, Any], ranks: RankSet) -> None:
    """Refuse ranks that have read other rows than the first one. Collective.

    Args:
        data: what was read, by setting of the section data.

    Raises:
        RefusalError: names the files.
    """
    here = {f"data.{name}": (rows.digest, len(rows)) for name, rows in data.items()}
    first = ranks.broadcast_object(here)
    agree(lambda: refuse(different_data(first, here)), ranks)


def agreed_settings(config: TrainerConfig | SupervisedConfig) -> dict[str, str]:
    """Return what all ranks of a run must be started with: values by `section.setting`, as JSON.

    Of paths only whether there is one, as hosts may differ in them; of a file of reward functions its name,
    and of one that Python was given not the digest, which may differ between processes. Secrets are masked.
    """
    agreed = {}
    for section, settings in masked_value("", as_dict(config)).items():
        for name, value in settings.items():
            if (setting := f"{section}.{name}") in PATHS:
                value = "..." if value else ""
            agreed[setting] = json.dumps(value, default=str)
    if function := agreed.get("reward.function"):
        without_folders = re.sub(r"[^\",:]*/([^\",:/]+\.py\b)", r"\1", function)
        digest = r"(reward_function_(?:\w+_)?)[0-9a-f]{12}\.py"
        agreed["reward.function"] = re.sub(digest, r"\1.py", without_folders)
    return agreed


def agreed_by_worlds(config: TrainerConfig) -> dict[str, str]:
    """Return what both worlds of a bridge must be started with: not how the training world itself runs."""
    return {
        name: value
        for name, value in agreed_settings(config).items()
        if not name.startswith("run.") or name == "run.seed"
    }


def different_settings(first: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return a problem for each setting that is not as on the first rank; both as of `agreed_settings`."""
    return [
        f"{name}={short_repr(json.loads(here[name]))} is {short_repr(json.loads(value))} on rank 0; "
        "start all ranks with the same settings"
        for name, value in first.items()
        if here.get(name, value) != value
    ]


def different_data(first: Mapping[str, tuple[int, int]], here: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a problem for each data file that has other rows than on the first rank.

    Args:
        first, here: digest and number of the rows by setting, such as `data.train`.
    """
    return [
        f"{name} is not the same file on all hosts: {rows:,} rows with the digest {digest:012x} here, and "
        f"{first[name][1]:,} with {first[name][0]:012x} on rank 0; copy one of them to all hosts, or name "
        "one in a folder that they share"
        for name, (digest, rows) in here.items()
        if first.get(name, (digest, rows)) != (digest, rows)
    ]
