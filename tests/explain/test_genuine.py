"""Errors that the installed torch, safetensors and Python raise, with the whole traceback."""

import argparse
import gzip
import pathlib
import pickle
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ckptfix.explain import explain


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write broken files of all kinds."""
    folder = tmp_path_factory.mktemp("files")
    torch.save({"w": torch.zeros(100), "b": torch.zeros(3)}, folder / "good.pth")
    torch.save({"w": torch.zeros(100)}, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"a": argparse.Namespace(x=1)}, folder / "class.pth")
    torch.save(nn.Linear(1, 1), folder / "whole.pth")
    torch.save({"w": torch.zeros(1)}, folder / "protocol4.pth", pickle_protocol=4)
    good, old = (folder / "good.pth").read_bytes(), (folder / "old.pth").read_bytes()
    texts: dict[str, bytes] = {
        "cut.pth": good[: len(good) // 2],
        "old_cut.pth": old[:-20],
        "old_head.pth": old[:200],
        "lfs.pth": b"version https://git-lfs.github.com/spec/v1\n",
        "page.pth": b"<!DOCTYPE html>",
        "json.pth": b'{"a": 1}',
        "break.pth": b"\nabc",
        "empty.pth": b"",
        "zeros.pth": bytes(1000),
        "gzip.pth": gzip.compress(good),
        "pickle.pth": pickle.dumps({"a": 1}),
    }
    for tag in ("cuda:3", "mps", "xla:0", "hpu:0", "xpu:0", "privateuseone:0"):
        texts[f"{tag.partition(':')[0]}.pth"] = old.replace(
            b"\x03\x00\x00\x00cpu", bytes([len(tag)]) + b"\x00\x00\x00" + tag.encode()
        )
    safetensors.torch.save_file({"w": torch.zeros(100)}, folder / "good.safetensors")
    whole = (folder / "good.safetensors").read_bytes()
    texts |= {
        "cut.safetensors": whole[:-10],
        "torch.safetensors": good[:100],
        "short.safetensors": b"abc",
        "text.safetensors": (10).to_bytes(8, "little") + b"notjson!!!" + bytes(10),
    }
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    with zipfile.ZipFile(folder / "good.pth") as source, zipfile.ZipFile(folder / "lacking.pth", "w") as target:
        for name in source.namelist():
            if not name.endswith("data/1"):
                target.writestr(name, source.read(name))
    return folder


def said(provoke: Callable[[], object]) -> str:
    """Return the traceback of the error that ``provoke`` raises, as Python prints it."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - whatever it is, its text is what the test is about
        provoke()
    return "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    ("file", "weights_only", "name"),
    [
        ("cut.pth", True, "damaged-archive"),
        ("old_cut.pth", True, "truncated-file"),
        ("old_head.pth", False, "truncated-file"),
        ("old_head.pth", True, "truncated-file"),
        ("lfs.pth", True, "git-lfs-pointer"),
        ("lfs.pth", False, "git-lfs-pointer"),
        ("page.pth", True, "web-page"),
        ("page.pth", False, "web-page"),
        ("json.pth", True, "no-pickle"),
        ("json.pth", False, "no-pickle"),
        ("break.pth", True, "no-pickle"),
        ("break.pth", False, "no-pickle"),
        ("zeros.pth", False, "no-pickle"),
        ("zeros.pth", True, "weights-only"),
        ("empty.pth", True, "empty-file"),
        ("empty.pth", False, "empty-file"),
        ("gzip.pth", True, "compressed"),
        ("gzip.pth", False, "compressed"),
        ("pickle.pth", True, "newer-pickle-protocol"),
        ("pickle.pth", False, "foreign-pickle"),
        ("class.pth", True, "weights-only-class"),
        ("whole.pth", True, "weights-only-class"),
        ("protocol4.pth", True, "newer-pickle-protocol"),
        ("lacking.pth", True, "missing-record"),
        ("nowhere.pth", True, "no-such-file"),
        ("mps.pth", True, "device-tag"),
        ("xla.pth", True, "device-tag"),
        ("hpu.pth", True, "device-tag"),
        ("xpu.pth", True, "device-tag"),
        ("privateuseone.pth", True, "device-tag"),
        pytest.param(
            "cuda.pth",
            True,
            "device-tag",
            marks=pytest.mark.skipif(torch.cuda.device_count() > 3, reason="the file's device exists here"),
        ),
    ],
)
def test_load(files: Path, file: str, weights_only: bool, name: str):
    explanation = explain(said(lambda: torch.load(files / file, weights_only=weights_only)))
    assert explanation is not None
    assert explanation.name == name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("cut.safetensors", "safetensors-cut"),
        ("torch.safetensors", "no-safetensors"),
        ("short.safetensors", "no-safetensors"),
        ("text.safetensors", "no-safetensors"),
        ("nowhere.safetensors", "no-such-file"),
    ],
)
def test_load_safetensors(files: Path, file: str, name: str):
    explanation = explain(said(lambda: safetensors.torch.load_file(files / file)))
    assert explanation is not None
    assert explanation.name == name


