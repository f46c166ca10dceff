"""Folders of ranks with false sizes, places and numbers: a typed error in bounded time and memory, and no code
runs."""

import os
import resource
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

import ckptfix
from ckptfix.errors import HostileError, UnreadableError
from tests.attacks.outcomes import REFUSED, outcome
from tests.reading.folders.ranks.test_llama import write_llama
from tests.reading.folders.ranks.test_megatron import write_megatron
from tests.reading.folders.ranks.test_zero import write_names, write_rank, write_zero, write_zero3

TENSORS = {"a": torch.arange(35.0).reshape(5, 7), "c": torch.arange(100.0, 113.0)}
HUGE = 1 << 40


_Shard = tuple[list[int], list[int], torch.Tensor]
"""The offsets and sizes of a shard, as they are claimed, and its tensor."""


class Pickled:
    """Pickles as a ``ShardedTensor``, without the process group that torch needs for one."""

    def __init__(
        self, size: tuple[int, ...], shards: list[tuple[list[int], list[int], torch.Tensor]], world: int
    ) -> None:
        self.size, self.shards, self.world = size, shards, world

    def __reduce_ex__(self, protocol: Any) -> Any:
        places = [ShardMetadata(offsets, sizes, "rank:0/cpu") for offsets, sizes, _ in self.shards]
        held = []
        for (_, _, tensor), place in zip(self.shards, places, strict=True):
            shard = Shard(tensor, ShardMetadata([0] * tensor.ndim, list(tensor.shape), "rank:0/cpu"))
            shard.metadata = place  # torch would not allow a false value
            held.append(shard)
        state = ShardedTensor.ProcessGroupState(0, 0, self.world, self.world)
        metadata = ShardedTensorMetadata(places, torch.Size(self.size), TensorProperties())
        args = (ShardedTensor, torch.float32, self.size, (1,), 0, torch.strided, "cpu", False)
        rebuild = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (rebuild, ShardedTensor, args, (held, metadata, state, None, False))


def shards(*parts: tuple[list[int], list[int]], size: tuple[int, ...] = (8,), world: int = 2) -> Callable[[Path], None]:
    """Write two ranks with parts of two elements of one tensor, and any claimed places."""

    def write(folder: Path) -> None:
        for rank, (offsets, sizes) in enumerate(parts):
            tensor = Pickled(size, [(offsets, sizes, torch.ones(2))], world)
            torch.save({"w": tensor, "b": torch.ones(1)}, folder / f"model_rank_{rank}.pt")

    return write


def zero(change: Callable[[dict[str, Any]], None], names: dict[str, Any] | None = None) -> Callable[[Path], None]:
    """Write ZeRO 2 on two ranks, with changed contents of each rank and other names."""

    def write(folder: Path) -> None:
        write_zero(folder, TENSORS, world=2)
        for rank in range(2):
            file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            held = torch.load(file, weights_only=False)["optimizer_state_dict"]
            change(held)
            write_rank(folder, rank, held)
        if names is not None:
            write_names(folder, "mp_rank_00", names, OrderedDict(TENSORS))

    return write


