"""Checks of a folder's weight values before a model is built: finite, and tied tensors equal."""

from collections.abc import Iterable, Iterator

import torch

from parallel.weights.files import CheckpointFolder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_tied(folder: CheckpointFolder) -> None:
    """Refuse an output layer that differs from the embedding: a tied model would silently ignore it.

    Raises:
        ValueError: `lm_head.weight` is in the folder and differs from the embedding.
    """
    if HEAD not in folder.names:
        return
    kinds = {(folder.shape(name), folder.dtype(name)) for name in (EMBEDDING, HEAD)}
    pairs = zip(folder.rows(EMBEDDING), folder.rows(HEAD))
    if len(kinds) > 1 or not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        raise ValueError(
            f"{folder.file(HEAD)} holds an lm_head.weight that is not the embedding, and"
            " tie_word_embeddings=true in config.json leaves"
            " it out; set tie_word_embeddings to false to use it, or delete the tensor"
        )


def not_finite(
    folder: CheckpointFolder, names: Iterable[str], dtypes: Iterable[torch.dtype]
) -> Iterator[str]:
    """Yield a problem for each tensor that holds NaN or an infinity, as stored or cast to one of `dtypes`."""
    names = list(names)
    folder.announce((name, 0, folder.shape(name)[0]) for name in names)
    for name in names:
        for part in folder.rows(name):
            extremes = torch.stack(part.aminmax()) if part.numel() else part
            if lost := next(
                (dtype for dtype in (part.dtype, *dtypes) if not extremes.to(dtype).isfinite().all()), None
            ):
                yield (
                    f"{name} in {folder.file(name)} holds NaN, an infinity or a number beyond"
                    f" {str(lost).removeprefix('torch.')};"
                    " copy the file again from its source, or use an earlier checkpoint of the model"
                )
                break
