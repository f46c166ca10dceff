"""A repair may write shards with an index; what reads them back, reads the same checkpoint."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptfix
from ckptfix.core.settings import Settings
from ckptfix.engine import delivery
from ckptfix.errors import UsageError, WriteError
from ckptfix.reading.opening import open_state_dict
from ckptfix.writing import output as shard_write
from ckptfix.writing.output import ShardNames, split
from tests.checks import assert_same


def state() -> OrderedDict[str, Any]:
    tied = torch.arange(10.0)
    state = OrderedDict(
        {
            "embed": tied,
            "a": torch.ones(5, dtype=torch.float64),
            "count": torch.tensor(3),
            "b": torch.full((30,), float("nan")),
            "c": torch.zeros(3, dtype=torch.bfloat16),
            "head": tied,
        }
    )
    state.__dict__["_metadata"] = {"": {"version": 1}, "relu": {"version": 2}}
    return state


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        pytest.param(10_000, [["embed", "a", "count", "b", "c", "head"]], id="one-is-enough"),
        pytest.param(90, [["embed", "a", "count", "head"], ["b"], ["c"]], id="a-tensor-above-the-limit-is-alone"),
        pytest.param(1, [["embed", "head"], ["a"], ["count"], ["b"], ["c"]], id="every-tensor-is-above-the-limit"),
    ],
)
def test_shards_keep_the_order_and_ties_together(limit: int, parts: list[list[str]]) -> None:
    made = split(open_state_dict(state()), limit)
    assert [list(part.entries) for part in made] == parts


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pth"])
def test_shards_read_back_as_they_were(tmp_path: Path, name: str) -> None:
    report = ckptfix.repair(state(), output=tmp_path / name, shard_size="90B").report
    index = tmp_path / f"{name}.index.json"
    assert report.output == str(index)
    stem, suffix = name.split(".")
    shards = [f"{stem}-0000{number}-of-00003.{suffix}" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*shards, index.name])
    for source in (tmp_path, index):
        checkpoint = ckptfix.open_checkpoint(source)
        assert_same(checkpoint.state_dict(), state())
        assert checkpoint.specs["embed"].view == checkpoint.specs["head"].view
    content = json.loads(index.read_text())
    assert list(content["weight_map"]) == list(state())
    assert content["metadata"]["total_size"] == 40 + 40 + 8 + 120 + 6


def test_other_readers_take_the_shards(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.full((8,), float(number)) for number in range(3)}
    ckptfix.repair(tensors, output=tmp_path / "model.safetensors", shard_size="64B")
    ckptfix.repair(tensors, output=tmp_path / "pytorch_model.bin", shard_size="64B")
    for load, pattern in ((load_file, "*.safetensors"), (torch.load, "*.bin")):
        loaded: dict[str, Any] = {}
        for path in sorted(tmp_path.glob(pattern)):
            loaded |= load(path)
        assert_same(loaded, tensors)


def test_shards_are_written_in_other_sizes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    ckptfix.repair(state(), output=first / "model.safetensors", shard_size="90B")
    ckptfix.repair(first, output=second / "model.safetensors", shard_size="150B")
    assert len(list(second.glob("*.safetensors"))) == 2
    assert_same(ckptfix.open_checkpoint(second).state_dict(), state())


def test_no_shard_has_only_other_entries(tmp_path: Path) -> None:
    held = OrderedDict(version=1, a=torch.ones(4), b=torch.ones(9), _extra_state={"scale": 2})
    assert [list(part.entries) for part in split(open_state_dict(held), 16)] == [
        ["version", "a"],
        ["b", "_extra_state"],
    ]
    ckptfix.repair(held, output=tmp_path / "model.pth", shard_size="16B")
    assert ckptfix.open_checkpoint(tmp_path).entries["_extra_state"] == {"scale": 2}


@pytest.mark.parametrize("name", ["model", "v1.5"])
def test_shards_have_a_suffix(tmp_path: Path, name: str) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    written = ckptfix.repair(tensors, output=tmp_path / name, shard_size="16B", format="safetensors").report.output
    assert written == str(tmp_path / f"{name}.safetensors.index.json")
    assert (tmp_path / f"{name}-00001-of-00002.safetensors").is_file()


def test_the_rest_of_the_container_is_reported_as_left_out(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": dict(state())}, tmp_path / "model.pth")
    report = ckptfix.repair(tmp_path / "model.pth", output=tmp_path / "flat.pth", shard_size="90B").report
    assert any("not the rest of the container" in remark for remark in report.remarks)
    assert ckptfix.open_checkpoint(tmp_path / "flat.pth.index.json").container == ()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00002-of-00003.safetensors"])
def test_existing_files_are_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    with pytest.raises(WriteError, match="already exists"):
        ckptfix.repair(state(), output=tmp_path / "model.safetensors", shard_size="90B")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "kept"


@pytest.mark.parametrize(
    ("module", "failing"), [(shard_write, "write_to"), (delivery, "verify"), (shard_write, "_write_index")]
)
def test_a_failure_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, failing: str) -> None:
    def fail(*_: Any) -> None:
        raise WriteError("the disk is full")

    monkeypatch.setattr(module, failing, fail)
    with pytest.raises(WriteError, match="the disk is full"):
        ckptfix.repair(state(), output=tmp_path / "model.safetensors", shard_size="90B")
    assert list(tmp_path.iterdir()) == []


def test_the_index_is_put_in_place_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[str] = []
    replace = Path.replace

    def spy(self: Path, target: Path) -> Path:
        placed.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", spy)
    ckptfix.repair(state(), output=tmp_path / "model.safetensors", shard_size="90B")
    assert placed == [*ShardNames(tmp_path / "model.safetensors", 3).shards, "model.safetensors.index.json"]


def test_an_interrupt_between_two_shards_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if "00002" in self.name:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        ckptfix.repair(state(), output=tmp_path / "model.safetensors", shard_size="90B")
    assert list(tmp_path.iterdir()) == []


def test_a_single_source_is_not_replaced_by_several(tmp_path: Path) -> None:
    source = tmp_path / "model.pth"
    torch.save({f"module.{key}": value for key, value in state().items()}, source)
    before = source.read_bytes()
    with pytest.raises(UsageError, match="replaces one file"):
        ckptfix.repair(source, in_place=True, shard_size="90B")
    assert source.read_bytes() == before


def test_an_index_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    tensors = {f"module.{key}": value for key, value in state().items()}
    for number, part in enumerate(({"module.a": tensors["module.a"]}, {"module.b": tensors["module.b"]}), 1):
        torch.save(part, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    weight_map = {f"module.{key}": f"pytorch_model-0000{number}-of-00002.bin" for number, key in ((1, "a"), (2, "b"))}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UsageError, match="in several files"):
        ckptfix.repair(index, in_place=True)
    report = ckptfix.repair(index, beside=True).report
    assert report.output == str(tmp_path / "pytorch_model.fixed.pth")
    assert list(torch.load(report.output)) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("2 GiB", 2 << 30), ("1.5k", 1500), ("7", 7), ("1TB", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert Settings(shard_size=text).shard_bytes == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-5GB", "5XB", "1e3", "5 5GB", "9" * 40])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        ckptfix.repair(state(), shard_size=text)


def test_a_clean_file_is_written_in_shards(tmp_path: Path) -> None:
    """A change of form was asked for, so the files are written although there is nothing to repair."""
    source = tmp_path / "model.safetensors"
    ckptfix.repair(state(), output=source)
    report = ckptfix.repair(source, beside=True, shard_size="90B").report
    index = tmp_path / "model.fixed.safetensors.index.json"
    assert report.output == str(index)
    assert_same(ckptfix.open_checkpoint(index).state_dict(), ckptfix.open_checkpoint(source).state_dict())
    assert ckptfix.repair(index, beside=True).report.output is None


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_whole_model_is_written_in_shards(suffix: str, tmp_path: Path) -> None:
    """Its parameters require gradients, which safetensors has no place for."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(module, tmp_path / "model.pt")
    report = ckptfix.repair(tmp_path / "model.pt", output=tmp_path / f"out{suffix}", shard_size="50B").report
    assert report.output is not None
    written = ckptfix.open_checkpoint(report.output).state_dict()
    assert_same({key: tensor.detach() for key, tensor in written.items()}, dict(module.state_dict()))


def test_the_index_lacks_entries_that_safetensors_cannot_hold(tmp_path: Path) -> None:
    weights = {"w": torch.ones(40), "v": torch.zeros(40)}
    torch.save({**weights, "kind": torch.float32}, tmp_path / "model.pth")
    repaired = ckptfix.repair(tmp_path / "model.pth", output=tmp_path / "out.safetensors", shard_size="170B")
    assert [finding.code for finding in repaired.report.findings] == ["FIL104"]
    assert repaired.report.output is not None
    assert_same(ckptfix.open_checkpoint(repaired.report.output).state_dict(), weights)
