"""Models of the Hugging Face hub, in its own cache (HF_HOME)."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from parallel.weights.json_files import parse_object, reason_of
from parallel.weights.remote.folder import INDEX, SINGLE, SMALL_FILES, cache_folder, locked

NAME = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}(?:@[\w./-]{1,96})?")
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


def is_hub_name(name: str) -> bool:
    """Whether a text may be a hub name: OWNER/NAME or OWNER/NAME@REVISION, and no local folder."""
    return NAME.fullmatch(name) is not None and not Path(name).exists()


def fetch_snapshot(name: str, *, weights: bool = True) -> Path:
    """Return the folder of a model of the hub, fetched unless it is in the hub's cache.

    One process of a host fetches; the others wait for it. A cached model is taken without asking the hub, so
    that a resumed run has the weights that it began with.

    Args:
        name: OWNER/NAME or OWNER/NAME@REVISION.
        weights: False leaves the weights out, for plans.

    Raises:
        ValueError: the model is not in the cache and cannot be fetched; the message has the command that
            fetches it where there is a network.
    """
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    patterns = [*SMALL_FILES, *(WEIGHTS if weights else ())]
    common: dict[str, Any] = dict(revision=revision or None, allow_patterns=patterns)
    common["endpoint"] = os.environ.get("HF_ENDPOINT")
    reason = ""
    with locked(cache_folder() / f"hub-{re.sub(r'[^0-9A-Za-z.-]', '_', name)}.lock"):
        for cached in (True, False):
            try:
                folder = Path(snapshot_download(repo, local_files_only=cached, **common))
                if not cached or _is_whole(folder, weights=weights):
                    return folder
            except Exception as error:  # of the hub's client, of its HTTP library, of the disk
                reason = reason_of(error.__cause__ or error)
    command = ["hf", "download", repo, *(["--revision", revision] if revision else [])]
    raise ValueError(
        f"there is no folder {short_repr(name)}, and as a model of the Hugging Face hub it cannot be fetched "
        f"({reason}); where there is a network, fetch it into HF_HOME with: {shlex.join(command)}"
    )


def _is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether a folder of the cache has its configuration and, if asked for, all weights that it names."""
    if not weights or (folder / SINGLE).exists():
        return (folder / SMALL_FILES[0]).exists()
    try:
        names = parse_object((folder / INDEX).read_bytes())["weight_map"].values()
        return all((folder / name).exists() for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