def sgd(*groups: int) -> torch.optim.Optimizer:
    """Return an optimizer with these numbers of parameters per group."""
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True) for _ in range(n)]} for n in groups], 0.1)


def shared() -> dict[str, torch.Tensor]:
    tensor = torch.zeros(3)
    return {"a": tensor, "b": tensor}


def nan_gradient() -> None:
    with torch.autograd.set_detect_anomaly(True):
        (torch.zeros(1, requires_grad=True).sqrt() * 0).sum().backward()


PROVOKED: dict[str, list[Callable[[], object]]] = {
    "does-not-fit": [
        lambda: nn.Linear(1, 1).load_state_dict({"module.weight": torch.zeros(1, 1)}),
        lambda: nn.Linear(3, 4).load_state_dict(nn.Linear(3, 2).state_dict()),
        lambda: nn.InstanceNorm2d(2).load_state_dict({"running_mean": torch.zeros(2), "running_var": torch.zeros(2)}),
    ],
    "optimizer-groups": [
        lambda: sgd(2).load_state_dict(sgd(1).state_dict()),
        lambda: sgd(1).load_state_dict(sgd(1, 1).state_dict()),
    ],
    "state-dict-not-model": [lambda: nn.Linear(1, 1).state_dict().eval()],  # type: ignore[attr-defined]  # that is the mistake
    "model-not-state-dict": [
        lambda: nn.Linear(1, 1).load_state_dict(nn.Linear(1, 1)),  # type: ignore[arg-type]  # that is the mistake
        lambda: nn.Linear(1, 1).load_state_dict(None),  # type: ignore[arg-type]  # that is the mistake
    ],
    "container-key": [lambda: dict[str, int]()["state_dict"]],
    "shared-tensors": [
        lambda: safetensors.torch.save(shared()),
        lambda: safetensors.torch.save({"a": torch.zeros(3, 3).t()[:2]}),
    ],
    "not-seekable": [lambda: torch.load(object())],  # type: ignore[arg-type]  # that is the mistake
    "batchnorm-one-value": [lambda: nn.BatchNorm1d(3)(torch.zeros(1, 3))],
    "zero-dim": [lambda: torch.tensor(1.0)[0]],
    "negative-strides": [lambda: torch.from_numpy(np.zeros(3)[::-1])],
    "view-of-strided": [lambda: torch.zeros(2, 3).t().view(6)],
    "index-out-of-range": [lambda: nn.Embedding(2, 2)(torch.tensor([5]))],
    "label-out-of-range": [lambda: nn.functional.cross_entropy(torch.zeros(1, 2), torch.tensor([5]))],
    "matrix-shapes": [lambda: nn.Linear(3, 2)(torch.zeros(1, 4))],
    "dtype-mismatch": [
        lambda: nn.Linear(3, 2)(torch.zeros(1, 3).double()),
        lambda: nn.Conv2d(3, 2, 3)(torch.zeros(1, 3, 4, 4).half()),
    ],
    "input-channels": [lambda: nn.Conv2d(3, 2, 3)(torch.zeros(1, 1, 4, 4))],
    "input-dimensions": [
        lambda: nn.Conv2d(3, 2, 3)(torch.zeros(4, 4)),
        lambda: nn.BatchNorm2d(3)(torch.zeros(4, 3)),
    ],
    "meta-tensor": [lambda: nn.Linear(1, 1, device="meta").to("cpu")],
    "not-for-numpy": [lambda: torch.zeros(1, requires_grad=True).numpy()],
    "no-operator-for-type": [
        lambda: nn.Embedding(2, 2)(torch.zeros(1)),
        lambda: nn.functional.cross_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32)),
    ],
    "half-on-cpu": [lambda: torch.linalg.det(torch.zeros(2, 2).half())],
    "half-overflow": [lambda: torch.zeros(1).half().masked_fill(torch.tensor([True]), -1e9)],
    "nan": [nan_gradient, lambda: torch.multinomial(torch.tensor([float("nan")]), 1)],
    "machine-memory": [lambda: torch.empty(10**15)],
    "no-process-group": [lambda: torch.distributed.all_reduce(torch.zeros(1))],
    "truncated-file": [lambda: pickle.loads(pickle.dumps([*range(100)])[:-50]), lambda: pickle.loads(b"\x80\x02u.")],
    "newer-pickle-protocol": [lambda: pickle.loads(b"\x80\x09.")],
    "python-2-pickle": [lambda: pickle.loads(b"U\x01\xd7.")],
    "missing-module": [lambda: pickle.loads(b"cmodels_of_mine\nNet\n.")],
    "missing-class": [lambda: pickle.loads(b"cargparse\nNet\n.")],
    "path-of-other-system": [
        lambda: (pathlib.PosixPath if pathlib.Path().__class__ is pathlib.WindowsPath else pathlib.WindowsPath)("a")
    ],
}


