"""Parts of fairseq2, which are plain tensors under the names of the whole."""

from pathlib import Path
from shutil import copyfile, copytree

import pytest
import torch

import ckptfix
from ckptfix.core.facts import Kind
from tests.reading.folders.ranks.genuine import swap

WHOLE = {
    "decoder.weight": torch.randn(10, 3),  # 3, 3, 3 and 1 rows
    "decoder.tiny": torch.randn(2),  # fewer than ranks
    "norm.weight": torch.ones(8),
    "norm.running_mean": torch.randn(8),
    "norm.num_batches_tracked": torch.tensor(4),
}
WORLD = 4


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What ``fsdp2_local_state_dict`` gives on each rank: the local tensor of each weight, and the buffers whole."""
    for rank in range(WORLD):
        state = {}
        for name, whole in WHOLE.items():
            share = -(-len(whole) // WORLD) if whole.dim() else 0
            is_buffer = name.endswith(("running_mean", "num_batches_tracked"))
            state[name] = whole if is_buffer else whole[rank * share : (rank + 1) * share].clone()
        for kind in ("model", "optimizer"):
            folder = tmp_path / "step_2" / kind / "pp_00" / "tp_00"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state if kind == "model" else {"state": {}}, folder / f"sdp_{rank:02d}.pt")
    return tmp_path / "step_2"


@pytest.mark.parametrize("named", ["", "..", "model", "model/pp_00/tp_00/sdp_02.pt"])
def test_weights_are_whole(saved: Path, tmp_path: Path, named: str) -> None:
    ckptfix.repair(saved / named, output=(out := tmp_path / "whole.pth"))
    merged = torch.load(out, weights_only=True)
    assert list(merged) == list(WHOLE)
    assert all(torch.equal(merged[name], whole) for name, whole in WHOLE.items())


def test_stages_of_a_pipeline_have_layers_of_their_own(saved: Path) -> None:
    for kind in ("model", "optimizer"):
        copytree(saved / kind / "pp_00", saved / kind / "pp_01")
    for file in (saved / "model/pp_01").rglob("*.pt"):
        torch.save({f"last.{name}": part for name, part in torch.load(file, weights_only=True).items()}, file)
    merged = ckptfix.open_checkpoint(saved).state_dict()
    assert merged.keys() == WHOLE.keys() | {f"last.{name}" for name in WHOLE}


def test_a_missing_last_rank_is_known_by_the_optimizer(saved: Path) -> None:
    (saved / "model/pp_00/tp_00/sdp_03.pt").unlink()
    with pytest.raises(ckptfix.UnreadableError, match=r"sdp_03\.pt"):
        ckptfix.open_checkpoint(saved)


def rows(saved: Path, ranks: int) -> None:
    """Leave some ranks, each with three rows of a weight."""
    for kind in ("model", "optimizer"):
        for rank in range(WORLD):
            file = saved / f"{kind}/pp_00/tp_00/sdp_{rank:02d}.pt"
            if kind == "model":
                torch.save({"weight": torch.randn(3, 8), "norm": torch.tensor(1.0)}, file)
            if rank >= ranks:
                file.unlink()


@pytest.mark.parametrize("beside", ["trainer/rank", "data_reader/dp"])
@pytest.mark.parametrize("stages", [1, 2])
def test_missing_last_ranks_are_known_by_those_that_saved_more(saved: Path, beside: str, stages: int) -> None:
    rows(saved, 3)
    for kind in ("model", "optimizer") if stages == 2 else ():
        copytree(saved / kind / "pp_00", saved / kind / "pp_01")
    file = saved / f"{beside}_00.pt"
    file.parent.mkdir()
    for rank in range(WORLD * (stages if beside.startswith("trainer") else 1)):
        file.with_name(file.name.replace("00", f"{rank:02d}")).touch()
    with pytest.raises(ckptfix.UnreadableError, match=r"lacks 1 rank of 4: model/pp_00/tp_00/sdp_03\.pt"):
        ckptfix.open_checkpoint(saved)


@pytest.mark.parametrize(
    ("ranks", "processes", "is_noted"),
    [(4, 4, False), (2, 4, True), (2, 0, True), (1, 1, False)],
    ids=["all", "replicas", "model-only", "single"],
)
def test_a_last_rank_that_may_not_be_the_last_is_a_note(
    saved: Path, ranks: int, processes: int, is_noted: bool
) -> None:
    rows(saved, ranks)
    for rank in range(processes):
        file = saved / f"trainer/rank_{rank:02d}.pt"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    report = ckptfix.check(saved)
    found = [finding for finding in report.findings if finding.code == "FIL203"]
    assert [f"sdp_{ranks - 1:02d}.pt is the last readable shard" in finding.message for finding in found] == [
        True
    ] * is_noted
    assert report.exit_code == 0


def test_parts_of_weights_that_end_early_need_no_note(saved: Path) -> None:
    assert not [finding for finding in ckptfix.check(saved).findings if finding.code == "FIL203"]


@pytest.mark.parametrize("rank", [1, 3])
def test_a_part_of_another_size_is_named(saved: Path, rank: int) -> None:
    rows(saved, WORLD)
    torch.save({"weight": torch.randn(5, 8), "norm": torch.tensor(1.0)}, saved / f"model/pp_00/tp_00/sdp_0{rank}.pt")
    said = rf"rows of weight do not fit \(3 in model/pp_00/tp_00/sdp_00\.pt, 5 in model/pp_00/tp_00/sdp_0{rank}\.pt\)"
    with pytest.raises(ckptfix.UnreadableError, match=said):
        ckptfix.open_checkpoint(saved)


def test_a_part_without_columns_is_not_left_out(saved: Path) -> None:
    rows(saved, WORLD)
    torch.save({"weight": torch.empty(3, 0), "norm": torch.tensor(1.0)}, saved / "model/pp_00/tp_00/sdp_01.pt")
    with pytest.raises(ckptfix.UnreadableError, match=r"the parts of weight do not fit along dimension 0: .*\[3, 0\]"):
        ckptfix.open_checkpoint(saved)


@pytest.mark.parametrize("change", ["unlink", "empty"])
@pytest.mark.parametrize(
    ("rank", "lost", "unknown"),
    [
        (0, {"decoder.weight": 36, "norm.weight": 8}, ["decoder.tiny"]),  # the next rank may have only its last row
        (1, {"decoder.weight": 36, "norm.weight": 8}, ["decoder.tiny"]),
        (3, {}, ["decoder.weight", "norm.weight"]),
    ],
)
def test_a_missing_rank_is_named_with_its_bytes_and_the_rest_is_kept(
    saved: Path, tmp_path: Path, rank: int, lost: dict[str, int], unknown: list[str], change: str
) -> None:
    file = saved / f"model/pp_00/tp_00/sdp_{rank:02d}.pt"
    file.unlink() if change == "unlink" else file.write_bytes(b"")
    with pytest.raises(ckptfix.UnreadableError, match=file.name):
        ckptfix.open_checkpoint(saved)
    report = ckptfix.repair(saved, output=(out := tmp_path / "whole.pth"), salvage=True).report
    checkpoint = ckptfix.open_checkpoint(saved, salvage=True)
    facts = [fact.data for fact in checkpoint.damage if fact.kind is Kind.BYTES_LACKING]
    assert [(data["keys"], data["nbytes"]) for data in facts] == ([(tuple(lost), sum(lost.values()))] if lost else [])
    assert {key: spec and spec.shape for key, spec in checkpoint.lost.items()} == {
        **{key: WHOLE[key].shape for key in lost},
        **dict.fromkeys(unknown),
    }
    assert (report.exit_code, set(report.left[0].keys)) == (1, {*lost, *unknown})
    merged = torch.load(out, weights_only=True)
    assert merged.keys() == WHOLE.keys() - checkpoint.lost.keys()
    assert all(torch.equal(value, WHOLE[key]) for key, value in merged.items())


def test_tensor_parallel_parts_are_not_guessed(saved: Path) -> None:
    copytree(saved / "model/pp_00/tp_00", saved / "model/pp_00/tp_01")
    with pytest.raises(ckptfix.UnreadableError, match="tensor parallelism"):
        ckptfix.open_checkpoint(saved / "model/pp_00/tp_01/sdp_00.pt")


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_part_in_the_place_of_another_is_noticed(saved: Path, tmp_path: Path, is_copy: bool) -> None:
    one, other = (saved / f"model/pp_00/tp_00/sdp_0{rank}.pt" for rank in (0, 1))
    copyfile(one, other) if is_copy else swap(one, other)
    assert {finding.code for finding in ckptfix.check(saved).findings if finding.blocks} == {"FIL105"}
    assert ckptfix.repair(saved, output=tmp_path / "whole.pth").report.output is None
