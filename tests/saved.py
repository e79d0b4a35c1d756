"""Small checkpoints of one rank, without training."""

from pathlib import Path

from parallel.checkpoint import folders as checkpoints
from tests.one_rank import ONE_RANK

MODELS = {"actor": {"hidden_size": 64, "rope_theta": 1e4}, "critic": {"hidden_size": 32}}


def write_weights(scratch: Path) -> None:
    (scratch / "actor").mkdir()
    (scratch / "actor/weights").write_bytes(bytes(range(256)) * 16)


def save(
    folder: Path, step: int, *, accuracy: float | None = None, own: dict | None = None, write=write_weights
) -> Path:
    validation = {} if accuracy is None else {"step": step, "validation/accuracy": accuracy}
    manifest = {
        "models": MODELS,
        "validation": validation,
        "roles": {"actor": {"optimizer_step": 7}},
        "before": {"x": 0.1},
    }
    return checkpoints.save(folder, ONE_RANK, step=step, manifest=manifest, rank_state=own or {}, write=write)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoints.complete(folder)]