@pytest.mark.parametrize(
    ("name", "provoke"), [(name, provoke) for name, all_of_it in PROVOKED.items() for provoke in all_of_it]
)
def test_provoked(name: str, provoke: Callable[[], object]):
    explanation = explain(said(provoke))
    assert explanation is not None
    assert explanation.name == name


def test_files(files: Path):
    mmap = explain(said(lambda: torch.load(files / "old.pth", mmap=True)))
    plain = explain(said(lambda: pickle.loads((files / "old.pth").read_bytes()[-400:])))
    parent = explain(said(lambda: torch.save({}, files / "nowhere" / "a.pth")))
    script = explain(said(lambda: torch.jit.load(str(files / "good.pth"))))
    text = explain(said(lambda: (files / "old.pth").read_text(encoding="utf-8")))
    assert plain is None or plain.name != "plain-pickle-load"
    assert [each.name for each in (mmap, parent, script, text) if each] == [
        "mmap-of-old-file",
        "no-such-folder",
        "no-torchscript",
        "opened-as-text",
    ]


def test_a_torch_file_under_pickle(files: Path):
    def load_all() -> None:
        with (files / "old.pth").open("rb") as file:
            while True:
                pickle.load(file)

    explanation = explain(said(load_all))
    assert explanation is not None
    assert explanation.name == "plain-pickle-load"


def test_torchscript_archive(files: Path):
    torch.jit.script(nn.Linear(1, 1)).save(str(files / "script.pt"))
    explanation = explain(said(lambda: torch.load(files / "script.pt", weights_only=True)))
    assert explanation is not None
    assert explanation.name == "torchscript"


def test_distributed_checkpoint(tmp_path: Path):
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"a": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)
    explanation = explain(said(lambda: load({"b": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)))
    assert explanation is not None
    assert explanation.name == "distributed-missing-key"


def test_wrong_hash(files: Path):
    url = (files / "good.pth").as_uri()
    explanation = explain(
        said(lambda: torch.hub.download_url_to_file(url, str(files / "copy.pth"), "00000000", progress=False))
    )
    assert explanation is not None
    assert explanation.name == "wrong-hash"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA")
def test_no_cuda_in_this_build():
    cuda = explain(said(lambda: torch.zeros(1).cuda()))
    symbol = explain(said(lambda: torch._C._cuda_getDevice()))
    assert cuda is not None
    assert symbol is not None
    assert (cuda.name, symbol.name) == ("no-cuda-build", "no-cuda-build")


def test_chained_exceptions():
    def read() -> None:
        try:
            pickle.loads(b"v1")
        except pickle.UnpicklingError as error:
            raise OSError("Unable to load weights from pytorch checkpoint file") from error

    explanation = explain(said(read))
    assert explanation is not None
    assert explanation.name == "git-lfs-pointer"
    assert explanation.chain == "number 1 of 2 chained exceptions; the others follow from it"
