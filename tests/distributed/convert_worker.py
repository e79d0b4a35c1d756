"""Megatron-Core's own distributed checkpoints against the converter, both ways, on four ranks."""

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from parallel import device
from parallel.rank_set import world

device.prepare()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint import CheckpointException  # noqa: E402

from parallel import megatron  # noqa: E402
from parallel.checkpoint.metadata import read_metadata  # noqa: E402
from parallel.convert import to_hugging_face, to_megatron  # noqa: E402
from parallel.convert.megatron_checkpoint import COMMON_STATE  # noqa: E402
from parallel.convert.to_hugging_face import CheckpointArguments  # noqa: E402
from parallel.convert.workers import Budget  # noqa: E402
from parallel.groups import ProcessGroups  # noqa: E402
from parallel.layout import Layout  # noqa: E402
from parallel.weights.architecture import read_architecture  # noqa: E402
from tests.tiny import write_hf  # noqa: E402
from verl_megatron.config import EngineConfig  # noqa: E402
from verl_megatron.roles.engine import Engine, EngineOptions  # noqa: E402

BUDGET = Budget(slab_bytes=6000, workers=1)  # smaller than most tensors
FILE_BYTES = 100_000
MODELS = (
    ("qwen3", "lm", "ForCausalLM", ("tp2pp2", "pp2vpp2", "tp4")),
    ("qwen2_tied_yarn", "lm", "ForCausalLM", ("pp2vpp2", "tp4")),
    ("llama_tied_llama3", "token", "ForTokenClassification", ("tp2pp2",)),
)
SINGLE_KEYS = {"non_homogeneous_layers": True, "singleton_local_shards": True}


def state_of(engine: Engine, **metadata) -> dict:
    metadata = {"dp_cp_group": engine.groups.dp_cp, **metadata}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(engine.chunks)}


def te_objects_of(engine: Engine) -> dict:
    """Objects that transformer-engine's layers add to the state, with the offsets of TransformerBlock.

    Norms have such an object since transformer-engine 2, its attention up to Megatron-Core 0.14. Without FP8
    it is an empty tensor.
    """
    replica, total = (0, engine.groups.tp.rank(), engine.groups.dp_cp.rank()), engine.arch.num_layers
    modules = ("core_attention", *(("q_layernorm", "k_layernorm") if engine.arch.qk_norm else ()))
    places = [
        (f"decoder.layers.self_attention.{module}", [(0, layer.layer_number - 1, total)])
        for chunk in engine.chunks
        for layer in chunk.decoder.layers
        for module in modules
    ]
    places += [
        ("decoder.final_layernorm", [])
        for chunk in engine.chunks
        if chunk.decoder.final_layernorm is not None
    ]
    return {
        f"te{i}": make_sharded_object_for_checkpoint(
            torch.empty(0, dtype=torch.uint8), f"{key}._extra_state", offsets, replica
        )
        for i, (key, offsets) in enumerate(places)
    }


def build(
    folder: Path, head: str, layout: str, *, weights: bool, config: EngineConfig | None = None
) -> Engine:
    groups = ProcessGroups(Layout.parse(layout, world().ranks), world())
    return Engine(
        arch=read_architecture(folder),
        folder=str(folder) if weights else None,
        groups=groups,
        head=head,
        options=EngineOptions(config=config or EngineConfig(), seed=1),
    )


def check_load(
    folder: Path, converted: Path, head: str, layout: str, config: EngineConfig | None = None
) -> None:
    """Strictly: Megatron-Core misses no key of the model's in what was converted."""
    truth, loaded = (build(folder, head, layout, weights=weights, config=config) for weights in (True, False))
    with megatron.megatron_globals(loaded.groups):
        state = dist_checkpointing.load(state_of(loaded), str(converted / "release"))
    for i, chunk in enumerate(loaded.chunks):
        chunk.load_state_dict(state[f"model{i}"])
    assert truth.tensors.keys() == loaded.tensors.keys()
    wrong = [name for name, tensor in truth.tensors.items() if not torch.equal(tensor, loaded.tensors[name])]
    assert not wrong, f"{folder.name} {layout}: {wrong}"


