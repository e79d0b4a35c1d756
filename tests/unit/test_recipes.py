"""Every recipe names settings that exist, and every shell script a recipe that exists."""

import re

import pytest
from omegaconf import OmegaConf

from tests.worlds import ROOT
from verl_megatron.checks import structured
from verl_megatron.config import SFTConfig, TrainerConfig

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "recipes").glob("*.sh"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_settings_exist_and_fit(path):
    recipe = OmegaConf.load(path)
    recipe.setdefault("data", {}).setdefault("train", "train.jsonl")
    config = structured(recipe, SFTConfig if path.stem.startswith("sft") else TrainerConfig)
    assert config.run.output_dir.startswith("outputs/")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short_and_name_recipes(path):
    text = path.read_text()
    names = re.findall(r"--config-name (\w+)", text)
    assert names and all((ROOT / "recipes" / f"{name}.yaml").is_file() for name in names)
    assert len(text.splitlines()) <= 40
