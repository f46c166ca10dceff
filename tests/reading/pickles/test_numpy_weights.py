"""Weights as numpy arrays in plain pickles: the model zoos of Detectron 1 (Caffe2) and Detectron2."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfix
from tests.checks import bytes_of

ARRAYS = {
    "row-major": np.arange(6, dtype="<f4").reshape(2, 3),
    "column-major": np.asfortranarray(np.arange(6, dtype="<f4").reshape(2, 3)),
    "a transposed view": np.arange(6, dtype="<f4").reshape(3, 2).T,
    "every second element": np.arange(12, dtype="<f4")[::2],
    "big-endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "big-endian and column-major": np.asfortranarray(np.arange(6, dtype=">i8").reshape(2, 3)),
    "half": np.arange(6, dtype="<f2"),
    "double": np.arange(6, dtype="<f8"),
    "complex": np.arange(3, dtype="<c8"),
    "bool": np.array([True, False]),
    "bytes": np.arange(5, dtype="u1"),
    "unsigned": np.arange(5, dtype="<u2"),
    "0-d": np.array(7, dtype="<i8"),
    "empty": np.zeros((0, 3), dtype="<f4"),
    "not a number": np.array([np.nan, -0.0, np.inf], dtype="<f4"),
}


def little(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).reshape(array.shape))


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_becomes_the_same_tensor(tmp_path: Path, name: str) -> None:
    path, want = tmp_path / "model.pkl", little(ARRAYS[name])
    content = {"model": {"conv.weight": ARRAYS[name], "other": ARRAYS["row-major"]}, "__author__": "Detectron2"}
    for protocol in range(6):
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        got = ckptfix.open_checkpoint(path).read("conv.weight")
        assert (got.dtype, got.shape) == (want.dtype, want.shape), protocol
        assert bytes_of(got) == bytes_of(want), protocol


BLOBS = {
    "conv1_w": ARRAYS["row-major"],
    "conv1_w_momentum": ARRAYS["big-endian"],
    "res_conv1_bn_s": ARRAYS["half"],
    "lr": np.array([0.02], dtype="<f4"),
}


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_blobs_of_detectron_1_keep_their_names_and_momenta(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model_final.pkl"
    path.write_bytes(pickle.dumps({"blobs": BLOBS, "cfg": "MODEL:\n  TYPE: generalized_rcnn\n"}, protocol=protocol))
    opened = ckptfix.open_checkpoint(path)
    assert (opened.format, opened.container, opened.keys()) == ("pickle", ("blobs",), list(BLOBS))
    ckptfix.repair(path, output=tmp_path / "out.pth")
    written = torch.load(tmp_path / "out.pth", weights_only=True)
    assert written["cfg"].startswith("MODEL")
    for name, array in BLOBS.items():
        assert bytes_of(written["blobs"][name]) == bytes_of(little(array))


def test_python_2_wrote_the_bytes_of_an_array_as_text(tmp_path: Path) -> None:
    """Bytes beyond ASCII in a SHORT_BINSTRING, and a shape of INT opcodes."""
    raw = np.array([-1.5, 3e8], dtype="<f4").tobytes()
    dtype = b"cnumpy\ndtype\n(U\x02f4K\x00K\x01tR(K\x03U\x01<NNNI-1\nI-1\nK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n(I2\nt" + dtype
    array += b"I00\nU" + bytes([len(raw)]) + raw + b"tb"
    path = tmp_path / "model.pkl"
    path.write_bytes(b"\x80\x02}U\x05blobs}U\x01w" + array + b"ss.")
    assert ckptfix.open_checkpoint(path).read("w").tolist() == [-1.5, 3e8]


def test_arrays_of_objects_and_text_stay_closed_and_are_not_weights(tmp_path: Path) -> None:
    arrays = {"w": ARRAYS["row-major"], "b": ARRAYS["half"], "names": np.array(["a", "b"]), "any": np.array([{}, None])}
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"model": arrays}))
    opened = ckptfix.open_checkpoint(path)
    assert opened.keys() == ["w", "b"]
    assert list(opened.entries) == list(arrays)


class OfAccelerator:
    """A tensor as torch pickles one of XLA: an array of float32 where its dtype is bfloat16."""

    def __init__(self, array: Any, dtype: torch.dtype) -> None:
        self.array, self.dtype = array, dtype

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return torch._utils._rebuild_device_tensor_from_numpy, (self.array, self.dtype, "xla:0", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int64])
def test_a_tensor_of_an_accelerator_keeps_its_dtype_and_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.5, -0.0, 3e4], [2.0, 7.0, 0.0]]).to(dtype)
    array = (tensor.float() if dtype == torch.bfloat16 else tensor).numpy()
    torch.save({"w": OfAccelerator(array, dtype), "b": torch.ones(2)}, tmp_path / "xla.pth")
    got = ckptfix.open_checkpoint(tmp_path / "xla.pth").read("w")
    assert (got.dtype, bytes_of(got)) == (dtype, bytes_of(tensor))
    assert ckptfix.repair(tmp_path / "xla.pth", output=tmp_path / "out.pth").report.exit_code == 0
    assert bytes_of(torch.load(tmp_path / "out.pth")["w"]) == bytes_of(tensor)


@pytest.mark.parametrize(("number", "dtype"), [(1.0000001, torch.bfloat16), (1.0, torch.float16)])
def test_an_array_that_holds_more_than_the_tensor_is_refused(tmp_path: Path, number: float, dtype: torch.dtype) -> None:
    torch.save({"w": OfAccelerator(np.array([number], dtype="f4"), dtype)}, tmp_path / "xla.pth")
    with pytest.raises(
        ckptfix.UnreadableError, match=r"saved as an array of float32 that holds other values.*the CPU$"
    ):
        ckptfix.open_checkpoint(tmp_path / "xla.pth")


@pytest.mark.parametrize("dtype", [object, "U3", "M8[s]"], ids=["objects", "text", "times"])
def test_arrays_that_are_not_numbers_are_not_weights(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"a.weight": np.zeros(3, dtype), "b.weight": np.zeros(2, dtype)}, 2))
    with pytest.raises(ckptfix.UnreadableError, match="no array in it can be read as a tensor"):
        ckptfix.repair(path, output=tmp_path / "out.safetensors")
