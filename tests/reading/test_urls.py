"""Checkpoints at URLs: the same results as for local files, and little is fetched."""

import io
import json
import shutil
import struct
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptfix
from ckptfix.bytes import remote
from ckptfix.bytes.files import is_url
from ckptfix.bytes.transfers import Patience
from ckptfix.errors import HostileError, UnreadableError, UsageError
from tests.checks import assert_same
from tests.cli.programs import run_here
from tests.reading.web import Web, serving

SAMPLES = Path(__file__).resolve().parents[2] / "sample_checkpoints"
FEW = 300_000


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", Patience(attempts=3, first=0.001))
    for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    with serving(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def wrapped(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


# ---- little is fetched


def sparse_safetensors(file: Path, tensors: int, nbytes: int) -> None:
    """Write a sparse file whose tensors take no room on the disk."""
    shape = [nbytes // 2048, 1024]
    header = {
        f"module.layers.{n}.weight": {"dtype": "F16", "shape": shape, "data_offsets": [n * nbytes, (n + 1) * nbytes]}
        for n in range(tensors)
    }
    raw = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        out.truncate(8 + len(raw) + tensors * nbytes)


def sparse_pth(file: Path, tensors: int, nbytes: int) -> None:
    """The same by torch itself, which leaves the storages out; memory that is never touched takes no space."""
    state_dict = {f"module.layers.{n}.weight": torch.empty(nbytes // 4096, 1024) for n in range(tensors)}
    with torch.serialization.skip_data():
        torch.save({"state_dict": state_dict, "epoch": 3}, file)


@pytest.mark.parametrize(("name", "make"), [("big.safetensors", sparse_safetensors), ("big.pth", sparse_pth)])
def test_names_of_ten_gigabytes_are_read_in_a_few_hundred_kilobytes(name, make, web, tmp_path):
    make(tmp_path / name, 500, 20 << 20)
    assert (tmp_path / name).stat().st_size > 10 * 10**9
    report = ckptfix.check(f"{web.url}/{name}")
    assert [(finding.code, len(finding.keys)) for finding in report.findings] == [("KEY102", 500)]
    assert (report.tensors, web.sent < FEW, len(web.requests) <= 4) == (500, True, True), web.sent


def test_a_large_file_is_not_fetched_from_a_server_without_ranges(web, tmp_path):
    sparse_safetensors(tmp_path / "big.safetensors", 4, 64 << 20)
    web.ranges = False
    with pytest.raises(UnreadableError, match=rf"only whole files.*download it first: curl -LO {web.url}/big"):
        ckptfix.check(f"{web.url}/big.safetensors")
    assert web.sent < 32 << 20  # what the buffers of a connection take


def test_a_small_file_needs_no_ranges(web, tmp_path):
    save_file(wrapped(weight=torch.zeros(2)), tmp_path / "a.safetensors")
    web.ranges = False
    assert len(ckptfix.check(f"{web.url}/a.safetensors").findings) == 1


# ---- the same as on this machine


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(reads=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 18)), min_size=1, max_size=8))
def test_every_range_equals_that_of_the_file(reads, web, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MOST", 1 << 17)
    monkeypatch.setattr(remote, "KEPT", 2)
    content = torch.randint(256, (700_001,), dtype=torch.uint8, generator=torch.manual_seed(0)).numpy().tobytes()
    (tmp_path / "a").write_bytes(content)
    file = remote.RemoteFile(f"{web.url}/a")
    for start, count in reads:
        assert file.read(start, count) == content[start : start + count]


@pytest.mark.parametrize(
    "name", sorted(path.name for path in SAMPLES.iterdir() if path.suffix in (".pth", ".safetensors"))
)
def test_a_sample_at_a_url_has_the_same_report(name, web, tmp_path):
    shutil.copy(SAMPLES / name, tmp_path)
    here, there = SAMPLES / name, f"{web.url}/{name}"
    assert_same(ckptfix.open_checkpoint(there).state_dict(), ckptfix.open_checkpoint(here).state_dict())
    for values in (False, True):
        reports = [ckptfix.check(path, values=values) for path in (str(here), there)]
        assert reports[0].findings == reports[1].findings


def test_values_are_read_when_asked_for_and_once(web, tmp_path):
    tensors = {f"layers.{n}.weight": torch.randn(256, 256) for n in range(8)}
    tensors["layers.3.weight"][7, 7] = torch.nan
    torch.save(tensors, tmp_path / "a.pth")
    size = (tmp_path / "a.pth").stat().st_size
    assert ckptfix.check(f"{web.url}/a.pth").findings == ()
    web.sent = 0
    report = ckptfix.check(f"{web.url}/a.pth", values=True)
    assert [(finding.code, finding.keys) for finding in report.findings] == [("VAL101", ("layers.3.weight",))]
    assert web.sent < size + (400 << 10)  # the tensor with a NaN is looked at again


def test_a_legacy_file_and_a_compressed_one(web, tmp_path):
    torch.save(wrapped(weight=torch.randn(64, 64)), tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    shutil.make_archive(str(tmp_path / "packed"), "gztar", tmp_path, "a.pth")
    for name in ("a.pth", "packed.tar.gz"):
        assert [finding.code for finding in ckptfix.check(f"{web.url}/{name}").findings] == ["KEY102"]


def test_a_model_loads_from_a_url(web, tmp_path):
    model = torch.nn.Linear(3, 2)
    torch.save(wrapped(**model.state_dict()), tmp_path / "a.pth")
    loaded = torch.nn.Linear(3, 2)
    for assign in (False, True):
        ckptfix.load(loaded, f"{web.url}/a.pth", assign=assign)
        assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_file_systems_of_fsspec(tmp_path):
    import fsspec

    torch.save(wrapped(weight=torch.randn(64, 64)), tmp_path / "a.pth")
    fsspec.filesystem("memory").put_file(str(tmp_path / "a.pth"), "/zoo/a.pth")
    for source in ("memory://zoo/a.pth", "memory://zoo"):
        report = ckptfix.check(source, values=True)
        assert (report.source, [finding.code for finding in report.findings]) == ("memory://zoo/a.pth", ["KEY102"])


def test_a_file_system_of_fsspec_that_sends_too_little(tmp_path, monkeypatch):
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    torch.save(wrapped(weight=torch.randn(256, 256)), tmp_path / "a.pth")
    fsspec.filesystem("memory").put_file(str(tmp_path / "a.pth"), "/short/a.pth")
    opened = MemoryFileSystem.open
    monkeypatch.setattr(remote, "PATIENCE", Patience(attempts=2, first=0.001))
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *args, **_: io.BytesIO(opened(*args).read()[:100_000]))
    with pytest.raises(UnreadableError, match=r"bytes were received of a range of \d+ \(2 tries\)"):
        ckptfix.check("memory://short/a.pth")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("https://host/a.pth", True),
        ("s3://bucket/a.pth", True),
        ("hf://org/repo", True),
        ("a.pth", False),
        ("/a/b.pth", False),
        ("file:///a.pth", False),
        ("odd name://a.pth", False),
        ("://", False),
    ],
)
def test_what_is_a_url(path, expected):
    assert is_url(path) is expected


# ---- failures


def small(folder: Path) -> None:
    torch.save({f"layers.{n}.weight": torch.randn(64, 64) for n in range(20)}, folder / "a.pth")


@pytest.mark.parametrize("trouble", [503, 429, "cut"])
def test_passing_errors_are_tried_again(trouble, web, tmp_path):
    small(tmp_path)
    web.troubles = [trouble, trouble]
    assert ckptfix.check(f"{web.url}/a.pth").tensors == 20


@pytest.mark.parametrize(
    ("troubles", "requests", "message"),
    [
        pytest.param([404], 1, "cannot be read: HTTP Error 404: Not Found; check the name", id="absent"),
        pytest.param([403], 1, "get permission or credentials", id="forbidden"),
        pytest.param([503] * 3, 3, r"Service Unavailable \(3 tries\); run it again later", id="down"),
        pytest.param(["cut"] * 3, 3, r"bytes were received of a range of 65536 \(3 tries\)", id="cut"),
    ],
)
def test_lasting_errors_are_reported(troubles, requests, message, web, tmp_path):
    small(tmp_path)
    web.troubles = troubles
    with pytest.raises(UnreadableError, match=message):
        ckptfix.check(f"{web.url}/a.pth")
    assert len(web.requests) == requests


@pytest.mark.parametrize("status", [429, 503])
def test_a_pause_that_the_server_asks_for_is_made(status, web, tmp_path, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    small(tmp_path)
    in_a_minute = formatdate(time.time() + 40.5, usegmt=True)
    web.troubles = [(status, "Retry-After", "7"), (status, "Retry-After", in_a_minute)]
    assert ckptfix.check(f"{web.url}/a.pth").tensors == 20
    assert (pauses[0], 30 < pauses[1] <= 41) == (7.0, True)


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_the_user_is_told_of_a_pause(command, web, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    small(tmp_path)
    web.troubles = [(429, "Retry-After", "7")]
    done = run_here(command, f"{web.url}/a.pth", cwd=tmp_path)
    assert done.stderr == f"ckptfix: {web.url}/a.pth: its server asks to wait: next try in 7 s\n"


@pytest.mark.parametrize("source", ["hf://org/repo", "hf://org/repo/a.pth"])
def test_a_failed_connection_is_described(source, web, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no server
    with pytest.raises(ckptfix.CkptfixError, match=r": Connection refused \(3 tries\)"):
        ckptfix.check(source)


def test_a_pause_that_is_too_long_is_reported(web, tmp_path):
    small(tmp_path)
    web.troubles = [(429, "Retry-After", "301")]
    with pytest.raises(UnreadableError, match=r"\(1 try\); run it again in 301 s, as the server asks"):
        ckptfix.check(f"{web.url}/a.pth")


def test_a_file_that_changes_meanwhile_is_refused(web, tmp_path):
    small(tmp_path)
    checkpoint = ckptfix.open_checkpoint(f"{web.url}/a.pth")
    web.version = "2"
    with pytest.raises(UnreadableError, match="changed while it was read"):
        checkpoint.state_dict()


def test_a_torn_archive_is_not_fetched_as_a_whole(web, tmp_path):
    small(tmp_path)
    raw = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "torn.pth").write_bytes(raw[: len(raw) * 3 // 4])
    with pytest.raises(UnreadableError, match=r"to see what is intact, download it first: curl -LO"):
        ckptfix.check(f"{web.url}/torn.pth")


def test_a_member_at_another_place_than_in_the_directory(web, tmp_path):
    small(tmp_path)
    raw = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "odd.pth").write_bytes(raw.replace(b"a/data/7", b"a/data/x", 1))
    assert ckptfix.check(f"{web.url}/odd.pth").tensors == 20
    with pytest.raises(UnreadableError, match=r"member a/data/7 is not where the archive's directory says"):
        ckptfix.check(f"{web.url}/odd.pth", values=True)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (416, "its server sends only whole files, not ranges; download it first: curl -LO"),
        ((302, "Location", "/a.pth"), r"would lead to an infinite loop\.$"),
    ],
)
def test_a_server_that_refuses_ranges_or_redirects_in_a_circle_is_not_asked_again(trouble, said, web, tmp_path):
    small(tmp_path)
    web.troubles = [trouble] * 40
    with pytest.raises(UnreadableError, match=said):
        ckptfix.check(f"{web.url}/a.pth")
    assert len(web.requests) < 12


def test_an_empty_file(web, tmp_path):
    (tmp_path / "a.pth").touch()
    with pytest.raises(UnreadableError, match="the file is empty"):
        ckptfix.check(f"{web.url}/a.pth")


# ---- repairs


def test_a_repair_says_how_to_download(web, tmp_path):
    torch.save(wrapped(weight=torch.randn(4, 4)), tmp_path / "a.pth")
    url = f"{web.url}/a.pth"
    for wanted in ({"output": tmp_path / "b.pth"}, {"beside": True}, {"in_place": True}):
        with pytest.raises(UsageError, match=f"can be repaired; download it first: curl -LO {url}"):
            ckptfix.repair(url, **wanted)
    assert ckptfix.repair(url, beside=True, dry_run=True).plan.edits


@pytest.mark.parametrize(
    ("url", "command", "name"),
    [
        (
            "hf://org/repo/model.safetensors",
            "hf download org/repo model.safetensors --local-dir .",
            "model.safetensors",
        ),
        ("hf://org/repo@v1", "hf download org/repo --revision v1 --local-dir .", "."),
        (
            "hf://datasets/org/repo/sub/a.pth",
            "hf download org/repo sub/a.pth --repo-type dataset --local-dir .",
            "sub/a.pth",
        ),
        (
            "hf://org/repo/model.safetensors.index.json",
            "hf download org/repo --local-dir .",
            "model.safetensors.index.json",
        ),
        ("https://host/b/a.pth?x=1", "curl -LO 'https://host/b/a.pth?x=1'", "a.pth"),
    ],
)
def test_downloads(url, command, name):
    assert (remote.download_advice(url), remote.local_name(url)) == (f"download it first: {command}", name)


# ---- repositories of the hub, and shards


def repository(web: Web, *names: str) -> Path:
    """A repository with these files; each file of weights has one tensor."""
    folder = web.root / "org" / "repo"
    folder.mkdir(parents=True)
    for name in names:
        if name.endswith(".safetensors"):
            save_file(wrapped(**{name.partition(".")[0]: torch.randn(4, 4)}), folder / name)
        elif name.endswith((".bin", ".pth")):
            torch.save(wrapped(weight=torch.randn(4, 4)), folder / name)
        else:
            (folder / name).write_text("{}")
    return folder


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(web: Web) -> Path:
    folder = repository(web, "config.json", *SHARDS)
    weight_map: dict[str, Any] = {f"module.{name.partition('.')[0]}": name for name in SHARDS}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        pytest.param(["config.json", "model.safetensors"], "model.safetensors", id="one"),
        pytest.param(["pytorch_model.bin", "model.safetensors", "tf_model.h5"], "model.safetensors", id="two formats"),
        pytest.param(["config.json", "last.pth"], "last.pth", id="another name"),
    ],
)
def test_the_weights_of_a_repository(names, chosen, web):
    repository(web, *names)
    report = ckptfix.check("hf://org/repo")
    assert (report.source, [finding.code for finding in report.findings]) == (f"hf://org/repo/{chosen}", ["KEY102"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(
            ["a.pth", "b.pth"],
            "several files match; name one of them, for example hf://org/repo/a.pth",
            id="several",
        ),
        pytest.param(["config.json"], "no checkpoint found; it holds config.json", id="none"),
    ],
)
def test_a_repository_whose_weights_are_not_certain(names, message, web):
    repository(web, *names)
    with pytest.raises(UnreadableError, match=message):
        ckptfix.check("hf://org/repo")


