"""The written file is compared with the plan byte by byte, whichever way it was written."""

import os
from collections import deque

import pytest
import torch

from ckptfix.bytes import sources
from ckptfix.engine.verification import verify
from ckptfix.errors import UnreadableError, WriteError
from tests.reading.files import opened, saved, write
from tests.reading.state_dicts import KINDS, STRIDED, ordered


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.startswith("views of") or kind == "views of float32"]
)
def test_noop_written_files_are_equal(kind, form, tmp_path):
    if kind in ("two dtypes of one storage", "conjugated and negated views"):
        from ckptfix.reading.opening import open_state_dict

        checkpoint = open_state_dict(ordered(KINDS[kind]()))
    else:
        checkpoint = opened(saved(ordered(KINDS[kind]()), tmp_path))
    try:
        path = write(checkpoint, form, tmp_path)
    except WriteError as error:
        assert "cannot hold" in str(error)  # noqa: PT017 - only some of the kinds have a form in each format
        return
    verify(path, checkpoint, path)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.1, -1.0])
def test_a_quantiser_whose_scale_is_not_a_positive_number_is_equal_to_itself(scale, tmp_path):
    tensor = torch._make_per_tensor_quantized_tensor(torch.arange(4, dtype=torch.uint8), scale, 3)
    checkpoint = opened(saved(ordered({"q": tensor}), tmp_path))
    path = write(checkpoint, "zip", tmp_path)
    verify(path, checkpoint, path)
    other = torch._make_per_tensor_quantized_tensor(torch.arange(4, dtype=torch.uint8), 0.2, 3)
    with pytest.raises(WriteError, match="the quantiser of q"):
        verify(path, opened(saved(ordered({"q": other}), tmp_path)), path)


def changed(kind: str) -> dict[str, torch.Tensor]:
    weight = torch.arange(4.0)
    return {
        "as it was": {"a": weight, "b": weight, "c": torch.zeros(2)},
        "a value": {"a": weight + 1, "b": weight, "c": torch.zeros(2)},
        "a sign of zero": {"a": weight, "b": weight, "c": -torch.zeros(2)},
        "a name": {"a": weight, "b": weight, "d": torch.zeros(2)},
        "the order": {"b": weight, "a": weight, "c": torch.zeros(2)},
        "a shape": {"a": weight, "b": weight, "c": torch.zeros(2, 1)},
        "a dtype": {"a": weight, "b": weight, "c": torch.zeros(2, dtype=torch.int32)},
        "a tie": {"a": weight, "b": weight.clone(), "c": torch.zeros(2)},
        "requires_grad": {"a": weight, "b": weight, "c": torch.zeros(2, requires_grad=True)},
        "a tensor too few": {"a": weight, "b": weight},
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "a value",
        "a sign of zero",
        "a name",
        "the order",
        "a shape",
        "a dtype",
        "a tie",
        "requires_grad",
        "a tensor too few",
    ],
)
def test_any_difference_is_found(kind, tmp_path):
    expected = opened(saved(changed("as it was"), tmp_path))
    verify(saved(changed("as it was"), tmp_path, "same.pth"), expected, tmp_path / "out")
    with pytest.raises(WriteError, match="differs from the plan"):
        verify(saved(changed(kind), tmp_path, "other.pth"), expected, tmp_path / "out")


def test_another_quantiser_is_found(tmp_path):
    def quantised(scale: float) -> dict[str, torch.Tensor]:
        return {"q": torch._make_per_tensor_quantized_tensor(torch.arange(4, dtype=torch.int8), scale, 0)}

    with pytest.raises(WriteError, match="the quantiser of q"):
        verify(saved(quantised(0.5), tmp_path, "a.pth"), opened(saved(quantised(0.25), tmp_path)), tmp_path)


