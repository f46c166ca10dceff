"""FIT107: codes of quantised weights become floats by the formula of their library, or are left as they are."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptfix
from ckptfix.core.finding import Level
from ckptfix.errors import TargetError
from ckptfix.report.display import report_lines
from tests.checks import bytes_of, check_noop, check_repaired
from tests.values import test_dequantising

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
    """``QuantizedHuggingFaceStorageReader`` of torch 2.9 and later, compared with the file that is written."""
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


@pytest.mark.parametrize(
    "beside",
    [
        {"scale_weight": torch.tensor([0.5]), "scale_input": torch.ones(1)},
        {"weight_scale": torch.tensor(0.5), "comfy_quant": torch.tensor(list(b'{"format": "float8_e4m3fn"}')).byte()},
    ],
    ids=["before 2026", "since"],
)
def test_8_bit_floats_of_comfyui(beside):
    model = net()
    codes = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    before = {**model.state_dict(), "0.weight": codes, **{f"0.{name}": tensor for name, tensor in beside.items()}}
    check_repaired(before, floats_of(model, codes.float() * 0.5), "FIT107", model, unsafe_fixes=True)


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
    "Quanto": {"weight._data": torch.ones(OUT, IN, dtype=torch.int8), "weight._scale": torch.ones(OUT, 1)},
    "Quanto with 4 bits": {
        "weight._data._data": torch.ones(OUT // 2, IN, dtype=torch.uint8),
        "weight._scale": torch.ones(OUT, 1),
        "weight._shift": torch.ones(OUT, 1),
    },
    "torchao": {"_weight_qdata": torch.ones(OUT, IN, dtype=torch.int8), "_weight_scale": torch.ones(OUT, 1)},
    "int8 in tiles": {
        "weight": torch.ones(OUT, IN, dtype=torch.int8),
        "SCB": torch.ones(OUT),
        "weight_format": torch.tensor(2, dtype=torch.uint8),
    },
    "scales that do not fit": {"weight": torch.ones(OUT, IN).to(torch.float8_e4m3fn), "weight_scale": torch.ones(7, 7)},
    "a scale of a name that nobody knows": {
        "weight": torch.ones(OUT, IN).to(torch.float8_e4m3fn),
        "my_scale": torch.ones(1),
    },
    "codes of ComfyUI that may be rotated": {
        "weight": torch.ones(OUT, IN, dtype=torch.int8),
        "weight_scale": torch.ones(OUT, 1),
        "comfy_quant": torch.ones(9).byte(),
    },
    "MLX": {
        "weight": torch.ones(OUT, IN // 4).to(torch.uint32),
        "scales": torch.ones(OUT, 4),
        "biases": torch.ones(OUT, 4),
    },
    "scales in whole numbers": {
        "weight": torch.ones(OUT, IN, dtype=torch.int8),
        "weight_scale": torch.ones(OUT, 1, dtype=torch.int32),
    },
    "EXL2": {"q_weight": WORDS, "q_scale": WORDS, "q_groups": torch.ones(4).short()},
    "zero points": {
        "weight": torch.ones(OUT, IN, dtype=torch.int8),
        "weight_scale": torch.ones(OUT, 1),
        "weight_zero_point": torch.ones(OUT, 1),
    },
}


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_codes_without_a_known_formula_are_not_dequantised(name, values, tmp_path):
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


def test_codes_of_another_shape_are_not_another_model():
    """Packed codes have fewer columns: naming another model would not help."""
    report = ckptfix.check(_packed(net(), REFUSED["MLX"]), net())
    assert "FIT103" not in {finding.code for finding in report.findings}


@pytest.mark.parametrize("name", REFUSED)
def test_a_quantised_file_alone_is_a_note(name):
    _, report = ckptfix.repair_state_dict(_packed(net(), REFUSED[name]), select=("FIT107",))
    assert [finding.level for finding in report.findings] == [Level.NOTE]


@pytest.mark.parametrize("name", REFUSED)
def test_noop_a_dtype_without_a_known_formula(name):
    made, report = ckptfix.repair_state_dict(_packed(net(), REFUSED[name]), select=("FIT107",), dtype="float32")
    assert [finding.level for finding in report.findings] == [Level.NOTE]
    assert made.keys() == _packed(net(), REFUSED[name]).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dtype_without_a_model_dequantises(dtype):
    scale = torch.tensor([[0.5, 2.0], [0.25, 8.0]])
    codes = torch.randn(256, 256).to(torch.float8_e4m3fn)
    state_dict = {"a.weight": codes, "a.weight_scale_inv": scale, "b.weight": torch.ones(3)}
    asked: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "accept": ("VAL102",)}
    _, report = ckptfix.repair_state_dict(state_dict, **asked)
    assert [finding.code for finding in report.remaining if finding.level] == ["FIT107"]
    made, report = ckptfix.repair_state_dict(state_dict, **asked, unsafe_fixes=True)
    assert (report.exit_code, [*made]) == (0, ["a.weight", "b.weight"])
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(made["a.weight"], (codes.float() * spread).to(dtype))


class FourBits(nn.Module):
    """The plain model of the two layers of ``tests/values/test_dequantising.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(13, 5, bias=False), nn.Linear(23, 3)