def test_a_repository_that_is_not_there(web):
    repository(web, "model.safetensors")
    with pytest.raises(UnreadableError, match=r"hf://org/other: cannot be listed: .* Not Found; check the name"):
        ckptfix.check("hf://org/other")


def test_shards_of_a_repository(web):
    folder = sharded(web)
    report = ckptfix.check("hf://org/repo@refs%2Fpr%2F1")
    assert (report.format, report.tensors, [finding.code for finding in report.findings]) == (
        "sharded-safetensors",
        2,
        ["KEY102"],
    )
    assert any("/tree/refs%2Fpr%2F1" in path for path, _ in web.requests)
    (folder / SHARDS[1]).unlink()
    with pytest.raises(UnreadableError, match=f"lacks the shard {SHARDS[1]} with 1 key"):
        ckptfix.check("hf://org/repo")
    assert ckptfix.open_checkpoint("hf://org/repo", salvage=True).lost == {
        f"module.{SHARDS[1].partition('.')[0]}": None
    }


def test_shards_of_a_server_that_lists_nothing(web):
    sharded(web)
    report = ckptfix.check(f"{web.url}/org/repo/model.safetensors.index.json")
    assert (report.format, report.tensors) == ("sharded-safetensors", 2)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", "https://other/a.safetensors"])