@pytest.mark.parametrize("name", ["float32", "float64", "uint8", "bfloat16"])
def test_tensors_of_many_blocks_are_compared_block_by_block(name, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfix.bytes.sources.BLOCK", 64)
    monkeypatch.setattr("ckptfix.bytes.sources._BUFFERS", deque())
    tensor = (torch.arange(40 * 30) % 251).to(STRIDED[name]).reshape(40, 30)
    checkpoint = opened(saved({"t": tensor.t(), "part": tensor[:, 1::2], "plain": tensor}, tmp_path))
    for form in ("zip", "legacy", "safetensors"):
        verify(write(checkpoint, form, tmp_path, f"{name}-{form}"), checkpoint, tmp_path)


def test_a_file_that_does_not_open_is_not_delivered(tmp_path):
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(WriteError, match="cannot reopen the written file"):
        verify(tmp_path / "bad", opened(saved({"w": torch.ones(1)}, tmp_path)), tmp_path / "out.pth")


def many_sizes() -> dict[str, torch.Tensor]:
    """Tensors smaller than a block, of several blocks and a rest, and of exact blocks, for small blocks."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"small": 3, "rest": 333, "exact": 256, "batches": 5000, "last": 1}
    weights = {key: torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for key, n in sizes.items()}
    return {**weights, "tied": weights["rest"]}


@pytest.fixture
def in_small_steps(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 64)
    monkeypatch.setattr(sources, "_BUFFERS", deque())
    monkeypatch.setattr(sources, "PIECE", 16)


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize("key", [key for key in many_sizes() if key != "tied"])
def test_one_wrong_byte_anywhere_is_found(key, tmp_path):
    state_dict = many_sizes()
    expected = opened(saved(state_dict, tmp_path))
    verify(saved(state_dict, tmp_path, "same.pth"), expected, tmp_path / "out")
    for place in {0, 63, 64, 65, 320, 999, 1000, len(state_dict[key]) - 1}:
        if place >= len(state_dict[key]):
            continue
        state_dict[key][place] ^= 1
        with pytest.raises(WriteError, match=f"differs from the plan: the bytes of {key};"):
            verify(saved(state_dict, tmp_path, "other.pth"), expected, tmp_path / "out")
        state_dict[key][place] ^= 1


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize("place", [0, 15, 16, 4999])
def test_one_wrong_byte_of_what_is_not_a_range_of_a_file_is_found(place, tmp_path):
    from ckptfix.reading.opening import open_state_dict

    state_dict = many_sizes()
    expected = open_state_dict(many_sizes())
    verify(saved(state_dict, tmp_path, "same.pth"), expected, tmp_path / "out")
    state_dict["batches"][place] ^= 1
    with pytest.raises(WriteError, match="differs from the plan: the bytes of batches;"):
        verify(saved(state_dict, tmp_path, "other.pth"), expected, tmp_path / "out")


def test_a_source_that_is_cut_before_the_comparison_is_named(tmp_path):
    source = saved({"a": torch.randn(100_000)}, tmp_path)
    expected = opened(source)
    written = write(expected, "zip", tmp_path)
    os.truncate(source, 1000)
    with pytest.raises(UnreadableError, match=r"saved\.pth: the file ends inside a storage"):
        verify(written, expected, tmp_path / "out")


def test_progress_covers_every_byte(tmp_path, in_small_steps):
    from ckptfix.core.progress import Task, watched_by

    class Watcher:
        def __init__(self) -> None:
            self.task: Task | None = None

        def advanced(self, task: Task) -> None:
            self.task = task

        def waits(self, reason: str, seconds: float) -> None:
            pass

    watcher = Watcher()
    expected = opened(saved(many_sizes(), tmp_path))
    with watched_by(watcher):
        verify(write(expected, "safetensors", tmp_path), expected, tmp_path / "out")
    assert watcher.task is not None
    assert watcher.task.done == watcher.task.total


def test_a_source_written_to_during_the_repair_is_refused(tmp_path):
    source = saved({"a": torch.randn(100_000)}, tmp_path)
    expected = opened(source)
    written = write(expected, "zip", tmp_path)
    verify(written, expected, tmp_path / "out")
    os.utime(source, ns=(0, 0))
    with pytest.raises(UnreadableError, match=r"saved\.pth: changed while it was read; run the same command again"):
        verify(written, expected, tmp_path / "out")
