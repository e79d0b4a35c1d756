"""Recipe files and the class of their settings."""

from pathlib import Path

from verl_megatron.config import SCHEMAS, Section, TrainerConfig


def schema_of(recipe: Path) -> type[Section]:
    """The settings of the command that a recipe is for: that which its name begins with, or training."""
    names = [name for name in SCHEMAS if recipe.stem.startswith(name)]
    return SCHEMAS[names[0]] if names else TrainerConfig
