"""Files whose size is not that of their layout: where the bytes are missing or too many, and what is in doubt."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import ckptfix
from ckptfix.bytes.sources import Content
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Level
from ckptfix.core.wording import clause
from ckptfix.reading.salvage import slips
from tests.checks import bytes_of


def network(width: int = 64) -> dict[str, torch.Tensor]:
    """Blocks as they are trained: weights, a norm, its statistics and its counter."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, torch.Tensor] = {}
    for block in "abcde":
        made[f"{block}.conv.weight"] = torch.randn(width, 16, 3, 3, generator=generator) * 0.05
        made[f"{block}.norm.bias"] = torch.randn(width, generator=generator) * 0.02
        made[f"{block}.norm.weight"] = 1 + torch.randn(width, generator=generator) * 0.1
        made[f"{block}.norm.running_var"] = torch.rand(width, generator=generator) + 0.5
        made[f"{block}.norm.num_batches_tracked"] = torch.tensor(1234)
    return made


NETWORK = network()
DATA = save(NETWORK)
START = 8 + int.from_bytes(DATA[:8], "little")
MIDDLE = START + (len(DATA) - START) // 2
ALIKE = {f"{name}.weight": torch.randn(16, 16, generator=torch.Generator().manual_seed(2)) for name in "abcd"}
DATA_ALIKE = save(ALIKE)


def salvaged(data: bytes, folder: Path) -> Checkpoint:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ckptfix.UnreadableError):
        ckptfix.open_checkpoint(path)
    return ckptfix.open_checkpoint(path, salvage=True)


def doubted(checkpoint: Checkpoint) -> set[str]:
    return {fact.place for fact in checkpoint.remarks if fact.kind is Kind.DOUBTFUL_VALUES}


def wrong(checkpoint: Checkpoint, state_dict: Mapping[str, torch.Tensor]) -> set[str]:
    """The keys whose bytes are not those that were saved."""
    return {key for key in checkpoint.specs if bytes_of(checkpoint.read(key)) != bytes_of(state_dict[key])}


def test_a_whole_file_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slips, "find_slip", None)
    (tmp_path / "model.safetensors").write_bytes(DATA)
    checkpoint = ckptfix.open_checkpoint(tmp_path / "model.safetensors", salvage=True)
    assert (checkpoint.damage, checkpoint.remarks) == ((), ())


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_file_that_was_cut_is_not_doubted(share: float, tmp_path: Path) -> None:
    checkpoint = salvaged(DATA[: START + int((len(DATA) - START) * share)], tmp_path)
    assert clause(checkpoint.damage[0]).startswith("is cut short")
    assert wrong(checkpoint, NETWORK) == doubted(checkpoint) == set()


@pytest.mark.parametrize(
    "tail",
    [b"\n-- end of the download --\n", b"\r\n", bytes(4096), save({"other": torch.ones(3)}), b"PK\x03\x04" + bytes(50)],
    ids=["text", "a line's end", "zeros", "another file", "an archive"],
)
def test_what_was_hung_on_is_not_doubted(tail: bytes, tmp_path: Path) -> None:
    checkpoint = salvaged(DATA + tail, tmp_path)
    assert checkpoint.keys() == list(ckptfix.open_checkpoint(tmp_path / "model.safetensors", salvage=True).specs)
    assert set(checkpoint.specs) == set(NETWORK)
    assert wrong(checkpoint, NETWORK) == doubted(checkpoint) == set()


@settings(max_examples=30, deadline=None)
@given(start=st.integers(START + 100, len(DATA) - 9000), size=st.integers(48, 9000))
def test_a_block_that_is_there_twice_is_taken_out(
    start: int, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = salvaged(DATA[: start + size] + DATA[start:], tmp_path_factory.mktemp("twice"))
    assert not checkpoint.lost
    assert wrong(checkpoint, NETWORK) == doubted(checkpoint) == set()


def test_a_file_with_a_block_twice_is_repaired_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA[:MIDDLE] + DATA[MIDDLE - 4096 :])
    report = ckptfix.repair(path, salvage=True, output=tmp_path / "out.safetensors", values=False).report
    assert report.exit_code == 0
    assert wrong(ckptfix.open_checkpoint(tmp_path / "out.safetensors"), NETWORK) == set()


def test_two_equal_tensors_are_no_block_that_is_there_twice(tmp_path: Path) -> None:
    """The file is as long as if one had been fetched twice, and something may as well hang on to it."""
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    state_dict = {"a": weight, "b": weight.clone(), "c": torch.randn(16, 16)}
    checkpoint = salvaged(save(state_dict) + b"\n" * weight.nbytes, tmp_path)
    assert "twice" not in clause(checkpoint.damage[0])
    assert wrong(checkpoint, state_dict) == set()


@pytest.mark.parametrize("size", [1, 2, 512, 4096, 30_000])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_behind_lost_bytes_the_rest_is_found(share: float, size: int, tmp_path: Path) -> None:
    place = START + int((len(DATA) - START) * share)
    checkpoint = salvaged(DATA[:place] + DATA[place + size :], tmp_path)
    assert f"has lost {size} bytes between" in clause(checkpoint.damage[0])
    assert wrong(checkpoint, NETWORK) == set()
    assert len(checkpoint.specs) >= 15
    assert {*checkpoint.specs, *checkpoint.lost} == set(NETWORK)


