"""The script that writes the table: unpacking reverses packing, and a library is replaced without the others."""

import pytest
from torch import nn

from benchmarks import structures
from ckptfix.known.table import KnownStructures

NAMES = ["small", "wide"]


def net(width, classes=5, channels=3):
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width, classes))


def library(widths):
    """Return a library with a model for each width."""
    return lambda: (
        (name, lambda width=width, **rest: net(width, **rest), 0) for name, width in zip(NAMES, widths, strict=False)
    )


def gathered(monkeypatch, known=None, **libraries):
    """Return the table with these libraries, each a list of the widths of its models."""
    entries = {name: ("pip", library(widths)) for name, widths in libraries.items()}
    monkeypatch.setattr(structures, "LIBRARIES", entries)
    found, versions = structures.unpacked(known) if known else ({}, {})
    for name in entries:
        structures.gather_library(name, found, versions)
    return found, versions


@pytest.fixture
def packed(tmp_path):
    def pack(found, versions):
        (tmp_path / "table").write_bytes(structures.packed(found, versions))
        return KnownStructures(tmp_path / "table")

    return pack


def test_what_is_packed_is_unpacked(monkeypatch, packed):
    found, versions = gathered(monkeypatch, smp=[8], timm=[8, 16])
    table = packed(found, versions)
    assert structures.unpacked(table) == (found, versions)
    assert structures.packed(*structures.unpacked(table)) == structures.packed(found, versions)
    entry = table.find("smp/small")
    assert entry is not None
    assert [model.name for model in entry[0].models] == ["smp/small", "timm/small"]
    assert dict(entry[1].sizes) == {"c": 5, "i": 3}
    assert entry[0].shapes["3.weight"] == "c.8"


def test_a_library_is_replaced_and_the_others_stay(monkeypatch, packed):
    table = packed(*gathered(monkeypatch, smp=[8, 16], timm=[8, 16]))
    again = packed(*gathered(monkeypatch, table, smp=[8, 32]))
    assert sorted(again.names()) == ["smp/small", "smp/wide", "timm/small", "timm/wide"]
    assert len(again) == 3
    entry = again.find("timm/wide")
    assert entry is not None
    assert [model.name for model in entry[0].models] == ["timm/wide"]
