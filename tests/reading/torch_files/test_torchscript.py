import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.core.facts import Kind
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.torch_files import torchscript
from ckptfix.reading.weights import modules
from tests.checks import assert_same


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.table: torch.Tensor
        self.scratch: torch.Tensor
        self.register_buffer("table", torch.ones(1))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_parameter("absent", None)
        self.loose = torch.randn(5)
        self.flag = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.sum() + self.table + self.scratch.sum() + self.loose.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.block = Block()
        self.embedding = nn.Embedding(4, 3)
        self.out = nn.Linear(3, 4, bias=False)
        self.out.weight = self.embedding.weight
        self.layers = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(self.block(self.norm(self.conv(x))).view(-1, 2))
        total: torch.Tensor = y + self.last + self.out(self.embedding(torch.zeros(1, dtype=torch.long))).sum()
        return total


@pytest.fixture(scope="module", params=["scripted", "traced", "half", "double"])
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = Net().eval()
    if request.param == "traced":
        module = torch.jit.trace(net, torch.ones(1, 1, 1, 1))
    else:
        module = torch.jit.script({"half": net.half, "double": net.double}.get(request.param, lambda: net)())
    path = tmp_path_factory.mktemp("torchscript") / "model.pt"
    module.save(str(path))
    return path


def test_the_state_dict_is_that_of_torch(archive: Path) -> None:
    opened = ckptfix.open_checkpoint(archive)
    assert opened.format == "torchscript"
    assert opened.metadata is None
    # Torch's own has the non-persistent buffer too: the archive does not mark it.
    assert_same(dict(opened.state_dict()), dict(torch.jit.load(archive).state_dict()))


def test_ties_are_kept(archive: Path) -> None:
    state_dict = ckptfix.open_checkpoint(archive).state_dict()
    assert state_dict["out.weight"].data_ptr() == state_dict["embedding.weight"].data_ptr()


def test_the_repaired_file_is_a_plain_state_dict(archive: Path, tmp_path: Path) -> None:
    done = ckptfix.repair(archive, output=tmp_path / "out.pth")
    finding = next(finding for finding in done.report.findings if finding.fix)
    assert "a TorchScript archive → state_dict" in finding.evidence.values()
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    assert_same(dict(written), dict(torch.jit.load(archive).state_dict()))
    assert not any(tensor.requires_grad for tensor in written.values())
    assert not ckptfix.check(tmp_path / "out.pth").fixed


def test_omitted_tensors_are_noted() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Block()), buffer)
    document = read(buffer.getvalue())
    left_out = [fact.place for fact in document.remarks if fact.kind is Kind.TENSOR_ATTRIBUTE]
    assert left_out == ["loose"]


def read(data: bytes) -> Any:
    from ckptfix.bytes.sources import Content
    from ckptfix.reading.sniffing import is_torchscript_zip
    from ckptfix.reading.torch_files import torchscript

    content = Content("model.pt", data)
    assert is_torchscript_zip(content)
    return torchscript.read(content)


def members_of(path: Path) -> dict[str, bytes]:
    archive = zipfile.ZipFile(path)
    return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_buffers_are_read_where_the_sources_do_not_list_them(tmp_path: Path) -> None:
    """As in files of torch 1.3 to 1.5, of which torch's loader of today drops every buffer."""
    path = tmp_path / "model.pt"
    torch.jit.script(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))).save(str(path))
    members = {
        name: data.replace(b"  __buffers__", b"  #__buffers_") if name.endswith(".py") else data
        for name, data in members_of(path).items()
    }
    path.write_bytes(zipped(members))
    keys = ckptfix.open_checkpoint(path).keys()
    assert keys[4:] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_all_tensors_are_read_where_the_sources_are_gone(tmp_path: Path) -> None:
    """As in files of the mobile interpreter, which has only bytecode."""
    path = tmp_path / "model.ptl"
    module = torch.jit.script(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))
    module._save_for_lite_interpreter(str(path))
    path.write_bytes(zipped({name: data for name, data in members_of(path).items() if "/code/" not in name}))
    assert ckptfix.open_checkpoint(path).keys() == [key for key, _ in module.state_dict().items()]


