"""A model's folder as vLLM sees it: the files that were checked, and no others.

Left to itself, vLLM prefers Mistral's configuration and weights to Hugging Face's, takes the last of several
weight files, and obeys files of sentence-transformers and of quantisation tools.
"""

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel.runtime import leftovers
from parallel.weights.files import CheckpointFolder
from parallel.weights.remote.folder import SMALL_FILES

# Configuration and tokenizer: what is fetched of a URL, and what tokenizers may read besides.
READ_FILES = (*SMALL_FILES, "tokenizer.*.json", "*.model", "*.tiktoken", "chat_templates")


class ModelView:
    """A temporary folder of links to a model's configuration, tokenizer and checked weights.

    The end of the process removes it, if not `remove`.

    Args:
        folder: Hugging Face folder.
        weights: False leaves the weights out, for an engine that gets them otherwise: load_format is dummy.

    Raises:
        ValueError: as of CheckpointFolder, or there is no room for links.
    """

    def __init__(self, folder: str, *, weights: bool):
        self.folder, self.weights = folder, weights
        source, where = Path(folder).absolute(), leftovers.process_folder()
        names = {path.name for pattern in READ_FILES for path in source.glob(pattern)}
        if weights:
            with CheckpointFolder(source) as checkpoint:
                names |= checkpoint.file_names
        try:
            self.path = Path(tempfile.mkdtemp(prefix="model-", dir=where))
            for name in names:
                (self.path / name).symlink_to(source / name)
        except OSError as error:
            raise ValueError(
                f"the folder of temporary files {where} cannot take links to the files of {folder} "
                f"({error.strerror}); make room there, or name another by the environment variable TMPDIR"
            ) from None

    @property
    def options(self) -> dict[str, Any]:
        """vLLM's settings."""
        return dict(
            model=str(self.path),
            served_model_name=self.folder,
            config_format="hf",
            tokenizer_mode="hf",
            load_format="safetensors" if self.weights else "dummy",
        )

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Context for starting the engine; if that fails, the links are removed.

        vLLM names compiled models by the model's path: by the folder's, so that the next run finds them.
        """
        from vllm.config import ModelConfig

        found, folder = ModelConfig.compute_hash, self.folder

        def compute_hash(self: ModelConfig) -> str:
            named = copy.copy(self)
            named.model = folder
            return found(named)

        ModelConfig.compute_hash = compute_hash
        try:
            yield
        except BaseException:
            self.remove()
            raise
        finally:
            ModelConfig.compute_hash = found

    def remove(self) -> None:
        """Remove the links."""
        shutil.rmtree(self.path, ignore_errors=True)
