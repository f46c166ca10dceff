"""One false claim in one file of a genuine folder of ranks, which another file or another claim contradicts: a typed
error, never other weights."""

import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import ckptfix
from ckptfix.errors import UnreadableError
from tests.reading.folders.ranks.genuine import unpacked
from tests.reading.folders.ranks.test_fairscale import write_fairscale
from tests.reading.folders.ranks.test_llama import write_llama
from tests.reading.folders.ranks.test_megatron import write_megatron


def change(file: Path, edit: Callable[[Any], object]) -> None:
    root = torch.load(file, weights_only=False)
    edit(root)
    torch.save(root, file)


def renamed(shapes: list[OrderedDict[str, Any]], old: str, new: str) -> None:
    """Rename a parameter in the groups of ``param_shapes``, in its place."""
    for group in shapes:
        held = [(new if name == old else name, shape) for name, shape in group.items()]
        group.clear()
        group.update(held)


def reshaped(shapes: list[OrderedDict[str, Any]], name: str, shape: list[int]) -> None:
    (group,) = (group for group in shapes if name in group)
    group[name] = torch.Size(shape)


# Changes of `param_shapes`. The last ones are small enough to be within the padding of a group.
OF_SHAPES: dict[str, Callable[[Any], None]] = {
    "a-name-that-is-not-in-the-model": lambda shapes: renamed(shapes, "l1.bias", "l1.biasx"),
    "a-name-that-is-there-twice": lambda shapes: renamed(shapes, "l2.weight", "bn.bias"),
    "a-name-of-a-frozen-weight": lambda shapes: renamed(shapes, "ln.bias", "frozen.bias"),
    "a-larger-shape": lambda shapes: reshaped(shapes, "l1.bias", [12]),
    "a-smaller-shape": lambda shapes: reshaped(shapes, "l1.bias", [10]),
}


@pytest.mark.parametrize("claim", OF_SHAPES)
@pytest.mark.parametrize("sample", ["zero1_w3_bf16_g2", "zero2_w3_fp32_g1", "zero2_w5_fp16_g9", "universal_zero2"])
def test_names_and_shapes_that_the_optimizer_states_contradict(tmp_path: Path, sample: str, claim: str) -> None:
    folder, _ = unpacked(sample, tmp_path)
    (file,) = folder.rglob("mp_rank_00_model_states.pt")
    change(file, lambda root: OF_SHAPES[claim](root["param_shapes"]))
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(folder)


