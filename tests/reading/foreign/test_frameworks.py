"""Models of other frameworks are recognised by their first bytes; noise is not."""

import random

import pytest

from ckptfix.bytes.sources import Content
from ckptfix.reading.foreign.files import name_foreign_file


def field(number: int, value: bytes | int) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    low = value & 0x7F
    return bytes([low | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([low])


NODE = field(1, b"input/x") + field(2, b"Placeholder") + field(5, field(1, b"dtype") + field(2, field(6, 1)))
GRAPH = field(1, NODE) + field(1, field(1, b"w") + field(2, b"Const")) + field(4, field(1, 27))
META_GRAPH = field(1, field(4, b"serve")) + field(2, GRAPH)
ONNX_GRAPH = field(1, field(1, b"x") + field(2, b"y") + field(4, b"Relu")) + field(2, b"g") + field(5, bytes(400))
ONNX = field(1, 8) + field(2, b"pytorch") + field(3, b"2.1.0") + field(7, ONNX_GRAPH) + field(8, field(2, 17))
FLAX = b"\x81\xa6params\x81\xa4bias\xc7\x12\x01\x93\x91\x02\xa7float32\xc4\x08" + bytes(8)

MODELS = {
    "an ONNX model": ONNX,
    "a frozen graph of TensorFlow": GRAPH,
    "a SavedModel of TensorFlow": field(1, 1) + field(2, META_GRAPH),
    "the graph of a TensorFlow checkpoint": META_GRAPH,
    "the index of a TensorFlow checkpoint": bytes(range(1, 81)) + bytes.fromhex("57fb808b247547db"),
    "a Core ML model": field(1, 5) + field(2, field(1, field(1, b"image"))) + field(500, b"layers"),
    "a model of Caffe": field(1, b"VGG") + field(100, field(1, b"conv1") + field(2, b"Convolution")),
    "a MessagePack file of Flax": FLAX,
}


@pytest.mark.parametrize("cut", [0, 3])
@pytest.mark.parametrize(("said", "data"), MODELS.items(), ids=MODELS)
def test_a_model_is_named(said: str, data: bytes, cut: int) -> None:
    """A truncated file is still recognised as a model; only a table is recognised by its end."""
    named = name_foreign_file(Content("f", data[: len(data) - cut])) or ""
    assert named.startswith(f"f: {said}") != (cut > 0 and "index" in said)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\n\x03abc", id="one text"),
        pytest.param(field(1, 1), id="one number"),
        pytest.param(field(1, 1) + field(3, b"x"), id="a number and another field"),
        pytest.param(field(1, 2**40) + field(7, ONNX_GRAPH), id="no version of ONNX"),
        pytest.param(field(1, b"\x01\x02") + field(100, b"x"), id="a name that is none"),
        pytest.param(b"\x81\xa6params" + bytes(60), id="MessagePack without arrays"),
        pytest.param(b"\x80\x02}q\0.", id="a pickle"),
        pytest.param(b"\x08" + b"\xff" * 30, id="a number without an end"),
        pytest.param(b"\x0a\xff\xff\xff\xff\x7f", id="a huge length"),
    ],
)
def test_other_bytes(data: bytes) -> None:
    assert name_foreign_file(Content("f", data)) is None


def test_noise_after_a_good_start() -> None:
    numbers = random.Random(9)
    for _ in range(2000):
        start = numbers.choice([b"\x08\x01\x12", b"\x08\x08", b"\x0a\x10", b"\x81\xa1", b"\x0a", b"\x08\x05\x12"])
        assert name_foreign_file(Content("f", start + numbers.randbytes(numbers.randrange(8, 300)))) is None
