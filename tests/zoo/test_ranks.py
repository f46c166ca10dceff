"""Folders of ranks in a zoo, and the files that name the latest of them."""

import json
from pathlib import Path
from typing import Any

import pytest

import ckptfix
from tests.reading.folders.ranks.genuine import unpacked
from tests.zoo import zoos

TAG = "saved/global_step2"


def zoo_of(folder: Path, sample: str = "zero2_w2_bf16_g2") -> Path:
    unpacked(sample, folder / "old")
    (folder / "old/truth.pt").unlink()
    return folder / "old"


def records(folder: Path) -> dict[str, Any]:
    lines = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    return {line["source"]: line for line in lines}


def test_a_universal_checkpoint_is_a_folder_and_not_written_again(tmp_path: Path) -> None:
    """DeepSpeed loads from the folder that has ``latest_universal``."""
    old, new = zoo_of(tmp_path), tmp_path / "new"
    finished = []
    for _ in range(2):
        assert zoos.migrate_here(old, new, "--format", "universal").returncode == 0
        line = records(new)[TAG]
        finished.append((line["finished"], line["seconds"]))
    assert finished[0] == finished[1]
    assert (line["output"], (new / TAG / "latest_universal").read_text()) == (TAG, "global_step2")
    assert line["output_parts"][-1] == f"{TAG}/latest_universal"
    assert line["output_size"] == sum((new / name).stat().st_size for name in line["output_parts"])
    assert zoos.migrate_here(old, new, "--format", "universal", "--verify").returncode == 0
    assert records(new)[TAG]["finished"] == finished[0][0]
    assert ckptfix.open_checkpoint(new / TAG).format == "universal"
