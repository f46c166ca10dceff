"""Several files that are one checkpoint are one item, and what only looks like them is not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch

from ckptfix.reading.opening import open_file
from ckptfix.zoo.items.listing import list_zoo
from ckptfix.zoo.places import Entry, Place
from ckptfix.zoo.places.local import LocalPlace
from tests.reading.folders.ranks.genuine import unpacked as unpack_sample
from tests.zoo.listings import FILE, FOLDER, OTHER, SHARDED, fill, index, kinds, parts, pickled, the_folder, weights


@pytest.fixture
def dcp(corpus: Path) -> Path:
    return corpus / "modern" / "dcp_dir"


@pytest.fixture
def unpacked(corpus: Path) -> Path:
    return corpus / "derived" / "exploded_folder_1.6.0"


def test_an_index_takes_its_shards(tmp_path: Path):
    place = fill(tmp_path, SHARDED)
    assert kinds(place) == {"llm/config.json": OTHER, "llm/model.safetensors.index.json": FOLDER}
    item = the_folder(place)
    assert parts(item) == sorted(set(SHARDED) - {"llm/config.json"})
    assert item.size == sum(len(raw) for name, raw in SHARDED.items() if name != "llm/config.json")
    assert list(open_file(str(tmp_path / item.name)).entries) == ["a", "b"]


def test_an_index_with_missing_shards_and_one_alone(tmp_path: Path):
    place = fill(tmp_path, {name: raw for name, raw in SHARDED.items() if "00002-of-00002" not in name})
    assert len(the_folder(place).parts) == 2
    alone = fill(tmp_path / "alone", {"x.index.json": SHARDED["llm/model.safetensors.index.json"]})
    assert parts(the_folder(alone)) == ["x.index.json"]


def test_an_index_of_another_name_and_what_is_none(tmp_path: Path):
    renamed = {name.replace("model.safetensors.index", "weights"): raw for name, raw in SHARDED.items()}
    assert the_folder(fill(tmp_path / "a", renamed)).name == "llm/weights.json"
    place = fill(tmp_path / "b", {"search.index.json": b"[1, 2]", "other.index.json": b'{"weight_map": 3}'})
    assert set(kinds(place).values()) == {OTHER}


def test_two_indexes_in_one_folder(tmp_path: Path):
    other = {
        "llm/pytorch_model.bin.index.json": index(a="pytorch_model-00001-of-00001.bin"),
        "llm/pytorch_model-00001-of-00001.bin": pickled({"a": torch.ones(2)}),
    }
    items = list_zoo(fill(tmp_path, SHARDED | other))
    assert [(item.name, len(item.parts)) for item in items if item.kind is FOLDER] == [
        ("llm/model.safetensors.index.json", 3),
        ("llm/pytorch_model.bin.index.json", 2),
    ]
    assert [item.name for item in items if item.kind is FILE] == []


def test_an_index_that_leads_out_takes_nothing_from_there(tmp_path: Path):
    fill(tmp_path, {"outside.bin": b"secret"})
    evil = index(a="../../outside.bin", b="/etc/passwd", c="../other/model.bin")
    place = fill(tmp_path / "zoo", {"a/x.index.json": evil, "other/model.bin": weights()})
    found = {item.name: parts(item) for item in list_zoo(place)}
    assert found == {"a/x.index.json": ["a/x.index.json", "other/model.bin"]}
    # Whoever opens it says why not.
    with pytest.raises(Exception, match="leads out of the folder"):
        open_file(str(tmp_path / "zoo/a/x.index.json"))


def test_numbered_shards_without_an_index_are_their_folder(tmp_path: Path):
    place = fill(tmp_path, {name: raw for name, raw in SHARDED.items() if "index" not in name})
    assert kinds(place) == {"llm": FOLDER, "llm/config.json": OTHER}
    assert list(open_file(str(tmp_path / the_folder(place).name)).entries) == ["a", "b"]


def test_numbered_files_of_a_data_set_are_no_checkpoint(tmp_path: Path):
    place = fill(tmp_path, {f"train-0000{n}-of-00003.parquet": b"PAR1 rows" for n in range(3)})
    assert set(kinds(place).values()) == {OTHER}


def test_a_folder_of_torch_distributed(tmp_path: Path, dcp: Path):
    (tmp_path / "zoo/step_10").mkdir(parents=True)
    for part in dcp.iterdir():  # without their modes: the corpus may be read-only
        shutil.copyfile(part, tmp_path / "zoo/step_10" / part.name)
    (tmp_path / "zoo/step_10/notes.txt").write_text("of the run")
    place = LocalPlace(str(tmp_path / "zoo"))
    assert kinds(place) == {"step_10": FOLDER, "step_10/notes.txt": OTHER}
    item = the_folder(place)
    assert parts(item) == sorted(f"step_10/{path.name}" for path in dcp.iterdir())
    assert open_file(str(tmp_path / "zoo" / item.name)).format == "dcp"


def test_a_hidden_file_called_metadata_is_no_checkpoint(tmp_path: Path):
    assert kinds(fill(tmp_path, {"a/.metadata": b"of another program"})) == {"a/.metadata": OTHER}


def test_an_unpacked_torch_file_is_its_folder(tmp_path: Path, unpacked: Path):
    shutil.copytree(unpacked, tmp_path / "zoo/net")
    item = the_folder(LocalPlace(str(tmp_path / "zoo")))
    assert len(list_zoo(LocalPlace(str(tmp_path / "zoo")))) == 1
    assert len(item.parts) == sum(path.is_file() for path in unpacked.rglob("*"))
    assert open_file(str(tmp_path / "zoo" / item.name)).specs


def test_a_data_set_with_a_pickle_is_not_unpacked_torch(tmp_path: Path):
    place = fill(tmp_path, {"cifar/data.pkl": b"\x80\x04}.", "cifar/data/0": b"x", "cifar/version": b"3\n"})
    assert kinds(place) == {"cifar/data.pkl": FILE, "cifar/data/0": OTHER, "cifar/version": OTHER}


def test_a_zoo_that_is_one_checkpoint(dcp: Path):
    (item,) = list_zoo(LocalPlace(str(dcp)))
    assert (item.name, item.kind) == (".", FOLDER)
    assert open_file(str(dcp / item.name)).format == "dcp"


def test_shards_of_ranks_are_their_folder(tmp_path: Path):
    names = [f"fsdp/shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    item = the_folder(fill(tmp_path, dict.fromkeys(names, weights())))
    assert (item.name, parts(item)) == ("fsdp", names)


def test_the_stamp_of_a_folder_changes_with_each_part(tmp_path: Path):
    place = fill(tmp_path, SHARDED)
    before = the_folder(place).stamp
    assert the_folder(place).stamp == before
    shard = tmp_path / "llm/model-00002-of-00002.safetensors"
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    assert the_folder(place).stamp != before


@pytest.mark.slow
def test_many_sharded_checkpoints_in_one_folder_take_no_more_time_each():
    """A look at the whole folder for each of them would."""

    @dataclass
    class Flat:
        count: int
        name: str = "zoo"
        root: Path = Path("zoo")

        def walk(self) -> Iterator[Entry]:
            for number in range(self.count):
                yield from (Entry(f"m{number:04}-0000{shard}-of-00002.safetensors", 5, "s") for shard in (1, 2))
                yield Entry(f"m{number:04}.safetensors.index.json", 99, "s")

        def head(self, name: str, count: int) -> bytes:
            return index(a=f"{name[:5]}-00001-of-00002.safetensors", b=f"{name[:5]}-00002-of-00002.safetensors")

        def where(self, name: str) -> str:
            return name

    def took(count: int) -> float:
        began = time.process_time()
        items = list_zoo(cast(Place, Flat(count)))
        assert [len(item.parts) for item in items] == [3] * count
        return time.process_time() - began

    took(10)
    assert any(took(1600) / took(400) < 8 for _ in range(3))


@pytest.mark.parametrize(
    ("sample", "folder", "count"),
    [
        ("zero2_w3_fp32_g1", "saved/global_step2", 4),
        ("zero3_w2_fp32_g1", "saved/global_step2", 4),
        ("fsdp1_sharded_w4", "saved", 4),
        ("fsdp2tp_w4", "saved", 4),
        ("megatron_tp2pp2", "saved/iter_0000001", 4),
    ],
)
def test_ranks_are_one_item(tmp_path: Path, sample: str, folder: str, count: int):
    unpack_sample(sample, tmp_path)
    (tmp_path / "truth.pt").unlink()
    item = the_folder(LocalPlace(str(tmp_path)))
    assert (item.name, len(item.parts)) == (folder, count)
    assert open_file(str(tmp_path / item.name)).specs


def test_files_that_are_only_numbered_by_rank_are_not_one(tmp_path: Path):
    place = fill(tmp_path, {f"lora_rank{rank}.pt": weights() for rank in (4, 8, 16)})
    assert set(kinds(place).values()) == {FILE}


def test_the_shards_of_llama_are_one_item(tmp_path: Path):
    place = fill(tmp_path, {"consolidated.00.pth": weights(), "consolidated.01.pth": weights(), "params.json": b"{}"})
    assert len(the_folder(place).parts) == 3
