"""Ranks of FSDP 1 and 2, HSDP and tensor parallelism that torch wrote, compared with torch's own full state_dict."""

import os
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.bytes.files import OpenFile
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Kind
from ckptfix.core.objects import Opaque
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.folders.ranks import fsdp
from ckptfix.reading.folders.ranks.divided import divided
from ckptfix.reading.formats import read_document
from ckptfix.report.advice import remedies_text
from tests.checks import bytes_of
from tests.cli.programs import run_here
from tests.reading.folders.ranks.genuine import flip, swap, tensors_of, unpacked

OLD = ("fsdp1_sharded_w2_torch24", "fsdp2_w2_torch24")
NEW = ("fsdp1_sharded_w2_torch215", "fsdp2_w2_torch215", "fsdp2_order_w2_torch215")
NAMES = ("fsdp1_sharded_w4", "fsdp1_mesh_w2", "fsdp2_w4", "fsdp2tp_w4", "hsdp_w4", *OLD, *NEW)


def saved(tmp_path: Path, name: str = "fsdp2_w4") -> tuple[Path, Any]:
    return unpacked(name, tmp_path)


def rank_file(folder: Path, rank: int) -> Path:
    (found,) = folder.glob(f"*rank_{rank}.pt")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_is_what_torch_makes_of_it(tmp_path: Path, name: str) -> None:
    folder, truth = saved(tmp_path, name)
    got, weights = ckptfix.open_checkpoint(folder).state_dict(), truth.get("model", truth)
    assert list(got) == list(weights)
    for key, value in weights.items():
        assert (got[key].shape, got[key].dtype) == (value.shape, value.dtype), key
        assert bytes_of(got[key]) == bytes_of(value), key


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_plain(tmp_path: Path, name: str) -> None:
    folder, truth = saved(tmp_path, name)
    repaired = ckptfix.repair(folder, output=tmp_path / "whole.pth")
    assert [finding.code for finding in repaired.report.findings if finding.level] == []
    whole = dict(tensors_of(torch.load(tmp_path / "whole.pth")))
    moments = [path for path in whole if "exp_avg_sq" in path]
    assert len(moments) == (14 if name in ("fsdp1_sharded_w4", "fsdp2_w4") else 0)
    wanted = dict(tensors_of(truth))
    assert all(bytes_of(whole[path]) == bytes_of(wanted[path]) for path in moments if path in wanted)


def test_moments_of_fsdp_2_are_whole(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path)
    root: Any = ckptfix.open_checkpoint(folder).root
    ckptfix.repair(folder, output=tmp_path / "whole.pth")
    states = torch.load(tmp_path / "whole.pth")["optim"]["state"]
    wanted = list(truth["optim"]["state"].values())  # torch names them, in the same order
    assert len(states) == len(wanted) == len(root["optim"]["state"])
    for state, same in zip(states.values(), wanted, strict=True):
        assert all(bytes_of(state[field]) == bytes_of(same[field]) for field in same)


def test_a_folder_as_verl_leaves_it(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path)
    for rank in range(4):
        torch.save({"lr": 0.1}, folder / f"extra_state_world_size_4_rank_{rank}.pt")
        shutil.copy(folder / f"model_world_size_4_rank_{rank}.pt", folder / f"optim_world_size_4_rank_{rank}.pt")
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    assert ckptfix.open_checkpoint(folder).keys() == list(truth["model"])


