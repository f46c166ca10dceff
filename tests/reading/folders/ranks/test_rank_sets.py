"""Sets of files that are numbered by rank."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.errors import UnreadableError, UsageError
from ckptfix.reading.folders.ranks import fsdp, rank_sets
from tests.checks import bytes_of
from tests.cli.programs import run_here
from tests.reading.folders.ranks.test_fsdp import dtensor, rank_file, saved


def test_several_sets_are_named(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    for file in list(folder.iterdir()):
        shutil.copy(file, folder / file.name.replace("model", "model_ema"))
    with pytest.raises(UnreadableError, match=r"2 sets of files that ranks wrote \(model_ema_world.*; name one of"):
        ckptfix.open_checkpoint(folder)


def test_links_say_which_set_is_the_latest(tmp_path: Path) -> None:
    """Ranks as Composer writes them."""
    folder, truth = saved(tmp_path)
    for rank in range(4):
        file = rank_file(folder, rank).rename(folder / f"ep0-ba2-rank{rank}.pt")
        torch.save({"w": dtensor(rank, torch.ones(4), 4)}, folder / f"ep0-ba1-rank{rank}.pt")
        (folder / f"latest-rank{rank}.pt").symlink_to(file.name)
    for given in (folder, folder / "latest-rank1.pt"):
        assert ckptfix.open_checkpoint(given).keys() == list(truth["model"])
    assert ckptfix.open_checkpoint(folder / "ep0-ba1-rank2.pt").keys() == ["w"]


def test_dinov2_names_the_latest_set(tmp_path: Path) -> None:
    """Each rank names its own file."""
    folder, truth = saved(tmp_path)
    for rank in range(4):
        file = rank_file(folder, rank).rename(folder / f"model_0000002.rank_{rank}.pth")
        torch.save({"w": dtensor(rank, torch.ones(4), 4)}, folder / f"model_0000001.rank_{rank}.pth")
        (folder / f"last_checkpoint.rank_{rank}").write_text(file.name)
    assert ckptfix.open_checkpoint(folder).keys() == list(truth["model"])
    (folder / "last_checkpoint.rank_3").write_text("model_0000001.rank_3.pth")
    with pytest.raises(UnreadableError, match="2 sets of files that ranks wrote"):
        ckptfix.open_checkpoint(folder)


def dinov2(tmp_path: Path) -> Path:
    """Two saves, of which files name the second as the latest."""
    folder, _ = saved(tmp_path, "fsdp2_w2_torch24")
    for rank in range(2):
        file = rank_file(folder, rank).rename(folder / f"model_0000002.rank_{rank}.pth")
        torch.save({"w": dtensor(rank, torch.arange(4.0))}, folder / f"model_0000001.rank_{rank}.pth")
        (folder / f"last_checkpoint.rank_{rank}").write_text(file.name)
    return folder


@pytest.mark.parametrize("has_latest", [True, False])
@pytest.mark.parametrize("save", [1, 2])
def test_a_rank_of_one_of_several_saves_stays_the_source(tmp_path: Path, save: int, has_latest: bool) -> None:
    """The folder stands for the latest save, and training may write another one meanwhile."""
    folder = dinov2(tmp_path)
    if not has_latest:
        for file in folder.glob("last_checkpoint.*"):
            file.unlink()
    named = folder / f"model_000000{save}.rank_1.pth"
    checkpoint = ckptfix.open_checkpoint(named)
    assert (checkpoint.path, checkpoint.folder) == (str(named), str(folder))
    printed = run_here("repair", named, "-o", "model.pth", "--format", "pth", "--dry-run", cwd=tmp_path).stdout
    assert f"\nrun: ckptfix repair {named} " in printed
    assert run_here(*printed.partition("\nrun: ckptfix ")[2].split(), cwd=tmp_path).returncode == 0
    written = torch.load(tmp_path / "model.pth")
    for key, value in checkpoint.state_dict().items():
        assert bytes_of(written[key]) == bytes_of(value)
    assert ckptfix.open_checkpoint(named, salvage=True).path == str(named)


def test_results_for_several_saves_do_not_collide(tmp_path: Path) -> None:
    folder = dinov2(tmp_path)
    outputs = [
        ckptfix.repair(folder / f"model_000000{save}.rank_0.pth", beside=True, format="pth").report.output
        for save in (1, 2)
    ]
    assert outputs == [str(folder / f"model_000000{save}.rank_0.fixed.pth") for save in (1, 2)]
    assert list(torch.load(str(outputs[0]))) == ["w"]
    assert ckptfix.open_checkpoint(folder).path == str(folder)
    named, other = (folder / f"model_0000001.rank_{rank}.pth" for rank in range(2))
    with pytest.raises(UsageError, match=r"rank_1\.pth: is part of the source; name another output"):
        ckptfix.repair(named, output=other, force=True)


def test_a_rank_of_the_only_save_stands_for_the_folder(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    assert ckptfix.open_checkpoint(rank_file(folder, 1)).path == str(folder)


def test_a_rank_beside_another_checkpoint_stays_the_source(tmp_path: Path) -> None:
    """The folder stands for the weights of a library in it."""
    folder, truth = saved(tmp_path)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    named = rank_file(folder, 1)
    assert ckptfix.open_checkpoint(folder).keys() == ["w"]
    assert ckptfix.open_checkpoint(named).keys() == list(truth["model"])
    assert ckptfix.open_checkpoint(named).path == str(named)


def test_explain_names_the_rank_of_one_of_several_saves(tmp_path: Path) -> None:
    named = dinov2(tmp_path) / "model_0000001.rank_0.pth"
    printed = run_here("explain", "unexpected keys: _flat_param", "--file", named, cwd=tmp_path).stdout
    assert f"run: ckptfix repair {named} --output model.pth" in printed
    assert f"this file: {named} is part of a fsdp checkpoint that holds a bare state_dict of 1 tensor" in printed


def test_the_names_in_a_folder_are_looked_up_once_for_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it has just changed: a new rank is noticed."""
    looks, listed = [], os.scandir

    def looked_at(folder: Path) -> Any:
        looks.append(folder)
        return listed(folder)

    monkeypatch.setattr(os, "scandir", looked_at)
    files = [tmp_path / f"model_rank_{rank}.pt" for rank in range(20)]
    for file in files:
        file.touch()
    for is_old in (True, False):
        if is_old:
            os.utime(tmp_path, (1, 1))
        looks.clear()
        assert all(fsdp.folder_of(file) for file in files)
        assert (len(looks) == 1) is is_old
        (tmp_path / "model_rank_20.pt").touch()
    (found,) = rank_sets.rank_sets(tmp_path).values()
    assert len(found.files) == 21
