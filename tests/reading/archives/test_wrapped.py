import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors

import ckptfix
from ckptfix.errors import HostileError, UnreadableError, UsageError
from ckptfix.reading.archives import unpacking
from tests.checks import assert_same

# In the order of safetensors, which sorts the keys of one dtype.
WEIGHTS = {"fc.bias": torch.tensor([float("nan"), -0.0]), "fc.weight": torch.arange(6.0).reshape(2, 3)}


def saved(weights: dict[str, torch.Tensor] = WEIGHTS, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def tarred(members: dict[str, bytes], mode: Any = "w", form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def with_size_apart(name: str, data: bytes) -> bytes:
    """A tar archive whose header has no room for the size of a file, as that of one of 8 GiB or more."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.size, info.pax_headers = len(data), {"size": str(len(data))}
        archive.addfile(info, io.BytesIO(data))
    written = bytearray(buffer.getvalue())
    header = memoryview(written)[1024:1536]  # after the extended header and its content
    header[124:136], header[148:156] = b"0" * 11 + b"\0", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(written)


def seventh_edition(name: str, data: bytes) -> bytes:
    """Return a tar archive in the old Unix format without a magic number."""
    archive = bytearray(tarred({name: data}))
    archive[257:512] = bytes(255)
    archive[148:156] = b" " * 8
    archive[148:156] = b"%06o\0 " % sum(archive[:512])
    return bytes(archive)


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


README = {"README.md": b"In this folder: weights", "__MACOSX/._model.pth": b"\x80\x02 resource fork", "a.txt": b"(d"}

WRAPPERS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: data,
    "gzip": gzip.compress,
    "gzip with a field of its own": lambda data: (
        b"\x1f\x8b\x08\4" + bytes(6) + b"\6\0AB\2\0zz" + gzip.compress(data)[10:]
    ),
    "gzip of two streams": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
    "gzip padded with zeros, as on a tape": lambda data: gzip.compress(data) + bytes(512),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "tar": lambda data: tarred({"model.pth": data}),
    "tar of the seventh edition, without a magic": lambda data: seventh_edition("model", data),
    "GNU tar with a long name": lambda data: tarred({"d/" * 80 + "m.pth": data}, form=tarfile.GNU_FORMAT),
    "pax tar with the size apart": lambda data: with_size_apart("m.pth", data),
    "pax tar with a long name beside a README": lambda data: tarred({**README, "d/" * 80 + "m.pth": data}),
    "tar.gz": lambda data: tarred({"exp/model_best.pth": data}, "w:gz"),
    "tar.bz2": lambda data: tarred({"exp/model_best.pth": data}, "w:bz2"),
    "tar.xz": lambda data: tarred({"exp/model_best.pth": data}, "w:xz"),
    "zip, deflated, with what people add": lambda data: zipped({**README, "model/model.pth": data}),
    "zip, stored": lambda data: zipped({"model.pth": data}, zipfile.ZIP_STORED),
    "zip, packed by lzma": lambda data: zipped({"model.pth": data}, zipfile.ZIP_LZMA),
    "zip of a zip of a gzip": lambda data: zipped({"a.zip": zipped({"model.pth.gz": gzip.compress(data)})}),
    "zip of a tar.gz of a gzip": lambda data: zipped({"a.tgz": tarred({"m.pth.gz": gzip.compress(data)}, "w:gz")}),
}
CHECKPOINTS = {
    "zip": saved(),
    "legacy": saved(legacy=True),
    "safetensors": save_safetensors(WEIGHTS),
    "protocol 0": pickle.dumps({key: value.numpy() for key, value in WEIGHTS.items()}, protocol=0),
    "protocol 1": pickle.dumps({key: value.numpy() for key, value in WEIGHTS.items()}, protocol=1),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_checkpoint_reads_as_the_bare_one(tmp_path: Path, wrapper: str, checkpoint: str) -> None:
    path = tmp_path / "named.pth"  # the suffix does not matter
    path.write_bytes(WRAPPERS[wrapper](CHECKPOINTS[checkpoint]))
    opened = ckptfix.open_checkpoint(path)
    assert opened.path == str(path)
    assert_same(dict(opened.state_dict()), WEIGHTS)


def test_values_outlive_the_opening_when_the_expanded_bytes_are_in_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "MEMORY_LIMIT", 100)
    path = tmp_path / "model.pth.gz"
    path.write_bytes(gzip.compress(saved()))
    opened = ckptfix.open_checkpoint(path)
    path.unlink()
    assert_same(dict(opened.state_dict()), WEIGHTS)


def test_a_deflated_torch_file_inside_of_an_archive_is_read(tmp_path: Path) -> None:
    members = {info.filename: zipfile.ZipFile(io.BytesIO(saved())).read(info) for info in infos(saved())}
    path = tmp_path / "x.zip"
    path.write_bytes(zipped({"again.pth": zipped(members)}))
    assert_same(dict(ckptfix.open_checkpoint(path).state_dict()), WEIGHTS)


def infos(data: bytes) -> list[zipfile.ZipInfo]:
    return zipfile.ZipFile(io.BytesIO(data)).infolist()


TWO = {"run/a.pth": saved({"a": torch.ones(1)}), "run/b.pth": saved({"b": torch.zeros(2)})}


@pytest.mark.parametrize("pack", [zipped, tarred], ids=["zip", "tar"])
def test_member_picks_one_of_several_checkpoints(tmp_path: Path, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(pack(TWO)))
    with pytest.raises(UsageError, match=r"2 files that may be checkpoints.*member='run/a\.pth', member='run/b\.pth'"):
        ckptfix.open_checkpoint(path)
    for name in ("run/b.pth", "b.pth"):
        assert ckptfix.open_checkpoint(path, member=name).keys() == ["b"]
    with pytest.raises(UsageError, match=r"no single file 'c\.pth'.*run/a\.pth.*run/b\.pth"):
        ckptfix.open_checkpoint(path, member="c.pth")


def test_member_is_refused_where_there_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(saved())
    with pytest.raises(UsageError, match=r"not an archive that holds 'a\.pth'"):
        ckptfix.open_checkpoint(path, member="a.pth")


REFUSED = {
    "gzip cut short": (
        gzip.compress(saved())[:-30],
        UnreadableError,
        r"gzip stream ends early, after \d+ bytes.*with salvage=True",
    ),
    "gzip with a wrong checksum": (
        gzip.compress(saved())[:-8] + bytes(8),
        UnreadableError,
        r"gzip stream fails after \d+ bytes \(wrong checksum\).*take all 2 tensors with salvage=True",
    ),
    "xz cut short": (lzma.compress(saved())[:-30], UnreadableError, "xz stream ends early"),
    "bzip2 damaged": (
        bz2.compress(saved())[:60] + bytes(200),
        UnreadableError,
        "bzip2 stream fails after 0 bytes.*nothing in it",
    ),
    "gzip with flags that no standard has": (
        b"\x1f\x8b\x08\xff" + gzip.compress(saved())[4:],
        UnreadableError,
        "gzip stream ends early, after 0 bytes",
    ),
    "zip of a damaged bzip2 stream": (
        (lambda data: data[:90] + bytes(20) + data[110:])(zipped({"model.pth": saved()}, zipfile.ZIP_BZIP2)),
        UnreadableError,
        r"model\.pth' is damaged from its first bytes on",
    ),
    "gzip of nothing": (gzip.compress(b""), UnreadableError, "its content is empty"),
    "tar cut short": (
        tarred({"model.pth": saved()})[:1024],
        UnreadableError,
        r"the tar archive has 1024 bytes and its file model\.pth ends at byte \d+; has 512 of its",
    ),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c\0\4", UnreadableError, "is packed by 7-Zip, which ckptfix cannot unpack"),
    "zstd": (b"\x28\xb5\x2f\xfd\0\4", UnreadableError, "is packed by zstd"),
    "lzma": (lzma.compress(b"x", lzma.FORMAT_ALONE), UnreadableError, r"is packed by LZMA without xz \(\.lzma\)"),
    "compress": (b"\x1f\x9d\x90PK", UnreadableError, r"is packed by compress \(\.Z\)"),
    "archive of pictures": (zipped({"a.png": b"\x89PNG"}), UnreadableError, r"without a checkpoint in it.*a\.png"),
    "archive of a git-lfs pointer": (
        zipped({"model.pth": b"version https://git-lfs.github.com/spec/v1\nsize 9"}),
        UnreadableError,
        "without a checkpoint in it",
    ),
    "gzip of an index of shards": (
        gzip.compress(b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        UnreadableError,
        "an index of shards without them; unpack it beside its shards",
    ),
    "archive of shards": (
        zipped({**TWO, "model.safetensors.index.json": b"{}"}),
        UsageError,
        "unpack it and name the folder",
    ),
    "more archives in each other than anybody makes": (
        gzip.compress(gzip.compress(gzip.compress(gzip.compress(gzip.compress(saved()))))),
        HostileError,
        "more than 4 deep",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damage_and_strange_archives_are_named(tmp_path: Path, case: str) -> None:
    data, error, message = REFUSED[case]
    path = tmp_path / "model.pth"
    path.write_bytes(data)
    with pytest.raises(error, match=message) as caught:
        ckptfix.open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def encrypted(data: bytearray) -> None:
    data[data.rindex(b"PK\x03\x04") + 6] |= 1
    data[data.rindex(b"PK\x01\x02") + 8] |= 1


def misplaced(data: bytearray) -> None:
    place = data.rindex(b"PK\x03\x04")
    data[place : place + 4] = b"\0\0\0\0"
    data[data.rindex(b"PK\x01\x02") + 42] ^= 1


def with_damage(data: bytearray) -> None:
    place = data.rindex(b"PK\x03\x04") + 39
    data[place : place + 20] = b"\xff" * 20


@pytest.mark.parametrize("member", [None, "model.pth"], ids=["alone", "by its name"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (encrypted, r"'model\.pth' is encrypted; unpack the archive with its password"),
        (misplaced, r"directory's entry of member model\.pth|is not where the archive's directory says"),
        (with_damage, r"is damaged from its first bytes on|decompression failed after 0 bytes"),
    ],
)
def test_a_member_that_cannot_be_read_is_named(
    tmp_path: Path, damage: Callable[[bytearray], None], message: str, member: str | None
) -> None:
    data = bytearray(zipped({"a.txt": b"a", "b.txt": b"b", "model.pth": saved()}))
    damage(data)
    path = tmp_path / "model.zip"
    path.write_bytes(data)
    with pytest.raises(UnreadableError, match=message):
        ckptfix.open_checkpoint(path, member=member)


BOMB = b"\x80\x02" + bytes(10 << 20)


@pytest.mark.parametrize("wrapper", ["gzip", "bzip2", "xz", "zip, stored", "tar.xz", "zip of a zip of a gzip"])
def test_a_bomb_ends_in_an_error_before_it_is_expanded(
    tmp_path: Path, wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "RATIO_FLOOR", 9 << 20)  # bombs of the real size: tests/attacks
    path = tmp_path / "bomb.pth"
    path.write_bytes(gzip.compress(BOMB) if wrapper == "zip, stored" else WRAPPERS[wrapper](BOMB))
    with pytest.raises(HostileError, match="expands more than 50 times"):
        ckptfix.open_checkpoint(path)


def test_too_little_space_for_the_expanded_bytes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MEMORY_LIMIT", 100)
    monkeypatch.setattr(unpacking, "DISK_RESERVE", 1 << 62)
    path = tmp_path / "model.pth.gz"
    path.write_bytes(gzip.compress(saved()))
    with pytest.raises(UnreadableError, match=r"less than 1 GiB is free.*set TMPDIR"):
        ckptfix.open_checkpoint(path)


def test_a_checkpoint_in_an_archive_is_repaired_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "release.zip"
    path.write_bytes(zipped({"out/model.pth": saved({f"module.{key}": value for key, value in WEIGHTS.items()})}))
    before = path.read_bytes()
    done = ckptfix.repair(path, beside=True)
    assert done.report.output == str(tmp_path / "model.fixed.pth")
    assert_same(torch.load(tmp_path / "model.fixed.pth"), WEIGHTS)
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match=r"the checkpoint is out/model\.pth in it; name an output"):
        ckptfix.repair(path, in_place=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "variables", [{"pytorch_variables.pth": None}, {"tensors.pth": {"log_ent_coef": torch.ones(1)}}], ids=["1.0", "0.8"]
)
def test_the_policy_of_stable_baselines3_is_the_checkpoint(tmp_path: Path, variables: dict[str, Any]) -> None:
    def saved_bytes(value: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    weights = {"mlp.0.weight": torch.ones(2, 2), "mlp.0.bias": torch.ones(2)}
    path = tmp_path / "ppo.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "{}")
        for name, value in variables.items():
            archive.writestr(name, saved_bytes(value))
        archive.writestr("policy.pth", saved_bytes(weights))
        archive.writestr("policy.optimizer.pth", saved_bytes({"state": {0: torch.ones(2)}, "param_groups": []}))
    checkpoint = ckptfix.open_checkpoint(path)
    assert (checkpoint.keys(), checkpoint.member) == (list(weights), "policy.pth")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_a_plain_pickle_next_to_weights_is_not_a_choice(tmp_path: Path, is_zip: bool) -> None:
    """medaka's archives contain the code that builds the model; without it, they hold only the state."""
    file = io.BytesIO()
    torch.save({"fc.weight": torch.ones(2)}, file, _use_new_zipfile_serialization=is_zip)
    path = tmp_path / "model.tar.gz"
    members = {"model/meta.pkl": pickle.dumps({"gru_size": 256}), "model/weights.pt": file.getvalue()}
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    assert ckptfix.open_checkpoint(path).member == "model/weights.pt"
    with pytest.raises(UnreadableError, match="no weights"):
        ckptfix.open_checkpoint(path, member="meta.pkl")
