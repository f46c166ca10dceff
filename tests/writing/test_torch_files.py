"""Large storages keep their place in a page, and torch finds all of them by every way it has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

from ckptfix.bytes.copying import LARGE, PAGE, Copier
from ckptfix.bytes.sources import FileBytes, located
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.engine.verification import verify
from ckptfix.errors import WriteError
from ckptfix.reading.opening import open_file
from ckptfix.writing.output import write_to
from ckptfix.writing.torch_files import write_zip
from ckptfix.writing.zip_writer import ALIGNMENT
from tests.reading.files import opened, saved, write
from tests.reading.state_dicts import same


def mixed() -> dict[str, torch.Tensor]:
    """Storages of which some are large, some are small, and none has the size of whole pages."""
    large = torch.arange(LARGE // 4 + 1, dtype=torch.float32)
    return {"first": large, "small": torch.ones(3), "second": large + 1, "tied": large, "part": large[5:300_000] - 1}


def places(checkpoint: Checkpoint) -> dict[str, FileBytes]:
    found = {key: located(spec.storage.source) for key, spec in checkpoint.specs.items() if spec.storage is not None}
    return {key: place for key, place in found.items() if place is not None}


def renamed(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors under longer names, so that all lies elsewhere."""
    entries = {f"{'wrapped.' * 20}{key}": value for key, value in checkpoint.entries.items()}
    return Checkpoint(checkpoint.path, checkpoint.format, entries, root=entries)


def test_large_storages_of_a_zip_file_keep_their_place_in_a_page(tmp_path):
    checkpoint = renamed(opened(saved(mixed(), tmp_path)))
    path = write(checkpoint, "zip", tmp_path)
    before, after = places(checkpoint), places(opened(path))
    assert any(after[key].offset != before[key].offset for key in before)
    for key, place in after.items():
        assert place.offset % ALIGNMENT == 0
        if place.nbytes >= LARGE:
            assert place.offset % PAGE == before[key].offset % PAGE
    padding = path.stat().st_size - sum(place.nbytes for place in {p.offset: p for p in after.values()}.values())
    assert padding < 3 * PAGE + 10_000
    same(
        dict(torch.load(path, weights_only=True)), {f"{'wrapped.' * 20}{key}": value for key, value in mixed().items()}
    )


@pytest.mark.parametrize("form", ["safetensors", "legacy"])
def test_storages_that_do_not_lie_at_an_aligned_place_are_aligned(form, tmp_path):
    source = write(opened(saved(mixed(), tmp_path)), form, tmp_path, "source")
    after = places(opened(write(opened(source), "zip", tmp_path)))
    assert {place.offset % ALIGNMENT for place in after.values()} == {0}


@pytest.mark.parametrize("form", ["zip", "safetensors", "legacy"])
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("calculated", [False, True])
def test_torch_finds_the_storages_by_every_way_that_it_has(calculated, mmap, form, tmp_path):
    """torch may work out where its own writer would have placed them, if a file says ``.format_version``."""
    source = write(opened(saved(mixed(), tmp_path)), form, tmp_path, "source")
    path = write(opened(source), "zip", tmp_path)
    with config.patch({"load.calculate_storage_offsets": calculated}):  # type: ignore[attr-defined] # added on import
        same(dict(torch.load(path, weights_only=True, mmap=mmap)), mixed())


def test_torch_finds_the_storages_of_fake_tensors(tmp_path):
    path = write(opened(saved(mixed(), tmp_path)), "zip", tmp_path)
    with FakeTensorMode():
        fakes = torch.load(path)
    for key, place in places(opened(path)).items():
        assert fakes[key].untyped_storage()._checkpoint_offset == place.offset


@pytest.mark.parametrize("form", ["zip", "safetensors", "legacy"])
def test_what_was_read_back_is_not_read_again(form, tmp_path, monkeypatch):
    source = write(opened(saved(mixed(), tmp_path)), form, tmp_path, "source")
    expected, goal = opened(source), tmp_path / "goal"
    written = write_to(goal, expected, write_zip, goal)
    read: list[int] = []
    real = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(buffers[0].nbytes)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("os.preadv", noted)
    verify(goal, expected, goal, [written])
    assert read == []
    verify(goal, expected, goal)
    assert sum(read) > sum(place.nbytes for place in places(expected).values())


def test_what_lies_elsewhere_than_it_was_written_is_read_again(tmp_path):
    """Two tensors of equal size change places: each lies in a range that was read back, but of the other."""
    state_dict = {"a": torch.zeros(LARGE), "b": torch.ones(LARGE)}
    expected, goal = opened(saved(state_dict, tmp_path)), tmp_path / "goal"

    def exchanging(checkpoint: Checkpoint, file: BinaryIO) -> Copier:
        swapped = {"a": checkpoint.entries["b"], "b": checkpoint.entries["a"]}
        return write_zip(Checkpoint(checkpoint.path, checkpoint.format, swapped, root=swapped), file)

    written = write_to(goal, expected, exchanging, goal)
    assert len(written.copied) == 2
    with pytest.raises(WriteError, match="differs from the plan: the bytes of a;"):
        verify(goal, expected, goal, [written])


def test_a_file_of_another_name_that_was_written_says_nothing(tmp_path):
    expected, goal = opened(saved({"a": torch.zeros(LARGE)}, tmp_path)), tmp_path / "goal"
    written = write_to(goal, expected, write_zip, goal)
    other = tmp_path / "other"
    content = bytearray(goal.read_bytes())
    content[places(open_file(str(goal)))["a"].offset] = 1
    other.write_bytes(content)
    with pytest.raises(WriteError, match="differs from the plan: the bytes of a;"):
        verify(other, expected, goal, [written])


def test_a_file_without_a_source_has_no_place_to_keep(tmp_path):
    from ckptfix.reading.memory import open_state_dict

    path = write(open_state_dict(mixed()), "zip", Path(tmp_path))
    assert {place.offset % ALIGNMENT for place in places(opened(path)).values()} == {0}
