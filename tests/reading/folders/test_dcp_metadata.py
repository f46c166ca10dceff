"""The metadata of torch.distributed.checkpoint is a pickle of claims."""

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfix.bytes.sources import Content
from ckptfix.errors import CkptfixError
from ckptfix.reading.folders.dcp import Location, Stored, parse_metadata

HALVES = [ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((2, 3))) for start in (0, 2)]


def metadata(**changes: Any) -> Metadata:
    described: Any = {
        "w": TensorStorageMetadata(TensorProperties(torch.float16), torch.Size((4, 3)), HALVES),
        "step": BytesStorageMetadata(),
    }
    stored = {
        MetadataIndex("w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 5, 7),
        MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 5),
    }
    return Metadata(**{"state_dict_metadata": described, "storage_data": stored, **changes})


def parse(value: Any) -> Any:
    return parse_metadata(Content(".metadata", pickle.dumps(value)))


def test_every_item_with_its_chunks_and_places() -> None:
    assert parse(metadata()).items == {
        "w": Stored(
            "float16",
            (4, 3),
            ((((0, 2), (0, 3)), Location("__0_0.distcp", 5, 7)), (((2, 4), (0, 3)), None)),
        ),
        "step": Stored("", (), (((), Location("__0_0.distcp", 0, 5)),)),
    }


def test_the_plan_gives_order_and_paths() -> None:
    found = parse(metadata(planner_data={"step": ("step",), "w": ("model", 0, "w"), "gone": ("gone",)}))
    assert list(found.items) == ["step", "w"]
    assert found.paths["w"] == ("model", 0, "w")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"w": 1}, id="a-dict"),
        pytest.param([], id="a-list"),
        pytest.param(metadata(state_dict_metadata=None), id="no-items"),
        pytest.param(metadata(state_dict_metadata={"w": 3}), id="a-number-for-an-item"),
        pytest.param(metadata(state_dict_metadata={3: BytesStorageMetadata()}), id="a-number-for-a-name"),
        pytest.param(metadata(storage_data=None), id="no-places"),
        pytest.param(metadata(storage_data={"w": _StorageInfo("x", 0, 1)}), id="a-name-for-an-index"),
        pytest.param(metadata(storage_data={MetadataIndex("w"): _StorageInfo("x", -1, 1)}), id="negative-offset"),
        pytest.param(metadata(storage_data={MetadataIndex("w"): _StorageInfo("x", 0, 1 << 70, ["zstd"])}), id="packed"),
        pytest.param(metadata(planner_data={"w": "model.w"}), id="text-for-a-path"),
        pytest.param(metadata(planner_data={"w": ()}), id="empty-path"),
    ],
)
def test_what_does_not_hold_is_a_typed_error(value: Any) -> None:
    with pytest.raises(CkptfixError, match=r"\.metadata"):
        parse(value)


def test_every_cut_is_a_typed_error() -> None:
    data = pickle.dumps(metadata())
    for length in range(1, len(data) - 1, 7):
        with pytest.raises(CkptfixError):
            parse_metadata(Content(".metadata", data[:length]))
