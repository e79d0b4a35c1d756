"""Settings of several recipes in one: mappings get each other's entries, all else is replaced."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

_OTHER_KIND = {dict: ListConfig, list: DictConfig}


def merged(files: Sequence[Path]) -> DictConfig:
    """Return the settings of recipes; those of later files win."""
    settings = OmegaConf.create({})
    for file in files:
        recipe = cast(DictConfig, OmegaConf.load(file))
        recipe.pop("defaults", None)
        for section, values in cast(dict, OmegaConf.to_container(recipe)).items():
            make_room(settings, str(section), values)
            for name, value in values.items() if isinstance(values, dict) else ():
                make_room(settings, f"{section}.{name}", value)
        settings = cast(DictConfig, OmegaConf.merge(settings, recipe))
    return settings


def make_room(settings: DictConfig, name: str, value: Any) -> None:
    """Empty a setting that is a list if `value` is a mapping, or the reverse: OmegaConf cannot merge the two.

    Args:
        name: SECTION or SECTION.SETTING.
    """
    other = _OTHER_KIND.get(type(value))
    if other is not None and isinstance(OmegaConf.select(settings, name), other):
        OmegaConf.update(settings, name, None)
