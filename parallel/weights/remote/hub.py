"""Models of the Hugging Face hub, in its own cache (HF_HOME)."""

import os
import re
import shlex
from pathlib import Path

from parallel.runtime.refusal import short_repr
from parallel.weights.json_files import reason_of
from parallel.weights.remote.folder import SMALL_FILES, cache_folder, locked

NAME = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}(?:@[\w./-]{1,96})?")
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


def is_hub_name(name: str) -> bool:
    """Whether a text may be a hub name: OWNER/NAME or OWNER/NAME@REVISION, and no local folder."""
    return NAME.fullmatch(name) is not None and not Path(name).exists()


def fetch_snapshot(name: str, *, weights: bool = True) -> Path:
    """Return the folder of a model of the hub, fetched as far as it is not in the hub's cache.

    One process of a host fetches; the others wait for it.

    Args:
        name: OWNER/NAME or OWNER/NAME@REVISION.
        weights: False leaves the weights out, for plans.

    Raises:
        ValueError: the model is not in the cache and cannot be fetched; the message has the command that
            fetches it where there is a network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    repo, _, revision = name.partition("@")
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    patterns = [*SMALL_FILES, *(WEIGHTS if weights else ())]
    (enable_progress_bars if first else disable_progress_bars)()
    reason = ""
    with locked(cache_folder() / f"hub-{re.sub(r'[^0-9A-Za-z.-]', '_', name)}.lock"):
        for offline in (False,) if first else (True, False):
            try:
                found = snapshot_download(
                    repo, revision=revision or None, allow_patterns=patterns, local_files_only=offline
                )
                return Path(found)
            except Exception as error:  # of the hub's client, of its HTTP library, of the disk
                reason = f"{type(error).__name__}: {reason_of(error)}"
    command = ["hf", "download", repo, *(["--revision", revision] if revision else [])]
    raise ValueError(
        f"there is no folder {short_repr(name)}, and as a model of the Hugging Face hub it cannot be fetched "
        f"({reason}); where there is a network, fetch it into HF_HOME with: {shlex.join(command)}"
    )
