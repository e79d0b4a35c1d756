"""A Megatron-Core distributed checkpoint (torch_dist) as a source of rows of Hugging Face tensors.

Reads checkpoints saved under any layout.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from parallel.checkpoint import metadata
from parallel.checkpoint.sealed import read_json, shortened
from parallel.convert import chunk
from parallel.convert.keys import LAYER, VOCAB_KEYS, GlobalTensor, global_tensors, rows_by_name
from parallel.convert.open_files import OpenFiles
from parallel.reshard.rectangles import uncovered
from parallel.weights.architecture import read_architecture
from parallel.weights.rules import Head, hf_shapes

TRACKER, CONFIG, HF_FOLDER = "latest_checkpointed_iteration.txt", "metadata.json", "hf"
# Prefixes of Megatron-LM's keys of training state.
TRAINING_STATE = re.compile(
    r"(optimizer|chained_\d+\.|rng_state|rerun_state_machine_state|opt_param_scheduler)"
)
COMMON_STATE = "common_state/shard_0_1"  # Megatron-Core 0.19's replacement for common.pt
# FP8 scales of transformer-engine, or None: module objects, with the shard suffix of Megatron's
# `ShardedObject`.
EXTRA_STATE = re.compile(r"(?:.+\.)?_extra_state/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
# halves with separate keys, due to `singleton_local_shards`
_GATE_OR_UP = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Box of a global tensor and the byte range of the archive that holds it."""

    layers: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]
    file: str
    start: int
    length: int


def checkpoint_folder(path: Path) -> Path:
    """Return the folder with metadata.json: `path`, or the one named by Megatron-LM's tracker file in it.

    Raises:
        ValueError: neither exists.
    """
    if (path / CONFIG).is_file():
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        raise ValueError(
            f"{path} holds neither {CONFIG} nor {TRACKER}; give the folder of a distributed checkpoint of "
            "Megatron-Core"
        )
    text = tracker.read_bytes()[:100].decode(errors="replace").strip()
    is_number = re.fullmatch("[0-9]{1,15}", text)
    folder = path / (f"iter_{int(text):07d}" if is_number else "release")
    if pickled := sorted(folder.glob("mp_rank_*/*.pt")):
        raise ValueError(
            f"{pickled[0]} is a pickle of Megatron-LM's older format, which is not read: it may run code; "
            "save the checkpoint with --ckpt-format torch_dist"
        )
    if text != "release" and not is_number or not (folder / CONFIG).is_file():
        raise ValueError(
            f"{tracker} says {text!r} and {folder / CONFIG} does not exist; the checkpoint is incomplete, "
            "copy it again"
        )
    return folder