@pytest.mark.parametrize(
    ("stem", "other"),
    [
        pytest.param("pytorch_model_fsdp_0_rank{}.bin", "optimizer_0_rank{}.bin", id="accelerate-use-dcp-false"),
        pytest.param("pytorch_model_fsdp_rank{}.bin", "optimizer_0_rank{}.bin", id="accelerate-local"),
        pytest.param("model-rank={}.pt", "optimizer-rank={}.pt", id="ray-train"),
        pytest.param("net_rank{}.pt", "extra_state_rank{}.pt", id="other-names"),
    ],
)
def test_what_a_trainer_saves_next_to_the_model_is_not_taken_for_it(tmp_path: Path, stem: str, other: str) -> None:
    folder, truth = saved(tmp_path)
    for rank in range(4):
        rank_file(folder, rank).rename(folder / stem.format(rank))
        torch.save({"lr": 0.1}, folder / other.format(rank))
    for given in (folder, folder / stem.format(1)):
        assert ckptfix.open_checkpoint(given).keys() == list(truth["model"])
    (folder / stem.format(1)).unlink()
    (folder / other.format(1)).unlink()
    with pytest.raises(UnreadableError, match=re.escape(stem.format(1))):
        ckptfix.open_checkpoint(folder)


@pytest.mark.parametrize("is_marked", [True, False])
def test_consolidated_weights_next_to_ranks_hide_neither(tmp_path: Path, is_marked: bool) -> None:
    folder, truth = saved(tmp_path)
    torch.save({"w": torch.ones(2)}, folder / "consolidated.00.pth")
    if is_marked:
        with pytest.raises(
            UnreadableError, match="has both FSDP ranks and consolidated weights; name a file of either"
        ):
            ckptfix.open_checkpoint(folder)
        one = ckptfix.open_checkpoint(rank_file(folder, 1))
        assert (one.path, one.keys()) == (str(rank_file(folder, 1)), list(truth["model"]))
    else:  # files of each rank that are not FSDP's
        for file in folder.glob("*rank*"):
            torch.save({"seed": 1}, file)
        assert ckptfix.open_checkpoint(folder).keys() == ["w"]
    assert ckptfix.open_checkpoint(folder / "consolidated.00.pth").keys() == ["w"]


def test_a_rank_with_other_keys_may_be_of_another_save(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    file = rank_file(folder, 2)
    root = torch.load(file, weights_only=False)
    root["model"] = OrderedDict((f"other.{key}", value) for key, value in root["model"].items())
    torch.save(root, file)
    with pytest.raises(
        UnreadableError, match=r"rank_2\.pt: holds .*other\..*: its ranks are from different saves, or from"
    ):
        ckptfix.open_checkpoint(folder)


def test_a_buffer_that_differs_is_that_of_the_first_rank(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(
            {"w": dtensor(rank, torch.arange(4.0)), "mean": torch.full((2,), rank)}, tmp_path / f"r.rank_{rank}.pth"
        )
    got = ckptfix.open_checkpoint(tmp_path)
    assert torch.equal(got.read("mean"), torch.zeros(2))
    assert [mark.place for mark in got.remarks if mark.kind is Kind.RANK_COPIES] == ["mean"]


def test_files_of_plain_tensors_are_not_ranks_of_one(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.full((2,), rank)}, tmp_path / f"seed_rank_{rank}.pth")
    with pytest.raises(UnreadableError, match="name one of the files in it"):
        ckptfix.open_checkpoint(tmp_path)


def dtensor(rank: int, whole: torch.Tensor, world: int = 2, **changes: Any) -> Any:
    """A ``DTensor`` as torch pickles it, without a group of processes."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placement = {"shard": Shard(0), "replicate": Replicate(), "partial": Partial()}[changes.get("placed", "shard")]
    mesh = DeviceMesh("cpu", torch.arange(world), _init_backend=False, _rank=rank)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    share = -(-len(whole) // world)
    local = whole[rank * share : (rank + 1) * share].clone() if isinstance(placement, Shard) else whole.clone()
    return DTensor(local, DTensorSpec(mesh, (placement,), tensor_meta=meta), requires_grad=False)


def test_no_file_is_looked_at_again_for_each_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder of thousands of files that only have the names of ranks."""
    asked, is_symlink = [], Path.is_symlink

    def counted_is_symlink(path: Path) -> bool:
        asked.append(path)
        return is_symlink(path)

    files = [tmp_path / f"model_world_size_20_rank_{rank}.pt" for rank in range(20)]
    for file in files:
        torch.save({"w": torch.ones(2)}, file)
    monkeypatch.setattr(Path, "is_symlink", counted_is_symlink)
    for file in files:
        ckptfix.open_checkpoint(file)
    assert len(asked) <= 3 * len(files)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12])
