"""Damaged files: exactly the intact tensors, bit for bit, or an intended error."""

import io
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfix
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.facts import Fact, Kind
from tests.checks import bytes_of

StateDict = dict[str, torch.Tensor]
Saved = Callable[[StateDict], bytes]


def _tensors() -> StateDict:
    """No tensor contains a zero byte, so that the end of each can be distinguished from zeros after it."""
    generator = torch.Generator().manual_seed(1)

    def dense(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel() * 4
        raw = torch.randint(1, 255, (count,), dtype=torch.uint8, generator=generator)
        return raw.view(torch.float32).reshape(shape)

    return OrderedDict(
        [("conv.weight", dense(4, 3)), ("conv.bias", dense(4)), ("norm.weight", dense(7)), ("fc.weight", dense(5, 6))]
    )


def _native_zip(state_dict: StateDict) -> bytes:
    file = io.BytesIO()
    torch.save(state_dict, file)
    return file.getvalue()


def _legacy(state_dict: StateDict) -> bytes:
    file = io.BytesIO()
    torch.save(state_dict, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _safetensors(state_dict: StateDict) -> bytes:
    from safetensors.torch import save

    return bytes(save(dict(state_dict)))


def _own_zip(state_dict: StateDict) -> bytes:
    from ckptfix.reading.opening import open_state_dict
    from ckptfix.writing.torch_files import write_zip

    file = io.BytesIO()
    write_zip(open_state_dict(state_dict), file)
    return file.getvalue()


FORMS: dict[str, Saved] = {
    "zip_of_torch": _native_zip,
    "zip_of_ckptfix": _own_zip,
    "legacy": _legacy,
    "safetensors": _safetensors,
}


def _places(data: bytes, state_dict: StateDict) -> dict[str, tuple[int, int]]:
    """Return where the bytes of every tensor are in the file."""
    starts = {key: data.index(bytes_of(tensor)) for key, tensor in state_dict.items()}
    return {key: (start, start + len(bytes_of(state_dict[key]))) for key, start in starts.items()}


def _cuts(data: bytes, places: dict[str, tuple[int, int]]) -> list[int]:
    """Every position around the start and the end of each tensor, and some of all others, at any place in a number."""
    edges = {edge + near for place in places.values() for edge in place for near in range(-9, 10)}
    first, last = min(start for start, _ in places.values()), max(end for _, end in places.values())
    others = (*range(1, first, 41), *range(first, last, 7), *range(last, len(data), 13))
    return sorted(cut for cut in edges.union(others) if 0 < cut < len(data))


def _salvaged(file: Path, data: bytes) -> Checkpoint | None:
    file.write_bytes(data)
    try:
        return ckptfix.open_checkpoint(file, salvage=True)
    except ckptfix.CkptfixError:
        return None


def _assert_whole(checkpoint: Checkpoint, state_dict: StateDict, where: object) -> None:
    for key in checkpoint.specs:
        assert bytes_of(checkpoint.read(key)) == bytes_of(state_dict[key]), (key, where)
    assert {*checkpoint.keys(), *checkpoint.lost} == set(state_dict), where


@pytest.mark.parametrize("form", FORMS)
def test_a_file_cut_anywhere_gives_exactly_what_is_whole(form: str, tmp_path: Path) -> None:
    state_dict = _tensors()
    data = FORMS[form](state_dict)
    places = _places(data, state_dict)
    for cut in _cuts(data, places):
        whole = {key for key, (_, end) in places.items() if end <= cut}
        checkpoint = _salvaged(tmp_path / "cut.pth", data[:cut])
        assert set(checkpoint.keys() if checkpoint else ()) == whole, cut
        if checkpoint is not None:
            _assert_whole(checkpoint, state_dict, cut)
            assert checkpoint.damage, cut


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_file_is_refused_without_salvage(form: str, tmp_path: Path) -> None:
    state_dict = _tensors()
    data = FORMS[form](state_dict)
    file = tmp_path / "cut.pth"
    for cut in _cuts(data, _places(data, state_dict))[::5]:
        file.write_bytes(data[:cut])
        with pytest.raises(ckptfix.UnreadableError, match=r"cut\.pth"):
            ckptfix.open_checkpoint(file)


def test_the_refusal_says_what_salvage_would_bring_back(tmp_path: Path) -> None:
    state_dict = _tensors()
    data = _legacy(state_dict)
    cut = sorted(end for _, end in _places(data, state_dict).values())[1] + 3
    file = tmp_path / "cut.pth"
    file.write_bytes(data[:cut])
    with pytest.raises(ckptfix.UnreadableError) as refusal:
        ckptfix.open_checkpoint(file)
    said = str(refusal.value)
    assert f"it has {cut} bytes and its storages end at byte {len(data)}" in said
    assert "2 of 4 tensors (" in said
    assert "% of the numbers) with salvage=True" in said


# The tensors are too small for safetensors, which has only its tensors at its end: see test_unfilled.
@pytest.mark.parametrize("form", [form for form in FORMS if form != "safetensors"])
def test_reserved_space_that_was_never_filled_is_not_data(form: str, tmp_path: Path) -> None:
    state_dict = _tensors()
    data = FORMS[form](state_dict)
    places = _places(data, state_dict)
    # Zeros inside of the last storage alone cannot be told from data where a format has nothing after it.
    proved = {"legacy": sorted(start for start, _ in places.values())[-1] - 8}
    for filled in _cuts(data, places):
        if filled >= proved.get(form, len(data)):
            break
        whole = {key for key, (_, end) in places.items() if end <= filled}
        checkpoint = _salvaged(tmp_path / "reserved.pth", data[:filled] + bytes(len(data) - filled))
        assert set(checkpoint.keys() if checkpoint else ()) == whole, filled
        if checkpoint is not None:
            _assert_whole(checkpoint, state_dict, filled)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_in_front_are_passed_over(form: str, tmp_path: Path) -> None:
    state_dict = _tensors()
    file = tmp_path / "junk.pth"
    file.write_bytes(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n\r\n" + FORMS[form](state_dict))
    with pytest.raises(ckptfix.UnreadableError, match="begins with 59 bytes"):
        ckptfix.open_checkpoint(file)
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    assert checkpoint.keys() == sorted(state_dict) if form == "safetensors" else list(state_dict)
    _assert_whole(checkpoint, state_dict, form)


@pytest.mark.parametrize("front", [_native_zip, lambda state_dict: b"PK\x03\x04" + bytes(96)], ids=["whole", "stray"])
def test_an_archive_after_another_one_is_damaged_as_for_torch(front: Saved, tmp_path: Path) -> None:
    state_dict = _tensors()
    file = tmp_path / "two.pth"
    file.write_bytes(front({"other": torch.ones(3)}) + _native_zip(state_dict))
    with pytest.raises(RuntimeError):
        torch.load(file)
    with pytest.raises(ckptfix.UnreadableError, match=r"directory .* bytes after the place that it states.*take all"):
        ckptfix.open_checkpoint(file)
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    _assert_whole(checkpoint, state_dict, "behind")


@pytest.mark.parametrize("form", ["legacy", "safetensors"])
def test_trailing_bytes_are_left_out(form: str, tmp_path: Path) -> None:
    state_dict = _tensors()
    checkpoint = _salvaged(tmp_path / "junk.pth", FORMS[form](state_dict) + b"-- end of the download --")
    assert checkpoint is not None
    _assert_whole(checkpoint, state_dict, form)
    assert not checkpoint.lost


@pytest.mark.parametrize("form", ["legacy", "zip_of_torch"])
def test_a_transfer_in_text_mode_is_undone(form: str, tmp_path: Path) -> None:
    state_dict = {"weight": torch.arange(60.0).reshape(6, 10), "count": torch.tensor(10)}  # 10 is a line feed
    data = FORMS[form](state_dict)
    assert b"\r\n" not in data
    mangled = data.replace(b"\n", b"\r\n")
    file = tmp_path / "mangled.pth"
    file.write_bytes(mangled)
    with pytest.raises(ckptfix.UnreadableError, match="CR LF"):
        ckptfix.open_checkpoint(file)
    checkpoint = ckptfix.open_checkpoint(file, salvage=True)
    _assert_whole(checkpoint, state_dict, form)


def test_a_transfer_in_text_mode_is_not_an_attack(tmp_path: Path) -> None:
    """Where the directory of the archive is read at the wrong place, two members may seem to have one name."""
    state_dict = {f"l.{at}.weight": torch.randn(200, 200) for at in range(5)}
    file = tmp_path / "x.pth"
    torch.save(state_dict, file)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(ckptfix.UnreadableError, match="CR LF"):
        ckptfix.open_checkpoint(file)
    _assert_whole(ckptfix.open_checkpoint(file, salvage=True), state_dict, "zip_of_torch")


def test_a_text_mode_transfer_is_undone_where_the_first_header_has_a_line_feed(tmp_path: Path) -> None:
    """``d/data.pkl`` has ten letters, and ten is a line feed."""
    state_dict = {"weight": torch.arange(60.0), "count": torch.tensor(10)}
    file = tmp_path / "d.pt"
    torch.save(state_dict, file)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(ckptfix.UnreadableError, match="CR LF"):
        ckptfix.open_checkpoint(file)
    _assert_whole(ckptfix.open_checkpoint(file, salvage=True), state_dict, "zip_of_torch")


@pytest.mark.parametrize("form", ["legacy", "zip_of_torch"])
def test_a_transfer_that_cannot_be_undone_gives_nothing(form: str, tmp_path: Path) -> None:
    carriage_returns = torch.tensor([13, 10, 13, 10, 1, 2, 3, 4], dtype=torch.uint8)
    data = FORMS[form]({"a": torch.arange(60.0), "b": carriage_returns, "c": torch.arange(9.0)})
    mangled = re.sub(rb"(?<!\r)\n", b"\r\n", data)
    assert _salvaged(tmp_path / "mangled.pth", mangled) is None


def test_views_of_the_whole_part_of_a_storage_are_kept(tmp_path: Path) -> None:
    flat = torch.arange(1.0, 101.0)
    state_dict = {"first": flat[:40], "second": flat[40:80], "third": flat[80:]}
    for save in (_native_zip, _legacy):
        data = save(state_dict)
        end = data.index(bytes_of(flat)) + 80 * 4
        checkpoint = _salvaged(tmp_path / "views.pth", data[: end + 4])
        assert checkpoint is not None
        assert checkpoint.keys() == ["first", "second"]
        assert list(checkpoint.lost) == ["third"]
        _assert_whole(checkpoint, state_dict, save.__name__)


def test_a_storage_without_its_descriptor_is_whole_where_the_file_ends(tmp_path: Path) -> None:
    state_dict = {"a": torch.arange(1.0, 9.0), "zeros": torch.zeros(16)}
    data = _native_zip(state_dict)
    end = data.index(b"/data/1") + 7
    start = data.index(bytes(64), end)
    for cut, whole in ((start + 63, ["a"]), (start + 64, ["a", "zeros"])):
        checkpoint = _salvaged(tmp_path / "cut.pth", data[:cut])
        assert checkpoint is not None
        assert checkpoint.keys() == whole


def test_a_lost_part_next_to_the_weights_is_left_out_and_said(tmp_path: Path) -> None:
    weights = _tensors()
    content: dict[str, Any] = {"state_dict": weights, "epoch": 3, "optimizer": {"state": {0: torch.arange(1.0, 50.0)}}}
    data = _native_zip(content)
    cut = data.index(bytes_of(content["optimizer"]["state"][0])) + 8
    checkpoint = _salvaged(tmp_path / "cut.pth", data[:cut])
    assert checkpoint is not None
    _assert_whole(checkpoint, weights, cut)
    assert not checkpoint.lost
    assert Fact(Kind.EXTRAS_LOST, "optimizer") in checkpoint.damage
    repaired = ckptfix.repair(tmp_path / "cut.pth", output=tmp_path / "out.pth", salvage=True, values=False)
    (left,) = repaired.report.left
    assert left.message == "data other than weights is lost: the file has lost tensors in optimizer, which is left out"
    assert repaired.report.exit_code == 1
    assert torch.load(tmp_path / "out.pth").keys() == {"state_dict", "epoch"}


def test_a_damaged_count_of_a_legacy_file_costs_the_storage_before_and_all_after_it(tmp_path: Path) -> None:
    state_dict = _tensors()
    data = bytearray(_legacy(state_dict))
    places = sorted(_places(bytes(data), state_dict).items(), key=lambda item: item[1])
    data[places[2][1][0] - 8] ^= 0x55
    checkpoint = _salvaged(tmp_path / "count.pth", bytes(data))
    assert checkpoint is not None
    _assert_whole(checkpoint, state_dict, "count")
    assert set(checkpoint.keys()) == {places[0][0]}


@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
def test_a_lost_sector_costs_the_tensors_in_it_alone(filler: bytes, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    state_dict = {f"layers.{index}": torch.rand(100 + index, generator=generator) + 1 for index in range(40)}
    data = _native_zip(state_dict)
    start, stop = 10_000, 12_000
    touched = {
        key for key, place in _places(data, state_dict).items() if place[0] < stop + 200 and place[1] > start - 200
    }
    checkpoint = _salvaged(tmp_path / "page.pth", data[:start] + filler * (stop - start) + data[stop:])
    assert checkpoint is not None
    sound = {key: tensor for key, tensor in state_dict.items() if key not in touched}
    assert len(sound) > 30
    assert sound.keys() <= set(checkpoint.keys())
    assert checkpoint.lost.keys() <= touched
    for key, tensor in sound.items():
        assert bytes_of(checkpoint.read(key)) == bytes_of(tensor), key
    assert checkpoint.damage


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8]),
    share=st.floats(0.0, 0.999),
    zeros=st.booleans(),
)
def test_no_damaged_end_gives_a_wrong_byte(
    form: str, shapes: list[list[int]], dtype: torch.dtype, share: float, zeros: bool, tmp_path_factory: Any
) -> None:
    state_dict = {
        f"t{n}": (torch.arange(torch.Size(shape).numel()) + n + 1).to(dtype).reshape(shape)
        for n, shape in enumerate(shapes)
    }
    data = FORMS[form](state_dict)
    cut = int(share * len(data))
    is_told = form.startswith("zip")  # the other formats have nothing after their last tensor that must not be zero
    damaged = data[:cut] + bytes(len(data) - cut if zeros and is_told else 0)
    checkpoint = _salvaged(tmp_path_factory.mktemp("damaged") / "file.pth", damaged)
    if checkpoint is not None:
        _assert_whole(checkpoint, state_dict, cut)