class MegatronCheckpoint:
    """An open checkpoint, checked against a Hugging Face config.json before any weight is read.

    Args:
        template: folder with the config.json; by default `hf`, next to the tracker file or in the
            checkpoint's folder.
        skip_extra: ignore keys that the model does not have, instead of refusing them.

    Raises:
        ValueError: a file is missing, truncated or invalid; a key is missing, unknown, of the wrong shape, or
            its chunks do not cover the model's tensor.
    """

    kind = "Megatron-Core distributed checkpoint"

    def __init__(self, path: Path, template: Path | None = None, *, skip_extra: bool = False):
        self.path = checkpoint_folder(Path(path))
        try:
            config = read_json(self.path / CONFIG)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}; copy it again from the checkpoint's source") from None
        if config.get("sharded_backend") != "torch_dist":
            backend = shortened(config.get("sharded_backend"), 40)
            raise ValueError(
                f"{self.path / CONFIG} names the format {backend!r}; only torch_dist is read, save the "
                "checkpoint with --ckpt-format torch_dist"
            )
        self.config_folder = self._config_folder(Path(path), template)
        self.arch = read_architecture(self.config_folder)
        self._files = OpenFiles(self.path)
        table = metadata.read_metadata(self.path)
        self.head: Head = self._head(table)
        self.shapes = hf_shapes(self.arch, self.head)
        self.tensors = global_tensors(self.arch, self.head)
        self.training_keys: list[str] = []
        self.extra_keys: list[str] = []
        self.chunks, dtypes = self._stored(table)
        if self.extra_keys and not skip_extra:
            shown = ", ".join(self.extra_keys[:8]) + (
                f" and {len(self.extra_keys) - 8} more" if len(self.extra_keys) > 8 else ""
            )
            raise ValueError(
                f"{self.path} has keys that {self.config_folder / 'config.json'}'s model does not have: "
                f"{shown}; leave them out with --skip-extra, if that is meant"
            )
        self._check(table)
        self._rows_of = rows_by_name(self.tensors)
        self.dtypes = {name: dtypes[self._rows_of[name][0].key] for name in self.shapes}
        self._located: dict[tuple[str, int], chunk.ChunkData] = {}

    @property
    def source_files(self) -> list[Path]:
        names = {part.file for stored in self.chunks.values() for part in stored}
        return [self.path / name for name in (metadata.FILE, *sorted(names))]

    def read(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """Read these rows of a Hugging Face tensor into `out`.

        Args:
            out: [stop - start, columns], contiguous and of the tensor's own dtype.
        """
        for part in self._rows_of[name]:
            top, bottom = max(start, part.rows[0]), min(stop, part.rows[1])
            if top < bottom:
                first = part.row + top - part.rows[0]
                self._fill(part.key, part.layer, first, out[top - start : bottom - start])

    def _fill(self, key: str, layer: int, first: int, out: Tensor) -> None:
        """Fill rows of one layer of a global tensor, from `first` on."""
        for stored in self.chunks[key]:
            top, bottom = max(first, stored.rows[0]), min(first + len(out), stored.rows[1])
            if not (stored.layers[0] <= layer < stored.layers[1] and top < bottom):
                continue
            width, height = stored.cols[1] - stored.cols[0], stored.rows[1] - stored.rows[0]
            data = self._locate(stored, out.dtype)
            at = (
                data.start
                + ((layer - stored.layers[0]) * height + top - stored.rows[0]) * width * out.dtype.itemsize
            )
            target = out[top - first : bottom - first]
            if width == out.shape[1]:
                self._files.read_into(stored.file, at, target)
            else:
                part = torch.empty(bottom - top, width, dtype=out.dtype)
                self._files.read_into(stored.file, at, part)
                target[:, slice(*stored.cols)] = part

    def _locate(self, stored: StoredChunk, dtype: torch.dtype) -> chunk.ChunkData:
        where = stored.file, stored.start
        if where not in self._located:
            data = chunk.locate(self._files, stored.file, stored.start, stored.length)
            box = prod(end - begin for begin, end in (stored.layers, stored.rows, stored.cols))
            if data.dtype != dtype or prod(data.shape) != box:
                raise ValueError(
                    f"{self.path / stored.file} has a {data.dtype} tensor of shape {list(data.shape)} at "
                    f"byte {stored.start}, not what {metadata.FILE} says"
                )
            self._located[where] = data
        return self._located[where]

    def _config_folder(self, path: Path, template: Path | None) -> Path:
        if template:
            return Path(template)
        for folder in (path / HF_FOLDER, self.path / HF_FOLDER, self.path.parent / HF_FOLDER):
            if (folder / "config.json").is_file():
                return folder
        raise ValueError(
            f"{path} has no folder {HF_FOLDER} with the model's config.json; name a Hugging Face folder of "
            "the same model with --template"
        )

    def _head(self, table) -> Head:
        if "output_layer.bias" in table.state_dict_metadata:
            return "token"
        output = table.state_dict_metadata.get("output_layer.weight")
        return "sequence" if isinstance(output, TensorStorageMetadata) and output.size[:1] == (1,) else "lm"

    def _stored(self, table) -> tuple[dict[str, list[StoredChunk]], dict[str, torch.dtype]]:
        """Return chunks and dtype by key.

        Keys of single layers and of halves of `linear_fc1` become boxes of the combined key.
        """
        chunks: dict[str, dict[tuple, StoredChunk]] = defaultdict(dict)
        dtypes: dict[str, torch.dtype] = {}
        for stored_key, entry in table.state_dict_metadata.items():
            if TRAINING_STATE.match(stored_key):
                self.training_keys.append(stored_key)
                continue
            if isinstance(entry, BytesStorageMetadata):
                if stored_key != COMMON_STATE and not EXTRA_STATE.fullmatch(stored_key):
                    self.extra_keys.append(stored_key)
                continue
            key, layer, row = self._canonical(stored_key)
            if key not in self.tensors:
                self.extra_keys.append(stored_key)
                continue
            tensor = self.tensors[key]
            self._check_shape(
                stored_key,
                tensor,
                tuple(entry.size),
                single=layer is not None,
                half=stored_key != key and bool(_GATE_OR_UP.fullmatch(stored_key)),
            )
            if (
                dtypes.setdefault(key, entry.properties.dtype) != entry.properties.dtype
                or entry.properties.dtype not in chunk._STORAGES.values()
            ):
                raise ValueError(
                    f"{stored_key} in {self.path} is {entry.properties.dtype}; all layers of a floating "
                    "tensor have one dtype, save the checkpoint again"
                )
            for part in entry.chunks:
                info = table.storage_data.get(metadata.MetadataIndex(stored_key, part.offsets))
                if info is None or info.transform_descriptors:
                    raise ValueError(
                        f"{self.path / metadata.FILE} does not say where {stored_key} at "
                        f"{list(part.offsets)} lies, or it is compressed; save the checkpoint again"
                    )
                layers, rows, cols = box = _box(tensor, tuple(part.offsets), tuple(part.sizes), layer, row)
                stored = StoredChunk(layers, rows, cols, info.relative_path, info.offset, info.length)
                chunks[key].setdefault(box, stored)
        return {key: list(boxes.values()) for key, boxes in chunks.items()}, dtypes

    def _canonical(self, stored_key: str) -> tuple[str, int | None, int]:
        """Return the model's key, the layer if the key is of a single one, and the first row of its part."""
        match = LAYER.fullmatch(stored_key)
        key, layer = (f"decoder.layers.{match[2]}", int(match[1])) if match else (stored_key, None)
        half = _GATE_OR_UP.fullmatch(key)
        return (half[1], layer, self.arch.intermediate_size * (half[2] == "v")) if half else (key, layer, 0)

    def _check_shape(
        self, key: str, tensor: GlobalTensor, shape: tuple[int, ...], *, single: bool, half: bool
    ) -> None:
        wanted = tensor.shape if single else tensor.full_shape
        axis = 0 if single or not tensor.stacked else 1
        rows = tensor.rows // 2 if half else tensor.rows
        padded = tensor.key in VOCAB_KEYS and shape[:1] >= (tensor.needed_rows,) and shape[1:] == wanted[1:]
        if not padded and shape != (*wanted[:axis], rows, *wanted[axis + 1 :]):
            raise ValueError(
                f"{key} in {self.path} is {list(shape)} and {self.config_folder / 'config.json'} describes "
                f"{list(wanted)}; give the config.json of this model"
            )

    def _check(self, table) -> None:
        """Check that the chunks cover the model once and that every chunk's file is long enough."""
        for key, tensor in self.tensors.items():
            boxes = self.chunks.get(key, [])
            needed = tensor.layers * tensor.needed_rows * tensor.cols
            stored_elements = sum(
                (b.layers[1] - b.layers[0])
                * max(0, min(b.rows[1], tensor.needed_rows) - b.rows[0])
                * (b.cols[1] - b.cols[0])
                for b in boxes
            )
            if stored_elements != needed:
                raise ValueError(
                    f"{key} in {self.path} has {stored_elements} of the model's {needed} elements; the"
                    " checkpoint is incomplete or of another model"
                )
            for layer in range(tensor.layers):
                rects = tuple((*b.rows, *b.cols) for b in boxes if b.layers[0] <= layer < b.layers[1])
                whole = (0, max((rect[1] for rect in rects), default=tensor.rows), 0, tensor.cols)
                left = uncovered(whole, rects)
                if left is None or any(rect[0] < tensor.needed_rows for rect in left):
                    raise ValueError(
                        f"chunks of {key} in {self.path} overlap or leave rows of layer {layer} open; save "
                        "the checkpoint again"
                    )
        ends: dict[str, int] = defaultdict(int)
        for info in table.storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = self.path / name
            if not path.resolve().is_relative_to(self.path.resolve()) or not path.is_file():
                raise ValueError(
                    f"{path} does not exist and {metadata.FILE} names it; copy it again from the "
                    "checkpoint's source"
                )
            if path.stat().st_size < end:
                raise ValueError(
                    f"{path} is truncated: it has {path.stat().st_size} bytes and {metadata.FILE} describes "
                    f"{end}; copy it again from the checkpoint's source"
                )


def _box(
    tensor: GlobalTensor, offsets: tuple[int, ...], sizes: tuple[int, ...], layer: int | None, row: int
) -> tuple[tuple[int, int], ...]:
    """Return a chunk as intervals of layers, rows and columns."""
    if layer is None and tensor.stacked:
        layers, offsets, sizes = (offsets[0], offsets[0] + sizes[0]), offsets[1:], sizes[1:]
    else:
        layers = (layer or 0, (layer or 0) + 1)
    cols = (offsets[1], offsets[1] + sizes[1]) if len(sizes) == 2 else (0, 1)
    return layers, (row + offsets[0], row + offsets[0] + sizes[0]), cols