def check_te_objects(folder: Path, te: Path, local: Path, out: Path, layout: str) -> None:
    """States with transformer-engine's objects load from files made for `te`, and convert back."""
    engine = build(folder, "lm", layout, weights=True)
    with megatron.megatron_globals(engine.groups):
        try:
            dist_checkpointing.load(state_of(engine) | te_objects_of(engine), str(local / "release"))
        except CheckpointException as error:
            assert "_extra_state/shard_" in str(error), error
        else:
            raise AssertionError(f"{local} was loaded without the objects that were asked for")
        dist_checkpointing.load(
            state_of(engine) | te_objects_of(engine), str(te / "release")
        )  # in place, and so the weights are right for what follows
    save(engine, out, te_objects_of(engine))
    if dist.get_rank() == 0:
        check_keys(out, te)
        check_back(folder, out)


def check_save(
    folder: Path, out: Path, head: str, layout: str, config: EngineConfig | None = None, **metadata
) -> None:
    engine = build(folder, head, layout, weights=True, config=config)
    save(engine, out, {}, **metadata)
    if dist.get_rank() == 0:
        check_back(folder, out)


def save(engine: Engine, out: Path, objects: dict, **metadata) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
    dist.barrier()
    synchronized = (
        nullcontext() if device.is_gpu() else patch("torch.cuda.synchronize")
    )  # Megatron-Core's writer calls it; this project has its own
    with megatron.megatron_globals(engine.groups), synchronized:
        dist_checkpointing.save(state_of(engine, **metadata) | objects, str(out))
    dist.barrier()


def check_back(folder: Path, out: Path) -> None:
    """What was saved converts to the folder that it came from, and no key is unknown."""
    back = out.with_name(out.name + "_hf")
    to_hugging_face.convert(
        CheckpointArguments(out, folder), back, dtype=None, budget=BUDGET, file_bytes=2**30
    )
    compare(folder, back)


def compare(folder: Path, other: Path) -> None:
    one, two = (load_file(path / "model.safetensors") for path in (folder, other))
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def check_keys(saved: Path, converted: Path, *, older: str | None = None) -> None:
    """Keys, shapes, dtypes and objects of a checkpoint that Megatron-Core saved, and of a converted folder.

    Args:
        older: part of keys that only older versions of Megatron-Core have; they are in the converted folder.
    """
    theirs, ours = (read_metadata(path).state_dict_metadata for path in (saved, converted / "release"))
    theirs, ours = described(theirs), described(ours)
    theirs.pop(COMMON_STATE, None)
    if older:
        assert any(older in key for key in ours), ours.keys()
        theirs, ours = without(theirs, older), without(ours, older)
    assert theirs == ours, set(theirs.items()) ^ set(ours.items())


def described(table: dict) -> dict:
    """Shape and dtype of each tensor of a checkpoint's table, None for its objects."""
    return {
        key: (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "size") else None
        for key, entry in table.items()
    }


def without(table: dict, part: str) -> dict:
    return {key: what for key, what in table.items() if part not in key}


def main() -> None:
    root = Path(sys.argv[1])
    device.initialize()
    for family, head, kind, layouts in MODELS:
        folder, converted, saved = root / family, root / f"{family}_mcore", root / f"{family}_saved"
        if dist.get_rank() == 0:
            write_hf(folder, family, kind)
            to_megatron.convert(folder, converted, spec="local", budget=BUDGET, file_bytes=FILE_BYTES)
        dist.barrier()
        for layout in layouts:
            check_load(folder, converted, head, layout)
        check_save(folder, saved, head, "tp2pp2")
        if dist.get_rank() == 0:
            check_keys(saved, converted)
        if family == "qwen3":
            check_save(folder, root / "single_keys", head, "tp2pp2", **SINGLE_KEYS)
            te = root / "te_mcore"
            if dist.get_rank() == 0:
                to_megatron.convert(folder, te, spec="te", budget=BUDGET, file_bytes=FILE_BYTES)
            dist.barrier()
            for layout in layouts:
                check_te_objects(folder, te, converted, root / "te_saved" / layout, layout)
        print(f"rank {dist.get_rank()} agrees on {family}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
