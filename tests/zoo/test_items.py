"""What is in a zoo: each file in one item."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import tarfile
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save

from ckptfix.bytes.transfers import ForbiddenError
from ckptfix.errors import UnreadableError
from ckptfix.reading.opening import open_file
from ckptfix.zoo.items import ABSENT, HEAD, Item, Looks, by_bytes, by_name, is_surely_other, list_zoo, read_list
from ckptfix.zoo.places import Entry, LocalPlace, Place, open_place
from tests.checks import bytes_of
from tests.cli.programs import run_here
from tests.reading.folders.ranks.genuine import unpacked as unpack_sample
from tests.zoo.made_items import FILE, FOLDER, OTHER, SHARDED, fill, index, kinds, parts, pickled, the_folder, weights


def test_an_empty_zoo(tmp_path: Path):
    assert list_zoo(LocalPlace(str(tmp_path))) == []


def test_files_are_recognised_by_name_or_by_bytes(tmp_path: Path):
    place = fill(
        tmp_path,
        {
            "a.pth": pickled({"w": torch.ones(2)}),
            "page.pth": b"<html>not found</html>",
            "weights": pickled({"w": torch.ones(2)}),
            "notes.txt": pickled({"w": torch.ones(2)}),
            "README.md": b"# Zoo",
            "vocabulary.pkl": b"\x80\x04}.",
            "empty.pth": b"",
            "empty.txt": b"",
            ".hidden.pth": weights(),
        },
    )
    items = {item.name: (item.kind, item.is_doubtful) for item in list_zoo(place)}
    assert items == {
        "a.pth": (FILE, False),
        "page.pth": (FILE, False),
        "weights": (FILE, False),
        "notes.txt": (FILE, False),
        "README.md": (OTHER, False),
        "vocabulary.pkl": (FILE, True),
        "empty.pth": (FILE, False),
        "empty.txt": (OTHER, False),
        ".hidden.pth": (FILE, False),
    }


def test_an_item_has_what_its_entry_says(tmp_path: Path):
    place = fill(tmp_path, {"a.pth": b"12345"})
    entry = place.entry("a.pth")
    assert entry is not None
    assert list_zoo(place) == [Item("a.pth", 5, entry.stamp, FILE)]


def test_what_a_repository_keeps_is_not_touched(tmp_path: Path):
    place = fill(tmp_path, {".git/lfs/objects/ab/cd": weights(), "a/.git/x.pth": weights(), "git/x.pth": weights()})
    assert kinds(place) == {".git/lfs/objects/ab/cd": OTHER, "a/.git/x.pth": OTHER, "git/x.pth": FILE}


def test_a_cache_of_the_hub_is_listed_by_its_true_names(tmp_path: Path):
    hub = "hub/models--org--net"
    place = fill(tmp_path, {f"{hub}/blobs/0123": weights(), f"{hub}/refs/main": b"rev"})
    (tmp_path / hub / "snapshots/rev").mkdir(parents=True)
    (tmp_path / hub / "snapshots/rev/model.safetensors").symlink_to("../../blobs/0123")
    items = {item.name.removeprefix(f"{hub}/"): item for item in list_zoo(place)}
    assert items["snapshots/rev/model.safetensors"].kind is FILE
    assert items["blobs/0123"].kind is OTHER
    assert "which is in snapshots/ under its real name" in str(items["blobs/0123"].fault)


def test_faults_of_the_listing(tmp_path: Path):
    place = fill(tmp_path, {"real.pth": weights()})
    (tmp_path / "broken.pth").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    items = {item.name: (item.kind, item.fault is not None) for item in list_zoo(place)}
    assert items == {"real.pth": (FILE, False), "broken.pth": (FILE, True), "pipe": (OTHER, True)}


def test_a_file_that_cannot_be_read_has_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = fill(tmp_path, {"closed": weights(), "open": weights()})
    head = LocalPlace.head

    def refusing(self: LocalPlace, name: str, count: int) -> bytes:
        if name == "closed":
            raise ForbiddenError(f"{self.where(name)}: cannot be read: Permission denied; get the right to it")
        return head(self, name, count)

    monkeypatch.setattr(LocalPlace, "head", refusing)
    items = {item.name: (item.kind, item.fault) for item in list_zoo(place)}
    assert items == {
        "closed": (FILE, "cannot be read: Permission denied; get the right to it"),
        "open": (FILE, None),
    }


def test_shards_whose_index_cannot_be_read_are_not_another_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alone = {"llm/ema-00001-of-00001.safetensors": weights()}
    place = fill(tmp_path, {**SHARDED, **alone})
    whole = the_folder(place)

    def refusing(self: LocalPlace, name: str, count: int) -> bytes:
        raise ForbiddenError(f"{self.where(name)}: cannot be read: Permission denied; get the right to it")

    monkeypatch.setattr(LocalPlace, "head", refusing)
    items = {item.name: item for item in list_zoo(place)}
    assert items.keys() == {whole.name, *alone, "llm/config.json"}
    assert items[whole.name] == replace(whole, fault="cannot be read: Permission denied; get the right to it")


ZOO = {name: weights() for name in ("a.pth", "b.pt", "sub/a.pth", "sub/deep/c.pth")} | SHARDED | {"sub/x.txt": b"x"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*.pth"], ["a.pth", "sub/a.pth", "sub/deep/c.pth"]),
        (["/*.pth"], ["a.pth"]),
        (["sub/*.pth", "b.pt"], ["b.pt", "sub/a.pth"]),
        (["sub/"], ["sub/a.pth", "sub/deep/c.pth", "sub/x.txt"]),
        (["*-00002-of-*"], ["llm/model.safetensors.index.json"]),
        (["*.index.json"], ["llm/model.safetensors.index.json"]),
        (["nothing"], []),
    ],
)
def test_patterns_choose(tmp_path: Path, patterns: list[str], expected: list[str]):
    items = list_zoo(fill(tmp_path, ZOO), patterns)
    assert [item.name for item in items] == expected
    assert all(len(item.parts) == 3 for item in items if item.kind is FOLDER)


def test_a_list_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = fill(tmp_path, ZOO)
    monkeypatch.chdir(tmp_path)
    listed = ["./a.pth", f"{tmp_path}/b.pt", "sub", "llm/model-00001-of-00002.safetensors", "gone.pth", "gone.pth"]
    items = {item.name: item for item in list_zoo(place, (), listed)}
    assert list(items) == sorted(
        ["a.pth", "b.pt", "gone.pth", "llm/model.safetensors.index.json", "sub/a.pth", "sub/deep/c.pth", "sub/x.txt"]
    )
    assert {name: item.fault for name, item in items.items() if item.fault} == {"gone.pth": ABSENT}
    assert [item.name for item in list_zoo(place, ["*.pth"], ["sub"])] == ["sub/a.pth", "sub/deep/c.pth"]


def test_lists_have_a_name_in_a_line_or_before_a_nul():
    assert read_list("a\nb c\r\n\n d\n") == ["a", "b c", " d"]
    assert read_list("a\nb\0c\0") == ["a\nb", "c"]
    assert read_list("a\u2028b\x0bc") == ["a\u2028b\x0bc"]


def test_a_remote_zoo_is_the_same(tmp_path: Path, memory: str):
    files = ZOO | {"weights": pickled({"w": torch.ones(2)}), "table.csv": b"1,2", "empty": b""}
    local, remote = fill(tmp_path, files), open_place(memory)
    for name in files:
        remote.put(tmp_path / name, name)
    plain = [(item.name, item.kind, item.size, parts(item)) for item in list_zoo(local)]
    assert [(item.name, item.kind, item.size, parts(item)) for item in list_zoo(remote)] == plain


def test_few_requests_tell_what_is_on_s3(bucket: tuple[Any, str], tmp_path: Path):
    """One listing; the index whole; one range of each file whose name says nothing."""
    server, url = bucket
    files = SHARDED | {"a.pth": weights(), "weights": weights(), "data.csv": b"1", "empty": b"", "README": b"text"}
    place = open_place(url)
    fill(tmp_path, files)
    for name in files:
        place.put(tmp_path / name, name)
    server.requests.clear()
    assert kinds(place)["weights"] is FILE
    path = url.removeprefix("s3:/")
    assert sorted(server.requests) == sorted(
        f"GET {path}{name}" for name in ("", "/weights", "/README", "/llm/model.safetensors.index.json")
    )


@pytest.mark.slow
def test_ten_thousand_files_take_little_more_than_a_look_at_each(tmp_path: Path):
    def look() -> int:
        """What there is to do at the least: each file is found, and read where its name says nothing."""
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
        return sum(path.stat().st_size >= 0 and (bool(path.suffix) or path.read_bytes() != b"") for path in files)

    def took(work: Callable[[], int]) -> float:
        began = time.process_time()
        assert work() == 10_000
        return time.process_time() - began

    for folder in range(100):
        (tmp_path / f"{folder:02}").mkdir()
        for number in range(50):
            (tmp_path / f"{folder:02}/{number}.pth").write_bytes(b"x")
            (tmp_path / f"{folder:02}/{number}").write_bytes(b"no suffix")
    place = LocalPlace(str(tmp_path))
    # The two take about the same; how long that is depends on the machine.
    assert any(took(lambda: len(list_zoo(place))) / took(look) < 4 for _ in range(3))


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


def test_the_files_of_an_optimizer_with_an_index_are_not_checkpoints(tmp_path: Path):
    """Files as ColossalAI writes them."""
    file, groups = "pytorch_optim-00001.bin", "pytorch_optim_group.bin"
    described = {"metadata": {"param_groups": groups, "total_size": 8}, "weight_map": {"0": file}}
    state = {0: {"exp_avg": torch.ones(2)}}
    files = {file: pickled(state), groups: pickled([]), "pytorch_optim.bin.index.json": json.dumps(described).encode()}
    assert set(kinds(fill(tmp_path, files)).values()) == {OTHER}
    with pytest.raises(UnreadableError, match=r"the state of an optimizer .* name the folder of its model"):
        open_file(str(tmp_path))


def test_arrays_of_zarr_are_one_folder(tmp_path: Path):
    names = ["w/common.pt", "w/metadata.json", "w/decoder.weight/.zarray", "w/decoder.weight/0.0"]
    assert parts(the_folder(fill(tmp_path, dict.fromkeys(names, b"{}")))) == sorted(names)


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
    with pytest.raises(Exception, match="leads outside the folder"):
        open_file(str(tmp_path / "zoo/a/x.index.json"))


def test_numbered_shards_without_an_index_are_their_folder(tmp_path: Path):
    place = fill(tmp_path, {name: raw for name, raw in SHARDED.items() if "index" not in name})
    assert kinds(place) == {"llm": FOLDER, "llm/config.json": OTHER}
    assert list(open_file(str(tmp_path / the_folder(place).name)).entries) == ["a", "b"]


def test_numbered_files_of_a_data_set_are_not_a_checkpoint(tmp_path: Path):
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


@pytest.mark.parametrize("name", ["", "run/checkpoint-5/"])
@pytest.mark.parametrize(
    "folders", [("pytorch_model_fsdp_0", "optimizer_0"), ("model", "optim"), ("weights/model", "optimizer/optim")]
)
def test_a_model_and_its_optimizer_saved_apart_are_one_checkpoint(tmp_path: Path, dcp: Path, name: str, folders):
    for part in folders:
        (home := tmp_path / "zoo" / name / part).mkdir(parents=True)
        for file in dcp.iterdir():
            shutil.copyfile(file, home / file.name)
    torch.save({"last_epoch": 5}, tmp_path / "zoo" / name / "scheduler.pt")
    place = LocalPlace(str(tmp_path / "zoo"))
    assert kinds(place) == {name.rstrip("/") or ".": FOLDER, f"{name}scheduler.pt": FILE}
    assert len(parts(the_folder(place))) == 2 * len(list(dcp.iterdir()))


@pytest.mark.parametrize("name", ["", "run/checkpoint-5/"])
def test_an_optimizer_saved_apart_belongs_to_the_ranks_beside_it(tmp_path: Path, dcp: Path, name: str):
    saved, _ = unpack_sample("fsdp1_local_names_w2", tmp_path)
    (home := tmp_path / "zoo" / name / "optimizer_0").mkdir(parents=True)
    for file in dcp.iterdir():
        shutil.copyfile(file, home / file.name)
    for rank, file in enumerate(sorted(saved.glob("*rank*"))):
        shutil.copyfile(file, home.parent / f"pytorch_model_fsdp_rank{rank}.bin")
    place = LocalPlace(str(tmp_path / "zoo"))
    assert kinds(place) == {name.rstrip("/") or ".": FOLDER}
    assert len(parts(the_folder(place))) == 2 + len(list(dcp.iterdir()))


def test_a_hidden_file_called_metadata_is_not_a_checkpoint(tmp_path: Path):
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
        ("moe_w4_ep2", "saved/global_step2", 13),
        ("tp2_zero2_w4_bf16", "saved/global_step2", 6),
        ("fsdp1_sharded_w4", "saved", 4),
        ("fsdp2tp_w4", "saved", 4),
        ("megatron_tp2pp2", "saved/iter_0000001", 4),
        ("megatron_dist_tp2pp2", "saved", 11),
        ("pipeline_pp2", "saved/global_step1", 9),
        ("universal_zero2", "saved/global_step2_universal", 43),
    ],
)
def test_ranks_are_one_item(tmp_path: Path, sample: str, folder: str, count: int):
    unpack_sample(sample, tmp_path)
    (tmp_path / "truth.pt").unlink()
    item = the_folder(LocalPlace(str(tmp_path)))
    assert (item.name, len(item.parts)) == (folder, count)
    assert open_file(str(tmp_path / item.name)).specs


@pytest.mark.parametrize("has_latest", [True, False])
def test_each_of_several_saves_in_one_folder_is_migrated(tmp_path: Path, has_latest: bool):
    """DINOv2 names the latest for each rank, by a name that the new zoo does not have."""
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    for number, sample in enumerate(("fsdp1_mesh_w2", "fsdp1_sharded_w2_torch24"), 1):
        unpack_sample(sample, tmp_path / sample)
        for rank in range(2):
            name = f"model_000{number}.rank_{rank}.pth"
            (tmp_path / sample / "saved" / f"model_world_size_2_rank_{rank}.pt").rename(zoo / name)
            if has_latest:
                (zoo / f"last_checkpoint.rank_{rank}").write_text(name)
    folders = [item for item in list_zoo(LocalPlace(str(zoo))) if item.parts]
    assert [(item.name, len(item.parts)) for item in folders] == [(f"model_000{n}.rank_0.pth", 2) for n in (1, 2)]
    assert run_here("migrate", zoo, tmp_path / "new", cwd=tmp_path).returncode == 0
    for number in (1, 2):
        whole = open_file(str(zoo / f"model_000{number}.rank_1.pth")).state_dict()
        written = open_file(str(tmp_path / "new" / f"model_000{number}.pth")).state_dict()
        assert {key: bytes_of(value) for key, value in written.items()} == {
            key: bytes_of(value) for key, value in whole.items()
        }
    assert not [*(tmp_path / "new").glob("last_checkpoint*")]


def test_files_that_are_only_numbered_by_rank_are_not_one(tmp_path: Path):
    place = fill(tmp_path, {f"lora_rank{rank}.pt": weights() for rank in (4, 8, 16)})
    assert set(kinds(place).values()) == {FILE}


@pytest.mark.parametrize("step", ["", "10/"])
def test_a_save_of_nanotron_is_one_item(tmp_path: Path, step: str):
    ranks = [f"weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors" for rank in (0, 1)]
    names = [f"{kind}/a/b/{kind}_{rank}" for kind in ("model", "optimizer") for rank in ranks]
    names += ["model/a/norm/model_weight.safetensors", "optimizer/optimizer_pp-0-of-1_tp-1-of-2.pt"]
    save = {f"{step}{name}": weights() for name in names} | {f"{step}checkpoint_metadata.json": b"{}"}
    place = fill(tmp_path, {**save, f"{step}config.yaml": b"a: 1", "other/model/a.safetensors": weights()})
    folder = the_folder(place)
    assert (folder.name, sorted(parts(folder))) == (step.rstrip("/") or ".", sorted(save))
    assert {name for name, kind in kinds(place).items() if kind is FILE} == {"other/model/a.safetensors"}


def test_the_shards_of_llama_are_one_item(tmp_path: Path):
    place = fill(tmp_path, {"consolidated.00.pth": weights(), "consolidated.01.pth": weights(), "params.json": b"{}"})
    assert len(the_folder(place).parts) == 3


WEIGHTS = OrderedDict(weight=torch.randn(64, 64), bias=torch.randn(64))


def saved(**options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer, **options)
    return buffer.getvalue()


def zipped(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, raw in members:
            archive.writestr(name, raw)
    return buffer.getvalue()


def tarred(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


def scripted() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    return buffer.getvalue()


MODERN, LEGACY = saved(), saved(_use_new_zipfile_serialization=False)

CHECKPOINTS = {
    "zip": MODERN,
    "legacy": LEGACY,
    "legacy of protocol 1": saved(_use_new_zipfile_serialization=False, pickle_protocol=1),
    "safetensors": save(dict(WEIGHTS)),
    "torchscript": scripted(),
    "gzip of a zip": gzip.compress(MODERN),
    "gzip of legacy": gzip.compress(LEGACY),
    "xz": lzma.compress(LEGACY),
    "tar with one": tarred(("model.pth", MODERN)),
    "tar with one of another name": tarred(("weights", LEGACY)),
    "tar.gz": gzip.compress(tarred(("weights", LEGACY))),
    "torch 0.1": tarred(("sys_info", b"x"), ("pickle", b"y"), ("storages", b"z")),
}
DOUBTFUL = {
    "plain pickle": pickle.dumps({"a": [1, 2, 3]}),
    "pickle of protocol 0": pickle.dumps({"a": 1}, protocol=0),
    "an ordinary zip": zipped(("images/1.png", b"x"), ("model.pth", MODERN)),
    "a tar of something": tarred(("notes.txt", b"x" * 9000)),
    "bzip2": bz2.compress(LEGACY),
}
OTHERS = {
    "nothing": b"",
    "text": b"cat sat on the mat\n" * 100,
    "json": json.dumps({"architectures": ["ResNet"]}).encode(),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "gguf": b"GGUF\x03\0\0\0" + bytes(100),
    "zeros": bytes(HEAD),
    "gzip of text": gzip.compress(b"a,b,c\n" * 1000),
    "elf": b"\x7fELF" + bytes(100),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_are_known_by_their_bytes(kind: str):
    assert by_bytes("weights_without_suffix", CHECKPOINTS[kind][:HEAD]) is Looks.CHECKPOINT


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_what_may_hold_anything_is_doubtful(kind: str):
    assert by_bytes("thing", DOUBTFUL[kind][:HEAD]) is Looks.DOUBTFUL


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files(kind: str):
    assert by_bytes("thing", OTHERS[kind][:HEAD]) is Looks.OTHER


def test_every_beginning_of_a_checkpoint_is_looked_at_without_an_error():
    for raw in (*CHECKPOINTS.values(), *DOUBTFUL.values()):
        for end in (*range(0, 64), 100, 511, 512, 513, 1024, 2000):
            by_bytes("thing", raw[:end])


def test_archives_of_other_programs_are_none():
    raw = zipped(("[Content_Types].xml", b"<Types/>"), ("word/document.xml", b"x"))
    assert by_bytes("report.docx", raw) is Looks.OTHER
    assert by_bytes("arrays.npz", zipped(("arr_0.npy", b"\x93NUMPY"))) is Looks.OTHER


def test_an_index_is_seen_by_its_map():
    raw = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "b.bin"}}).encode()
    assert by_bytes("weights.json", raw) is Looks.INDEX
    assert by_name("sub/model.safetensors.index.json") is Looks.INDEX


def test_a_pointer_to_a_file_that_was_never_fetched():
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"
    assert by_bytes("net.bin", pointer) is Looks.CHECKPOINT
    assert by_bytes("cat.png", pointer) is Looks.OTHER


@pytest.mark.parametrize(
    "name",
    "a.pth a.PT b/a.ckpt a.safetensors a.th a.pth.tar a.pth.tar.gz a.pt.zip pytorch_model.bin "
    "pytorch_model-00001-of-00002.bin open_clip_pytorch_model.bin adapter_model.bin .pth __0_0.distcp".split(),
)
def test_names_that_claim_to_be_checkpoints(name: str):
    assert by_name(name) is Looks.CHECKPOINT
    assert not is_surely_other(name)


@pytest.mark.parametrize("name", "a.bin training_args.bin a.pkl a.tar a.zip a.pth.json weights pth a.pth/b.txt".split())
def test_names_that_claim_nothing(name: str):
    assert by_name(name) is None


def test_a_new_line_in_a_name_is_part_of_it():
    assert by_name("a\n.pth") is Looks.CHECKPOINT
    assert by_name("a.pth\n.txt") is None


def test_the_corpus_is_seen_whole(corpus: Path):
    """Each genuine file is recognised by its bytes only, under any name."""
    unseen = [
        path.name
        for folder in ("1.0.0-py27", "1.4.0-py27", "1.6.0", "2.6.0")
        for path in sorted((corpus / folder).iterdir())
        if path.is_file() and by_bytes("thing", path.read_bytes()[:HEAD]) is Looks.OTHER
    ]
    assert unseen == []


@pytest.mark.parametrize("names", [("0001_0", "0002_0"), ("0001_0",), ("0001_0", "0002_0", "0001_1", "0002_1")])
def test_shards_of_torchtune_are_one_folder_if_they_are_of_one_epoch(tmp_path: Path, names: tuple[str, ...]):
    (tmp_path / "zoo").mkdir()
    files = [f"hf_model_{name}.pt" for name in names]
    for file in files:
        torch.save({f"{file[9:13]}.weight": torch.ones(2)}, tmp_path / "zoo" / file)
    found = kinds(LocalPlace(str(tmp_path / "zoo")))
    assert found == ({".": FOLDER} if len(names) == 2 else dict.fromkeys(sorted(files), FILE))


def test_a_listed_name_may_begin_like_the_zoo_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("old/a.pth", "old/old/a.pth", "old/b.pth"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        torch.save({"w": torch.ones(1)}, path)
    place = open_place("old")
    assert [item.name for item in list_zoo(place, (), ["old/a.pth"])] == ["old/a.pth"]  # as a printed command names it
    assert [item.name for item in list_zoo(place, (), ["old/b.pth", "old/gone.pth"])] == ["b.pth", "gone.pth"]