INFO = "universal_checkpoint_info"
# Changes of the model states of one tensor-parallel rank.
OF_SPLITS: dict[str, Callable[[Any], object]] = {
    "no-replicated-parameters": lambda root: root[INFO].pop("tp_replicated_parameter_patterns"),
    "no-row-parallel-parameters": lambda root: root[INFO].pop("parameter_with_row_parallelism_patterns"),
    "no-pairs-of-parameters": lambda root: root[INFO].pop("parameter_with_2_sub_params_cat_dim_0"),
    "another-pattern": lambda root: root[INFO].update(parameter_with_row_parallelism_patterns=["x"]),
    "no-patterns": lambda root: root.pop(INFO),
    "no-names": lambda root: root.pop("param_shapes"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("claim", OF_SPLITS)
def test_splits_that_another_rank_contradicts(tmp_path: Path, claim: str, rank: int) -> None:
    folder, _ = unpacked("tp2_zero2_w4_bf16", tmp_path)
    (file,) = folder.rglob(f"mp_rank_{rank:02d}_model_states.pt")
    change(file, OF_SPLITS[claim])
    with pytest.raises(UnreadableError, match="do not say the same about how they divide weights"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("old", ["a", "b"])
def test_an_item_of_dcp_without_a_description(tmp_path: Path, old: str) -> None:
    """Renaming one in the metadata to the name of another leaves a file's tensor without one."""
    save({"a": torch.ones(3), "b": torch.zeros(3)}, checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata[old]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnreadableError, match=f"{old} in files, but not among the tensors"):
        ckptfix.open_checkpoint(tmp_path)


def patch(file: Path, pattern: bytes, new: bytes) -> None:
    """Replace the first match in the pickle of a rank, which only torch with its process groups can load."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            changed, count = re.subn(pattern, new, data, count=1, flags=re.DOTALL) if "data.pkl" in name else (data, 1)
            assert count == 1
            archive.writestr(name, changed)


@pytest.mark.parametrize("strides", [b"K\1K\1", b"K\0K\1", b"K\6K\1", b"K\7K\0"])
def test_a_shard_whose_elements_overlap(tmp_path: Path, strides: bytes) -> None:
    folder, _ = unpacked("fsdp2_w4", tmp_path)
    patch(folder / "model_world_size_4_rank_1.pt", rb"(K\x00K\x04K\x07\x86q.)K\x07K\x01(?=\x86)", rb"\g<1>" + strides)
    with pytest.raises(UnreadableError, match=r"emb\.weight.*strides make elements of its part overlap"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("place", [b"K\4K\6", b"K\0K\x0b"], ids=["another-offset", "another-size"])
def test_views_of_a_flat_parameter_that_overlap(tmp_path: Path, place: bytes) -> None:
    """FSDP 1 with ``use_orig_params``: the offset and the size of ``blocks.0.ln.weight``."""
    folder, _ = unpacked("fsdp1_local_names_w2", tmp_path)
    patch(folder / "model.rank_1.pth", rb"K\x00K\x06(?=\x85q.K\x01\x85)", place)
    with pytest.raises(UnreadableError, match="its weights overlap in their flat parameter"):
        ckptfix.open_checkpoint(folder)


def test_ranges_of_dcp_that_overlap(tmp_path: Path) -> None:
    """The archive at the end of a range that is too long is that of the next tensor."""
    save({"a": torch.ones(3), "b": torch.zeros(3)}, checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    first, second = sorted(metadata.storage_data.values(), key=lambda info: info.offset)
    first.length += second.length
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnreadableError, match="a and b in the same bytes"):
        ckptfix.open_checkpoint(tmp_path)


def _unit(root: Any) -> Any:
    return root["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]


# Changes of one rank of fairscale, of which the others have the same names and shapes.
OF_FAIRSCALE: dict[str, Callable[[Any], object]] = {
    "a-name": lambda root: _unit(root)["names"].__setitem__(1, "fc.other"),
    "two-names": lambda root: _unit(root)["names"].reverse(),
    "a-shape": lambda root: _unit(root)["shapes"].__setitem__(0, torch.Size([3, 5])),
    "a-tie": lambda root: root["shard_metadata"]["param_metadata"][1]["shared_param_info"].clear(),
    "a-buffer": lambda root: root["model"].update({"decoder.other": root["model"].pop("decoder.version")}),
    "a-module": lambda root: root["shard_metadata"]["param_metadata"][1].update(fsdp_path="decoder"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("claim", OF_FAIRSCALE)
def test_names_and_shapes_that_another_rank_contradicts(tmp_path: Path, claim: str, rank: int) -> None:
    write_fairscale(tmp_path, 2)
    change(tmp_path / f"checkpoint_last-shard{rank}.pt", OF_FAIRSCALE[claim])
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_llama, "consolidated.{:02d}.pth"),
        (write_megatron, "iter_0000007/mp_rank_{:02d}/model_optim_rng.pt"),
    ],
    ids=["llama", "megatron"],
)
@pytest.mark.parametrize("rows", [0, 1, 15])
def test_a_rank_with_fewer_rows_than_the_others(
    tmp_path: Path, write: Callable[[Path, int], object], name: str, rows: int, rank: int
) -> None:
    write(tmp_path, 2)

    def shorten(root: Any) -> None:
        state = root.get("model", root)
        key = next(key for key in state if key.endswith(("wq.weight", "linear_qkv.weight")))
        state[key] = state[key][:rows]

    change(tmp_path / name.format(rank), shorten)
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(tmp_path)


def test_a_tensor_parallel_part_whose_elements_overlap(tmp_path: Path) -> None:
    write_megatron(tmp_path, 2)
    file = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"

    def expand(root: Any) -> None:
        key = "decoder.layers.0.self_attention.linear_qkv.weight"
        root["model"][key] = root["model"][key][:1].expand(root["model"][key].shape)

    change(file, expand)
    with pytest.raises(UnreadableError, match=r"linear_qkv\.weight do not fit"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_rank_of_fairseq2_that_is_not_a_file_is_missing(tmp_path: Path, kind: str) -> None:
    """Only the names of its files say how many ranks there were."""
    folder = tmp_path / "model" / "pp_00" / "tp_00"
    folder.mkdir(parents=True)
    torch.save({"a": torch.ones(2, 2)}, folder / "sdp_00.pt")
    last = folder / "sdp_01.pt"
    {"link": lambda: last.symlink_to("gone"), "pipe": lambda: os.mkfifo(last), "folder": last.mkdir}[kind]()
    with pytest.raises(UnreadableError, match=r"sdp_01\.pt"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("rows", "is_fine"), [((2, 2, 1), True), ((2, 1, 0), True), ((2, 1, 2), False), ((0, 2, 2), False)]
)
def test_rows_of_fairseq2_that_no_rank_could_have(tmp_path: Path, rows: tuple[int, ...], is_fine: bool) -> None:
    folder = tmp_path / "model" / "pp_00" / "tp_00"
    folder.mkdir(parents=True)
    for rank, count in enumerate(rows):
        torch.save({"a": torch.rand(count, 2), "b": torch.rand(1)}, folder / f"sdp_{rank:02d}.pt")
    if is_fine:
        assert ckptfix.open_checkpoint(tmp_path).specs["a"].shape == (sum(rows), 2)
    else:
        with pytest.raises(UnreadableError, match="rows of a do not fit"):
            ckptfix.open_checkpoint(tmp_path)
