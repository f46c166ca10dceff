import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import clause
from ckptfix.errors import UnreadableError, WriteError
from tests.attacks.crafted import STORAGE, safetensors
from tests.attacks.test_hostile_files import GOOD
from tests.reading.files import opened, read_all, saved, write
from tests.reading.state_dicts import STRIDED, pattern, same

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
    assert ("note", "by", "me") in {(remark.kind.value, remark.place, clause(remark)) for remark in checkpoint.remarks}


def test_metadata_of_other_programs_is_kept(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "official.safetensors", metadata={"by": "me"})
    again = opened(write(opened(tmp_path / "official.safetensors"), "safetensors", tmp_path))
    assert ("by", "me") in {(remark.place, clause(remark)) for remark in again.remarks}


def record(**fields: object) -> dict[str, object]:
    return {**GOOD["w"], **fields}


def text(header: str) -> bytes:
    return safetensors(header.encode("utf-8"), STORAGE)


RECORD = json.dumps(GOOD["w"])
VIOLATIONS: dict[str, tuple[bytes, str]] = {
    "overlap": (safetensors({**GOOD, "v": GOOD["w"]}, STORAGE), "no overlap, no holes.*overlap the tensor before"),
    "a hole": (
        safetensors({"w": record(shape=[15], data_offsets=[4, 64])}, STORAGE),
        "no holes.*leave a gap at byte 4",
    ),
    "an empty tensor inside of another": (
        safetensors({**GOOD, "v": record(shape=[0], data_offsets=[32, 32])}, STORAGE),
        "no overlap",
    ),
    "offsets in the wrong order": (safetensors({"w": record(data_offsets=[64, 0])}, STORAGE), "data_offsets in order"),
    "beyond the end": (safetensors({"w": record(shape=[32], data_offsets=[0, 128])}, STORAGE), "describes 128 bytes"),
    "dtype times shape": (safetensors({"w": record(shape=[15])}, STORAGE), "needs 60 bytes .* give 64"),
    "an overflow": (safetensors({"w": record(shape=[1 << 32] * 2)}, STORAGE), "no overflow"),
    "an overflow before a zero": (
        safetensors({"w": record(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0])}, b""),
        "no overflow",
    ),
    "a header that is too long": (safetensors(GOOD, STORAGE, length=1 << 40), "HeaderTooLarge"),
    "a header that ends early": (safetensors(b"{", STORAGE), "not valid JSON"),
    "a field twice": (text(f'{{"w": {RECORD[:-1]}, "dtype": "F32"}}}}'), "is in it twice"),
    "__metadata__ twice": (text(f'{{"__metadata__":{{}},"__metadata__":{{}},"w":{RECORD}}}'), "is in it twice"),
    "bytes that are no UTF-8": (safetensors(b'{"\xff":' + RECORD.encode() + b"}", STORAGE), "not UTF-8"),
    "half a surrogate pair": (text(f'{{"\\ud800":{RECORD}}}'), "surrogates not allowed"),
    "UTF-16": (safetensors(json.dumps(GOOD).encode("utf-16-le"), STORAGE), "not valid JSON"),
    "NaN": (text(f'{{"w":{RECORD[:-1]},"x":NaN}}}}'), "NaN is not a JSON number"),
    "trailing bytes": (safetensors(GOOD, STORAGE + b"x"), "1 bytes after its last tensor"),
    "text behind the header": (text(json.dumps(GOOD) + "x"), "Extra data"),
    "zeros behind the header": (text(json.dumps(GOOD) + "\0"), "Extra data"),
    "a negative offset": (
        safetensors({"w": record(data_offsets=[-64, 0])}, STORAGE),
        "data_offsets holds whole numbers",
    ),
    "a negative size": (safetensors({"w": record(shape=[-4, -4])}, STORAGE), "shape holds whole numbers"),
    "a bool": (safetensors({"w": record(shape=[True, 16])}, STORAGE), "shape holds whole numbers.*True"),
    "a float": (safetensors({"w": record(shape=[16.0])}, STORAGE), "shape holds whole numbers.*16.0"),
    "a nested shape": (safetensors({"w": record(shape=[[16]])}, STORAGE), "shape holds whole numbers.*a list"),
    "a null": (safetensors({"w": record(shape=[None])}, STORAGE), "shape holds whole numbers"),
    "three offsets": (safetensors({"w": record(data_offsets=[0, 64, 64])}, STORAGE), "two data_offsets"),
    "a shape that is no list": (safetensors({"w": record(shape="16")}, STORAGE), "shape is a list"),
    "no shape": (safetensors({"w": {"dtype": "F32"}}, STORAGE), "it has no shape"),
    "a record that is no object": (safetensors({"w": None}, STORAGE), "a record of dtype"),
    "nested 3000 deep": (text('{"w":' + "[" * 3000 + "]" * 3000 + "}"), "not valid JSON|contradicts the specification"),
    "a dtype that is none": (
        safetensors({"w": record(dtype="F33")}, STORAGE),
        "'F33': the specification knows no such",
    ),
    "a dtype that is a number": (safetensors({"w": record(dtype=3)}, STORAGE), "a known dtype"),
    "half a byte": (safetensors({"w": record(dtype="F4", shape=[3], data_offsets=[0, 2])}, b"ab"), "fill whole bytes"),
    "__metadata__ that is a list": (
        safetensors({"__metadata__": ["a"], **GOOD}, STORAGE),
        "does not map strings to strings",
    ),
}


