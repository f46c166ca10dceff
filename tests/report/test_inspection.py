import json
import os
from collections import OrderedDict

import pytest
import torch
from msgspec.structs import replace

from ckptfix.core.checkpoint import Candidate, Checkpoint
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Global, Opaque
from ckptfix.reading.opening import open_file, open_state_dict
from ckptfix.report.inspection import classes, describe, inspect_checkpoint, inspection_lines, key_lines, size_on_disk
from ckptfix.report.style import TextFormat


def training_checkpoint() -> Checkpoint:
    """A container with a tied pair, a view of a large tensor, an entry that is not a tensor, and other entries."""
    embedding = torch.zeros(20, 8)
    state_dict: OrderedDict[str, object] = OrderedDict(
        {"emb.weight": embedding, "dec.weight": embedding, "dec.bias": torch.zeros(1000)[:20], "n": torch.tensor(3)}
    )
    state_dict["packed"] = (1, 2)
    checkpoint = open_state_dict(state_dict)
    namespace = Opaque(Global("argparse", "Namespace"), state={"lr": 0.1})
    return replace(
        checkpoint,
        path="model.pth",
        format="torch-zip",
        container=("model", "weights"),
        root={"epoch": 3, "args": namespace, "model": {"ema": {}, "weights": dict(checkpoint.entries)}},
        metadata={"": {"version": 1}},
        candidates=(Candidate(("model", "weights"), 4, 341), Candidate(("model", "ema"), 4, 341)),
        remarks=(Fact.of(Kind.PROTOCOL, "data.pkl", protocol="4"),),
    )


def test_facts():
    facts = inspect_checkpoint(training_checkpoint(), 6000)
    assert json.loads(json.dumps(facts, allow_nan=False)) == {
        "version": 1,
        "source": "model.pth",
        "format": "torch-zip",
        "producer": None,
        "member": None,
        "damage": [],
        "lost": [],
        "unknown_classes": {},
        "untrusted_names": [],
        "container": "model.weights",
        "candidates": [
            {"name": "model.weights", "tensors": 4, "numel": 341},
            {"name": "model.ema", "tensors": 4, "numel": 341},
        ],
        "tensors": 4,
        "numel": 341,
        "dtypes": {"float32": {"tensors": 3, "numel": 340}, "int64": {"tensors": 1, "numel": 1}},
        "devices": {"cpu": 3},
        "file_size": 6000,
        "stored_bytes": 640 + 4000 + 8,
        "tensor_bytes": 640 + 80 + 8,
        "ties": [["emb.weight", "dec.weight"]],
        "metadata": 1,
        "entries": {"packed": "tuple of 2"},
        "extras": {"epoch": "3", "args": "object of argparse.Namespace", "model.ema": "dict of 0"},
        "classes": {"argparse.Namespace": 1},
        "likeness": None,
        "remarks": [{"kind": "protocol", "where": "data.pkl", "detail": "4"}],
        "keys": {
            "emb.weight": {"dtype": "float32", "shape": [20, 8]},
            "dec.weight": {"dtype": "float32", "shape": [20, 8]},
            "dec.bias": {"dtype": "float32", "shape": [20]},
            "n": {"dtype": "int64", "shape": []},
        },
    }


def test_lines():
    assert TextFormat().write(inspection_lines(training_checkpoint(), 6000)) == (
        """\
model.pth: torch-zip, 4 tensors, 341 elements
state_dict: model.weights
  also: model.ema (4 tensors, 341 elements; --weights model.ema)
dtypes: float32 3 tensors (340 elements), int64 1 tensor (1 element)
saved on: cpu (3 storages)
size: file 6.00 kB, storages 4.65 kB, tensors cover 728 B
  3.92 kB belong to no tensor of this state_dict: a view saves its whole storage
_metadata: 1 module
ties:
  emb.weight = dec.weight
entries that are not tensors:
  packed: tuple of 2
outside the state_dict:
  epoch: 3
  args: object of argparse.Namespace
  model.ema: dict of 0
objects of known classes:
  argparse.Namespace (1)
remarks:
  protocol: 4 (data.pkl)
keys:
  {emb,dec}.weight  float32[20, 8]  (2)
  dec.bias  float32[20]
  n  int64[]
"""
    )


def test_a_plain_state_dict_says_little():
    text = TextFormat().write(inspection_lines(open_state_dict({"w": torch.zeros(2)})))
    assert "state_dict: the file itself\n" in text
    assert "_metadata: none\n" in text
    assert "ties: none\n" in text
    assert "also:" not in text
    assert "beside" not in text
    assert "belong to no tensor" not in text


def test_no_tensors_at_all():
    assert "dtypes: none\n" in TextFormat().write(inspection_lines(open_state_dict({})))


def test_empty_tensors_are_not_a_tie():
    empty = torch.zeros(0)
    assert inspect_checkpoint(open_state_dict({"a": empty, "b": empty}))["ties"] == []


def test_two_views_of_one_storage_are_not_a_tie():
    whole = torch.zeros(4)
    facts = inspect_checkpoint(open_state_dict({"a": whole[:2], "b": whole[2:]}))
    assert facts["ties"] == []
    assert facts["stored_bytes"] == facts["tensor_bytes"] == 16


def test_sparse_tensors_have_their_layout():
    checkpoint = open_state_dict({"s": torch.eye(3).to_sparse()})
    assert list(key_lines(checkpoint)) == ["s float32[3, 3] sparse_coo"]
    assert inspect_checkpoint(checkpoint)["keys"]["s"]["layout"] == "sparse_coo"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("resnet18", "'resnet18'"),
        ("x" * 1000, "'" + "x" * 58 + "…"),
        ({"a": 1}, "dict of 1"),
        ([1, 2], "list of 2"),
        (b"abc", "3 bytes"),
        (Global("torch", "float16"), "the name torch.float16"),
        (1j, "complex"),
    ],
)
def test_describe(value, text):
    assert describe(value) == text


def test_a_huge_number_is_not_written_out():
    assert describe(10**6000) == "a huge number"


def test_classes_of_a_tree_that_holds_itself():
    inner = Opaque(Global("zoo", "Net"))
    inner.state = {"parent": inner, "child": Opaque(Global("zoo", "Block"))}
    assert classes([inner, inner]) == {"zoo.Net": 1, "zoo.Block": 1}


@pytest.mark.parametrize(
    ("row", "producer"),
    [
        ("1.0.0-py27/plain_sd.pth", "torch 1.5 or earlier, or a later one told to use the old format"),
        ("1.4.0-py27/zip_on_request_sd.pth", "torch 1.4 or 1.5"),
        ("1.6.0/plain_sd.pth", "torch 1.6 to 2.0"),
        ("2.6.0/plain_sd.pth", "torch 2.1 to 2.6"),
        ("derived/torch01_tar_sd.pth", "torch 0.1"),
        ("modern/ok.safetensors", ""),
    ],
)
def test_the_producer_is_named_where_it_shows(corpus, row, producer):
    assert open_file(str(corpus / row)).producer == producer


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"123")
    assert size_on_disk(tmp_path) == 8
    assert size_on_disk(tmp_path / "b") == 3


class Net:
    """A class of the user's own."""


class Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def test_names_that_are_not_trusted_are_listed(tmp_path):
    torch.save({"w": torch.ones(2), "a": Runs(), "b": Net(), "c": OrderedDict()}, tmp_path / "f.pth")
    found = inspect_checkpoint(open_file(str(tmp_path / "f.pth")))["untrusted_names"]
    assert found == [f"{os.name}.system", f"{__name__}.Net"]
