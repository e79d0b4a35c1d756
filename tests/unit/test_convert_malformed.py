"""Checkpoints whose metadata or chunks are malformed or malicious: refused by name, and no code runs."""

import pickle
import random
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from parallel.checkpoint.metadata import read_metadata
from parallel.convert.megatron_checkpoint import MegatronCheckpoint
from tests.converted import assert_same, rewrite, to_hf


class Evil:
    def __reduce__(self):
        return print, ("constructed",)


def test_a_pickle_of_anything_else_is_not_loaded(mcore, capsys):
    (mcore / "release" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"\.metadata is not the table .* builtins.print"):
        MegatronCheckpoint(mcore)
    assert capsys.readouterr().out == ""


def test_a_chunk_of_anything_else_is_not_loaded(mcore, tmp_path, capsys):
    table = read_metadata(mcore / "release")
    info = next(
        info for index, info in table.storage_data.items() if index.fqn == "decoder.final_layernorm.weight"
    )
    torch.save(Evil(), mcore / "release" / "evil.distcp")
    length = (mcore / "release" / "evil.distcp").stat().st_size

    def change(table):
        for index in table.storage_data:
            if index.fqn == "decoder.final_layernorm.weight":
                table.storage_data[index] = type(info)("evil.distcp", 0, length)

    rewrite(mcore, change)
    with pytest.raises(ValueError, match=r"evil.distcp has no tensor .* __builtin__.print"):
        to_hf(mcore, tmp_path / "back")
    assert capsys.readouterr().out == ""


ODD = (
    None,
    True,
    -1,
    2**62,
    10**30,
    0.5,
    "text",
    "../../other",
    "/dev/zero",
    (),
    (-1,),
    (1, 2, 3, 4),
    [3],
    {},
    torch.Size([2**40, 2**40]),
    torch.float8_e4m3fn,
)
FIELDS = {
    "table": ("size", "chunks", "properties"),
    "chunk": ("offsets", "sizes"),
    "properties": ("dtype",),
    "info": ("relative_path", "offset", "length"),
}


def spoil_table(table, chance: random.Random) -> None:
    """Put another value into one record of the table."""
    entry = chance.choice(
        [entry for entry in table.state_dict_metadata.values() if not isinstance(entry, BytesStorageMetadata)]
    )
    part, record = chance.choice(
        [
            ("table", entry),
            ("chunk", entry.chunks[0]),
            ("properties", entry.properties),
            ("info", chance.choice([*table.storage_data.values()])),
        ]
    )
    object.__setattr__(record, chance.choice(FIELDS[part]), chance.choice(ODD))


def test_a_spoiled_table_is_refused_in_a_sentence_or_still_right(converted, tmp_path):
    shutil.copytree(converted / "mcore", tmp_path / "mcore")
    path, refused = tmp_path / "mcore/release/.metadata", 0
    whole = path.read_bytes()
    for number in range(150):
        path.write_bytes(whole)
        chance = random.Random(number)
        rewrite(tmp_path / "mcore", lambda table, chance=chance: spoil_table(table, chance))
        try:
            to_hf(tmp_path / "mcore", tmp_path / f"back{number}")
            assert_same(converted / "hf", tmp_path / f"back{number}")
        except ValueError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error) and len(str(error)) < 800, number
            refused += 1
        shutil.rmtree(tmp_path / f"back{number}.partial", ignore_errors=True)
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "holds no JSON object"),
        (b"\xff", "cannot be read"),
        (b'{"sharded_backend": 5}', "names the format '5'"),
    ],
)
def test_a_description_that_is_none_is_refused(mcore, content, why):
    (mcore / "release/metadata.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"metadata.json.*{why}"):
        MegatronCheckpoint(mcore)


def test_pickles_of_megatrons_older_format_are_named(tmp_path):
    """Whatever the tracker file holds."""
    (tmp_path / "iter_0000010/mp_rank_00").mkdir(parents=True)
    torch.save(Evil(), tmp_path / "iter_0000010/mp_rank_00/model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(
        ValueError,
        match=r"mp_rank_00/model_optim_rng.pt is a pickle of Megatron-LM's older format, .*--ckpt-format",
    ):
        MegatronCheckpoint(tmp_path)
    for text in (b"\xff\xfe", b"9" * 10_000, "\u00b2".encode(), b""):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text)
        with pytest.raises(ValueError, match="the checkpoint is incomplete, copy it again"):
            MegatronCheckpoint(tmp_path)