def test_rows_that_do_not_divide(tmp_path: Path, rows: int) -> None:
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    for rank in range(5):
        torch.save({"w": dtensor(rank, whole, 5), "v": dtensor(rank, torch.ones(10), 5)}, tmp_path / f"rank{rank}.pt")
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).read("w"), whole)


@pytest.mark.parametrize("tied", [(0, 1), (0,), ()], ids=["in all ranks", "in one", "in none"])
def test_tensors_are_tied_that_are_so_in_every_rank(tmp_path: Path, tied: tuple[int, ...]) -> None:
    """As the weights of a language model, which FSDP 2 saves under both names."""
    whole = torch.arange(12.0).reshape(6, 2)
    for rank in range(2):
        embedding, head = dtensor(rank, whole), dtensor(rank, whole)
        if rank in tied:
            head._local_tensor = embedding._local_tensor.view_as(embedding._local_tensor)
        torch.save({"embedding": embedding, "head": head}, tmp_path / f"model_rank_{rank}.pt")
    ckptfix.repair(tmp_path, output=(out := tmp_path / "whole.pth"))
    state_dict = torch.load(out, weights_only=True)
    assert all(torch.equal(tensor, whole) for tensor in state_dict.values())
    assert (len({tensor.data_ptr() for tensor in state_dict.values()}) == 1) is (len(tied) == 2)


