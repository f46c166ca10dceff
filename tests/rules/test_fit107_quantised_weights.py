"""FIT107: codes of quantised weights become floats by the formula of their library, or nothing at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import TargetError
from tests.checks import bytes_of, check_noop, check_repaired

OUT, IN = 200, 260


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, 3)).to(dtype)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = weight.float().abs().amax(1)
    return torch.round(weight.float() / largest[:, None] * 127).to(torch.int8), largest


def bitsandbytes(model: nn.Module, **more: torch.Tensor) -> dict[str, Any]:
    """As ``Linear8bitLt`` saves the first layer."""
    state = dict(model.state_dict())
    state["0.weight"], state["0.SCB"] = _int8(state["0.weight"])
    return {**state, **more}


def floats_of(model: nn.Module, weight: torch.Tensor) -> dict[str, Any]:
    return {**model.state_dict(), "0.weight": weight}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"0.weight_format": torch.tensor(0, dtype=torch.uint8)}], ids=["", "in rows"])
def test_int8_of_bitsandbytes(dtype, more):
    model = net(dtype)
    before = bitsandbytes(model, **more)
    # int8_vectorwise_dequant of bitsandbytes: A * stats.view(-1, 1) * 7.874015718698502e-3
    weight = (before["0.weight"] * before["0.SCB"].view(-1, 1) * 7.874015718698502e-3).to(dtype)
    check_repaired(before, floats_of(model, weight), "FIT107", model, unsafe_fixes=True)
    original = model.state_dict()["0.weight"].float()
    assert (weight.float() - original).abs().max() < 0.01 * original.abs().max()


def test_8_bit_floats_in_squares():
    """DeepSeek-V3: one scale for each square of 128, the last ones cut."""
    model = net(torch.bfloat16)
    codes = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.5
    squares = scales.repeat_interleave(128, 0)[:OUT].repeat_interleave(128, 1)[:, :IN]
    before = {**model.state_dict(), "0.weight": codes, "0.weight_scale_inv": scales}
    weight = (codes.float() * squares).to(torch.bfloat16)
    check_repaired(before, floats_of(model, weight), "FIT107", model, unsafe_fixes=True)


def test_8_bit_floats_as_torch_reads_them(tmp_path):
    """``QuantizedHuggingFaceStorageReader`` of torch 2.9 and later, beside the file that is written."""
    dcp = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage", reason="torch 2.9 or later")
    from torch.distributed.checkpoint.state_dict_loader import load

    model = net()
    codes, scales = torch.randn(OUT, IN).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    source = tmp_path / "saved" / "model-00001-of-00001.safetensors"
    source.parent.mkdir()
    saved = {**model.state_dict(), "0.weight": codes, "0.weight_scale_inv": scales}
    save_file(saved, source)
    index = {"metadata": {}, "weight_map": dict.fromkeys(saved, source.name)}
    (source.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    wanted = {"0.weight": torch.zeros(OUT, IN)}
    load(wanted, storage_reader=dcp.QuantizedHuggingFaceStorageReader(str(source.parent)))
    ckptfix.repair(source.parent, model, output=tmp_path / "whole.safetensors", unsafe_fixes=True)
    assert bytes_of(load_file(tmp_path / "whole.safetensors")["0.weight"]) == bytes_of(wanted["0.weight"])


@pytest.mark.parametrize("shape", [(), (1,), (OUT,), (OUT, 1)], ids=str)
def test_8_bit_floats_with_a_scale_for_all_or_for_each_row(shape):
    model = net()
    codes, scale = torch.randn(OUT, IN).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    rows = scale.reshape(-1, 1) if scale.numel() > 1 else scale
    before = {**model.state_dict(), "0.weight": codes, "0.weight_scale": scale}
    check_repaired(before, floats_of(model, codes.float() * rows), "FIT107", model, unsafe_fixes=True)


def _packed(model: nn.Module, weight: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = dict(model.state_dict())
    del state["0.weight"]
    return {**state, **{f"0.{name}": tensor for name, tensor in weight.items()}}


WORDS, BYTES = torch.ones(IN // 8, OUT, dtype=torch.int32), torch.ones(IN * OUT // 2, 1, dtype=torch.uint8)
REFUSED = {
    "GPTQ": {"qweight": WORDS, "qzeros": WORDS[:2], "scales": torch.ones(2, OUT), "g_idx": torch.ones(IN)},
    "AWQ": {"qweight": WORDS, "qzeros": WORDS[:2], "scales": torch.ones(2, OUT)},
    "4-bit": {"weight": BYTES, "weight.absmax": torch.ones(9), "weight.quant_state.bitsandbytes__nf4": BYTES[:80]},
    "packed": {"weight_packed": WORDS, "weight_scale": torch.ones(OUT, 1), "weight_shape": torch.tensor([OUT, IN])},
    "HQQ": {"W_q": WORDS},
    "torchao": {"_weight_qdata": torch.ones(OUT, IN, dtype=torch.int8), "_weight_scale": torch.ones(OUT, 1)},
    "int8 in tiles": {
        "weight": torch.ones(OUT, IN, dtype=torch.int8),
        "SCB": torch.ones(OUT),
        "weight_format": torch.tensor(2, dtype=torch.uint8),
    },
    "scales that do not fit": {"weight": torch.ones(OUT, IN).to(torch.float8_e4m3fn), "weight_scale": torch.ones(7, 7)},
    "zero points": {
        "weight": torch.ones(OUT, IN, dtype=torch.int8),
        "weight_scale": torch.ones(OUT, 1),
        "weight_zero_point": torch.ones(OUT, 1),
    },
}


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_known_formula_is_never_written_as_weights(name, values, tmp_path):
    torch.save(_packed(net(), REFUSED[name]), tmp_path / "f.pth")
    settings: dict[str, Any] = {
        "unsafe_fixes": True, "drop_mismatched": True, "fill": "target", "allow_untrained": True, "values": values
    }  # fmt: skip
    report = ckptfix.repair(tmp_path / "f.pth", net(), output=tmp_path / "out.pth", **settings).report
    assert report.exit_code == 1
    assert not (tmp_path / "out.pth").exists()
    assert [finding.level for finding in report.remaining if finding.code == "FIT107"] == [Level.ERROR]
    with pytest.raises(TargetError):
        ckptfix.load(net(), tmp_path / "f.pth", unsafe_fixes=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_quantised_file_alone_is_a_note(name):
    _, report = ckptfix.repair_state_dict(_packed(net(), REFUSED[name]), select=("FIT107",))
    assert [finding.level for finding in report.findings] == [Level.NOTE]


class Quantised(nn.Module):
    """A model that has the codes and their scales itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("SCB", torch.ones(4))


