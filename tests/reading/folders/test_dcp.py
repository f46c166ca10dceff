"""Folders of torch.distributed.checkpoint: as torch writes them from one process, and in chunks as several write."""

import os
import pickle
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only

import ckptfix
from ckptfix.bytes.sources import FileBytes
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Level
from ckptfix.errors import DamageWarning, HostileError, UnreadableError, WriteError
from tests.checks import assert_same, bytes_of
from tests.reading.folders.ranks.genuine import swap, unpacked

STATE = {
    "conv.weight": torch.arange(24.0).reshape(2, 3, 4),
    "bn.running_var": torch.tensor([1.0, float("nan")]),
    "bn.num_batches_tracked": torch.tensor(7),
    "head.weight": torch.arange(8, dtype=torch.bfloat16).reshape(4, 2).t(),
    "none": torch.empty(0, 3),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder that ``dcp.save`` wrote."""
    folder = tmp_path / "step_10"
    container = {
        "model": STATE,
        "epoch": 3,
        "args": {"lr": 0.1},
        "history": [torch.zeros(1), {"loss": torch.ones(1)}],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        save(container, checkpoint_id=folder, no_dist=True)
    return folder


Part = tuple[tuple[int, ...], Tensor] | None


def write_chunks(
    folder: Path, tensors: dict[str, tuple[Tensor, Sequence[Part]]], world: int = 99, **rest: Any
) -> Metadata:
    """Write tensors in chunks ``(offsets, part)``, each chunk into a file of its own as if a rank had written it; if
    there are more than ``world`` chunks, the first rank goes on with the next one."""
    folder.mkdir(exist_ok=True)
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, (whole, parts) in tensors.items():
        chunks = []
        for rank, (offsets, part) in ((at % world, part) for at, part in enumerate(parts) if part is not None):
            with (folder / f"__{rank}_0.distcp").open("ab") as file:
                start = file.tell()
                torch.save(part, file)
                info = _StorageInfo(f"__{rank}_0.distcp", start, file.tell() - start)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
            stored[MetadataIndex(name, torch.Size(offsets))] = info
        described[name] = TensorStorageMetadata(TensorProperties(whole.dtype), whole.shape, chunks)
    metadata = Metadata(described, **{"planner_data": None, "storage_data": stored, **rest})
    write_metadata(folder, metadata)
    return metadata


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_torch_saved_comes_back(saved: Path) -> None:
    checkpoint = ckptfix.open_checkpoint(saved)
    assert (checkpoint.format, checkpoint.container) == ("dcp", ("model",))
    assert_same(checkpoint.state_dict(), STATE)
    root: Any = checkpoint.root
    assert (root["epoch"], root["args"]) == (3, {"lr": 0.1})
    assert isinstance(root["history"], list)
    assert [spec.shape for spec in (root["history"][0], root["history"][1]["loss"])] == [(1,), (1,)]


def test_weights_are_picked_by_name(saved: Path) -> None:
    assert_same(ckptfix.open_checkpoint(saved, weights="model").state_dict(), STATE)


def test_a_tensor_of_one_chunk_is_a_range_of_its_file(saved: Path) -> None:
    spec = ckptfix.open_checkpoint(saved).specs["conv.weight"]
    assert spec.storage is not None
    source = spec.storage.source
    assert isinstance(source, FileBytes)
    assert source.nbytes == spec.nbytes


def test_a_repair_writes_one_file(saved: Path, tmp_path: Path) -> None:
    ckptfix.repair(saved, output=tmp_path / "one.pth")
    assert_same(torch.load(tmp_path / "one.pth")["model"], STATE)


def test_noop_a_file_whose_name_only_ends_so_is_opened_by_itself(saved):
    torch.save({"fc.weight": torch.ones(2, 2)}, saved / "my_meta.pt")
    assert ckptfix.open_checkpoint(saved / "my_meta.pt").keys() == ["fc.weight"]


@pytest.mark.parametrize("name", ["meta.pt", "common.pt"])
def test_what_lightning_and_megatron_save_next_to_the_chunks_is_in_the_container(saved: Path, name: str) -> None:
    torch.save({"global_step": 7, "epoch": 99, "rng": torch.arange(3)}, saved / name)
    ckptfix.repair(saved, output=saved.parent / "one.pth")
    one = torch.load(saved.parent / "one.pth")
    assert (one["global_step"], one["epoch"]) == (7, 3)
    assert torch.equal(one["rng"], torch.arange(3))
    assert_same(one["model"], STATE)
    assert ckptfix.open_checkpoint(saved / name).path == str(saved)


def test_the_container_of_lightning_is_as_its_trainer_reads_it_from_one_file(tmp_path: Path) -> None:
    """``lightning.pytorch.utilities.consolidate_checkpoint`` gives the weights and the optimizers these names."""
    states = [{"state": {"conv.weight": {"exp_avg": torch.full((2,), float(at))}}} for at in range(11)]
    saved = {"model": STATE, **{f"optimizer_{at}": state for at, state in enumerate(states)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        save(saved, checkpoint_id=tmp_path / "last.ckpt", no_dist=True)
    torch.save({"epoch": 2, "pytorch-lightning_version": "2.6.6"}, tmp_path / "last.ckpt" / "meta.pt")
    ckptfix.repair(tmp_path / "last.ckpt", output=tmp_path / "one.ckpt")
    one = torch.load(tmp_path / "one.ckpt")
    assert_same(one["state_dict"], STATE)
    assert [state["state"]["conv.weight"]["exp_avg"][0] for state in one["optimizer_states"]] == [*range(11)]
    assert set(one) == {"state_dict", "optimizer_states", "epoch", "pytorch-lightning_version"}


@pytest.mark.parametrize(
    ("beside", "is_apart"),
    [
        ({"train_state": {"step": torch.tensor(7)}}, True),
        ({"optimizer": {"state.w.exp_avg": torch.ones(2), "param_groups.w.lr": 0.1}, "data": {"rank": b"1"}}, True),
        ({"decoder": {"weight": torch.ones(2)}}, False),
        ({"layer._extra_state": {"scale": torch.ones(2)}}, False),
        ({}, False),
    ],
    ids=["counters", "optimizer", "noop: another part of the model", "noop: extra state", "noop: weights only"],
)
def test_weights_among_the_state_of_the_training_are_apart_from_it(tmp_path: Path, beside: Any, is_apart: bool) -> None:
    """As torchtitan saves them, for which safetensors cannot carry the counters, and no model has a place."""
    save({**STATE, **beside}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    checkpoint = ckptfix.open_checkpoint(tmp_path / "step-7")
    assert checkpoint.container == (("model",) if is_apart else ())
    assert set(STATE) <= set(checkpoint.keys())
    if is_apart:
        ckptfix.repair(tmp_path / "step-7", output=tmp_path / "one.safetensors", format="safetensors")
        written = load_file(tmp_path / "one.safetensors")
        assert_same({key: written.pop(key) for key in STATE}, STATE)
        assert not written
        ckptfix.repair(tmp_path / "step-7", output=tmp_path / "one.pth")
        one = torch.load(tmp_path / "one.pth")
        assert_same(one["model"], STATE)
        assert set(one) == {"model", *beside}


def test_a_link_out_of_the_folder_is_not_followed(saved: Path) -> None:
    torch.save({"stolen": 1}, saved.parent / "meta.pt")
    (saved / "meta.pt").symlink_to(saved.parent / "meta.pt")
    with pytest.raises(HostileError, match="leads outside the folder"):
        ckptfix.open_checkpoint(saved)


def test_noop_a_tensor_of_no_elements_needs_no_chunk(tmp_path: Path) -> None:
    write_chunks(tmp_path, {"w": (torch.ones(2), [((0,), torch.ones(2))]), "none": (torch.empty(0, 3), [])})
    opened = ckptfix.open_checkpoint(tmp_path)
    assert_same(opened.state_dict(), {"w": torch.ones(2), "none": torch.empty(0, 3)})
    assert not opened.damage


def test_without_a_plan_the_names_stay_flat(tmp_path: Path) -> None:
    write_chunks(tmp_path, {"model.a": (STATE["conv.weight"], [((0, 0, 0), STATE["conv.weight"])])})
    assert ckptfix.open_checkpoint(tmp_path).keys() == ["model.a"]


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_chunks_are_put_together(tmp_path: Path, dimension: int) -> None:
    whole = torch.arange(60, dtype=torch.float16).reshape(3, 4, 5)
    first, second = whole.split([1, whole.shape[dimension] - 1], dimension)
    offsets = tuple(int(index == dimension) for index in range(3))
    parts = [((0, 0, 0), first.contiguous()), (offsets, second.contiguous())]
    write_chunks(tmp_path, {"w": (whole, parts), "b": (whole[0, 0], [((0,), whole[0, 0].clone())])})
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert_same(checkpoint.state_dict(), {"w": whole, "b": whole[0, 0]})
    ckptfix.repair(tmp_path, output=tmp_path / "one.pth")
    assert_same(torch.load(tmp_path / "one.pth"), {"w": whole, "b": whole[0, 0]})


def test_chunks_that_are_strided_views(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    write_chunks(tmp_path, {"w": (whole, [((0, 0), whole[:, :2]), ((0, 2), whole[:, 2:])])})
    assert_same(ckptfix.open_checkpoint(tmp_path).state_dict(), {"w": whole})


def chunked(folder: Path) -> Metadata:
    """A tensor in two files, and another in only the first."""
    whole = torch.arange(12.0).reshape(4, 3)
    parts = [((0, 0), whole[:2].clone()), ((2, 0), whole[2:].clone())]
    return write_chunks(folder, {"a": (torch.ones(2), [((0,), torch.ones(2))]), "w": (whole, parts)})


@pytest.mark.parametrize("change", ["none", "average", "copied"])
def test_a_file_that_was_copied_over_that_of_another_rank(tmp_path: Path, change: str) -> None:
    """A model and its average may have equal values, each in its own file."""
    whole = torch.randn(8, 5)
    halves = [((0, 0), whole[:4].clone()), ((4, 0), whole[4:].clone())]
    tensors: dict[str, Any] = {
        "w": (whole, halves),
        "v": (whole + 1, [((0, 0), whole[:4] + 1), ((4, 0), whole[4:] + 1)]),
    }
    if change == "average":
        nothing = [((row, 0), torch.empty(0, 5)) for row in (7, 8)]
        tensors = {"w": (whole, halves), "average": (whole, [*nothing, *halves])}
    write_chunks(tmp_path, tensors)
    if change == "copied":
        copyfile(tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp")
    report = ckptfix.repair(tmp_path, output=tmp_path / "whole.pth").report
    found = [finding.message for finding in report.findings if finding.code == "FIL105"]
    assert [message.partition(":")[0] for message in found] == (
        ["__1_0.distcp holds the same values as __0_0.distcp"] if change == "copied" else []
    )
    assert (tmp_path / "whole.pth").exists() is (change != "copied")


@pytest.mark.parametrize("change", ["equal layers", "equal rows", "copied"])
def test_layers_that_are_equal_are_not_called_copies(tmp_path: Path, change: str) -> None:
    """Four files with halves of two layers, each layer a copy of the other, or all halves equal: as in models that are
    made larger by repeating layers. Of a copied file, the other halves differ."""
    layer = torch.randn(1, 4, 5)
    if change == "equal rows":
        layer[:, 2:] = layer[:, :2]
    whole = torch.cat([layer, layer + (change == "copied")])
    parts = [((at, row, 0), whole[at : at + 1, row : row + 2].clone()) for at in (0, 1) for row in (0, 2)]
    write_chunks(tmp_path, {"w": (whole, parts)})
    if change == "copied":
        copyfile(tmp_path / "__0_0.distcp", tmp_path / "__2_0.distcp")
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    repeated = [(mark.place, mark.data["other"]) for mark in checkpoint.remarked(Kind.RANK_REPEATED)]
    assert repeated == ([("__2_0.distcp", "__0_0.distcp")] if change == "copied" else [])
    if change != "copied":
        assert torch.equal(checkpoint.state_dict()["w"], whole)


def test_several_parts_in_a_copied_file_are_not_taken_for_a_repetition(tmp_path: Path) -> None:
    """Each file has both halves of a layer, as of a gated one."""
    layers = torch.randn(2, 4, 5)
    parts = [((at, row, 0), layers[at : at + 1, row : row + 2].clone()) for row in (0, 2) for at in (0, 1)]
    write_chunks(tmp_path, {"w": (layers, parts)}, world=2)
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).state_dict()["w"], layers)
    copyfile(tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp")
    assert len(ckptfix.open_checkpoint(tmp_path).remarked(Kind.RANK_REPEATED)) == 1


def test_names_in_groups_have_the_order_of_the_weights(tmp_path: Path) -> None:
    """Plain torch goes by position, and FSDP 1 (``use_orig_params=False``) saves its own order."""
    groups = [{"lr": 0.1, "params": ["c", "a"]}, {"lr": 0.2, "params": ["b"]}, {"lr": 0.3, "params": [5, 4]}]
    state = {name: {"exp_avg": torch.ones(1)} for name in "cab"}
    model = {name: torch.ones(1) for name in "abc"}
    save({"model": model, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=tmp_path, no_dist=True)
    root: Any = ckptfix.open_checkpoint(tmp_path).root
    assert [group["params"] for group in root["optim"]["param_groups"]] == [["a", "c"], ["b"], [5, 4]]


def stepped(folder: Path, steps: Sequence[Sequence[int]], is_shared: bool = True) -> None:
    """Parameters of which every file has a part, and counters that the files divide among them: those of each file."""
    counters = [(rank, step) for rank, own in enumerate(steps) for step in own]
    tensors: dict[str, tuple[Tensor, Sequence[Part]]] = {}
    for number, (rank, step) in enumerate(counters):
        moment = torch.randn(len(steps), 5)
        rows: list[Part] = [((row, 0), moment[row : row + 1].clone()) for row in range(len(steps))]
        if not is_shared:
            rows = [*[None] * rank, ((0, 0), moment)]
        tensors[f"optimizer.state.layers.{number}.weight.exp_avg"] = moment, rows
        counter = torch.tensor(float(step))
        tensors[f"optimizer.state.layers.{number}.weight.step"] = counter, [*[None] * rank, ((), counter)]
    write_chunks(folder, tensors)


@pytest.mark.parametrize(
    ("steps", "is_shared", "odd"),
    [
        pytest.param([[7] * 4, [7] * 3, []], True, [], id="one save"),
        pytest.param([[7] * 4, [5] * 3, [7] * 3], True, ["__1_0.distcp"], id="another step"),
        pytest.param([[7, 7, 3], [3, 7, 7], [7] * 3], True, [], id="layers that were frozen for some time"),
        pytest.param([[7] * 4, [5] * 2, [7] * 3], True, [], id="too few to tell"),
        pytest.param([[7] * 4, [5] * 3, [7] * 3], False, [], id="stages with parameters of their own"),
    ],
)
def test_a_file_of_another_step(tmp_path: Path, steps: list[list[int]], is_shared: bool, odd: list[str]) -> None:
    """All sizes are equal; only the counters show which save a file belongs to."""
    stepped(tmp_path, steps, is_shared)
    report = ckptfix.check(tmp_path, weights="optimizer.state.layers.0.weight")
    found = [finding.message for finding in report.findings if finding.code == "FIL105"]
    expected = [f"{name} was saved with a different step than most ranks" for name in odd]
    assert [message.partition(":")[0] for message in found] == expected


def remove(folder: Path, metadata: Metadata) -> None:
    (folder / "__1_0.distcp").unlink()


def cut(folder: Path, metadata: Metadata) -> None:
    path = folder / "__1_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[: data.index(bytes_of(torch.arange(6.0, 12.0))) + 4])


def zero(folder: Path, metadata: Metadata) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


def shrink(folder: Path, metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].chunks[1].sizes = torch.Size((1, 3))  # type: ignore[union-attr]  # a tensor


def retype(folder: Path, metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.float64  # type: ignore[union-attr]  # a tensor


def forget(folder: Path, metadata: Metadata) -> None:
    metadata.storage_data.popitem()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            remove,
            r"lacks the shard __1_0.distcp with 1 key; lacks 24 bytes of 1 tensor .* w is lost: fetch the missing",
        ),
        (cut, "__1_0.distcp is cut short"),
        (zero, "holds no torch.save file"),
        (shrink, "have 9 of the 12 elements"),
        (retype, "is not what .metadata says"),
        (forget, "does not say where it is"),
    ],
)
def test_damage_costs_the_tensors_that_it_touches(tmp_path: Path, spoil: Any, said: str) -> None:
    metadata = chunked(tmp_path)
    spoil(tmp_path, metadata)
    write_metadata(tmp_path, metadata)
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert_same(checkpoint.state_dict(), {"a": torch.ones(2)})
    lost = checkpoint.lost["w"]
    assert lost is not None
    assert lost.shape == (4, 3)


def test_a_part_that_is_cut_short_costs_what_lies_after_the_cut(saved: Path, tmp_path: Path) -> None:
    """A file written by torch, truncated at every position: all tensors before the cut are intact, none after it."""
    (path,) = saved.glob("*.distcp")
    data = path.read_bytes()
    keys = ("conv.weight", "bn.running_var")  # the others are too small to be found by their bytes, or are transposed
    ends = {key: data.index(bytes_of(STATE[key])) + STATE[key].nbytes for key in keys}
    for stop in range(100, len(data), 307):
        path.write_bytes(data[:stop])
        whole = {key for key, end in ends.items() if end <= stop}
        try:
            checkpoint = ckptfix.open_checkpoint(saved, weights="model", salvage=True)
        except UnreadableError:
            assert not whole
            continue
        assert whole <= set(checkpoint.specs), stop
        assert_same(dict(checkpoint.state_dict()), {key: STATE[key] for key in checkpoint.specs})
        with pytest.raises(UnreadableError, match=f"{path.name} is cut short"):
            ckptfix.open_checkpoint(saved)


def test_a_flipped_bit_in_a_part_is_found(tmp_path: Path) -> None:
    metadata = chunked(tmp_path)
    path = tmp_path / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(bytes_of(torch.arange(6.0, 12.0))) + 1] ^= 2
    path.write_bytes(data)
    write_metadata(tmp_path, metadata)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("a"), torch.ones(2))
    with pytest.warns(DamageWarning, match=r"the storage of w \(in __1_0\.distcp\) fails its checksum"):
        checkpoint.read("w")
    with pytest.raises(UnreadableError, match=r"the storage of w \(in __1_0\.distcp\) fails its checksum"):
        checkpoint.state_dict()
    assert [(f.code, f.keys) for f in ckptfix.check(tmp_path).findings] == [("FIL201", ("w",))]
    with pytest.raises(WriteError, match=r"the storage of w \(in __1_0\.distcp\) fails its checksum"):
        ckptfix.repair(tmp_path, output=tmp_path / "out.pth", values=False)


def test_a_part_of_another_save_is_not_taken(saved: Path, tmp_path: Path) -> None:
    (path,) = saved.glob("*.distcp")
    write_chunks(tmp_path / "other", {"w": (torch.ones(9), [((0,), torch.ones(9))])})
    path.write_bytes((tmp_path / "other" / "__0_0.distcp").read_bytes())
    match = r"cannot be used \(__0_0\.distcp has other data than the metadata describes\)"
    with pytest.raises(UnreadableError, match=match):
        ckptfix.open_checkpoint(saved)
    assert [*ckptfix.open_checkpoint(saved, salvage=True).specs] == ["none"]  # which has no bytes


def test_a_part_that_an_earlier_save_left_is_a_note(tmp_path: Path) -> None:
    chunked(tmp_path)
    assert ckptfix.check(tmp_path).findings == ()
    (tmp_path / "__7_0.distcp").write_bytes((tmp_path / "__0_0.distcp").read_bytes())
    (finding,) = ckptfix.check(tmp_path).findings
    assert (finding.code, finding.level) == ("FIL203", Level.NOTE)
    assert finding.message.startswith("__7_0.distcp holds nothing of this checkpoint")


def test_noop_a_rank_of_which_nothing_is_saved_writes_an_empty_file(tmp_path: Path) -> None:
    """As with ``DefaultSavePlanner(dedup_save_to_lowest_rank=True)``."""
    chunked(tmp_path)
    (tmp_path / "__7_0.distcp").touch()
    assert ckptfix.check(tmp_path).findings == ()


def test_a_save_that_was_never_finished(tmp_path: Path) -> None:
    chunked(tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / ".metadata.tmp")
    with pytest.raises(UnreadableError, match="the save never finished"):
        ckptfix.open_checkpoint(tmp_path)


Ranks = list[dict[str, tuple[Tensor, Sequence[Part]]]]


def write_ranks(folder: Path, ranks: Ranks) -> None:
    """What ranks write that do not communicate: their own files, each with its own metadata."""
    for rank, tensors in enumerate(ranks):
        metadata = write_chunks(folder / f"of {rank}", tensors)
        for index, info in list(metadata.storage_data.items()):
            metadata.storage_data[index] = replace(info, relative_path=info.relative_path.replace("__0", f"__{rank}"))
        (folder / f"of {rank}" / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))


WHOLE = torch.arange(12.0).reshape(4, 3)
TOP, BOTTOM = ((0, 0), WHOLE[:2].clone()), ((2, 0), WHOLE[2:].clone())
ONES: tuple[Tensor, Sequence[Part]] = (torch.ones(2), [((0,), torch.ones(2))])


def test_metadata_of_each_rank_is_put_together(tmp_path: Path) -> None:
    write_ranks(tmp_path, [{"w": (WHOLE, [TOP]), "a": ONES}, {"w": (WHOLE, [BOTTOM]), "a": ONES}])
    assert_same(ckptfix.open_checkpoint(tmp_path).state_dict(), {"w": WHOLE, "a": torch.ones(2)})
    (tmp_path / "__1.metadata").unlink()
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert (checkpoint.keys(), list(checkpoint.lost)) == (["a"], ["w"])


def test_ranks_that_saved_different_values_under_one_name(tmp_path: Path) -> None:
    other = (torch.ones(2), [((0,), torch.zeros(2))])
    write_ranks(tmp_path, [{"a": ONES, "b": ONES}, {"a": other, "b": ONES}])
    said = r"holds different values of a in __1_0\.distcp than in __0_0\.distcp: fetch these"
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert_same(checkpoint.state_dict(), {"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="torch 2.6 and later")
@pytest.mark.parametrize("changed", [0, 500, -1])
def test_copies_without_checksums_are_compared_as_far_as_they_are_read(tmp_path: Path, changed: int) -> None:
    first, other = torch.zeros(1000), torch.zeros(1000)
    other[changed] = 1
    torch.serialization.set_crc32_options(False)
    try:
        write_ranks(tmp_path, [{"a": (first, [((0,), first)])}, {"a": (other, [((0,), other)])}])
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(UnreadableError, match="different values of a"):
        ckptfix.open_checkpoint(tmp_path).state_dict()
    assert_same(ckptfix.open_checkpoint(tmp_path, salvage=True).state_dict(), {"a": first})


def test_a_missing_file_of_which_another_has_copies_costs_nothing(tmp_path: Path) -> None:
    write_ranks(tmp_path, [{"a": ONES, "b": ONES}, {"a": ONES, "b": ONES}])
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(
        UnreadableError, match=r"lacks the shard __1_0\.distcp with 2 keys: fetch .* take all 2 tensors"
    ):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert_same(checkpoint.state_dict(), {"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.parametrize("name", ["__1_0.distcp", "__2_1.distcp"])
def test_what_a_missing_file_held_is_named(tmp_path: Path, name: str) -> None:
    """Its bytes and tensors are those that torch's metadata has for it."""
    folder, truth = unpacked("megatron_dist_tp2pp2", tmp_path)
    metadata = FileSystemReader(folder).read_metadata()
    held: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        described = metadata.state_dict_metadata[index.fqn]
        if place.relative_path == name and isinstance(described, TensorStorageMetadata):
            (chunk,) = [chunk for chunk in described.chunks if chunk.offsets == index.offset]
            held[index.fqn] = held.get(index.fqn, 0) + chunk.sizes.numel() * described.properties.dtype.itemsize
    (folder / name).unlink()
    with pytest.raises(UnreadableError, match=rf"lacks the shard {name} with \d+ keys; lacks \d+ bytes of") as caught:
        ckptfix.open_checkpoint(folder)
    fact = caught.value.data["damage"][1]["data"]
    assert (fact["nbytes"], set(fact["keys"])) == (sum(held.values()), set(held))
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    assert 0 < len(got) < len(truth)
    assert all(bytes_of(got[key]) == bytes_of(truth[key]) for key in got)


@pytest.mark.parametrize(
    ("name", "copy"), [("__1_1.distcp", ""), ("__3_1.distcp", ""), ("__1_1.distcp", "__2_1.distcp")]
)
def test_beside_a_missing_file_only_a_copied_one_is_called_a_copy(tmp_path: Path, name: str, copy: str) -> None:
    """Two of the others differ only in tensors of which the missing file has a part."""
    folder, _ = unpacked("megatron_dist_tp2pp2", tmp_path)
    (folder / name).unlink()
    if copy:
        copyfile(folder / "__0_1.distcp", folder / copy)
    checkpoint = ckptfix.open_checkpoint(folder, salvage=True)
    repeated = [mark.place for mark in checkpoint.damage if mark.kind is Kind.SHARD_MISPLACED]
    assert repeated == ([copy] if copy else [])
    assert not any(mark.kind is Kind.RANK_REPEATED for mark in checkpoint.remarks)


@pytest.mark.parametrize("is_swap", [False, True])
@pytest.mark.parametrize(
    ("sample", "one", "other", "is_known"),
    [
        ("megatron_dist_tp2pp2", "__0_0.distcp", "__2_0.distcp", True),  # the first chunks have the same places
        ("megatron_dist_tp2pp2", "__2_0.distcp", "__0_0.distcp", True),
        ("megatron_dist_tp2pp2", "__2_1.distcp", "__3_1.distcp", True),
        ("megatron_dist_tp2pp2", "__3_0.distcp", "__3_1.distcp", False),  # as long as __1_0.distcp
        ("megatron_fsdp_w2", "__0_0.distcp", "__1_0.distcp", True),
        ("megatron_fsdp_w2", "__1_0.distcp", "__0_0.distcp", True),
    ],
)
def test_the_file_of_another_rank_is_named_and_not_used(
    tmp_path: Path, sample: str, one: str, other: str, is_known: bool, is_swap: bool
) -> None:
    """Some of its chunks have the place, shape and dtype of those that should be there."""
    folder, _ = unpacked(sample, tmp_path)
    whole = ckptfix.open_checkpoint(folder).state_dict()
    if is_swap:
        swap(folder / one, folder / other)
    else:
        copyfile(folder / one, folder / other)
    has = re.escape(f"the data of {one}" if is_known else "other data than the metadata describes")
    with pytest.raises(UnreadableError, match=rf"cannot be used \({re.escape(other)} has {has}\)") as caught:
        ckptfix.open_checkpoint(folder)
    named = set(re.findall(r"cannot be used \((\S+) has", str(caught.value)))
    assert named == ({one, other} if is_swap else {other})
    if sample == "megatron_fsdp_w2" and is_swap:
        assert "no tensor is whole" in str(caught.value)
        return
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    wanted = whole if sample == "megatron_dist_tp2pp2" else {key.removeprefix("module."): whole[key] for key in whole}
    for key, value in got.items():
        name = key.removeprefix("module.")
        assert name not in wanted or bytes_of(value) == bytes_of(wanted[name])


def test_of_two_files_with_the_same_values_none_is_used(tmp_path: Path) -> None:
    folder, truth = unpacked("megatron_dist_tp2pp2", tmp_path)
    copyfile(folder / "__1_1.distcp", folder / "__3_1.distcp")
    found = ckptfix.open_checkpoint(folder, salvage=True)
    assert [fact.place for fact in found.damage if fact.kind is Kind.SHARD_MISPLACED] == [
        "__1_1.distcp",
        "__3_1.distcp",
    ]
    got = found.state_dict()
    assert got
    assert all(bytes_of(got[key]) == bytes_of(truth[key]) for key in got)


def test_ranks_with_the_same_expert_are_not_copies(tmp_path: Path) -> None:
    """Experts that begin as copies of one layer; each file has tensors of its own too."""
    expert = torch.randn(1, 40)
    parts: list[Part] = [((rank, 0), expert.clone()) for rank in range(3)]
    bias = torch.randn(3)
    tensors: dict[str, Any] = {"experts": (expert.expand(3, 40), parts), "bias": (bias, [None, ((0,), bias), None])}
    write_chunks(tmp_path, {**tensors, "norm": (bias + 1, [((0,), bias + 1)])})
    assert [finding.code for finding in ckptfix.check(tmp_path).findings if finding.code == "FIL105"] == []


def test_a_link_to_a_file_that_does_not_exist_is_a_missing_file(tmp_path: Path) -> None:
    folder, _ = unpacked("megatron_dist_tp2pp2", tmp_path)
    (folder / "__1_1.distcp").unlink()
    (folder / "__1_1.distcp").symlink_to(tmp_path / "elsewhere" / "__1_1.distcp")
    with pytest.raises(UnreadableError, match=r"lacks the shard __1_1\.distcp with 5 keys; lacks 4928 bytes of"):
        ckptfix.open_checkpoint(folder)


def test_ranks_that_saved_different_shapes_under_one_name(tmp_path: Path) -> None:
    write_ranks(tmp_path, [{"a": ONES}, {"a": (WHOLE, [TOP])}])
    with pytest.raises(UnreadableError, match="ranks saved different things under the name a; load it with as many"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_rank_alone_as_torch_writes_it(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        save(dict(STATE), checkpoint_id=tmp_path / "step", use_collectives=False)
    finally:
        torch.distributed.destroy_process_group()
    assert [path.name for path in (tmp_path / "step").glob("*.metadata")] == ["__0.metadata"]
    assert_same(ckptfix.open_checkpoint(tmp_path / "step").state_dict(), STATE)


def test_nothing_whole_is_an_error_even_when_salvaging(tmp_path: Path) -> None:
    chunked(tmp_path)
    for path in tmp_path.glob("*.distcp"):
        path.unlink()
    with pytest.raises(UnreadableError, match="no tensor is whole"):
        ckptfix.open_checkpoint(tmp_path, salvage=True)


def test_chunks_without_their_metadata(tmp_path: Path) -> None:
    chunked(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(UnreadableError, match=r"without their \.metadata file"):
        ckptfix.open_checkpoint(tmp_path)


def test_one_file_of_several(saved: Path) -> None:
    whole = ckptfix.open_checkpoint(saved)
    for file in (next(saved.glob("*.distcp")), saved / ".metadata"):
        one = ckptfix.open_checkpoint(file)
        assert (one.path, one.keys()) == (str(saved), whole.keys())


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/hostname", "link.distcp"])
def test_a_file_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "saved"
    metadata = chunked(folder)
    (tmp_path / "outside.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "link.distcp").symlink_to(tmp_path / "outside.distcp")
    next(iter(metadata.storage_data.values())).relative_path = name
    write_metadata(folder, metadata)
    for salvage in (False, True):
        with pytest.raises(HostileError, match="leads outside the folder"):
            ckptfix.open_checkpoint(folder, salvage=salvage)


def test_objects_come_back_inert_and_their_payloads_are_found(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.system, ("touch run",)

    metadata = chunked(tmp_path)
    with (tmp_path / "__2_0.distcp").open("wb") as file:
        torch.save(Payload(), file)
        metadata.storage_data[MetadataIndex("extra")] = _StorageInfo("__2_0.distcp", 0, file.tell())
    metadata.state_dict_metadata["extra"] = BytesStorageMetadata()
    write_metadata(tmp_path, metadata)
    root: Any = ckptfix.open_checkpoint(tmp_path).root
    assert root["extra"].args == ("touch run",)
    assert "FIL901" in [finding.code for finding in ckptfix.check(tmp_path).findings]


def test_a_leaf_inside_of_a_leaf_is_damage(tmp_path: Path) -> None:
    one = torch.ones(1)
    paths = {"a": ("m",), "b": ("m", "b")}
    write_chunks(tmp_path, {"a": (one, [((0,), one)]), "b": (one, [((0,), one)])}, planner_data=paths)
    with pytest.raises(UnreadableError, match="no unique place"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_file_without_the_others_is_not_the_checkpoint(saved: Path) -> None:
    metadata = saved / ".metadata"
    metadata.rename(saved / "kept")
    with pytest.raises(UnreadableError, match=r"is the \.metadata of torch\.distributed.*name its folder"):
        ckptfix.open_checkpoint(saved / "kept")
    chunks = next(saved.glob("*.distcp"))
    with pytest.raises(UnreadableError, match=r"one of several; name its folder instead, which has to hold \.metadata"):
        ckptfix.open_checkpoint(chunks)


OPTIMIZER: dict[str, Any] = {"state": {"w": {"exp_avg": torch.rand(3)}}, "param_groups": [{"lr": 0.1}]}
FLAT_OPTIMIZER = {"state.w.exp_avg": torch.rand(3), "param_groups.w.lr": 0.1}


@pytest.mark.parametrize(
    ("folders", "model", "optimizer"),
    [
        (("pytorch_model_fsdp_0", "optimizer_0"), {"model": STATE}, {"optimizer": OPTIMIZER}),
        (("weights", "optimizer"), STATE, OPTIMIZER),
        (("weights", "optimizer"), {"model": STATE}, {"optim": OPTIMIZER, "sched": {"last_epoch": 3}}),
        (("model", "optim"), STATE, {"optim": FLAT_OPTIMIZER, "sched": {"last_epoch": 3}}),
        (("model", "optim"), "safetensors", {"optim": FLAT_OPTIMIZER}),
        (("weights/model", "optimizer/optim"), "safetensors", {"optim": FLAT_OPTIMIZER}),
    ],
    ids=["accelerate", "XTuner", "NeMo RL", "NeMo AutoModel", "NeMo AutoModel: safetensors", "NeMo RL with AutoModel"],
)
def test_a_model_and_its_optimizer_saved_apart_are_one_checkpoint(
    tmp_path: Path, folders: tuple[str, str], model: Any, optimizer: dict[str, Any]
) -> None:
    if model == "safetensors":
        writer = HuggingFaceStorageWriter(str(tmp_path / folders[0]), save_distributed=True)
        save({key: value.contiguous() for key, value in STATE.items()}, storage_writer=writer, no_dist=True)
    else:
        save(model, checkpoint_id=tmp_path / folders[0], no_dist=True)
    save(optimizer, checkpoint_id=tmp_path / folders[1], no_dist=True)
    torch.save({"step": 3}, tmp_path / "scheduler.bin")
    assert ckptfix.open_checkpoint(tmp_path).path == str(tmp_path)
    ckptfix.repair(tmp_path, output=tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth")
    assert_same({key: whole["model"][key] for key in STATE}, STATE)
    held, want = (tree_map_only(Tensor, Tensor.tolist, {"optimizer": one} | one) for one in (whole, optimizer))
    name = "optim" if "optim" in want else "optimizer"
    assert held[name] == want[name]
    for lost in (tmp_path / folders[1]).glob("*.distcp"):
        lost.unlink()
    with pytest.raises(
        UnreadableError, match=rf"has a shard that cannot be read .*{folders[1]}: lacks the shard __0_0"
    ):
        ckptfix.open_checkpoint(tmp_path)
    left = ckptfix.repair(tmp_path, salvage=True).state_dict()
    assert_same({key: left[key] for key in STATE}, STATE)


def test_an_optimizer_that_was_saved_by_number_loads(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    save({"model": net.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    ckptfix.repair(tmp_path / "saved", output=tmp_path / "whole.pth")
    other = torch.optim.AdamW(net.parameters())
    other.load_state_dict(torch.load(tmp_path / "whole.pth")["optim"])
    held, want = (tree_map_only(Tensor, Tensor.tolist, each.state_dict()["state"]) for each in (other, optimizer))
    assert held == want


def test_several_steps_in_a_folder_are_not_chosen_from(tmp_path: Path) -> None:
    save({"w": torch.rand(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert ckptfix.open_checkpoint(tmp_path).path == str(tmp_path / "step-1")
    save({"w": torch.rand(3)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    with pytest.raises(UnreadableError, match=r"holds 2 checkpoints of torch.distributed.* \(step-1, step-2\)"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("is_link", [True, False], ids=["link", "text"])
def test_the_step_that_a_link_names_the_latest(tmp_path: Path, is_link: bool) -> None:
    """As Composer leaves them: an uploaded file is replaced by text instead of a link."""
    for step in (1, 2, 3):
        save({"a": torch.full((2,), float(step))}, checkpoint_id=tmp_path / f"ep0-ba{step}", no_dist=True)
    if is_link:
        (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba2")
    else:
        (tmp_path / "latest-rank0.pt.symlink").write_text("run/checkpoints/ep0-ba2")
    assert ckptfix.open_checkpoint(tmp_path).read("a").tolist() == [2.0, 2.0]
    (tmp_path / "other.symlink").write_text("ep0-ba3")
    with pytest.raises(UnreadableError, match=r"holds \d checkpoints of torch\.distributed\.checkpoint \(ep0-ba1"):
        ckptfix.open_checkpoint(tmp_path)