def four_bits(**other: Any) -> dict[str, torch.Tensor]:
    layers = {"a": test_dequantising.nested(**other), "b": test_dequantising.plain()}
    beside = {f"{name}.weight.{part}".rstrip("."): each for name, one in layers.items() for part, each in one.items()}
    return {**beside, "b.bias": torch.ones(3)}


def _made() -> dict[str, torch.Tensor]:
    a, b = (
        torch.frombuffer(bytearray.fromhex(text), dtype=dtype).reshape(shape)
        for text, dtype, shape in (
            (test_dequantising.NESTED_MADE, torch.bfloat16, (5, 13)),
            (test_dequantising.PLAIN_MADE, torch.float16, (3, 23)),
        )
    )
    return {"a.weight": a.float(), "b.weight": b.float(), "b.bias": torch.ones(3)}


def test_four_bits_of_bitsandbytes():
    check_repaired(four_bits(), _made(), "FIT107", FourBits(), unsafe_fixes=True)


def test_noop_codes_stored_as_floats():
    """FSDP needs all parameters in one dtype; as such, codes are NaN and huge values."""
    state = four_bits(shape=[4, 16])
    state["a.weight.absmax"] = state["a.weight.absmax"][:2]
    state["a.weight"] = torch.full((32,), 255, dtype=torch.uint8).view(torch.bfloat16).view(-1, 1)
    assert state["a.weight"].isnan().all()
    assert {finding.code for finding in ckptfix.repair_state_dict(state)[1].findings} == {"FIT107"}


def test_codes_stored_as_other_floats_than_the_models_are_not_cast(tmp_path):
    codes = torch.arange(32, dtype=torch.uint8)
    stored, wanted = (
        {"a.weight": codes.view(dtype).view(-1, 1), "a.weight.absmax": torch.ones(2)}
        for dtype in (torch.bfloat16, torch.float16)
    )
    for name, state in (("like", wanted), ("stored", stored)):
        save_file(state, tmp_path / f"{name}.safetensors")
    likeness = tmp_path / "like.safetensors"
    report = ckptfix.repair(
        tmp_path / "stored.safetensors", like=likeness, output=tmp_path / "out.safetensors", unsafe_fixes=True
    ).report
    assert [finding.level for finding in report.remaining if finding.code == "FIT104"] == [Level.ERROR]
    assert (report.exit_code, report.edits) == (1, ())


def test_four_bits_become_floats_of_a_dtype():
    made, report = ckptfix.repair_state_dict(four_bits(), dtype="float32", unsafe_fixes=True)
    assert report.exit_code == 0
    assert {key: bytes_of(each) for key, each in made.items()} == {key: bytes_of(each) for key, each in _made().items()}


def test_a_check_of_four_bits_says_that_a_repair_makes_floats():
    (found,) = ckptfix.repair_state_dict(four_bits(), select=("FIT107",))[1].findings
    assert (found.level, "dequantises them" in found.message) == (Level.NOTE, True)


def test_four_bits_that_do_not_fit_are_refused_with_the_reason():
    found = ckptfix.repair_state_dict(four_bits(nested_offset=None), FourBits(), unsafe_fixes=True)[1].findings
    refused = [finding.message for finding in found if finding.code == "FIT107" and not finding.fix]
    assert [("1 layer" in message, "lacks `nested_blocksize`" in message) for message in refused] == [(True, True)]
    turned = ckptfix.repair_state_dict(four_bits(shape=[13, 5]), FourBits(), unsafe_fixes=True)[1].findings
    assert any("the model's shapes differ from those in their `quant_state`" in finding.message for finding in turned)


def test_the_configuration_of_quantised_weights_is_named(tmp_path):
    save_file(four_bits(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "x", "quantization_config": {"load_in_4bit": true}}')
    report = ckptfix.check(tmp_path, FourBits())
    shown = "\n".join(map(str, report_lines(report)))
    assert "remove `quantization_config` from config.json" in shown
    assert "unsafe_fixes=True" in shown.splitlines()[-1]  # a command, although the parts next to codes do not fit


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
        ({"weight": torch.ones(4, 4), "layer_scale": torch.ones(4)}, None),
        (nn.Linear(4, 4).to(torch.float8_e4m3fn).state_dict(), nn.Linear(4, 4)),
    ],
    ids=[
        "floats",
        "floats and a model",
        "a quantised model",
        "a scale",
        "a scale of floats",
        "a layer's scale",
        "8 bits without a scale",
    ],
)
def test_noop(state, model):
    check_noop(state, "FIT107", model)


def test_dequantised_only_on_request():
    state, report = ckptfix.repair_state_dict(bitsandbytes(net()), net())
    assert state["0.weight"].dtype == torch.int8
    assert report.exit_code == 1
    with pytest.raises(TargetError):
        ckptfix.load(net(), bitsandbytes(net()))


