"""Sets of files that are numbered by rank."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.ranks import fsdp, rank_sets
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
