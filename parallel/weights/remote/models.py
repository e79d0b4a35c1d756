"""Local folders for model paths of all kinds: folders, hub names and URLs."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from parallel.weights.remote.folder import complete, digest_of, fetch_folder
from parallel.weights.remote.hub import fetch_snapshot, is_hub_name
from parallel.weights.remote.source import checked, shown

__all__ = ["is_remote", "local_folder", "shown", "version_of"]


def is_remote(name: str) -> bool:
    """Whether a model's path is a URL or may be a hub name."""
    return "://" in name or is_hub_name(name)


def local_folder(name: str, *, weights: bool = True, whole: bool = False) -> str:
    """Return the local folder of a model's path; a folder's own path is returned as it is.

    Args:
        weights: False leaves weights out, for plans.
        whole: wait for all weights. Otherwise those of a URL arrive while a CheckpointFolder reads them.

    Raises:
        ValueError: the model cannot be fetched.
    """
    if "://" in name:
        if (parts := checked(name)).scheme == "file":
            return unquote(parts.path)
        folder = fetch_folder(name, weights=weights)
        if whole:
            complete(folder)
        return str(folder)
    return str(fetch_snapshot(name, weights=weights)) if is_hub_name(name) else name


def version_of(name: str, folder: str) -> str:
    """Return what differs between versions of a model's files: of its local `folder`, or "" for a path."""
    if "://" in name and urlsplit(name).scheme != "file":
        return digest_of(Path(folder))
    return Path(folder).name if folder != name else ""  # the hub's folder is called as its commit
