"""Weights of bitsandbytes in four bits become what its ``dequantize_4bit`` made of them, or nothing."""

import json
from typing import Any

import pytest
import torch

from ckptfix.core.edits import FOUR_BITS, Dequantise
from ckptfix.core.spec import TensorSpec
from ckptfix.reading.boxes import row_major_bytes
from ckptfix.reading.tensors import spec_of_tensor
from ckptfix.values.dequantising import QuantState, dequantised_spec, quant_state
from tests.checks import bytes_of

NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1"
)
FP4 = "0 0.0625 8 12 4 6 2 3 0 -0.0625 -8 -12 -4 -6 -2 -3"

# Two matrices of bitsandbytes 0.50.2: NF4 with double quantisation, whose rows end within blocks, and FP4.
NESTED_CODES = "7947a6e17686b8a98b51ca67afe2c9f6455977a3588b27bc45a61e2db7244320f7"
NESTED_MADE = (
    "0000013c64bc0000453c92bb113d0bbd000092bb7f3b92bb873c7f3b453c013c7f3b873c14bc0bbdb03c453c92bb0000453c483d113dd2bcb03c"
    "013c483d92bb30bce5bbe5bbc83b00000000193c75bce5bb453b453b523ca3bc0000523c893c30bce5bb193c62bbd8bce03ca3bcae3c523c0000"
    "a3bc30bc30bc75bca3bc1bbde23b"
)
PLAIN_CODES = "99f26d9666c49fe6eee64917577c4cf46692efbc11612f1762c5cec4bd854e37dbf510"
PLAIN_MADE = (
    "478d478deaa347294721eaa7478d47214721472147a54725478deaa347a1472147a147a147a147214725478d470dea23ea27ea23ea2347a54725"
    "47a5eaa3472547214721478d472947a1eaa3eaab47a5470d470d4721470d4729eaa3470dea234721472947a5ea2747a547a147a54725eaabeaa7"
    "0000ea27472547a1ea2bea23a1a4a1a8a1a0a1242c0a"
)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _eight_bits() -> torch.Tensor:
    """``create_dynamic_map`` of bitsandbytes."""
    made = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = 10.0 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        made += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(made))


def _state(kind: str, **said: Any) -> dict[str, torch.Tensor]:
    text = json.dumps({"quant_type": kind, **said}).encode()
    return {f"quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8)}


def nested(**other: Any) -> dict[str, torch.Tensor]:
    """Return a layer as ``Linear4bit`` saves it, with other values in its ``quant_state``."""
    said = {
        "blocksize": 32, "dtype": "bfloat16", "shape": [5, 13], "nested_blocksize": 256, "nested_dtype": "float32",
        "nested_offset": 0.0311279296875,
    }  # fmt: skip
    return {
        "": _bytes(NESTED_CODES).view(-1, 1),
        "absmax": _bytes("ebcb00"),
        "quant_map": torch.tensor([float(number) for number in NF4.split()]),
        "nested_absmax": torch.tensor([0.0244140625]),
        "nested_quant_map": _eight_bits(),
        **_state("nf4", **{**said, **other}),
    }


def plain() -> dict[str, torch.Tensor]:
    """Return a layer without double quantisation."""
    return {
        "": _bytes(PLAIN_CODES).view(-1, 1),
        "absmax": _bytes("00407d3d0020143d").view(torch.float32),
        "quant_map": torch.tensor([float(number) for number in FP4.split()]) / 12,
        **_state("fp4", blocksize=64, dtype="float16", shape=[3, 23]),
    }


def specs_of(layer: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {f"w.{part}".rstrip("."): spec_of_tensor(tensor) for part, tensor in layer.items()}


def _made(layer: dict[str, torch.Tensor], dtype: str) -> TensorSpec | None:
    specs = specs_of(layer)
    edit = Dequantise("w", specs["w"].dtype, dtype, "w.absmax", FOUR_BITS)
    return dequantised_spec(specs["w"], specs, edit, "f")


@pytest.mark.parametrize(
    ("layer", "made", "dtype", "shape"),
    [(nested(), NESTED_MADE, "bfloat16", (5, 13)), (plain(), PLAIN_MADE, "float16", (3, 23))],
    ids=["nf4", "fp4"],
)
def test_dequantised_weights_have_the_bits_of_bitsandbytes(layer, made, dtype, shape):
    spec = _made(layer, dtype)
    assert spec is not None
    assert (spec.shape, bytes(row_major_bytes(spec, "f")).hex()) == (shape, made)
    source = spec.storages[0].source
    assert all(source.read(a, b) == bytes.fromhex(made)[a:b] for a in range(0, source.nbytes, 7) for b in range(a, 140))


def test_another_dtype_has_the_rounded_numbers():
    spec = _made(nested(), "float32")
    assert spec is not None
    assert bytes(row_major_bytes(spec, "f")) == bytes_of(_bytes(NESTED_MADE).view(torch.bfloat16).float())


def test_codes_may_be_stored_as_any_dtype():
    """``bnb_4bit_quant_storage``, which FSDP needs."""
    layer = nested(shape=[4, 16]) | {"absmax": nested()["absmax"][:2]}
    layer[""] = layer[""][:32].flatten().view(torch.bfloat16).view(-1, 1)
    spec = _made(layer, "bfloat16")
    assert spec is not None
    assert bytes(row_major_bytes(spec, "f")).hex() == NESTED_MADE[: 64 * 4]


def without(part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in nested().items() if not name.startswith(part)}


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (without("quant_state"), "lack a `quant_state`"),
        (nested() | _state("fp4"), "lack a `quant_state`"),
        (without("quant_map"), "`quant_map` is missing"),
        (without("nested_absmax"), "`nested_absmax` is missing"),
        (without("nested_quant_map"), "`nested_quant_map` is missing"),
        (nested(nested_offset=None), "lacks `nested_blocksize` or `nested_offset`"),
        (nested(quant_type="int4"), "is damaged"),
        (nested(blocksize=48), "is damaged"),
        (nested(dtype="int8"), "is damaged"),
        (nested(shape=[5, 15]), "does not fit the codes"),
        (nested(shape=[-5, -13]), "does not fit the codes"),
        (nested(shape=[]), "does not fit the codes"),
        (nested(blocksize=64), "`absmax` does not have the length"),
        (nested(nested_blocksize=10**30), "is damaged"),
        (nested() | {"nested_absmax": torch.ones(2)}, "`nested_absmax` does not have the length"),
        (nested() | {"nested_quant_map": torch.ones(256).int()}, "`nested_quant_map` does not have the length"),
        (nested() | {"quant_map": torch.zeros(16)}, "lacks the numbers of nf4"),
        (nested(quant_type="fp4"), "lacks the numbers of fp4"),
        (nested() | {"absmax": torch.ones(3).int()}, "`absmax` does not have the length"),
    ],
)
def test_what_does_not_fit_is_refused(layer, reason):
    state = quant_state("w", specs_of(layer), "f")
    assert isinstance(state, str)
    assert reason in state
    assert _made(layer, "bfloat16") is None


def test_noop_a_sound_layer_has_no_reason():
    assert isinstance(quant_state("w", specs_of(nested()), "f"), QuantState)
