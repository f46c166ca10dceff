"""Files whose size differs from their layout: no tensor is mistaken for another without a warning that names it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import ckptfix
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Kind
from ckptfix.core.finding import Level
from tests.checks import bytes_of

GENERATOR = torch.Generator().manual_seed(1)
NETWORK = {
    name: tensor
    for block in "abc"
    for name, tensor in {
        f"{block}.conv.weight": torch.randn(64, 16, 3, 3, generator=GENERATOR) * 0.05,
        f"{block}.norm.weight": 1 + torch.randn(64, generator=GENERATOR) * 0.1,
        f"{block}.norm.num_batches_tracked": torch.tensor(1234),
    }.items()
}
DATA = save(NETWORK)
START = 8 + int.from_bytes(DATA[:8], "little")


def salvaged(data: bytes, folder: Path) -> Checkpoint:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ckptfix.UnreadableError):
        ckptfix.open_checkpoint(path)
    return ckptfix.open_checkpoint(path, salvage=True)


def doubted(checkpoint: Checkpoint) -> set[str]:
    return {fact.place for fact in checkpoint.remarks if fact.kind is Kind.DOUBTFUL_VALUES}


def wrong(checkpoint: Checkpoint, state_dict: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the keys whose bytes differ from the saved ones."""
    return {key for key in checkpoint.specs if bytes_of(checkpoint.read(key)) != bytes_of(state_dict[key])}


def test_noop_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA)
    checkpoint = ckptfix.open_checkpoint(tmp_path / "model.safetensors", salvage=True)
    assert (checkpoint.damage, checkpoint.remarks) == ((), ())


@pytest.mark.parametrize(
    "tail",
    [b"\n-- end of the download --\n", b"\r\n", bytes(4096), save({"other": torch.ones(3)}), b"PK\x03\x04" + bytes(50)],
    ids=["text", "a line's end", "zeros", "another file", "an archive"],
)
def test_appended_bytes_raise_no_doubt(tail: bytes, tmp_path: Path) -> None:
    state_dict = {**NETWORK, "z": torch.full((3,), 1.1)}
    checkpoint = salvaged(save(state_dict) + tail, tmp_path)
    assert set(checkpoint.specs) == set(state_dict)
    assert wrong(checkpoint, state_dict) == doubted(checkpoint) == set()


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_file_that_was_cut_keeps_what_is_whole(share: float, tmp_path: Path) -> None:
    checkpoint = salvaged(DATA[: START + int((len(DATA) - START) * share)], tmp_path)
    assert [fact.kind for fact in checkpoint.damage] == [Kind.DATA_CUT]
    assert not wrong(checkpoint, NETWORK)
    assert doubted(checkpoint) == set(checkpoint.specs)


@settings(max_examples=60, deadline=None)
@given(
    place=st.integers(START, len(DATA)), size=st.integers(1, 9000), way=st.sampled_from(["lost", "twice", "strange"])
)
def test_no_wrong_bytes_without_a_doubt(
    place: int, size: int, way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if way == "lost":
        data = DATA[:place] + DATA[place + size :]
    else:
        data = DATA[:place] + (DATA[place - size : place] if way == "twice" else b"\x05" * size) + DATA[place:]
    if data == DATA:
        return
    path = tmp_path_factory.mktemp("size") / "model.safetensors"
    path.write_bytes(data)
    checkpoint = ckptfix.open_checkpoint(path, salvage=True)
    assert {*checkpoint.specs, *checkpoint.lost} == set(NETWORK)
    assert wrong(checkpoint, NETWORK) <= doubted(checkpoint)


def test_a_doubt_remains_after_a_repair(tmp_path: Path) -> None:
    middle = START + (len(DATA) - START) // 2
    checkpoint = salvaged(DATA[:middle] + bytes(range(32)) + DATA[middle:], tmp_path)
    report = ckptfix.repair(tmp_path / "model.safetensors", salvage=True, output=tmp_path / "out.safetensors").report
    (doubt,) = (finding for finding in report.remaining if "may differ from what was saved" in finding.message)
    assert (doubt.code, doubt.level, set(doubt.keys)) == ("FIL203", Level.WARNING, doubted(checkpoint))
    assert report.exit_code == 1
