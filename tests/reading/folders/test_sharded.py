"""Shards become one checkpoint, and every disagreement between index and shards is reported."""

import gzip
import json
import lzma
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptfix
from ckptfix.core.facts import Kind, clause
from ckptfix.core.finding import Level
from ckptfix.errors import HostileError, UnreadableError
from tests.checks import assert_same

STATE = {
    "norm.weight": torch.tensor([1.0, float("nan")]),
    "embed.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "head.steps": torch.tensor(3),
    "head.weight": torch.arange(4.0),
}
"""In the order of falling item sizes, in which safetensors puts the tensors of a file."""

SHARDS = (("norm.weight", "embed.weight"), ("head.steps", "head.weight"))
BIN, SAFETENSORS = "pytorch_model-0000{}-of-00002.bin", "model-0000{}-of-00002.safetensors"


def write(folder: Path, names: str = SAFETENSORS, state: dict[str, Tensor] = STATE) -> dict[str, Any]:
    """Write the shards with their index, and give the index back."""
    weight_map = {}
    for number, keys in enumerate(SHARDS, 1):
        shard = {key: state[key] for key in keys}
        path = folder / names.format(number)
        save_file(shard, path) if names is SAFETENSORS else torch.save(shard, path)
        weight_map.update(dict.fromkeys(keys, path.name))
    index = {"metadata": {"total_size": sum(value.nbytes for value in state.values())}, "weight_map": weight_map}
    write_index(folder, index, names)
    return index


def write_index(folder: Path, index: dict[str, Any], names: str = SAFETENSORS) -> None:
    name = "model.safetensors.index.json" if names is SAFETENSORS else "pytorch_model.bin.index.json"
    (folder / name).write_text(json.dumps(index))


@pytest.mark.parametrize("names", [BIN, SAFETENSORS], ids=["bin", "safetensors"])
@pytest.mark.parametrize("given", ["folder", "index", "no index"])
def test_shards_become_one_checkpoint(tmp_path: Path, names: str, given: str) -> None:
    write(tmp_path, names)
    index = next(tmp_path.glob("*.index.json"))
    if given == "no index":
        index.unlink()
    checkpoint = ckptfix.open_checkpoint(index if given == "index" else tmp_path)
    assert checkpoint.format == ("sharded" if names is BIN else "sharded-safetensors")
    assert (checkpoint.damage, checkpoint.lost) == ((), {})
    assert_same(checkpoint.state_dict(), STATE)


def test_keys_come_in_the_order_of_the_index(tmp_path: Path) -> None:
    index = write(tmp_path)
    index["weight_map"] = dict(sorted(index["weight_map"].items()))
    write_index(tmp_path, index)
    assert ckptfix.open_checkpoint(tmp_path).keys() == sorted(STATE)


def test_a_subfolder_may_hold_the_shards(tmp_path: Path) -> None:
    index = write(tmp_path)
    (tmp_path / "parts").mkdir()
    for key, name in index["weight_map"].items():
        index["weight_map"][key] = f"parts/{name}"
    for shard in tmp_path.glob("*.safetensors"):
        shard.rename(tmp_path / "parts" / shard.name)
    write_index(tmp_path, index)
    assert_same(ckptfix.open_checkpoint(tmp_path).state_dict(), STATE)