def test_an_invalid_header_is_not_called_damaged(tmp_path):
    length = 100_000_001
    with (tmp_path / "long.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little") + b'{"w":')
        file.seek(7 + length)
        file.write(b"}" + STORAGE)
    with pytest.raises(UnreadableError, match=r"100000001 bytes.*HeaderTooLarge.*in several files"):
        opened(tmp_path / "long.safetensors")


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_violated_clause_is_named(case, tmp_path):
    content, clause = VIOLATIONS[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorError), safe_open(path, "pt") as official:
        official.keys()
    with pytest.raises(UnreadableError, match=clause):
        opened(path)


# What the library reads and torch cannot hold, or what has two meanings.
REFUSED_HERE: dict[str, tuple[bytes, str]] = {
    "a key twice": (text(f'{{"w":{RECORD},"w":{RECORD}}}'), "the key 'w'"),
    "a note twice": (text(f'{{"__metadata__":{{"a":"b","a":"c"}},"w":{RECORD}}}'), "the key 'a'"),
    "six bits": (
        safetensors({"w": record(dtype="F6_E2M3", shape=[8], data_offsets=[0, 6])}, b"abcdef"),
        "torch has no",
    ),
    "rows that end inside of a byte": (
        safetensors({"w": record(dtype="F4", shape=[8, 3], data_offsets=[0, 12])}, STORAGE[:12]),
        "fill whole bytes",
    ),
    "65 dimensions": (safetensors({"w": record(shape=[1] * 64 + [16])}, STORAGE), "it has 65 dimensions"),
    "no tensor": (safetensors({}, b""), "no weights found"),
}


@pytest.mark.parametrize("case", REFUSED_HERE)
def test_files_beyond_the_specification_are_refused(case, tmp_path):
    content, clause = REFUSED_HERE[case]
    path = tmp_path / "odd.safetensors"
    path.write_bytes(content)
    with safe_open(path, "pt") as official:
        assert official.keys() is not None
    with pytest.raises(UnreadableError, match=clause):
        opened(path)