class Shape:
    """Stands in for a tensor if only its shape is needed."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def zero3(names: dict[str, Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_zero3(folder, TENSORS, world=2)
        write_names(folder, "zero_pp_rank_0_mp_rank_00", names, OrderedDict((key, torch.empty(0)) for key in names), 2)

    return write


def frozen_as(*shape: int) -> Callable[[Path], None]:
    """Write ZeRO 3 on two ranks, each with five numbers of a frozen weight, and any claimed shape of it."""

    def write(folder: Path) -> None:
        write_zero3(folder, TENSORS, world=2)
        for file in folder.glob("*_model_states.pt"):
            held = {"frozen_param_shapes": {"f": torch.Size(shape)}, "frozen_param_fragments": {"f": torch.ones(5)}}
            torch.save({**torch.load(file, weights_only=False), **held}, file)

    return write


def shared(depth: int) -> Any:
    """Return a dict that contains itself many times: 4^depth values in a few objects."""
    value: Any = {"x": 1}
    for _ in range(depth):
        value = dict.fromkeys("abcd", value)
    return value


def bomb(folder: Path) -> None:
    for rank in range(2):
        tensor = Pickled((4,), [([2 * rank], [2], torch.ones(2))], 2)
        torch.save({"bomb": shared(24), "w": tensor}, folder / f"model_rank_{rank}.pt")


def megatron_bomb(folder: Path) -> None:
    for rank in range(2):
        home = folder / f"mp_rank_{rank:02d}"
        home.mkdir()
        torch.save({"checkpoint_version": 3.0, "model": shared(24)}, home / "model_optim_rng.pt")


def megatron_of(**args: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_megatron(folder, 2)
        for file in folder.rglob("*.pt"):
            root = torch.load(file, weights_only=False)
            torch.save({**root, "args": {**vars(root["args"]), **args}}, file)

    return write


def llama_of(**params: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_llama(folder, 2, **params)
        (folder / "consolidated.01.pth").rename(folder / "consolidated.9999.pth")

    return write


FOLDERS = {
    "overlapping-boxes": shards(([0], [2]), ([1], [2]), size=(4,)),
    "a-box-past-the-end": shards(([0], [2]), ([3], [2]), size=(4,)),
    "a-box-larger-than-its-part": shards(([0], [2]), ([2], [HUGE]), size=(HUGE + 2,)),
    "a-whole-of-a-terabyte": shards(([0], [2]), ([2], [2]), size=(HUGE,)),
    "boxes-of-other-dimensions": shards(([0], [2]), ([0, 0], [2, 1]), size=(4,)),
    "a-hundred-thousand-ranks": shards(([0], [2]), ([2], [2]), world=100_000),
    "more-ranks-than-there-can-be": shards(([0], [2]), ([2], [2]), world=1 << 50),
    "zero-on-a-hundred-thousand-ranks": zero(lambda held: held.update(partition_count=[100_000])),
    "zero-on-too-many-ranks": zero(lambda held: held.update(partition_count=[1 << 60])),
    "zero-on-no-rank": zero(lambda held: held.update(partition_count=[0])),
    "zero-with-a-shape-of-terabytes": zero(lambda held: None, {"a": Shape(HUGE, HUGE)}),
    "zero-with-partitions-past-the-end": zero(lambda held: None, {"a": Shape(5, 7), "c": Shape(4000)}),
    "zero-with-padding-of-terabytes": zero(lambda held: held.update(param_alignment_paddings=[[HUGE, 0, 0]])),
    "zero-with-negative-padding": zero(lambda held: held.update(param_alignment_paddings=[[-35, 0]])),
    "zero-with-words-for-padding": zero(lambda held: held.update(param_alignment_paddings=[["x", "y"]])),
    "zero-3-with-a-shape-of-terabytes": zero3({"a": Shape(HUGE), "c": Shape(13)}),
    "zero-3-past-the-end": zero3({"a": Shape(5, 7), "c": Shape(500)}),
    "zero-3-with-a-frozen-weight-that-is-too-small": frozen_as(1, 7),
    "zero-3-with-a-frozen-weight-of-nothing": frozen_as(0, 7),
    "zero-3-with-a-frozen-weight-of-terabytes": frozen_as(HUGE),
    "megatron-on-a-hundred-thousand-ranks": megatron_of(tensor_model_parallel_size=100_000),
    "megatron-on-more": megatron_of(tensor_model_parallel_size=1 << 19, pipeline_model_parallel_size=1 << 19),
    "megatron-with-stages-that-are-not-there": megatron_of(pipeline_model_parallel_size=1 << 18),
    "megatron-that-holds-itself": megatron_bomb,
    "llama-with-ranks-that-are-not-there": llama_of(),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_typed_error(tmp_path: Path, name: str) -> None:
    FOLDERS[name](tmp_path)
    assert outcome(tmp_path) == REFUSED


def test_a_frozen_weight_of_its_shape_is_taken(tmp_path: Path) -> None:
    frozen_as(2, 5)(tmp_path)
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).state_dict()["f"], torch.ones(2, 5))


@pytest.mark.parametrize("dim", [0, 1, 64, -1, 10**9, "32", None])
@pytest.mark.parametrize("by_columns", [False, True])
def test_a_false_width_of_llama_does_not_turn_its_embeddings(tmp_path: Path, by_columns: bool, dim: Any) -> None:
    whole = write_llama(tmp_path, 2, by_columns=by_columns, dim=dim)
    got = ckptfix.open_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(got[key], value) for key, value in whole.items())


def test_a_container_that_holds_itself_is_walked_once(tmp_path: Path) -> None:
    bomb(tmp_path)
    assert outcome(tmp_path) == "repaired"


def test_ranks_of_megatron_that_hold_themselves_are_left_early(tmp_path: Path) -> None:
    megatron_bomb(tmp_path)
    with pytest.raises(UnreadableError, match="hold one another over and over"):
        ckptfix.open_checkpoint(tmp_path)


def test_in_bounded_memory(tmp_path: Path) -> None:
    for name, write in FOLDERS.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    command = [
        sys.executable,
        "-m",
        "tests.attacks.outcomes",
        str(2 << 30),
        *(str(tmp_path / name) for name in FOLDERS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [REFUSED] * len(FOLDERS)


def test_salvage_of_a_lie_is_bounded(tmp_path: Path) -> None:
    FOLDERS["zero-on-a-hundred-thousand-ranks"](tmp_path)
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(tmp_path, salvage=True)


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_payload_in_any_rank_is_named(tmp_path: Path, rank: int) -> None:
    write_zero(tmp_path, TENSORS, world=2)
    file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({**torch.load(file, weights_only=False), "x": Payload()}, file)
    findings = ckptfix.check(tmp_path).findings
    assert "FIL901" in [finding.code for finding in findings]
    assert not Path("executed").exists()


def test_a_payload_is_named_before_what_is_wrong_with_the_ranks(tmp_path: Path) -> None:
    shards(([0], [2]), ([1], [2]), size=(4,))(tmp_path)
    file = tmp_path / "model_rank_1.pt"
    tensor = Pickled((4,), [([1], [2], torch.ones(2))], 2)
    torch.save({"w": tensor, "x": Payload()}, file)
    with pytest.raises(HostileError, match="built to run code"):
        ckptfix.open_checkpoint(tmp_path)


def test_links_lead_nowhere_else(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    write_zero(inside, TENSORS, world=2)
    file = inside / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.rename(outside / file.name)
    file.symlink_to(outside / file.name)
    with pytest.raises(HostileError, match="leads outside the folder"):
        ckptfix.open_checkpoint(inside)


def test_a_snapshot_of_links_is_read(tmp_path: Path) -> None:
    """In the cache of the Hugging Face hub, every file is a link into another folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    write_zero(blobs, TENSORS, world=2)
    snapshot.mkdir()
    for file in list(blobs.iterdir()):
        (snapshot / file.name).symlink_to(file)
    assert ckptfix.open_checkpoint(snapshot).keys() == list(TENSORS)


