"""A small whole checkpoint, damaged in hundreds of ways: named or harmless; no run dies or hangs.

Both count: a damaged file, and a manifest rewritten with a valid digest around wrong content.
"""

import copy
import json
import math
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallel.checkpoint import folders as checkpoints
from parallel.checkpoint import random_state, resume, sealed
from parallel.checkpoint import training_state as checkpoint
from parallel.checkpoint.folders import MANIFEST, CheckpointError
from tests.damage import changed_keys, spoiled_files
from tests.one_rank import ONE_RANK, world_of_one
from verl_megatron.algorithms.kl import AdaptiveKL
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.manifest import changed_settings, manifest_problem, recorded_problem, samples_problem
from verl_megatron.observe.metrics import Sums

NUMBERS = dict(
    max_lr=1e-4, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=9, start_wd=0.1, end_wd=0.1, wd_incr_steps=0
)
SCHEDULER = NUMBERS | {"num_steps": 7, "lr_decay_style": "cosine", "wd_incr_style": "constant"}
CURSOR = {"epoch": 1, "position": 3, "num_prompts": 5, "seed": 1, "shuffle": 1}
MANIFEST_OF_A_RUN = {
    "layouts": {"actor": "tp1 on ranks [0]"},
    "models": {"actor": {"hidden_size": 64, "rope_theta": 1e4}},
    "versions": {"torch": "2"},
    "settings": {"run": {"seed": 1}, "algorithm": {"kl_coef": 0.1}},
    "before": {"validation/accuracy": 0.25},
    "kl": {"coef": 0.125},
    "cursor": CURSOR,
    "roles": {"actor": {"optimizer_step": 7, "scheduler": SCHEDULER}},
}


@pytest.fixture(scope="module")
def world():
    with world_of_one() as world:
        yield world


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory) -> Path:
    """Checkpoints of steps 1 and 2 with weights, random states, samples and recorded numbers."""
    folder = tmp_path_factory.mktemp("whole")
    for step in (1, 2):
        tensors = {
            "weight": torch.arange(32.0) * step,
            "optimizer.state.exp_avg.weight": torch.ones(32) / step,
        }

        def write(scratch: Path, tensors: dict = tensors) -> None:
            writer = checkpoint._Writer(scratch / "actor", sync_files=False)
            torch.distributed.checkpoint.save(tensors, storage_writer=writer)

        manifest = copy.deepcopy(MANIFEST_OF_A_RUN) | {
            "validation": {"step": step, "validation/accuracy": step / 4}
        }
        path = checkpoints.save(
            folder,
            ONE_RANK,
            step=step,
            manifest=manifest,
            rank_state={"rng": random_state.rng_state()},
            write=write,
        )
        batch = RolloutBatch.from_lists([0, 1], [[1], [2]], [[3], [4]], [[-0.5], [-0.25]])
        batch.group_id, batch.policy_version = torch.tensor([0, 1]), torch.tensor([0, 0])
        sums = {"totals": {"loss": (1.0, 2.0)}, "maxima": {}}
        own = {
            "made_with": {"seed": 1},
            "batch": batch.tensors(),
            "sums": sums,
            "reshard_bytes": 5,
            "seconds": {"rollout": 1.0},
            "cursor": CURSOR,
        }
        checkpoints.attach(path, "samples", own, ONE_RANK)
        checkpoints.write_record(path, "recorded", {"policy/loss": 0.5, "rate": math.nan})
    return folder


def load(folder: Path, said: list[str]) -> tuple[str, dict[str, str]]:
    """What a run would go on with: the checkpoint's name, and its parts as text."""
    path, manifest = resume.newest_sound(folder, ONE_RANK, say=said.append, check=manifest_problem)
    resume.refuse_other_models(path, manifest, MANIFEST_OF_A_RUN["models"])
    changed_settings(manifest["settings"], MANIFEST_OF_A_RUN["settings"])
    tensors = {"weight": torch.zeros(32), "optimizer.state.exp_avg.weight": torch.zeros(32)}
    torch.distributed.checkpoint.load(tensors, checkpoint_id=path / "actor")
    random_state.set_rng_state(resume.read_rank_state(path, 0)["rng"])
    PromptCursor(num_prompts=5, seed=1).load_state_dict(manifest["cursor"])
    AdaptiveKL(0.1, 0.1, 10).load_state_dict(manifest["kl"])
    samples = resume.read_attachment(path, "samples", ONE_RANK, say=said.append, check=samples_problem)
    if samples is not None:
        RolloutBatch(**samples[0][0]["batch"]), Sums.from_state(samples[0][0]["sums"])
    recorded = resume.read_record(path, "recorded", ONE_RANK, say=said.append, check=recorded_problem)
    parts = {
        "manifest": {**manifest, "files": ...},
        "tensors": tensors,
        "rng": resume.read_rank_state(path, 0),
        "samples": samples,
        "recorded": recorded,
    }
    return path.name, {name: repr(part) for name, part in parts.items()}


# ---- trials ----------------------------------------------------------------------------------------------


def trial(whole: Path, folder: Path, spoil: Callable[[Path], None]) -> tuple[str, dict, list[str]]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "step_1").symlink_to(whole / "step_1")
    shutil.copytree(whole / "step_2", folder / "step_2")
    spoil(folder / "step_2")
    said = []
    return *load(folder, said), said


