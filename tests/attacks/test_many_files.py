"""Folders with far more files than any training leaves: what is read does not grow with their number, or at most in
proportion to it."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptfix
from ckptfix.bytes.files import OpenFile
from ckptfix.errors import UnreadableError
from ckptfix.reading.folders.ranks.files import RankFiles
from ckptfix.reading.folders.ranks.names import NANOTRON_METADATA
from tests.cli.programs import run_here

FILES = 600
MOST_READ = 300  # files and folders, whatever the number of files

# Names of ranks of one save, by their number.
OF_ONE_SAVE: dict[str, Callable[[int], str]] = {
    "fsdp": lambda rank: f"model_world_size_{FILES}_rank_{rank}.pt",
    "dcp": lambda rank: f"__{rank}_0.distcp",
    "zero": lambda rank: f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    "zero-model-states": lambda rank: f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
    "zero-of-tensor-parallel-ranks": lambda rank: f"mp_rank_{rank:02d}_model_states.pt",
    "megatron": lambda rank: f"mp_rank_{rank:02d}/model_optim_rng.pt",
    "llama": lambda rank: f"consolidated.{rank:02d}.pth",
    "layers": lambda layer: f"layer_{layer:02d}-model_00-model_states.pt",
    "ranks-of-a-layer": lambda rank: f"layer_00-model_{rank:02d}-model_states.pt",
    "fairseq2": lambda rank: f"model/pp_00/tp_00/sdp_{rank:02d}.pt",
    "nanotron": lambda rank: f"model/model/a/model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-{FILES}.safetensors",
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The files and folders that are opened."""
    found = Counter[str]()
    opening, listing = OpenFile.__init__, os.scandir

    def opened(self: OpenFile, path: str, descriptor: int | None = None) -> None:
        found["files"] += 1
        opening(self, path, descriptor)

    def listed(folder: Any) -> Any:
        found["folders"] += 1
        return listing(folder)

    monkeypatch.setattr(OpenFile, "__init__", opened)
    monkeypatch.setattr(os, "scandir", listed)
    return found


def write(folder: Path, name: Callable[[int], str], content: bytes) -> Path:
    for number in range(FILES):
        file = folder / name(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    if name is OF_ONE_SAVE["nanotron"]:
        (folder / NANOTRON_METADATA).write_text("{}")
    return folder


@pytest.mark.parametrize("content", [b"", bytes(range(256))], ids=["empty", "garbage"])
@pytest.mark.parametrize("kind", OF_ONE_SAVE)
def test_ranks_of_which_none_is_readable_are_left_early(
    tmp_path: Path, kind: str, content: bytes, read: Counter[str]
) -> None:
    write(tmp_path, OF_ONE_SAVE[kind], content)
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(tmp_path)
    assert read.total() <= MOST_READ


@pytest.mark.parametrize("kind", ["fsdp", "zero", "megatron", "fairseq2"])
def test_check_writes_one_short_line_about_them(tmp_path: Path, kind: str, read: Counter[str]) -> None:
    write(tmp_path, OF_ONE_SAVE[kind], b"")
    done = run_here("check", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert len((done.stdout + done.stderr).splitlines()) == 1
    assert len(done.stdout + done.stderr) < 2000
    assert read.total() <= 2 * MOST_READ


def test_salvage_reads_all_of_them(tmp_path: Path, read: Counter[str]) -> None:
    write(tmp_path, OF_ONE_SAVE["zero"], b"")
    files = RankFiles(tmp_path, salvage=True)
    assert all(files.root(file) is None for file in tmp_path.iterdir())
    assert len(files.damage) == FILES


def test_a_readable_rank_is_read_with_all_others(tmp_path: Path) -> None:
    write(tmp_path, OF_ONE_SAVE["zero"], b"")
    first, *others = sorted(tmp_path.iterdir())
    first.write_bytes(b"\x80\x02}q\x00.")
    files = RankFiles(tmp_path, salvage=False)
    assert files.root(first) == {}
    assert all(files.root(file) is None for file in others)


def test_the_first_ranks_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write(tmp_path, OF_ONE_SAVE["zero"], b"")
    files = RankFiles(tmp_path, salvage=False)
    with pytest.raises(UnreadableError, match=r"_rank_0_\S+: the file is empty.*no rank can be read"):
        [files.root(tmp_path / OF_ONE_SAVE["zero"](rank)) for rank in range(FILES)]


@pytest.mark.parametrize("content", [b"", bytes(range(256)), b"\x80\x02}q\x00."], ids=["empty", "garbage", "bare"])
@pytest.mark.parametrize("name", ["name.rank_{}.pth", "rank{}.pt"])
def test_files_that_only_have_names_of_ranks_are_read_once_each(
    tmp_path: Path, name: str, content: bytes, read: Counter[str]
) -> None:
    """None of them is read together with all others."""
    write(tmp_path, name.format, content)
    os.utime(tmp_path, (1, 1))
    for number in range(FILES):
        with pytest.raises(UnreadableError):
            ckptfix.open_checkpoint(tmp_path / name.format(number))
    assert read.total() <= 5 * FILES