@pytest.mark.parametrize("tag", ["../outside", "/etc", ".", "\0", "x" * 900])
def test_a_tag_leads_nowhere_else(tmp_path: Path, tag: str) -> None:
    (tmp_path / "inside").mkdir()
    write_zero(tmp_path / "outside", TENSORS, world=2)
    (tmp_path / "inside" / "latest").write_text(tag)
    with pytest.raises((HostileError, UnreadableError)):
        ckptfix.open_checkpoint(tmp_path / "inside")


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder"])
def test_a_rank_that_is_not_a_file_is_missing(tmp_path: Path, kind: str) -> None:
    write_zero(tmp_path, TENSORS, world=2)
    file = tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.unlink()
    make: dict[str, Callable[[Path], None]] = {
        "pipe": os.mkfifo,
        "loop": lambda path: path.symlink_to(path.name),
        "folder": Path.mkdir,
    }
    make[kind](file)
    assert outcome(tmp_path) == REFUSED


def test_more_files_than_a_process_may_open_at_first(tmp_path: Path) -> None:
    """A rank is a file that stays open. A thousand links to one of them are not a thousand ranks."""
    for name, links in (("genuine", 0), ("links", 1000)):
        write_zero(tmp_path / name, TENSORS, world=40)
        for rank in range(40, 40 + links):
            file = tmp_path / name / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            file.symlink_to("zero_pp_rank_0_mp_rank_00_optim_states.pt")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 20, hard))
    try:
        assert ckptfix.open_checkpoint(tmp_path / "genuine").keys() == list(TENSORS)
        with pytest.raises(UnreadableError, match="ranks beyond the 40") as raised:
            ckptfix.open_checkpoint(tmp_path / "links")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(str(raised.value)) < 2000


def test_more_files_than_a_process_may_ever_open(tmp_path: Path) -> None:
    """Files beyond the limit are opened when they are read, also by the kernel's copy."""
    tensors = {**TENSORS, "large": torch.arange(1 << 18)}
    write_zero(tmp_path / "ranks", tensors, world=40)
    command = [sys.executable, "-m", "ckptfix", "repair", str(tmp_path / "ranks"), "-o", str(tmp_path / "whole.pth")]
    subprocess.run(["sh", "-c", 'ulimit -n 12; exec "$@"', "sh", *command], check=True, capture_output=True)
    whole = torch.load(tmp_path / "whole.pth")["module"]
    assert {key: value.tolist() for key, value in whole.items()} == {k: v.tolist() for k, v in tensors.items()}