@pytest.mark.timeout(120)
def test_a_spoiled_file_is_told_by_name_or_changes_nothing(whole, tmp_path):
    sound, older = (
        trial(whole, tmp_path / "run", lambda path: None)[1],
        trial(whole, tmp_path / "run", lambda path: shutil.rmtree(path))[1],
    )
    trials = [*spoiled_files(whole / "step_2"), *changed_keys(whole / "step_2", random.Random(1), seal=False)]
    assert len(trials) > 300
    for what, spoil in trials:
        name, parts, said = trial(whole, tmp_path / "run", spoil)
        if name == "step_1":
            assert len(said) == 1 and "step_2 is damaged and not used: " in said[0] and parts == older, what
            continue
        apart = {part for part in parts if parts[part] != sound[part]}
        assert apart <= {"samples", "recorded"} and all(parts[part] == "None" for part in apart), what
        assert said or not apart or what.startswith("remove of"), f"{what}: nothing was said"
        assert all(line.startswith("warning: ") and len(line) < 1000 and "\n" not in line for line in said), (
            what
        )


@pytest.mark.timeout(120)
def test_what_was_written_anew_with_a_digest_has_to_make_sense(whole, tmp_path):
    """Numbers may have been changed; anything else is passed over, or refused in a sentence."""
    counts = {"passed over": 0, "refused": 0, "used": 0}
    for what, spoil in changed_keys(whole / "step_2", random.Random(2), seal=True):
        try:
            name, parts, said = trial(whole, tmp_path / "run", spoil)
        except CheckpointError as error:  # of another model
            assert "models.actor" in what and "\n" not in str(error), what
            counts["refused"] += 1
        except ValueError as error:  # of other data
            assert "cursor" in what and "the saved data position has" in str(error), what
            counts["refused"] += 1
        else:
            counts["passed over" if said else "used"] += 1
    assert counts["passed over"] > 100, counts


def key_of_another_checkpoint(path: Path) -> None:
    for name in ("samples.json", "samples_0.pt", "recorded.json"):
        shutil.copy(path.parent / "step_1" / name, path / name)


def test_what_was_added_to_another_checkpoint_is_not_used(whole, tmp_path):
    name, parts, said = trial(whole, tmp_path / "run", key_of_another_checkpoint)
    assert name == "step_2" and parts["samples"] == parts["recorded"] == "None"
    assert len(said) == 2 and all(".json belongs to another checkpoint" in line for line in said)


def doubled(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"kl": {', '"kl": {"coef": 5}, "kl": {', 1))


def another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent / "step_1", path)


def no_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (doubled, "a key is there twice"),
        (another_step, "is of step 1, not of the folder's"),
        (no_folder, "Not a directory"),
    ],
)
def test_a_manifest_is_of_its_folder(whole, tmp_path, spoil, why):
    name, _, said = trial(whole, tmp_path / "run", spoil)
    assert name == "step_1" and len(said) == 1 and why in said[0]


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def hostile_state(path: Path) -> None:
    torch.save({"rng": Harmful()}, path / "rank_0.pt")


def hostile_table(path: Path) -> None:
    (path / "actor/.metadata").write_bytes(pickle.dumps(Harmful()))


def table_of_objects(path: Path) -> None:
    from torch.distributed.checkpoint import metadata

    write_table(path, {"weight": metadata.BytesStorageMetadata()}, {})


def table_outside(path: Path) -> None:
    from torch.distributed.checkpoint import filesystem, metadata

    where = {
        metadata.MetadataIndex("weight"): filesystem._StorageInfo("../../step_1/actor/__0_0.distcp", 0, 9)
    }
    write_table(path, {}, where)


def table_of_an_unlisted_file(path: Path) -> None:
    from torch.distributed.checkpoint import filesystem, metadata

    write_table(path, {}, {metadata.MetadataIndex("weight"): filesystem._StorageInfo("other.distcp", 0, 9)})


def write_table(path: Path, state: dict, where: dict) -> None:
    from torch.distributed.checkpoint import metadata

    (path / "actor/.metadata").write_bytes(pickle.dumps(metadata.Metadata(state, storage_data=where)))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (hostile_state, r"rank_0.pt is refused: .*posix.mkdir"),
        (hostile_table, r"\.metadata is not the table of a distributed checkpoint \(it names posix.mkdir"),
        (table_of_objects, r"\.metadata is refused: it holds objects"),
        (table_outside, "lies outside the folder"),
        (table_of_an_unlisted_file, "names other.distcp, which manifest.json does not list"),
    ],
)
def test_a_hostile_pickle_with_a_right_digest_is_passed_over(whole, tmp_path, spoil, why):
    def spoil_and_seal(path: Path) -> None:
        spoil(path)
        content = json.loads((path / MANIFEST).read_text())
        content["files"] = {name: sealed.described(path / name) for name in content["files"]}
        del content[sealed.SEAL]
        (path / MANIFEST).write_text(sealed.sealed(content))

    name, _, said = trial(whole, tmp_path / "run", spoil_and_seal)
    assert name == "step_1" and len(said) == 1
    assert re.search(why, said[0]), said
    assert not Path("harmed").exists()
