"""The index of a sharded checkpoint is JSON with file names, none of which is trusted."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from ckptfix.bytes.sources import Content
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.folders.shard_index import ShardIndex, file_inside, is_index, parse_index


def content_of(data: bytes) -> Content:
    return Content("model.index.json", data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b'{"a": 1}', False, id="other-json"),
        pytest.param(b'["weight_map"]', False, id="a-list"),
        pytest.param(b'{\0\0\0\0\0\0\0{"weight_map":{}}', False, id="a-safetensors-header-of-123-bytes"),
        pytest.param(b'{"weight_map": {}}', True, id="plain"),
        pytest.param(b'\xef\xbb\xbf{\n "metadata": {},\n "weight_map": {}}', True, id="byte-order-mark-and-indent"),
    ],
)
def test_is_recognised_by_its_bytes(data: bytes, expected: bool) -> None:
    assert is_index(content_of(data)) is expected


def test_index_keeps_order_and_total() -> None:
    given = {"metadata": {"total_size": 12}, "weight_map": {"b": "2.bin", "a": "1.bin", "c": "2.bin"}}
    index = parse_index(content_of(json.dumps(given).encode()))
    assert index == ShardIndex("model.index.json", {"b": "2.bin", "a": "1.bin", "c": "2.bin"}, 12)
    assert index.files == ["2.bin", "1.bin"]


@pytest.mark.parametrize("total", [None, -1, "12", True, 1.5], ids=str)
def test_a_total_that_is_not_a_size_is_none(total: Any) -> None:
    given = {"metadata": {"total_size": total}, "weight_map": {"a": "1.bin"}}
    assert parse_index(content_of(json.dumps(given).encode())).total_size is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param('{"weight_map": {"a": "1.bin"', "not valid JSON", id="cut-short"),
        pytest.param('{"weight_map": {"a": "1.bin", "a": "2.bin"}}', "'a' is in it twice", id="doubled-key"),
        pytest.param('{"weight_map": {"a": 1}}', "the file name for some keys", id="number-for-a-file"),
        pytest.param('{"weight_map": ["a"]}', "the file name for some keys", id="list-for-a-map"),
        pytest.param('{"weight_map": {}}', "names no tensor", id="empty"),
        pytest.param("[]", "not a JSON object", id="a-list"),
        pytest.param('"weight_map"', "not a JSON object", id="a-text"),
        pytest.param('{"weight_map": ' + "[" * 100_000, "not valid JSON", id="nested-too-deep"),
    ],
)
def test_malformed_index(text: str, cause: str) -> None:
    with pytest.raises(UnreadableError, match=cause):
        parse_index(content_of(text.encode()))


@pytest.mark.parametrize("name", ["model.bin", "shards/model.bin", "shards/./model.bin", "..model..bin"])
def test_names_inside_of_the_folder(tmp_path: Path, name: str) -> None:
    assert file_inside(tmp_path, name, str(tmp_path / "index.json")) == tmp_path / name


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../model.bin", "shards/../../x", "..\\x", "C:\\x", "c:x", "\\\\host\\x", "", "a\0b", "..", "/"],
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HostileError, match="leads outside the folder"):
        file_inside(tmp_path, name, str(tmp_path / "index.json"))


def test_a_name_that_no_file_system_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostileError, match="cannot be followed"):
        file_inside(tmp_path, "\ud800", str(tmp_path / "index.json"))


def test_links(tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside.bin"
    folder.mkdir()
    outside.touch()
    (folder / "real.bin").touch()
    (folder / "inside.bin").symlink_to("real.bin")
    (folder / "out.bin").symlink_to(outside)
    index = str(folder / "index.json")
    assert file_inside(folder, "inside.bin", index) == folder / "inside.bin"
    with pytest.raises(HostileError, match="a link that leads out"):
        file_inside(folder, "out.bin", index)


def test_a_loop_of_links_is_refused_or_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "loop.bin").symlink_to("loop.bin")
    # What Python says of a loop differs between its versions.
    with contextlib.suppress(HostileError):
        assert not file_inside(tmp_path, "loop.bin", str(tmp_path / "index.json")).is_file()


def test_cache_of_the_hub_keeps_index_and_shards_as_links_to_one_place(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, blob in (("model.safetensors.index.json", "aa"), ("model-00001-of-00001.safetensors", "bb")):
        (blobs / blob).touch()
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    index = str(snapshot / "model.safetensors.index.json")
    assert file_inside(snapshot, "model-00001-of-00001.safetensors", index).is_file()