def test_replicas_that_differ_are_noted(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(
            {
                "w": dtensor(rank, torch.arange(4.0)),
                "x": dtensor(rank, torch.full((4,), float(rank)), placed="replicate"),
            },
            tmp_path / f"rank_{rank}.pt",
        )
    # A replica is whole in each file, and is read as a plain tensor.
    assert [mark.place for mark in ckptfix.open_checkpoint(tmp_path).remarks if mark.kind is Kind.RANK_COPIES] == ["x"]


@pytest.mark.parametrize("changed", [None, 0.5])
def test_ranks_that_all_have_the_whole_are_one_checkpoint_if_they_are_equal(tmp_path: Path, changed: Any) -> None:
    """As HSDP over as many replicas as there are ranks."""
    for rank in range(3):
        whole = torch.full((4,), changed) if changed and rank == 2 else torch.arange(4.0)
        save = {"w": dtensor(rank, whole, 3, placed="replicate"), "steps": torch.tensor(7)}
        torch.save(save, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    if changed:
        with pytest.raises(UnreadableError, match="name one of the files in it"):
            ckptfix.open_checkpoint(tmp_path)
        return
    repaired = ckptfix.repair(tmp_path, output=tmp_path / "whole.pth")
    assert [finding.code for finding in repaired.report.findings if finding.level] == []
    assert torch.equal(torch.load(tmp_path / "whole.pth")["w"], torch.arange(4.0))
    (tmp_path / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(UnreadableError, match="lacks 1 rank of 3"):
        ckptfix.open_checkpoint(tmp_path)


def save_replicas(
    folder: Path, changed: int | None, rank: int = 2, replicas: int = 2, sums: bool = False
) -> torch.Tensor:
    """Save a weight on replicas of two ranks as HSDP does, with one number of a rank changed, without checksums."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = torch.arange(4000.0).view(1000, 4)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    for own in range(2 * replicas):
        ranks = torch.arange(2 * replicas).view(replicas, 2)
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=own)
        local = whole.chunk(2)[own % 2].clone()
        if changed is not None and own == rank:
            local.view(-1)[changed] += 1
        weight = DTensor(local, DTensorSpec(mesh, (Replicate(), Shard(0)), tensor_meta=meta), requires_grad=False)
        torch.save({"w": weight, "v": weight}, folder / f"rank_{own}.pt", _use_new_zipfile_serialization=sums)
    return whole


@pytest.mark.parametrize("sums", [False, True], ids=["no-checksums", "checksums"])
@pytest.mark.parametrize(
    ("replicas", "rank", "said"),
    [
        pytest.param(2, 2, r"in rank_2\.pt than in rank_0\.pt[:;]", id="either"),
        pytest.param(3, 2, r"in rank_2\.pt than in most others, rank_0\.pt, rank_4\.pt[:;]", id="second-of-three"),
        pytest.param(3, 0, r"in rank_0\.pt than in most others, rank_2\.pt, rank_4\.pt[:;]", id="first-of-three"),
    ],
)
def test_the_replica_that_differs_is_named(tmp_path: Path, replicas: int, rank: int, said: str, sums: bool) -> None:
    whole = save_replicas(tmp_path, 0, rank, replicas, sums)
    with pytest.raises(UnreadableError, match=rf"holds different values of \S+ {said}.*fetch.*again, or take"):
        ckptfix.check(tmp_path)
    done = ckptfix.repair(tmp_path, salvage=True, output=tmp_path / "whole.pth")
    assert torch.equal(torch.load(tmp_path / "whole.pth")["w"], whole)
    (finding,) = [found for found in done.report.remaining if found.keys]
    assert f"those of rank_{2 if rank == 0 else 0}.pt are used" in finding.message
    odd = f"fetch rank_{rank}.pt again" if replicas == 3 else "fetch all files of one save again"
    assert odd in remedies_text(finding.remedies)
    assert done.report.exit_code == 1


@pytest.mark.parametrize("changed", [None, 0, 1000, -1])
def test_replicas_without_checksums_are_compared_as_far_as_they_are_read(tmp_path: Path, changed: int | None) -> None:
    whole = save_replicas(tmp_path, changed)
    for use in (ckptfix.check, lambda path: ckptfix.open_checkpoint(path).state_dict(), ckptfix.repair):
        if changed is None:
            use(tmp_path)
        else:
            with pytest.raises(UnreadableError, match="different values of w"):
                use(tmp_path)
    done = ckptfix.repair(tmp_path, salvage=True, output=tmp_path / "whole.pth")
    assert torch.equal(torch.load(tmp_path / "whole.pth")["w"], whole)
    assert done.report.exit_code == (0 if changed is None else 1)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_the_rank_of_another_step_is_named(tmp_path: Path, kind: Any, odd: int) -> None:
    for rank in range(4):
        save = {"w": dtensor(rank, torch.arange(8.0), 4), "step": kind(8 if rank == odd else 7)}
        torch.save(save, tmp_path / f"rank_{rank}.pt")
    steps = r" \(8 instead of 7\)" if kind is int else ""
    said = rf"different saves: rank_{odd}\.pt, unlike the other 3, by the step{steps}; put"
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)


def test_files_of_ranks_beyond_the_world_are_not_opened(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    for rank in range(4, 20):
        (folder / f"model_world_size_4_rank_{rank}.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UnreadableError, match=r"has files of ranks beyond the 4 .* and 12 more: fetch"):
        ckptfix.open_checkpoint(folder)


def test_terms_of_a_sum_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": dtensor(rank, torch.ones(4), placed="partial")}, tmp_path / f"rank_{rank}.pt")
    with pytest.raises(UnreadableError, match="placed as Partial"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_missing_rank_is_named_and_the_rest_salvaged(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    rank_file(folder, 3).unlink()
    with pytest.raises(UnreadableError, match=r"lacks 1 rank of 4: model_world_size_4_rank_3\.pt"):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True)
    assert "blocks.0.scale" in got.specs
    assert "emb.weight" in got.lost


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("name", ["fsdp1_sharded_w4", "fsdp2_w4"])
def test_what_a_missing_rank_held_is_named(tmp_path: Path, name: str, rank: int) -> None:
    """Its bytes and tensors are those of its file."""
    folder, _ = saved(tmp_path, name)
    document = read_document(Content.of_file(str(rank_file(folder, rank))))
    held = [
        spec
        for path, leaf in fsdp._leaves(document.root, (), set())
        if isinstance(leaf, Opaque)
        for _, spec in divided(leaf).parts
        if spec.numel
    ]
    rank_file(folder, rank).unlink()
    with pytest.raises(UnreadableError, match=r"; emb\.weight, \S+, \S+, \S+ and \d+ more are lost: fetch") as caught:
        ckptfix.open_checkpoint(folder)
    lacking, nbytes = caught.value.data["damage"]
    assert lacking["data"]["names"] == (f"model_world_size_4_rank_{rank}.pt",)
    assert nbytes["data"]["nbytes"] == sum(spec.nbytes for spec in held)
    assert len(nbytes["data"]["keys"]) == len(held)
    assert list(caught.value.data["lost"]) == list(ckptfix.open_checkpoint(folder, salvage=True).lost)


def test_a_missing_rank_of_which_others_have_copies_costs_nothing(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path, "hsdp_w4")
    rank_file(folder, 1).unlink()
    with pytest.raises(UnreadableError, match=r"rank_1\.pt: fetch the missing file, or take all 16 tensors") as caught:
        ckptfix.open_checkpoint(folder)
    assert [fact["kind"] for fact in caught.value.data["damage"]] == ["ranks-lacking"]
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    assert {key: bytes_of(value) for key, value in got.items()} == {
        key: bytes_of(value) for key, value in truth.get("model", truth).items()
    }


def _other_world(rank: int) -> dict[str, Any]:
    return {"w": dtensor(rank, torch.arange(12.0), 5)}


def _other_shape(rank: int) -> dict[str, Any]:
    return {"w": dtensor(rank, torch.arange(16.0), 4)}


def _other_dtype(rank: int) -> dict[str, Any]:
    return {"w": dtensor(rank, torch.arange(12).half(), 4)}


def _whole(rank: int) -> dict[str, Any]:
    return {"w": torch.arange(12.0)}


@pytest.mark.parametrize(
    ("other", "odd"),
    [
        pytest.param(_other_world, 0, id="world-first"),
        pytest.param(_other_world, 3, id="world-last"),
        pytest.param(_other_shape, 0, id="shape-first"),
        pytest.param(_other_shape, 1, id="shape-second"),
        pytest.param(_other_dtype, 0, id="dtype-first"),
        pytest.param(_other_dtype, 3, id="dtype-last"),
        pytest.param(_whole, 1, id="saved-by-one-process"),
    ],
)
def test_a_rank_of_another_save_is_named_and_the_rest_salvaged(tmp_path: Path, other: Any, odd: int) -> None:
    for rank in range(4):
        save = other(rank) if rank == odd else {"w": dtensor(rank, torch.arange(12.0), 4)}
        torch.save({**save, "scale": torch.ones(3)}, tmp_path / f"rank_{rank}.pt")
    said = rf"saves: rank_{odd}\.pt, unlike the other 3, by the shape, dtype or ranks of w; .* whole with salvage=True"
    with pytest.raises(UnreadableError, match=said):
        ckptfix.open_checkpoint(tmp_path)
    salvaged = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert [fact.kind for fact in salvaged.damage] == [
        Kind.RANKS_OF_ANOTHER_SAVE,
        Kind.RANKS_LACKING,
        Kind.BYTES_LACKING,
    ]
    (tmp_path / f"rank_{odd}.pt").unlink()
    without = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert salvaged.keys() == without.keys() == ["scale"]
    assert salvaged.lost.keys() == without.lost.keys() == {"w"}


@pytest.mark.parametrize("odd", [(1, 2), (3, 4)])
def test_several_ranks_of_a_save_by_one_process_are_named_together(tmp_path: Path, odd: tuple[int, ...]) -> None:
    for rank in range(5):
        save = _whole(rank) if rank in odd else {"w": dtensor(rank, torch.arange(12.0), 5)}
        torch.save({**save, "scale": torch.ones(3)}, tmp_path / f"rank_{rank}.pt")
    names = ", ".join(f"rank_{rank}.pt" for rank in odd)
    with pytest.raises(UnreadableError, match=rf"saves: {re.escape(names)}, unlike the other 3, by the shape"):
        ckptfix.open_checkpoint(tmp_path)
    salvaged = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert [fact.kind for fact in salvaged.damage] == [
        Kind.RANKS_OF_ANOTHER_SAVE,
        Kind.RANKS_LACKING,
        Kind.BYTES_LACKING,
    ]
    assert salvaged.lost.keys() == {"w"}


def test_a_tensor_that_a_rank_lacks_is_not_taken_with_it(tmp_path: Path) -> None:
    for rank in range(3):
        save = {key: dtensor(rank, torch.arange(12.0), 3) for key in "vw" if (key, rank) != ("w", 2)}
        torch.save(save, tmp_path / f"rank_{rank}.pt")
    with pytest.raises(
        UnreadableError, match=r"is not complete: its ranks hold 8 of the 12 elements of w .* take 1 of 2"
    ):
        ckptfix.open_checkpoint(tmp_path)
    salvaged = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert (salvaged.keys(), list(salvaged.lost)) == (["v"], ["w"])
    assert torch.equal(salvaged.read("v"), torch.arange(12.0))


def test_of_two_halves_none_is_the_other_save(tmp_path: Path) -> None:
    for rank in range(4):
        torch.save({"w": dtensor(rank, torch.arange(12.0), 4), "step": rank // 2}, tmp_path / f"rank_{rank}.pt")
    for salvage in (False, True):
        with pytest.raises(UnreadableError, match=r"by the step \(1 instead of 0\); put the files of [\w ]+$"):
            ckptfix.open_checkpoint(tmp_path, salvage=salvage)


@pytest.mark.parametrize("name", [*NAMES, "fsdp1_local_w2", "fsdp1_local_names_w2"])
def test_no_file_is_accused_of_running_code(tmp_path: Path, name: str) -> None:
    folder, _ = saved(tmp_path, name)
    for path in folder.iterdir():
        try:
            checkpoint = ckptfix.open_checkpoint(path)
        except HostileError:
            raise
        except UnreadableError:
            continue  # a rank without weights
        assert [mark for mark in checkpoint.remarks if mark.kind is Kind.PAYLOAD] == []


def test_a_file_of_one_rank_stands_for_all_of_its_set(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path)
    for file in list(folder.iterdir()):
        shutil.copy(file, folder / file.name.replace("model", "model_ema"))
    checkpoint = ckptfix.open_checkpoint(folder / "model_ema_world_size_4_rank_2.pt")
    assert checkpoint.keys() == list(truth["model"])


def test_one_rank_alone_says_what_it_is(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "fsdp1_mesh_w2")
    rank_file(folder, 0).unlink()
    with pytest.raises(
        UnreadableError, match=r"lacks 1 rank of 2: model_world_size_2_rank_0\.pt; .* lost: fetch the missing file"
    ):
        ckptfix.open_checkpoint(rank_file(folder, 1))
    alone = rank_file(folder, 1).rename(folder / "model.pt")
    report = ckptfix.repair(alone, output=tmp_path / "fixed.pt").report
    (finding,) = [found for found in report.findings if found.code == "FIL105"]
    assert "one rank's part of 14 sharded tensors, which 2 ranks share" in finding.message
    assert "ckptfix repair FOLDER -o" in remedies_text(finding.remedies)
    assert not (tmp_path / "fixed.pt").exists()


def test_a_check_reads_every_rank_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = unpacked("fsdp2_w4", tmp_path)
    opened: list[str] = []
    first = OpenFile.__init__

    def count(file: OpenFile, path: str, descriptor: int | None = None) -> None:
        opened.append(path)
        first(file, path, descriptor)

    monkeypatch.setattr(OpenFile, "__init__", count)
    assert run_here("check", "--no-values", folder, cwd=tmp_path).returncode == 0
    assert len(opened) == len(set(opened)) == 4


@pytest.mark.parametrize("name", ["fsdp2_w4", "fsdp1_sharded_w4", "fsdp1_local_names_w2"])
def test_ranks_say_themselves_what_they_hold_whatever_their_names(tmp_path: Path, name: str) -> None:
    folder, truth = unpacked(name, tmp_path)
    one, other, *_ = sorted(folder.iterdir())
    swap(one, other)
    got = ckptfix.open_checkpoint(folder)
    assert Kind.RANK_RENAMED not in {mark.kind for mark in got.remarks}
    assert all(bytes_of(got.read(key)) == bytes_of(value) for key, value in truth.get("model", truth).items())


def test_a_rank_that_was_copied_over_another_is_named(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    rank_file(folder, 2).write_bytes(rank_file(folder, 1).read_bytes())
    with pytest.raises(UnreadableError, match=r"elements of .* \(model_world_size_4_rank_2\.pt was saved as .*_rank_1"):
        ckptfix.open_checkpoint(folder)


def test_a_flat_rank_that_was_copied_over_another_is_named(tmp_path: Path) -> None:
    folder, _ = unpacked("fsdp1_local_names_w2", tmp_path)
    shutil.copy(folder / "model.rank_0.pth", folder / "model.rank_1.pth")
    with pytest.raises(UnreadableError, match=r"model\.rank_0\.pth, model\.rank_1\.pth are files of one rank"):
        ckptfix.open_checkpoint(folder)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (1, 3, 1)])
def test_a_mesh_may_have_dimensions_of_one_rank(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As that of a training with tensor parallelism over one rank, of which newer torches do not keep the size."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole, ranks = torch.arange(14.0).view(7, 2), torch.arange(3).view(shape)
    for rank, part in enumerate(whole.chunk(3)):
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        placed = DTensorSpec(mesh, (Shard(0),) * len(shape), tensor_meta=meta)
        state = {"weight": DTensor(part.clone(), placed, requires_grad=False)}
        torch.save(state, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).state_dict()["weight"], whole)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize(
    ("order", "is_kept", "is_refused"),
    [
        ([[0, 2], [1, 3]], None, False),
        ([[0, 1], [2, 3]], None, False),
        ([[1, 0], [3, 2]], None, True),
        ([[1, 0], [3, 2]], False, True),
        ([[1, 0], [3, 2]], True, False),
        ([1, 0, 3, 2], None, True),
        ([1, 0, 3, 2], True, False),
    ],
    ids=str,
)
def test_a_mesh_out_of_order_is_refused(tmp_path: Path, order: Any, is_kept: bool | None, is_refused: bool) -> None:
    """torch distributes the parts by rank but records other places, unless ``preserve_rank_order`` is set (2.15)."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole, ranks = torch.arange(8.0), torch.tensor(order)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    for rank in range(4):
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        if is_kept is not None:
            mesh._preserve_rank_order = is_kept  # type: ignore[attr-defined]
        placed = DTensorSpec(mesh, (Shard(0),) * ranks.ndim, tensor_meta=meta)
        at = ranks.flatten().tolist().index(rank)
        state = {"w": DTensor(whole.chunk(4)[at].clone(), placed, requires_grad=False)}
        torch.save(state, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    if is_refused:
        with pytest.raises(UnreadableError, match=r"the tensor w .* ranks of its mesh are not in order: 1, 0, 3, 2"):
            ckptfix.open_checkpoint(tmp_path)
    else:
        assert torch.equal(ckptfix.open_checkpoint(tmp_path).read("w"), whole)


def test_the_parts_of_ranks_without_any_elements_may_have_another_empty_shape(tmp_path: Path) -> None:
    """As under FSDP 2 together with tensor parallelism over more ranks than there are columns."""
    for rank in range(3):
        weight = dtensor(rank, torch.arange(4.0).view(2, 2), 3)
        if rank == 2:
            weight._local_tensor = torch.empty(0, 0)
        torch.save({"w": weight}, tmp_path / f"rank_{rank}.pt")
    assert torch.equal(ckptfix.open_checkpoint(tmp_path).read("w"), torch.arange(4.0).view(2, 2))


@pytest.mark.parametrize("name", ["hsdp_w4", "fsdp2tp_w4"])
@pytest.mark.parametrize("share", [0.5, 0.55, 0.6, 0.65, 0.7])
def test_buffers_are_those_of_another_rank_if_the_file_of_the_first_is_cut_short(
    tmp_path: Path, name: str, share: float
) -> None:
    folder, truth = saved(tmp_path, name)
    first = folder / "rank_0.pt"
    os.truncate(first, int(first.stat().st_size * share))
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    for key in ("blocks.0.scale", "blocks.1.scale"):
        assert bytes_of(got[key]) == bytes_of(truth["model"][key])
    assert all(bytes_of(got[key]) == bytes_of(truth["model"][key]) for key in got)


@pytest.mark.parametrize("name", ["hsdp_w4", "fsdp2tp_w4"])
def test_a_rank_without_the_others_names_them(tmp_path: Path, name: str) -> None:
    """Its tensors say how many ranks there were."""
    folder, _ = saved(tmp_path, name)
    for rank in (0, 2, 3):
        rank_file(folder, rank).unlink()
    for named in (folder, folder / "rank_1.pt"):
        with pytest.raises(UnreadableError, match=r"lacks 3 ranks of 4: rank_0\.pt, rank_2\.pt, rank_3\.pt"):
            ckptfix.open_checkpoint(named)


def test_files_that_macos_writes_beside_ranks_are_no_ranks(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path, "hsdp_w4")
    for file in list(folder.iterdir()):
        file.with_name(f"._{file.name}").write_bytes(b"\x00\x05\x16\x07")
    assert ckptfix.open_checkpoint(folder).state_dict().keys() == truth["model"].keys()


@pytest.mark.parametrize("word", [b"torch._utils", b"_rebuild_tensor_v2", b"emb.weight"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_with_a_damaged_pickle_counts_as_missing(tmp_path: Path, rank: int, word: bytes) -> None:
    """A flipped letter may make another function, name or shape of it; the other replicas have all weights."""
    folder, truth = saved(tmp_path, "hsdp_w4")
    flip(rank_file(folder, rank), word, at=len(word) - 1)
    name = rf"rank_{rank}\.pt: has a data\.pkl that fails its checksum.* take all 16 tensors with salvage=True"
    with pytest.raises(UnreadableError, match=name):
        ckptfix.open_checkpoint(folder)
    got = ckptfix.open_checkpoint(folder, salvage=True).state_dict()
    assert list(got) == list(truth["model"])
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in truth["model"].items())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_intact_replica_is_taken_instead_of_a_damaged_one(tmp_path: Path, rank: int) -> None:
    folder, truth = saved(tmp_path, "hsdp_w4")
    file = rank_file(folder, rank)
    leaf = read_document(Content.of_file(str(file))).root["model"]["emb.weight"]
    ((_, part),) = divided(leaf, {}).parts
    assert part.storage is not None
    flip(file, bytes(part.storage.source.read(0, part.storage.nbytes)))
    found = ckptfix.open_checkpoint(folder, salvage=True)
    (fact,) = found.damage
    assert (fact.kind, fact.place) == (Kind.SHARD_DAMAGED, f"rank_{rank}.pt")
    got = found.state_dict()
    assert all(bytes_of(got[key]) == bytes_of(value) for key, value in truth["model"].items())


def test_plain_torch_gives_each_parameter_its_own_moments(tmp_path: Path) -> None:
    """It goes by position, and the groups of FSDP 1 list the names in another order than the model has."""
    saved, _ = unpacked("fsdp1_sharded_w4", tmp_path)
    ckptfix.repair(saved, output=tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth")
    state = whole["optimizer"]["state"]
    parameters = {name: torch.nn.Parameter(value) for name, value in whole["model"].items() if name in state}
    optimizer = torch.optim.AdamW(parameters.values())
    optimizer.load_state_dict(whole["optimizer"])
    assert all(torch.equal(optimizer.state[one]["exp_avg"], state[name]["exp_avg"]) for name, one in parameters.items())
