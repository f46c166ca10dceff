from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from ckptfix.dtypes import DTYPES
from ckptfix.errors import UnreadableError, WriteError
from tests.attacks.crafted import STORAGE, safetensors
from tests.attacks.test_hostile_files import GOOD
from tests.formats.files import opened, read_all, saved, write
from tests.formats.state_dicts import STRIDED, pattern, same

KNOWN = {name: dtype for name, dtype in STRIDED.items() if DTYPES[name].safetensors}


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_official_library_writes_is_read(name, tmp_path):
    tensors = {
        "b": pattern(KNOWN[name], 3, 4),
        "a": pattern(KNOWN[name], 2),
        "empty": torch.empty(0, 2, dtype=KNOWN[name]),
    }
    save_file(tensors, tmp_path / "official.safetensors", metadata={"format": "pt", "by": "me"})
    checkpoint = opened(tmp_path / "official.safetensors")
    got = read_all(checkpoint)
    assert set(got) == set(tensors)
    for key, tensor in tensors.items():
        same(got[key], tensor, key)
    assert ("note", "by", "me") in {(remark.kind, remark.where, remark.detail) for remark in checkpoint.remarks}


def test_notes_of_others_come_along(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "official.safetensors", metadata={"by": "me"})
    again = opened(write(opened(tmp_path / "official.safetensors"), "safetensors", tmp_path))
    assert ("by", "me") in {(remark.where, remark.detail) for remark in again.remarks}


@pytest.mark.parametrize(
    ("content", "clause"),
    [
        (safetensors(GOOD, STORAGE, length=1 << 40), "HeaderTooLarge"),
        (safetensors(b"{", STORAGE), "no valid JSON"),
        (safetensors(b'{"a":1,"a":2}'), "stands twice"),
        (safetensors({**GOOD, "v": GOOD["w"]}, STORAGE), "overlap"),
        (safetensors({"w": {**GOOD["w"], "shape": [15], "data_offsets": [4, 64]}}, STORAGE), "leave a gap"),
        (safetensors({"w": {**GOOD["w"], "shape": [15]}}, STORAGE), "needs 60 bytes and its data_offsets give 64"),
        (safetensors({"w": {**GOOD["w"], "dtype": "F33"}}, STORAGE), "'F33', which this version does not know"),
        (safetensors(GOOD, STORAGE + b"x"), "1 bytes behind its last tensor"),
        (safetensors({"__metadata__": {"a": 1}, **GOOD}, STORAGE), "not a map of texts"),
        (safetensors({"w": {"dtype": "F32"}}, STORAGE), "record of 'w' is malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_violated_clause_is_named(content, clause, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=clause):
        opened(path)


def test_a_tie_is_stored_once_and_read_as_one(tmp_path):
    weight = pattern(torch.float32, 1000)
    path = write(opened(saved({"a": weight, "b": weight, "c": weight[:10]}, tmp_path)), "safetensors", tmp_path)
    assert path.stat().st_size < 6000
    built = opened(path).state_dict()
    assert list(built) == ["a", "b", "c"]
    assert built["a"].data_ptr() == built["b"].data_ptr()


def test_a_conjugated_view_is_no_tie_of_its_base(tmp_path):
    values = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    got = read_all(opened(write(opened(saved({"a": values, "b": values.conj()}, tmp_path)), "safetensors", tmp_path)))
    assert got["b"].tolist() == values.conj().tolist() != got["a"].tolist()


@pytest.mark.parametrize("key", ["__metadata__", "\ud800"])
def test_a_name_that_the_format_cannot_hold_is_refused(key, tmp_path):
    with pytest.raises(WriteError, match="--format pth"):
        write(opened(saved({key: torch.ones(1)}, tmp_path)), "safetensors", tmp_path)


def test_a_large_transposed_tensor_is_written_row_by_row(tmp_path):
    """Larger than a block of the stream, so that it is written and compared in several."""
    import ckptfix

    tensor = torch.arange(1100 * 1100, dtype=torch.float32).reshape(1100, 1100).t()
    source = saved({"w": tensor}, tmp_path)
    written = ckptfix.repair(source, output=tmp_path / "out.safetensors").report.output
    assert written is not None
    assert torch.equal(ckptfix.open_checkpoint(written).read("w"), tensor)