def test_metadata_of_the_shards_is_joined(tmp_path: Path) -> None:
    write(tmp_path, BIN)
    for number, (keys, version) in enumerate(zip(SHARDS, (2, 3), strict=True), 1):
        shard: Any = torch.nn.Module().state_dict()
        shard.update({key: STATE[key] for key in keys})
        shard._metadata = {keys[0].partition(".")[0]: {"version": version}}
        torch.save(shard, tmp_path / BIN.format(number))
    assert ckptfix.open_checkpoint(tmp_path).metadata == {"norm": {"version": 2}, "head": {"version": 3}}


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    write(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    assert not torch.equal(checkpoint.read("head.weight"), STATE["head.weight"])


def missing(folder: Path, index: dict[str, Any]) -> None:
    (folder / SAFETENSORS.format(2)).unlink()


def truncated(folder: Path, index: dict[str, Any]) -> None:
    path = folder / SAFETENSORS.format(2)
    path.write_bytes(path.read_bytes()[:9])


def stale_entry(folder: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["old.weight"] = "model-00009-of-00002.safetensors"


def absent_key(folder: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["old.weight"] = SAFETENSORS.format(1)


def unlisted_key(folder: Path, index: dict[str, Any]) -> None:
    del index["weight_map"]["head.weight"]


def unlisted_shard(folder: Path, index: dict[str, Any]) -> None:
    for key in SHARDS[1]:
        del index["weight_map"][key]


def moved_key(folder: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["head.steps"] = SAFETENSORS.format(1)


def doubled_key(folder: Path, index: dict[str, Any], dtype: torch.dtype = torch.int64) -> None:
    steps = {"head.steps": torch.tensor(4, dtype=dtype)}
    save_file({**steps, **{key: STATE[key] for key in SHARDS[0]}}, folder / SAFETENSORS.format(1))


@pytest.mark.parametrize(
    ("spoil", "said", "kept", "lost"),
    [
        (missing, "lacks the shard model-00002-of-00002.safetensors with 2 keys", SHARDS[0], SHARDS[1]),
        (truncated, "has a shard that cannot be read", SHARDS[0], SHARDS[1]),
        (stale_entry, "lacks the shard model-00009-of-00002.safetensors with 1 key", STATE, ["old.weight"]),
        (absent_key, "lists old.weight, which no shard has", STATE, ["old.weight"]),
        (unlisted_key, "does not list head.weight", STATE, []),
        (unlisted_shard, "does not list head.steps, head.weight", STATE, []),
        (doubled_key, "has head.steps in two shards with different values", STATE, []),
    ],
)
def test_what_does_not_agree_is_reported_and_the_rest_salvaged(
    tmp_path: Path, spoil: Callable[[Path, dict[str, Any]], None], said: str, kept: Any, lost: Any
) -> None:
    index = write(tmp_path)
    spoil(tmp_path, index)
    write_index(tmp_path, index)
    with pytest.raises(UnreadableError, match=said) as caught:
        ckptfix.open_checkpoint(tmp_path)
    assert "salvage=True" in str(caught.value)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert_same(checkpoint.state_dict(), {key: STATE[key] for key in kept})
    assert list(checkpoint.lost) == list(lost)
    assert any(said in clause(fact) for fact in checkpoint.damage)


def test_a_key_in_another_shard_than_the_index_says_is_read(tmp_path: Path) -> None:
    index = write(tmp_path)
    moved_key(tmp_path, index)
    write_index(tmp_path, index)
    assert_same(ckptfix.open_checkpoint(tmp_path).state_dict(), STATE)
    result = ckptfix.repair(tmp_path, output=tmp_path.with_name("out.safetensors"))
    assert [finding.code for finding in result.report.fixed] == ["FIL203"]
    assert "lists another shard for head.steps" in result.report.fixed[0].message


def test_a_key_in_two_shards_with_the_same_bytes_is_a_tie(tmp_path: Path) -> None:
    write(tmp_path)
    save_file(
        {"norm.weight": STATE["norm.weight"], **{key: STATE[key] for key in SHARDS[1]}},
        tmp_path / SAFETENSORS.format(2),
    )
    assert_same(ckptfix.open_checkpoint(tmp_path).state_dict(), STATE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_two_values_and_no_index_is_nobodys_choice(tmp_path: Path, dtype: torch.dtype) -> None:
    doubled_key(tmp_path, write(tmp_path), dtype)
    next(tmp_path.glob("*.index.json")).unlink()
    for salvage in (False, True):
        with pytest.raises(UnreadableError, match=r"head\.steps is in .* no index says which is meant"):
            ckptfix.open_checkpoint(tmp_path, salvage=salvage)


def test_a_missing_number_without_an_index(tmp_path: Path) -> None:
    missing(tmp_path, write(tmp_path))
    next(tmp_path.glob("*.index.json")).unlink()
    with pytest.raises(UnreadableError, match="lacks the shard model-00002-of-00002"):
        ckptfix.open_checkpoint(tmp_path)
    assert_same(ckptfix.open_checkpoint(tmp_path, salvage=True).state_dict(), {key: STATE[key] for key in SHARDS[0]})


def test_nothing_whole_is_an_error_even_when_salvaging(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {"a": "gone.bin"}})
    with pytest.raises(UnreadableError, match="no tensor is whole"):
        ckptfix.open_checkpoint(tmp_path, salvage=True)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/hostname", "link.bin"])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.ones(1)}, tmp_path / "secret.bin")
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    write_index(folder, {"weight_map": {"a": name}})
    for salvage in (False, True):
        with pytest.raises(HostileError, match="leads outside the folder"):
            ckptfix.open_checkpoint(folder, salvage=salvage)


def test_an_index_that_names_itself_ends(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {"a": "model.safetensors.index.json"}})
    with pytest.raises(UnreadableError):
        ckptfix.open_checkpoint(tmp_path)


def write_containers(folder: Path, *around: dict[str, Any]) -> None:
    """Shards of one tensor each, with something around it."""
    for number, beside in enumerate(around, 1):
        shard = {**beside, "state_dict": {f"layer{number}.weight": torch.full((2,), float(number))}}
        torch.save(shard, folder / f"net-0000{number}-of-0000{len(around)}.pt")


def test_shards_in_the_same_container_are_read_with_it(tmp_path: Path) -> None:
    write_containers(tmp_path, {"epoch": 3, "arch": "net"}, {"epoch": 3, "arch": "net"})
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert checkpoint.container == ("state_dict",)
    assert isinstance(checkpoint.root, dict)
    assert list(checkpoint.root) == ["epoch", "arch", "state_dict"]
    assert checkpoint.root["epoch"] == 3
    assert_same(
        checkpoint.state_dict(), {f"layer{number}.weight": torch.full((2,), float(number)) for number in (1, 2)}
    )


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(({"epoch": 3}, {"epoch": 4}), id="other-values"),
        pytest.param(({"epoch": 3}, {}), id="other-names"),
        pytest.param(({"optimizer": {"lr": [1]}}, {"optimizer": {"lr": [1]}}), id="more-than-numbers-and-texts"),
    ],
)
def test_shards_in_containers_that_differ_are_not_torn_out_of_them(tmp_path: Path, around: Any) -> None:
    write_containers(tmp_path, *around)
    with pytest.raises(UnreadableError, match=r"more than a state_dict each.*weights at state_dict.*save the checkp"):
        ckptfix.open_checkpoint(tmp_path)


def test_the_index_says_how_much_is_missing(tmp_path: Path) -> None:
    index = write(tmp_path)
    missing(tmp_path, index)
    lost = r"00002\.safetensors with 2 keys, 24 of 44 bytes \(54\.5 %\); head\.steps, head\.weight are lost:"
    with pytest.raises(UnreadableError, match=lost):
        ckptfix.open_checkpoint(tmp_path)
    index["metadata"]["total_size"] = 20  # less than there is: not trusted
    write_index(tmp_path, index)
    with pytest.raises(UnreadableError, match=r"00002\.safetensors with 2 keys; head.* are lost: fetch"):
        ckptfix.open_checkpoint(tmp_path)


def test_how_much_is_missing_is_not_known_next_to_a_shard_that_cannot_be_read(tmp_path: Path) -> None:
    index = write(tmp_path)
    stale_entry(tmp_path, index)
    truncated(tmp_path, index)
    write_index(tmp_path, index)
    with pytest.raises(
        UnreadableError, match=r"00009-of-00002\.safetensors with 1 key; has a shard that cannot be read"
    ):
        ckptfix.open_checkpoint(tmp_path)


def test_a_shard_of_a_name_that_is_too_long_is_missing(tmp_path: Path) -> None:
    index = write(tmp_path)
    index["weight_map"]["a"] = "a" * 300
    write_index(tmp_path, index)
    with pytest.raises(UnreadableError, match=r"lacks the shard aaa.*with 1 key.*4 of 5 tensors with salvage=True"):
        ckptfix.open_checkpoint(tmp_path)


def test_many_missing_shards_are_one_clause(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00009.safetensors")
    with pytest.raises(UnreadableError, match=r"lacks 8 shards: model-00002-of-00009.* and 4 more; .* lost: .*: fetch"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", '{"weight_map": {"a": "mod'], ids=["empty", "cut"])
def test_the_numbers_of_the_shards_stand_in_for_a_broken_index(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        UnreadableError, match=r"has an index that cannot be read \(.*take all \d tensors with salvage=True"
    ):
        ckptfix.open_checkpoint(tmp_path)
    assert set(ckptfix.open_checkpoint(tmp_path, salvage=True).keys()) == set(STATE)


def test_two_indexes(tmp_path: Path) -> None:
    write(tmp_path, SAFETENSORS)
    write(tmp_path, BIN, {key: value + 1 for key, value in STATE.items()})
    assert_same(ckptfix.open_checkpoint(tmp_path).state_dict(), STATE)
    for index in list(tmp_path.glob("*.index.json")):
        index.rename(tmp_path / f"my_{index.name}")
    with pytest.raises(UnreadableError, match="2 indexes"):
        ckptfix.open_checkpoint(tmp_path)


def test_two_sets_of_shards_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, SAFETENSORS)
    write(tmp_path, BIN)
    for index in list(tmp_path.glob("*.index.json")):
        index.unlink()
    with pytest.raises(UnreadableError, match="2 sets of shards"):
        ckptfix.open_checkpoint(tmp_path)


def test_a_payload_in_a_shard_is_found(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.system, ("touch run",)

    write(tmp_path, BIN)
    torch.save({**{key: STATE[key] for key in SHARDS[1]}, "extra": Payload()}, tmp_path / BIN.format(2))
    next(tmp_path.glob("*.index.json")).unlink()
    assert "FIL901" in [finding.code for finding in ckptfix.check(tmp_path).findings]


@pytest.mark.parametrize("given", ["folder", "index", "no index"])
@pytest.mark.parametrize("suffix", [".gz", ".xz", ""], ids=["gz", "xz", "gz under the plain name"])
def test_shards_that_were_compressed_one_by_one_are_read_and_noted(tmp_path: Path, suffix: str, given: str) -> None:
    write(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        data = path.read_bytes()
        path.unlink()
        packed = lzma.compress(data) if suffix == ".xz" else gzip.compress(data)
        path.with_name(path.name + suffix).write_bytes(packed)
    index = next(tmp_path.glob("*.index.json"))
    if given == "no index":
        index.unlink()
    given_path = index if given == "index" else tmp_path
    assert_same(ckptfix.open_checkpoint(given_path).state_dict(), STATE)
    report = ckptfix.check(given_path, values=False)
    found = [(each.code, each.level) for each in report.findings]
    if not suffix:  # the loaders of the name refuse them
        assert found == [("FIL109", Level.WARNING)]
        assert ckptfix.repair(given_path, beside=True, values=False).report.exit_code == 0
        return
    assert found == [("FIL203", Level.NOTE)]
    assert "shards are compressed one by one (model-00001-of-00002.safetensors" in report.findings[0].message


def test_a_shard_that_fails_its_checksum_puts_its_own_tensors_in_doubt(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / SAFETENSORS.format(2)
    packed = bytearray(gzip.compress(path.read_bytes()))
    packed[-6] ^= 1
    path.write_bytes(packed)
    report = ckptfix.repair(tmp_path, salvage=True, output=tmp_path / "out.safetensors", values=False).report
    (doubt,) = (found for found in report.remaining if found.level > Level.NOTE)
    assert (doubt.code, doubt.keys, report.exit_code) == ("FIL203", SHARDS[1], 1)


def test_a_missing_shard_without_an_index_leaves_a_loss_without_names(tmp_path: Path) -> None:
    write(tmp_path)
    next(tmp_path.glob("*.index.json")).unlink()
    (tmp_path / SAFETENSORS.format(2)).unlink()
    report = ckptfix.repair(tmp_path, salvage=True, output=tmp_path / "out.safetensors", values=False).report
    assert report.exit_code == 1
    assert [found.message for found in report.remaining if found.level == Level.ERROR] == [
        "tensors with unknown names are lost: those of shards that are not there, and no index names"
    ]


def test_an_index_that_cannot_be_read_is_got_over_by_its_own_name_too(tmp_path: Path) -> None:
    write(tmp_path)
    index = next(tmp_path.glob("*.index.json"))
    index.write_text(index.read_text()[:-3])
    with pytest.raises(UnreadableError, match=r"has an index that cannot be read.*take all 4 tensors"):
        ckptfix.open_checkpoint(index)
    assert_same(ckptfix.open_checkpoint(index, salvage=True).state_dict(), STATE)


def test_a_byte_order_mark_in_front_of_the_index_is_damage(tmp_path: Path) -> None:
    write(tmp_path)
    index = next(tmp_path.glob("*.index.json"))
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())
    with pytest.raises(UnreadableError, match=r"begins with a byte order mark.*take all 4 tensors"):
        ckptfix.open_checkpoint(tmp_path)


@pytest.mark.parametrize("total", ["sum", None, "none"])
def test_a_total_that_is_right_or_not_given_says_nothing(tmp_path: Path, total: str | None) -> None:
    index = write(tmp_path)
    index["metadata"] = {} if total is None else {"total_size": total} if total == "none" else index["metadata"]
    write_index(tmp_path, index)
    assert ckptfix.check(tmp_path, values=False).findings == ()


def test_a_total_of_another_save_is_noted_and_other_dtypes_that_explain_it_are_a_warning(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(3), "d": torch.ones(3)}
    keys = list(state)
    for number, part in enumerate((keys[:2], keys[2:]), 1):
        save_file({key: state[key] for key in part}, tmp_path / SAFETENSORS.format(number))
    weight_map = {key: SAFETENSORS.format(1 + (key in keys[2:])) for key in keys}
    write_index(tmp_path, {"metadata": {"total_size": 40}, "weight_map": weight_map})
    assert ckptfix.check(tmp_path, values=False).findings == ()
    write_index(tmp_path, {"metadata": {"total_size": 64}, "weight_map": weight_map})
    (found,) = ckptfix.check(tmp_path, values=False).findings
    assert (found.code, found.level) == ("FIL203", Level.NOTE)
    assert "the index says 64 bytes of tensors, and its shards have 40" in found.message
    save_file({key: state[key].half() for key in keys[2:]}, tmp_path / SAFETENSORS.format(2))
    (found,) = ckptfix.check(tmp_path, values=False).findings
    assert (found.code, found.level) == ("FIL203", Level.NOTE)  # the other dtype does not make it right
    write_index(tmp_path, {"metadata": {"total_size": 40}, "weight_map": weight_map})
    (found,) = ckptfix.check(tmp_path, values=False).findings
    assert (found.code, found.level) == ("FIL203", Level.WARNING)
    assert f"{SAFETENSORS.format(2)} has other dtypes than the rest: shards of two saves are mixed" in found.message


def test_a_flat_index_is_one(tmp_path: Path) -> None:
    """accelerate takes ``{key: file}`` too."""
    index = write(tmp_path)
    write_index(tmp_path, index["weight_map"])
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert (checkpoint.damage, checkpoint.lost) == ((), {})
    assert_same(checkpoint.state_dict(), STATE)


@pytest.mark.parametrize("others", [0, 1], ids=["shards", "another file"])
def test_a_stale_index_next_to_complete_shards_is_passed_over(tmp_path: Path, others: int) -> None:
    index = write(tmp_path)
    index["weight_map"] = {f"old.{key}": f"model-{n:05}-of-00003.safetensors" for n, key in enumerate(STATE, others)}
    write_index(tmp_path, index)
    with pytest.raises(UnreadableError, match=r"stale index: model-.*take all 4 tensors with salvage=True"):
        ckptfix.open_checkpoint(tmp_path)
    checkpoint = ckptfix.open_checkpoint(tmp_path, salvage=True)
    assert checkpoint.lost == {}
    assert_same(checkpoint.state_dict(), STATE)


def test_a_stale_index_of_the_same_keys_is_not_damage(tmp_path: Path) -> None:
    """Sharded again, with the old index left next to the shards: every key is found."""
    index = write(tmp_path)
    write_index(tmp_path, index | {"weight_map": dict.fromkeys(STATE, "model-00001-of-00003.safetensors")})
    checkpoint = ckptfix.open_checkpoint(tmp_path)
    assert (checkpoint.damage, checkpoint.lost) == ((), {})
    assert_same(checkpoint.state_dict(), STATE)
    done = ckptfix.repair(tmp_path, output=tmp_path / "whole.safetensors")
    assert [finding.code for finding in done.report.fixed] == ["FIL203"]
    assert "FIL203" not in {finding.code for finding in ckptfix.check(tmp_path / "whole.safetensors").findings}


def test_an_index_is_kept_to_if_one_of_its_shards_is_there_or_one_next_to_it_is_not(tmp_path: Path) -> None:
    index = write(tmp_path)
    index["weight_map"]["head.steps"] = "model-00001-of-00003.safetensors"
    write_index(tmp_path, index)
    assert [fact.kind for fact in ckptfix.open_checkpoint(tmp_path, salvage=True).damage][:1] == [Kind.SHARDS_MISSING]
    index["weight_map"] = dict.fromkeys(STATE, "model-00001-of-00003.safetensors")
    write_index(tmp_path, index)
    (tmp_path / SAFETENSORS.format(1)).unlink()
    with pytest.raises(UnreadableError, match="no tensor is whole"):
        ckptfix.open_checkpoint(tmp_path, salvage=True)


def test_any_number_of_missing_shards_is_reported_in_bounded_time(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-20000.safetensors" for number in range(1, 20_001)]
    save_file({"k0": torch.ones(2)}, tmp_path / names[0])
    write_index(tmp_path, {"weight_map": {f"k{number}": name for number, name in enumerate(names)}})
    start = time.process_time()
    assert len(ckptfix.open_checkpoint(tmp_path, salvage=True).lost) == 19_999
    assert time.process_time() - start < 15  # 300 seconds where each key looked through all names


def test_shards_of_torchtune_are_those_of_one_epoch(tmp_path: Path) -> None:
    """Before 0.5 their names have an epoch and no total; the folder also has an adapter and the state of the recipe."""
    for number, keys in enumerate(SHARDS, 1):
        torch.save({key: STATE[key] for key in keys}, tmp_path / f"hf_model_000{number}_0.pt")
    torch.save({"a.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_0.pt")
    torch.save({"seed": 1, "epochs_run": 0}, tmp_path / "recipe_state.pt")
    opened = ckptfix.open_checkpoint(tmp_path)
    assert_same(opened.state_dict(), STATE)
    assert not opened.damage
    assert ckptfix.check(tmp_path).exit_code == 1  # the NaN

    torch.save(STATE, tmp_path / "hf_model_0001_1.pt")  # the only one of its epoch is whole
    assert_same(ckptfix.open_checkpoint(tmp_path).state_dict(), STATE)
    torch.save({}, tmp_path / "hf_model_0002_1.pt")
    with pytest.raises(UnreadableError, match=r"\(hf_model_…_0\.pt, hf_model_…_1\.pt\) .* name a file of one of them"):
        ckptfix.open_checkpoint(tmp_path)
    for number, keys in enumerate(SHARDS, 1):
        one = ckptfix.open_checkpoint(named := tmp_path / f"hf_model_000{number}_0.pt")
        assert_same(one.state_dict(), STATE)
        assert one.path == str(named)  # of the folder's epochs
        torch.save({key: torch.ones(2) for key in keys}, tmp_path / f"hf_model_000{number}_1.pt")
    other = ckptfix.open_checkpoint(tmp_path / "hf_model_0002_1.pt").state_dict()
    assert_same(other, {key: torch.ones(2) for keys in SHARDS for key in keys})


def test_a_missing_shard_of_torchtune_is_damage(tmp_path: Path) -> None:
    for number in (1, 3):
        torch.save({f"{number}.weight": torch.ones(2)}, tmp_path / f"hf_model_000{number}_4.pt")
    with pytest.raises(UnreadableError, match=r"hf_model_0002_4\.pt"):
        ckptfix.open_checkpoint(tmp_path)