@pytest.mark.parametrize("filler", [b"\0", b"junk", bytes(range(7, 251, 9))], ids=["zeros", "text", "bytes"])
@pytest.mark.parametrize("size", [1, 20, 4096])
def test_behind_strange_bytes_the_rest_is_found_or_doubted(filler: bytes, size: int, tmp_path: Path) -> None:
    checkpoint = salvaged(DATA[:MIDDLE] + (filler * size)[:size] + DATA[MIDDLE:], tmp_path)
    bad = wrong(checkpoint, NETWORK)
    assert {*checkpoint.specs, *checkpoint.lost} == set(NETWORK)
    if size == 1:
        assert "has 1 bytes too many between" in clause(checkpoint.damage[0])
        assert not bad
        assert len(checkpoint.specs) >= 15
    else:
        assert bad
        assert bad <= doubted(checkpoint)


@pytest.mark.parametrize(
    "data",
    [DATA_ALIKE[:1800] + DATA_ALIKE[1832:], DATA_ALIKE[:1800] + bytes(range(32)) + DATA_ALIKE[1800:]],
    ids=["lost", "too many"],
)
def test_where_nothing_tells_the_tensors_are_kept_and_named(data: bytes, tmp_path: Path) -> None:
    checkpoint = salvaged(data, tmp_path)
    bad = wrong(checkpoint, ALIKE)
    assert len(bad) >= 2
    assert bad <= doubted(checkpoint)
    report = ckptfix.repair(tmp_path / "model.safetensors", salvage=True, output=tmp_path / "out.safetensors").report
    (doubt,) = (finding for finding in report.remaining if "may hold other values" in finding.message)
    assert (doubt.code, doubt.level, set(doubt.keys)) == ("FIL203", Level.WARNING, doubted(checkpoint))
    assert report.exit_code == 1


def test_bytes_too_many_in_the_header_put_its_names_in_doubt(tmp_path: Path) -> None:
    """They push its padding out, so that the JSON is whole and has another name."""
    data = next(data for size in range(8) if b"}  " in (data := save(NETWORK, {"by": "x" * size}))[:4000])
    start = 8 + int.from_bytes(data[:8], "little")
    spaces = start - len(data[:start].rstrip(b" "))
    checkpoint = salvaged(data.replace(b"a.conv", b"a.con" + b"v" * (spaces + 1), 1), tmp_path)
    assert {fact.kind for fact in checkpoint.remarks} >= {Kind.DOUBTFUL_NAMES}
    assert not wrong(checkpoint, {**NETWORK, f"a.con{'v' * (spaces + 1)}.weight": NETWORK["a.conv.weight"]})


@pytest.mark.parametrize("size", [-4, 4])
def test_one_number_more_or_less_is_found_or_leaves_a_doubt(size: int, tmp_path: Path) -> None:
    for place in range(START + 60, len(DATA) - 8, len(DATA) // 7):
        data = DATA[:place] + DATA[place - size :] if size < 0 else DATA[:place] + bytes(size) + DATA[place:]
        checkpoint = salvaged(data, tmp_path)
        assert wrong(checkpoint, NETWORK) <= doubted(checkpoint), place


@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(min_size=70, max_size=300), start=st.integers(0, 60), distance=st.integers(32, 60), few=st.booleans()
)
def test_runs_are_those_that_a_plain_search_finds(data: bytes, start: int, distance: int, few: bool) -> None:
    data = bytes(byte & 1 for byte in data) if few else data
    data = data[: start + distance] + data[start:]
    equal = [data[at] == data[at + distance] for at in range(len(data) - distance)]
    expected, begin = [], None
    for at, is_equal in enumerate([*equal, False]):
        if is_equal and begin is None:
            begin = at
        elif not is_equal and begin is not None:
            expected += [(begin, at)] if at - begin >= distance else []
            begin = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slips, "BLOCK", 64)
        assert list(slips._runs(Content("x", data), distance)) == expected


@given(st.sets(st.integers(0, 120)), st.integers(1, 100), st.integers(0, 100), st.integers(1, 30))
def test_windows_are_the_bytes_around_edges(edges: set[int], size: int, start: int, length: int) -> None:
    stop = start + length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slips, "WINDOW", 4)
        ranges = list(slips._Windows(sorted(edges), size).within(start, stop))
    seen = [at for low, high in ranges for at in range(low, high)]
    assert seen == [at for at in range(start, min(stop, size)) if any(edge - 4 <= at < edge + 4 for edge in edges)]
    assert all(before[1] < behind[0] for before, behind in pairwise(ranges))


def test_of_too_many_tensors_the_values_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({f"w{number}": torch.full((4,), float(number)) for number in range(9)})[:-8])
    monkeypatch.setattr(slips, "MOST_TENSORS", 8)
    monkeypatch.setattr(slips, "_scores", None)
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert len(checkpoint.specs) == 8
    assert {fact.place for fact in checkpoint.remarks if fact.kind is Kind.DOUBTFUL_VALUES} == {*checkpoint.specs}