def test_an_index_does_not_lead_out_of_its_folder(name, web):
    folder = sharded(web)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(HostileError, match="leads outside the folder"):
        ckptfix.check(f"{web.url}/org/repo/model.safetensors.index.json")
    with pytest.raises(UnreadableError, match="has a stale index"):  # by the list of the files
        ckptfix.check("hf://org/repo")
    assert not any("secret" in path for path, _ in web.requests)


@pytest.mark.parametrize("url", ["hf://org/repo@v9", "hf://org/repo@v9/model.safetensors"])
@pytest.mark.parametrize(
    ("status", "code", "token", "message"),
    [
        (401, "RepoNotFound", "", "no such repository, or no access to it; check the name, and set HF_TOKEN if"),
        (
            401,
            "RepoNotFound",
            "x",
            "no such repository, or no access to it; check the name and the permissions of",
        ),
        (401, "GatedRepo", "", "granted on request; ask for it at http://.*/org/repo, and set HF_TOKEN to your token"),
        (403, "GatedRepo", "x", "granted on request; ask for it at http://.*/org/repo for your token"),
        (404, "RevisionNotFound", "", "the repository has no revision v9; name a branch, a tag or a commit"),
        (404, "EntryNotFound", "", "Not Found; check the name"),
    ],
)
def test_refusals_of_the_hub(url, status, code, token, message, web, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    web.troubles = [(status, "X-Error-Code", code)]
    with pytest.raises(UnreadableError, match=message):
        ckptfix.check(url)
    assert len(web.requests) == 1


def test_a_private_repository_that_was_renamed(web, monkeypatch):
    repository(web, "model.safetensors")
    web.token, web.renamed = "secret", {"org/old": "org/repo"}
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert len(ckptfix.check("hf://org/old").findings) == 1


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [("HF_HOME", "home", "home/token"), ("HF_TOKEN_PATH", "mine", "mine"), ("XDG_CACHE_HOME", "", "huggingface/token")],
)
def test_the_token_that_a_login_stored(variable, value, place, web, tmp_path, monkeypatch):
    repository(web, "model.safetensors")
    web.token = "secret"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(variable, str(tmp_path / value))
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("secret\n")
    assert len(ckptfix.check("hf://org/repo").findings) == 1


def test_the_token_is_sent_only_to_the_hub(web, tmp_path_factory, monkeypatch):
    repository(web, "model.safetensors")
    web.token = "secret"
    for url in ("hf://org/repo/model.safetensors", "hf://org/repo"):
        with pytest.raises(UnreadableError, match="check the name, and set HF_TOKEN if it is private"):
            ckptfix.check(url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving(web.root) as other:
        web.elsewhere = other.url
        assert len(ckptfix.check("hf://org/repo").findings) == 1
        assert {token for _, token in other.requests} == {None}
        assert other.sent > 0
    web.elsewhere = ""
    ckptfix.check(f"{web.url}/org/repo/resolve/main/model.safetensors")  # the hub by its own URL
    with serving(web.root) as stranger:
        ckptfix.check(f"{stranger.url}/org/repo/model.safetensors")
        assert {token for _, token in stranger.requests} == {None}
