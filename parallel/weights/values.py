"""Checks of a folder's weight values before a model is built: finite, and tied tensors equal."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from parallel.device import cores_per_rank
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
    names, dtypes = list(names), list(dtypes)

    def lost_in(part: torch.Tensor) -> torch.dtype | None:
        extremes = torch.stack(part.aminmax()) if part.numel() else part
        return next((each for each in (part.dtype, *dtypes) if not extremes.to(each).isfinite().all()), None)

    folder.announce((name, 0, folder.shape(name)[0]) for name in names)
    threads = max(1, cores_per_rank() // torch.get_num_threads())
    with ThreadPoolExecutor(threads) as pool:  # each reads 2 to 3 GB/s from the page cache
        # Parts are views of the mapped files, which a thread reads, so many may wait.
        pending = [(name, pool.map(lost_in, folder.rows(name))) for name in names]
        for name, losses in pending:
            if lost := next(filter(None, losses), None):
                yield (
                    f"{name} in {folder.file(name)} holds NaN, an infinity or a number beyond"
                    f" {str(lost).removeprefix('torch.')};"
                    " copy the file again from its source, or use an earlier checkpoint of the model"
                )