def test_a_frozen_module_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU()).eval())).save(str(path))
    with pytest.raises(UnreadableError, match="was frozen: its 2 weights are constants without names"):
        ckptfix.open_checkpoint(path)


@pytest.mark.parametrize(
    ("module", "limit", "most", "message"),
    [
        (torchscript, "_SOURCE_LIMIT", 99, r"member code/.*\.py declares \d+ bytes"),
        (modules, "PLACE_LIMIT", 2, "nested deeper than"),
    ],
    ids=["sources", "modules"],
)
def test_an_archive_of_too_many_objects_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, limit: str, most: int, message: str
) -> None:
    monkeypatch.setattr(module, limit, most)
    torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).save(str(tmp_path / "model.pt"))
    with pytest.raises(HostileError, match=message):
        ckptfix.check(tmp_path / "model.pt")


def test_a_class_of_the_archive_is_not_a_payload_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    members = {name: data.replace(b"__torch__.torch.nn.modules.linear", b"__torch__.os.sys.subprocess.exec0")
               for name, data in members_of(path).items()}  # fmt: skip
    path.write_bytes(zipped(members))
    assert {finding.code for finding in ckptfix.check(path).findings} == {"FIL102"}


def test_a_payload_in_the_pickles_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    members = members_of(path)
    members["model/constants.pkl"] = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R\x85."
    path.write_bytes(zipped(members))
    assert "FIL901" in [finding.code for finding in ckptfix.check(path).findings]


def model_json(module: dict[str, Any], tensors: list[dict[str, Any]], **members: bytes) -> bytes:
    model = {"protoVersion": "1", "mainModule": module, "producerVersion": "1.0", "tensors": tensors}
    return zipped({"m/version": b"1", "m/model.json": json.dumps(model).encode(), **members})


TENSOR = {"dims": ["2"], "offset": "1", "strides": ["1"], "dataType": "FLOAT", "data": {"key": "tensors/0"}}
DATA = {"m/tensors/0": torch.arange(4.0).numpy().tobytes()}


def test_the_json_form_gives_views_ties_and_defaults_that_were_left_out() -> None:
    scalar = {"dataType": "INT64", "data": {"key": "tensors/1"}}
    module = {
        "parameters": [
            {"name": "count", "isBuffer": True, "tensorId": "2"},
            {"name": "weight", "tensorId": "1"},
        ],
        "submodules": [{"name": "tied", "parameters": [{"name": "weight"}]}],
    }
    data = model_json(module, [TENSOR, TENSOR, scalar], **DATA, **{"m/tensors/1": (7).to_bytes(8, "little")})
    root = read(data).root
    assert list(root) == ["weight", "count", "tied.weight"]
    assert root["weight"].storage is root["tied.weight"].storage
    assert (root["weight"].offset, root["count"].shape) == (1, ())


BROKEN: dict[str, tuple[Any, list[dict[str, Any]], type[Exception], str]] = {
    "a tensor larger than its member": (
        {"parameters": [{"name": "w"}]},
        [{**TENSOR, "dims": ["9"]}],
        HostileError,
        "claims 40 bytes of a storage of 16",
    ),
    "a negative size": ({"parameters": [{"name": "w"}]}, [{**TENSOR, "dims": ["-1"]}], HostileError, "negative size"),
    "a type nobody knows": (
        {"parameters": [{"name": "w"}]},
        [{**TENSOR, "dataType": "STRING"}],
        UnreadableError,
        "of type STRING",
    ),
    "a number beyond the table": ({"parameters": [{"name": "w", "tensorId": "5"}]}, [], UnreadableError, "malformed"),
    "a module that is a list": ([], [TENSOR], UnreadableError, "malformed"),
    "no weights": ({}, [], UnreadableError, "without weights"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_json_form_is_named(case: str) -> None:
    module, tensors, error, message = BROKEN[case]
    with pytest.raises(error, match=message):
        read(model_json(module, tensors, **DATA))


def test_deep_json_ends_in_an_error() -> None:
    deep: dict[str, Any] = {"name": "a"}
    for _ in range(300):
        deep = {"name": "a", "submodules": [deep]}
    with pytest.raises(HostileError, match="nested deeper than 200"):
        read(model_json(deep, []))