ACCEPTED: dict[str, bytes] = {
    "as written": safetensors(GOOD, STORAGE),
    "white space around the header": text(f"  {json.dumps(GOOD)} \t\n"),
    "fields of others": safetensors({"w": record(note=[1, {"a": None}])}, STORAGE),
    "__metadata__ that is null": safetensors({"__metadata__": None, **GOOD}, STORAGE),
    "keys in another order than the tensors": safetensors(
        {"b": record(shape=[8], data_offsets=[32, 64]), "a": record(shape=[8], data_offsets=[0, 32])}, STORAGE
    ),
    "an empty tensor at the end": safetensors({"v": record(shape=[0], data_offsets=[64, 64]), **GOOD}, STORAGE),
    "a zero before large sizes": safetensors({"v": record(shape=[0, 1 << 40], data_offsets=[0, 0]), **GOOD}, STORAGE),
    "an empty key": safetensors({"": GOOD["w"]}, STORAGE),
    "a surrogate pair": text(f'{{"\\ud83d\\ude00":{RECORD}}}'),
    "eight bits of exponent": safetensors({"w": record(dtype="F8_E8M0", shape=[64])}, STORAGE),
    "four bits": safetensors({"w": record(dtype="F4", shape=[128])}, STORAGE),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_the_library_reads_is_read_the_same(case, tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(ACCEPTED[case])
    got = read_all(opened(path))
    with safe_open(path, "pt") as official:
        assert set(got) == set(official.keys())
        for key in official.keys():  # noqa: SIM118 - it is no dict
            same(got[key], official.get_tensor(key), key)


def test_a_tie_is_stored_once_and_read_as_one(tmp_path):
    weight = pattern(torch.float32, 1000)
    path = write(opened(saved({"a": weight, "b": weight, "c": weight[:10]}, tmp_path)), "safetensors", tmp_path)
    assert path.stat().st_size < 6000
    built = opened(path).state_dict()
    assert list(built) == ["a", "b", "c"]
    assert built["a"].data_ptr() == built["b"].data_ptr()


def test_a_conjugated_view_is_not_a_tie_of_its_base(tmp_path):
    values = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    got = read_all(opened(write(opened(saved({"a": values, "b": values.conj()}, tmp_path)), "safetensors", tmp_path)))
    assert got["b"].tolist() == values.conj().tolist() != got["a"].tolist()


@pytest.mark.parametrize("key", ["__metadata__", "\ud800"])
def test_a_name_that_the_format_cannot_hold_is_refused(key, tmp_path):
    with pytest.raises(WriteError, match="format='pth'"):
        write(opened(saved({key: torch.ones(1)}, tmp_path)), "safetensors", tmp_path)


def test_a_large_transposed_tensor_is_written_row_by_row(tmp_path):
    """Larger than a block of the stream, so that it is written and compared in several."""
    import ckptfix

    tensor = torch.arange(1100 * 1100, dtype=torch.float32).reshape(1100, 1100).t()
    source = saved({"w": tensor}, tmp_path)
    written = ckptfix.repair(source, output=tmp_path / "out.safetensors").report.output
    assert written is not None
    assert torch.equal(ckptfix.open_checkpoint(written).read("w"), tensor)


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ({"ckptfix.ties": "{"}, "ckptfix.ties in __metadata__ is not valid JSON"),
        ({"ckptfix.ties": '{"alias": "gone"}'}, "does not fit the tensors (as 'alias')"),
        ({"ckptfix.metadata": '"text"'}, "ckptfix.metadata in __metadata__ is not a JSON object"),
    ],
    ids=["no JSON", "a tie to nothing", "a text"],
)
def test_a_note_of_ours_that_others_damaged_is_reported_and_the_weights_are_read(notes, said, tmp_path):
    """Tools that take tensors out keep the notes as they are."""
    import ckptfix

    save_file({"a": torch.ones(3)}, tmp_path / "edited.safetensors", metadata=notes)
    assert list(opened(tmp_path / "edited.safetensors").specs) == ["a"]
    report = ckptfix.check(tmp_path / "edited.safetensors", values=False)
    assert [finding.code for finding in report.findings] == ["FIL203"]
    assert said in report.findings[0].message
    assert report.exit_code == 1