def test_no_other_advice_for_keys_of_the_fix():
    """The scales are unexpected keys, too: with a command, dequantising them elsewhere is not advised."""
    more = {"0.weight_format": torch.tensor(0, dtype=torch.uint8)}
    shown = "\n".join(map(str, report_lines(ckptfix.check(bitsandbytes(net(), **more), net()))))
    assert "the fix of FIT107 covers these keys" in shown
    assert "load the file with the library that wrote it" not in shown


class Experts(nn.Module):
    """Experts as gpt-oss has them, in one parameter each."""

    def __init__(self, dtype: torch.dtype, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))


def paired(form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a layer of NVFP4 as modelopt, compressed-tensors or ComfyUI saves it, and its weight."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (6, 16), dtype=torch.uint8)
    steps, whole = (torch.rand(6, 2) + 0.1).to(torch.float8_e4m3fn), torch.tensor(0.0037)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    floats = (table[numbers & 7] * (1 - 2 * (numbers >> 3))).unflatten(1, (2, 16))
    if form == "compressed-tensors":
        beside = {"fc.weight_global_scale": 1 / whole.view(1), "fc.input_global_scale": torch.ones(1)}
        scales = steps.float() / beside["fc.weight_global_scale"]
        state = {"fc.weight_packed": codes, "fc.weight_scale": steps, **beside}
    else:
        scales = steps.float() * whole
        state = {"fc.weight": codes, "fc.weight_scale": steps, "fc.weight_scale_2": whole}
        state |= {"fc.comfy_quant": torch.tensor([*b"{}"], dtype=torch.uint8)} if form == "ComfyUI" else {}
    return state, (floats * scales.unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_nvfp4_is_dequantised_as_in_the_libraries(tmp_path, form, dtype):
    state, weight = paired(form)
    model = nn.ModuleDict({"fc": nn.Linear(32, 6, bias=False)}).to(dtype)
    check_repaired(state, {"fc.weight": weight.to(dtype)}, "FIT107", model, unsafe_fixes=True)
    save_file(state, tmp_path / "in.safetensors")
    output, name = tmp_path / "out.safetensors", str(dtype).removeprefix("torch.")
    ckptfix.repair(tmp_path / "in.safetensors", output=output, dtype=name, unsafe_fixes=True)
    assert torch.equal(load_file(output)["fc.weight"], weight.to(dtype))


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("ComfyUI", {}),
        ("modelopt", {"fc.weight_scale": torch.ones(6, 4).to(torch.float8_e4m3fn)}),
        ("modelopt", {"fc.weight_scale_2": torch.ones(2)}),
    ],
    ids=["scales in another order", "too many scales", "two scales of the whole"],
)
def test_codes_of_nvfp4_whose_scales_do_not_fit_are_refused(form, more):
    state, _ = paired(form)
    model = nn.ModuleDict({"fc": nn.Linear(32, 6, bias=False)})
    _, report = ckptfix.repair_state_dict(state | more, model, select=("FIT107",), unsafe_fixes=True)
    assert ["cannot dequantise" in finding.message for finding in report.remaining] == [True]


def packed(**sizes: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Return codes and scales by name, of experts, rows and packs."""
    made = {}
    for name, size in sizes.items():
        made[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8)
        made[f"{name}_scales"] = torch.randint(90, 140, size, dtype=torch.uint8)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_four_bits_are_dequantised_as_in_transformers(tmp_path, dtype):
    """One matrix is square, and turned as the other is."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    state = packed(gate_up_proj=(2, 300, 2), down_proj=(2, 64, 2))
    state["down_proj_scales"][0, 0] = torch.tensor([0, 254])
    net = Experts(dtype, gate_up_proj=(2, 64, 300), down_proj=(2, 64, 64))
    torch.save(state, tmp_path / "in.pth")
    ckptfix.repair(tmp_path / "in.pth", model=net, unsafe_fixes=True, output=tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth")
    assert list(made) == ["gate_up_proj", "down_proj"]
    for name, value in made.items():
        truth = convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"], dtype=dtype)
        assert (value.shape, bytes_of(value)) == (truth.shape, bytes_of(truth))


def test_codes_of_four_bits_in_rows_stay_in_rows():
    torch.manual_seed(0)
    state = packed(w=(2, 3, 1))
    made = ckptfix.repair_state_dict(state, Experts(torch.float32, w=(2, 3, 32)), unsafe_fixes=True)[0]["w"]
    codes, sizes = state["w_blocks"], (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    low = [(-1 if code & 8 else 1) * sizes[code & 7] for code in codes[1, 2, 0].tolist()]
    assert made[1, 2, ::2].tolist() == [value * 2.0 ** (int(state["w_scales"][1, 2, 0]) - 127) for value in low]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 64, 64), torch.float32), ((2, 64, 32), torch.float32), ((2, 32, 64), torch.float16)],
    ids=["square", "of another shape", "of a dtype that is too narrow"],
)
def test_four_bits_without_enough_information_are_refused(shape, dtype):
    state = packed(w=(2, shape[2] if shape[1] == 32 else 64, 2 if shape[1] == 64 else 1))
    found = ckptfix.repair_state_dict(state, Experts(dtype, w=shape), select=("FIT107",), unsafe_fixes=True)[1].findings
    assert ["quantised (MXFP4)" in finding.message for finding in found] == [True]
