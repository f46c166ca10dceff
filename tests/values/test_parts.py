"""Tensors in parts, by one thread or several: the same figures."""

import math
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.bytes import threads
from ckptfix.bytes.checksums import is_pending, is_sound
from ckptfix.bytes.sources import located
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.spec import Storage, TensorSpec, TensorStatistics
from ckptfix.errors import UnreadableError
from ckptfix.reading.tensors import spec_of_tensor
from ckptfix.values import scan
from ckptfix.values.scan import PART, channels_with, parts_of
from ckptfix.values.statistics import Statistics, tensor_statistics
from tests.values.memory import checkpoint_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int32]


def numbers(count: int) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    values[count // 2] = 0
    return values


@pytest.fixture
def file(tmp_path: Path) -> Path:
    large = PART // 4 + 12_345
    tensors = {f"large.{dtype}": numbers(large).to(dtype) for dtype in DTYPES}
    tensors["nan"] = numbers(2 * large)
    tensors["nan"][[large, large + 1]] = torch.tensor([math.nan, math.inf])
    tensors |= {f"small.{index}": numbers(index + 1) for index in range(30)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def all_figures(file: Path) -> dict[str, TensorStatistics]:
    return dict(Statistics(ckptfix.open_checkpoint(file)).items())


def spec_in(checkpoint: Checkpoint, key: str) -> TensorSpec:
    return checkpoint.specs[key]


def place_of(checkpoint: Checkpoint, key: str) -> int:
    """Where in the file a tensor begins."""
    spec = spec_in(checkpoint, key)
    place = located(spec.storage.source)  # type: ignore[union-attr]  # it has a storage
    assert place is not None
    return place.offset + spec.offset * spec.itemsize


def test_the_number_of_threads_changes_no_bit(file, monkeypatch):
    several = all_figures(file)
    assert several["nan"].first_nonfinite == PART // 4 + 12_345
    assert (several["nan"].nan, several["nan"].pos_inf) == (1, 1)
    monkeypatch.setattr(threads, "THREADS", 1)
    assert all_figures(file) == several
    monkeypatch.setattr(threads, "processors", lambda: 1)
    assert all_figures(file) == several
    checkpoint = ckptfix.open_checkpoint(file)
    assert {key: tensor_statistics(spec_in(checkpoint, key)) for key in several} == several
    one_by_one = Statistics(checkpoint)
    assert {key: one_by_one[key] for key in reversed(several)} == several


@pytest.mark.parametrize("cut", [0, 1, 1 << 18, PART + 100])
def test_a_file_that_has_become_shorter_is_reported_in_one_line(file, cut):
    checkpoint = ckptfix.open_checkpoint(file)
    os.truncate(file, cut)
    with pytest.raises(UnreadableError, match="the file ends inside a storage"):
        dict(Statistics(checkpoint).items())


def test_a_file_that_shrinks_while_two_threads_look_is_reported_once(file, monkeypatch):
    true_look, asked = scan.ScanPart.look, count()

    def cut_later(part):
        if next(asked) == 3:
            os.truncate(file, 1000)
        return true_look(part)

    monkeypatch.setattr(scan.ScanPart, "look", cut_later)
    with pytest.raises(UnreadableError, match="the file ends inside a storage") as caught:
        Statistics(ckptfix.open_checkpoint(file)).compute()
    assert "\n" not in str(caught.value)


INTERRUPTED = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
import ckptfix
from ckptfix.values.statistics import Statistics
from ckptfix.values import scan
look, looks, shutdown, stopped = scan.ScanPart.look, count(), ThreadPoolExecutor.shutdown, Event()
def interrupted(part):
    if (number := next(looks)) == 1:
        os.kill(os.getpid(), signal.SIGINT)
    if number:
        stopped.wait(50)  # however late the main thread is told: the others are not done by then
    return look(part)
def stopping(pool, **options):
    shutdown(pool, wait=False, **options)
    stopped.set()
    shutdown(pool, **options)
scan.ScanPart.look, ThreadPoolExecutor.shutdown = interrupted, stopping
scan.PART = scan.BATCH = 1 << 12
statistics = Statistics(ckptfix.open_checkpoint(sys.argv[1]))
try:
    statistics.compute()
except KeyboardInterrupt:
    scan.ScanPart.look, batches = look, next(looks)
    statistics.compute()
    print("heard", batches < 1000, len(dict(statistics.items())))
"""


def test_a_signal_stops_the_scan(tmp_path):
    save_file({"large": numbers(1 << 21)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", INTERRUPTED, tmp_path / "model.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout.split(), done.stderr) == (["heard", "True", "1"], "")


def test_parts_cover_a_tensor_once():
    matrix = torch.zeros(2, PART // 4 + 1)
    specs = checkpoint_of({"w": matrix, "t": matrix.t(), "some": matrix[:, 1:]}).specs
    for key in ("w", "t"):  # a transposed matrix is a run in memory as well
        parts = parts_of(specs[key], None)
        assert [part.start for part in parts] == [0, PART // 4, PART // 2]
        assert [part.stop for part in parts] == [*(part.start for part in parts[1:]), matrix.numel()]
    assert len(parts_of(specs["some"], None)) == 1


def test_the_first_bad_element_of_a_transposed_matrix_in_parts():
    matrix = torch.zeros(3000, 2000)
    matrix[2999, 1] = matrix[5, 7] = math.nan
    figures = Statistics(checkpoint_of({"t": matrix.t()}))["t"]
    assert len(parts_of(checkpoint_of({"t": matrix.t()}).specs["t"], None)) > 1
    assert figures.nan == 2
    assert figures.first_nonfinite == int(np.flatnonzero(np.isnan(matrix.t().numpy().reshape(-1)))[0])


SIZES = {"small": 9, "middle": 1 << 18, "large": PART // 2 + 1000}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    tensors = {key: numbers(size) for key, size in SIZES.items()}
    torch.save({**tensors, "slice": numbers(20)[5:], "empty": numbers(1)[1:]}, tmp_path / "model.pth")
    return tmp_path / "model.pth"


def flipped(file: Path, key: str, place: int) -> Checkpoint:
    """The checkpoint with one bit of a tensor changed in its file."""
    place_in_file = located(spec_in(ckptfix.open_checkpoint(file), key).storage.source)  # type: ignore[union-attr]  # it has a storage
    assert place_in_file is not None
    with file.open("r+b") as opened:
        opened.seek(place_in_file.offset + place)
        (byte,) = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    return ckptfix.open_checkpoint(file)


def storages(checkpoint: Checkpoint) -> dict[str, Storage]:
    return {key: spec.storage for key, spec in checkpoint.specs.items() if spec.storage is not None}


def test_the_scan_proves_the_checksums_of_whole_tensors(archive):
    checkpoint = ckptfix.open_checkpoint(archive)
    Statistics(checkpoint).compute()
    assert {key for key, storage in storages(checkpoint).items() if is_pending(storage)} == {"slice", "empty"}
    assert all(map(is_sound, storages(checkpoint).values()))


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("is_last", [False, True])
def test_the_scan_finds_a_flipped_bit(archive, key, is_last):
    checkpoint = flipped(archive, key, 4 * SIZES[key] - 4 if is_last else 0)
    Statistics(checkpoint).compute()
    assert [name for name, storage in storages(checkpoint).items() if not is_sound(storage)] == [key]


def zeros(values):
    return values == 0


def plain(tensor: torch.Tensor, least: int = 1) -> tuple[int, ...]:
    return channels_with(spec_of_tensor(tensor), zeros, least)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor(0.0), id="scalar"),
        pytest.param(torch.zeros(0, 4), id="empty"),
        pytest.param(torch.zeros(3).expand(4, 3), id="one-channel-repeated"),
        pytest.param(torch.zeros(2, 2).to_sparse(), id="sparse"),
        pytest.param(torch.zeros(2, dtype=torch.complex64), id="complex"),
        pytest.param(torch.ones(5, 5), id="none"),
    ],
)
def test_tensors_without_statistics(tensor):
    assert plain(tensor) == ()


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.half(),
        lambda tensor: tensor.to(memory_format=torch.channels_last),
        lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["row-major", "half", "channels-last", "transposed"],
)
def test_any_order_in_memory(view):
    tensor = torch.ones(6, 5, 3, 3)
    tensor[1, 2, 0, 0], tensor[4] = 0, 0
    assert plain(view(tensor)) == (1, 4)
    assert plain(view(tensor), least=45) == (4,)


def test_over_many_blocks():
    tensor = torch.ones(3, 1_500_000)
    tensor[2, -1] = 0
    assert channels_with(spec_of_tensor(tensor), zeros) == (2,)
    assert channels_with(spec_of_tensor(tensor * np.nan), np.isnan, 1_500_000) == (0, 1, 2)
