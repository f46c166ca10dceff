"""FIL203: names that one flipped bit keeps from those around them are found, and no others."""

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.rules.fil203_damaged_file import misspelt

RESNET = tuple(
    f"{layer}.{leaf}"
    for layer in ("conv1", "bn1", "layer1.0.bn1", "layer1.1.bn1", "layer2.0.bn1", "fc")
    for leaf in (
        ("weight",) if layer == "conv1" else ("weight", "bias", "running_mean") if "bn" in layer else ("weight", "bias")
    )
)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(RESNET, id="a model"),
        pytest.param(("fc1.weight", "fc3.weight", "fc3.bias"), id="numbers"),
        pytest.param(("net.0.b", "net.1.b", "net.2.c"), id="letters"),
        pytest.param(("q_proj.weight", "q_proj.bias", "p_proj.weight"), id="words of one letter"),
        pytest.param(("a.3", "a.4", "b.3", "b.4", "scale", "t"), id="a letter beside numbers in lists"),
        pytest.param(("side.weight", "side.bias", "wide.weight", "wide.bias"), id="words with all their leaves"),
        pytest.param(
            tuple(f"word{'abcdefghijklmnop'[at % 16]}{'q' * (at // 16)}" for at in range(300)), id="no pattern"
        ),
        pytest.param((), id="none"),
    ],
)
def test_noop_for_names_that_are_alike_by_right(keys: tuple[str, ...]) -> None:
    assert misspelt(keys) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layer1.0.bn1.bias", "layer1.0.bn1.biaw"),
        ("layer1.0.bn1.bias", "layer1.0>bn1.bias"),
        ("layer1.0.bn1.running_mean", "layEr1.0.bn1.running_mean"),
        ("layer1.0.bn1.weight", "layer1.0.bn1\x0eweight"),
        ("bn1.running_mean", "bn1.runniîg_mean"),
        ("conv1.weight", "conv1.weioht"),
    ],
)
def test_one_bit_of_a_name(old: str, new: str) -> None:
    assert misspelt([new if key == old else key for key in RESNET]) == {new: old}


def _saved(folder: Path, old: bytes, new: bytes) -> Path:
    """A file in which the first ``old`` is ``new``, as if a bit of it had changed."""
    file, weights = folder / "f.pth", {key: torch.zeros(3) for key in RESNET}
    torch.save({"state_dict": weights, "epoch": 3}, file, _use_new_zipfile_serialization=False)
    raw = file.read_bytes()
    assert old in raw
    file.write_bytes(raw.replace(old, new, 1))
    return file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"fc.bias", b"fc.biaw", "'fc.biaw' for 'fc.bias'"),
        (b"cpu", b"cqu", "the device 'cqu'"),
        (b"cpu", b"cp ", "the device 'cp '"),
        (b"state_dict", b"statE_dict", "'statE_dict' for 'state_dict'"),
    ],
)
def test_a_flipped_bit_of_a_file_without_checksums_is_a_warning(
    tmp_path: Path, old: bytes, new: bytes, said: str
) -> None:
    findings = ckptfix.check(_saved(tmp_path, old, new), select=("FIL203",)).findings
    (finding,) = (finding for finding in findings if "one bit" in finding.message)
    assert said in finding.message
    assert finding.level is Level.WARNING


@pytest.mark.parametrize("device", ["cuda:3", "mps", "xla:0", "npu:0", "ascend:1", "TPU:0"])
def test_noop_for_the_devices_of_others(tmp_path: Path, device: str) -> None:
    file = _saved(tmp_path, b"cpu", b"cpu")
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"\x03\x00\x00\x00cpu", len(device).to_bytes(4, "little") + device.encode()))
    assert ckptfix.open_checkpoint(file).devices == (device,)
    assert ckptfix.check(file, select=("FIL203",)).findings == ()