@pytest.mark.parametrize(
    ("state", "model"),
    [
        (net().state_dict(), None),
        (net().state_dict(), net()),
        (Quantised().state_dict(), Quantised()),
        ({"scales": torch.ones(4), "weight": torch.ones(4, 4)}, None),
        ({"weight": torch.ones(4, 4), "weight_scale": torch.ones(4)}, None),
        (nn.Linear(4, 4).to(torch.float8_e4m3fn).state_dict(), nn.Linear(4, 4)),
    ],
    ids=["floats", "floats and a model", "a quantised model", "a scale", "a scale of floats", "8 bits without a scale"],
)
def test_noop(state, model):
    check_noop(state, "FIT107", model)


def test_nothing_is_multiplied_unasked():
    state, report = ckptfix.repair_state_dict(bitsandbytes(net()), net())
    assert state["0.weight"].dtype == torch.int8
    assert report.exit_code == 1
    with pytest.raises(TargetError):
        ckptfix.load(net(), bitsandbytes(net()))


class Experts(nn.Module):
    """Experts as gpt-oss has them, in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.ones(2, 64, 3))


@pytest.mark.parametrize("width", [16, 8])
def test_codes_of_four_bits_in_place_of_a_parameter(width):
    packed = {
        "down_proj_blocks": torch.ones(2, 3, 2, width, dtype=torch.uint8),
        "down_proj_scales": torch.ones(2, 3, 2, dtype=torch.uint8),
    }
    findings = ckptfix.repair_state_dict(packed, Experts(), select=("FIT107",))[1].findings
    assert [finding.keys for finding in findings] == [tuple(packed)] * (width == 16)
    assert all("quantised (MXFP4)" in finding.message for finding in findings)
