"""FIT107 quantised-weights: codes of quantised weights where the model wants the weights.

## What it finds
Weights that another library keeps as integers or 8-bit floats beside their scales, by the names that it gives them:
bitsandbytes (`SCB`, `weight.absmax`, `weight.quant_state…`), GPTQ and AWQ (`qweight`, `qzeros`, `scales`),
compressed-tensors (`weight_packed`, `weight_scale`), HQQ (`W_q`), EXL2 and EXL3 (`q_weight`, `trellis`), MLX (whole
numbers with `scales` and `biases`), torchao in safetensors (`_weight_qdata`), MXFP4 of gpt-oss (`…_blocks`,
`…_scales`), 8-bit weights with `weight_scale`, `weight_scale_inv` or ComfyUI's `scale_weight`, and 8-bit weights beside
any other key that is called a scale. An error if the model wants plain floats there; a note without a model.

## Why it matters
The codes often have the shape of the weights: `load_state_dict` converts them to floats without a word, and the layer
is off by its scale. Dropping the scales as unexpected keys makes that final.

## Fix safety
Unsafe: `--unsafe-fixes` multiplies codes by their scales if the formula is known:

- bitsandbytes int8, in row order;
- 8-bit codes with one scale for the matrix, for each row, or for each square of 128;
- MXFP4, bit for bit as transformers does, if the shapes of the model say whether matrices are turned.

From all other formats nothing is written, as the file lacks something that their formula needs: the order in which
4-bit codes are packed, or whether zero points were stored less one (GPTQ). Load them with the library that wrote them,
dequantise, and save the result. Scales follow their codes to other names; nothing is written from codes that lost them.

## Example
    ckptfix repair int8.pth --model my_models:net --unsafe-fixes
    # multiply the codes of 224 keys by their scales (bitsandbytes int8)

## Sources
- https://arxiv.org/abs/2208.07339 and `bitsandbytes/functional.py` (`int8_vectorwise_dequant`)
- https://huggingface.co/deepseek-ai/DeepSeek-V3 (`weight_scale_inv`, squares of 128)
- https://github.com/ModelCloud/GPTQModel (the two formats of GPTQ, which differ in the zero points)"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Dequantise, Drop, Edit, Rename
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.casting import BLOCKS, INT8, MXFP4, MXFP4_TURNED, scale_steps, unpacked_shape
from ckptfix.values.scan import first_numbers

# What libraries put beside the codes, or in their place.
_BESIDE = re.compile(
    r"(?P<path>(.*\.)?)(?P<part>SCB|weight_format|[qQ]weight|qzeros|scales|g_idx|W_q|weight_packed|weight_shape"
    r"|weight_zero_point|_weight_(qdata|scale|zero_point|scale_and_zero|tensor_impl_\w+)|comfy_quant"
    r"|q_(weight|groups|invperm)|trellis|su|sv|suh|svh|mcg|mul1|biases"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)|\w*scale\w*)"
)

# The part that only one format has, and its name.
_NAMES = (
    ("SCB", INT8),
    ("weight.absmax", "bitsandbytes 4-bit"),
    ("qweight", "GPTQ or AWQ"),
    ("Qweight", "GPTQ or AWQ"),
    ("weight_packed", "compressed-tensors"),
    ("W_q", "HQQ"),
    ("q_weight", "EXL2"),
    ("trellis", "EXL3"),
    ("_weight_qdata", "torchao"),
    ("weight_scale_inv", BLOCKS),
    ("weight_scale", BLOCKS),
    ("scale_weight", BLOCKS),
)
_SCALES = ("SCB", "weight_scale_inv", "weight_scale", "scale_weight")

_CODES = ("int8", "float8_e4m3fn", "float8_e5m2")
_OTHER = "codes with scales of another format"
_APART = "codes whose scales are under other names"

_PACKED = re.compile(r"(.+)_blocks")  # of MXFP4, in the place of a parameter without a suffix

DEQUANTISE = "load the file with the library that wrote it, dequantise the model, and save it again"


class QuantisedLayer(Struct):
    """The keys of a quantised layer by their part of the name, and the format."""

    parts: dict[str, str] = field(default_factory=dict)
    scheme: str = ""


def quantised_weights(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose to dequantise what the target wants as plain floats, or refuse to write it."""
    specs = context.checkpoint.specs
    layers = wanted_layers(specs, context.target)
    if not layers:
        return
    schemes = ", ".join(dict.fromkeys(layer.scheme for layer in layers.values()))
    if context.target is None:
        yield rule.finding(
            Level.NOTE,
            f"the weights of {counted(len(layers), 'layer')} are quantised ({schemes}): a model has to be prepared by "
            "the library that wrote them",
            keys=[key for layer in layers.values() for key in layer.parts.values()],
        )
        return
    cures = {path: _cure(path, layer, context, context.target) for path, layer in layers.items()}
    cures.update(_unpacked(layers, specs, context.target))
    known = [path for path in layers if cures[path]]
    other = [path for path in layers if not cures[path]]
    if known:
        yield rule.finding(
            Level.ERROR,
            f"the weights of {counted(len(known), 'layer')} are stored as codes, to be multiplied by their scales",
            keys=[key for path in known for key in layers[path].parts.values()],
            evidence={"formats": schemes},
            fix=Fix.unsafe(edit for path in known for edit in cures[path]),
            remedies=(Remedy.of("multiplies them, which rounds to the model's dtype", unsafe_fixes=True),),
            blocks=Blocks.FILLING | Blocks.WRITING,
        )
    if other:
        yield rule.finding(
            Level.ERROR,
            f"the weights of {counted(len(other), 'layer')} are quantised ({schemes}), and the file does not have all "
            "that is needed to make floats of them",
            keys=[key for path in other for key in layers[path].parts.values()],
            remedies=advise(DEQUANTISE),
            blocks=Blocks.FILLING | Blocks.WRITING,
        )


def wanted_layers(specs: Mapping[str, TensorSpec], target: Target | None) -> dict[str, QuantisedLayer]:
    """Return the quantised layers of which the target wants plain floats, by path; all without a target."""
    return {path: layer for path, layer in _layers(specs).items() if _is_wanted(path, layer, target)}


def keys_of_codes(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys that only quantised weights have beside them or in their place."""
    parts = {part for part, _ in _NAMES}
    return tuple(key for key in keys if (found := _BESIDE.fullmatch(key)) and found["part"] in parts)


def _layers(specs: Mapping[str, TensorSpec]) -> dict[str, QuantisedLayer]:
    layers: dict[str, QuantisedLayer] = {}
    for key in specs:
        if found := _BESIDE.fullmatch(key):
            layers.setdefault(found["path"], QuantisedLayer()).parts[found["part"]] = key
    for path, layer in layers.items():
        layer.scheme = next((name for part, name in _NAMES if part in layer.parts), "")
        codes = specs.get(f"{path}weight")
        if codes is not None and codes.dtype == "uint32" and {"scales", "biases"} <= layer.parts.keys():
            layer.parts["weight"], layer.scheme = f"{path}weight", "MLX"
        elif codes is not None and DTYPES[codes.dtype].itemsize == 1:
            layer.parts["weight"] = f"{path}weight"
            is_scaled = codes.dtype in _CODES and any("scale" in part for part in layer.parts)
            layer.scheme = layer.scheme or _OTHER * is_scaled
        elif layer.scheme in (INT8, BLOCKS, "bitsandbytes 4-bit"):
            layer.scheme = ""  # their codes are the weight itself
    for key, codes in specs.items():
        found = _PACKED.fullmatch(key)
        scales = specs.get(f"{found[1]}_scales") if found else None
        if found and scales and unpacked_shape(codes, scales):
            layers[found[1]] = QuantisedLayer({"blocks": key, "scales": f"{found[1]}_scales"}, MXFP4)
    quantised = {path: layer for path, layer in layers.items() if layer.scheme}
    # Renamed without their scales, codes would pass for weights.
    if any(
        f"{path}weight" not in specs for path, layer in layers.items() if not layer.parts.keys().isdisjoint(_SCALES)
    ):
        known = {key for layer in quantised.values() for key in layer.parts.values()}
        alone = [key for key, spec in specs.items() if spec.dtype in _CODES and key not in known]
        quantised |= {key.removesuffix("weight"): QuantisedLayer({"weight": key}, _APART) for key in alone}
    return quantised


def companions(new: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the renames of what is beside codes that get new names: it is known as theirs by its own name."""
    made: dict[str, str] = {}
    for path, layer in _layers(specs).items():
        name = new.get(f"{path}weight", "")
        if name.endswith("weight"):
            front = name.removesuffix("weight")
            made |= {
                key: front + part for part, key in layer.parts.items() if key not in new and front + part not in specs
            }
    return made


def _is_wanted(path: str, layer: QuantisedLayer, target: Target | None) -> bool:
    """Return whether the model wants the plain weight, and has no place for what is beside the codes."""
    if target is None:
        return True
    slot = target.slots.get(path if layer.scheme == MXFP4 else layer.parts.get("weight", f"{path}weight"))
    beside = [key for part, key in layer.parts.items() if part != "weight"]
    return (
        slot is not None
        and (DTYPES[slot.dtype].is_float and DTYPES[slot.dtype].itemsize > 1)
        and not any(key in target.slots for key in beside)
    )


def _cure(path: str, layer: QuantisedLayer, context: Context, target: Target) -> tuple[Edit, ...]:
    """Return the edits that make floats of the codes; none if the formula is not known."""
    scale = next((layer.parts[part] for part in _SCALES if part in layer.parts), "")
    specs, key = context.checkpoint.specs, f"{path}weight"
    extra = layer.parts.keys() - {"weight", "weight_format", "input_scale", "scale_input", *_SCALES}
    if scale and specs[scale].numel == 1 and specs[key].dtype.startswith("float8"):
        extra -= {"comfy_quant"}  # its other formats rotate the weights, or have a scale for each block
    if layer.scheme not in (INT8, BLOCKS) or extra or not _is_in_rows(layer, context):
        return ()
    slot = target.slots[key]
    if specs[key].shape != slot.shape or scale_steps(specs[key].shape, specs[scale].shape) is None:
        return ()
    if specs[key].dtype not in _CODES or not DTYPES[specs[scale].dtype].is_float:
        return ()
    return (
        Dequantise(key, specs[key].dtype, slot.dtype, scale, layer.scheme),
        *(Drop(other) for part, other in layer.parts.items() if part != "weight"),
    )


def _unpacked(
    layers: Mapping[str, QuantisedLayer], specs: Mapping[str, TensorSpec], target: Target
) -> dict[str, tuple[Edit, ...]]:
    """Return the edits that unpack layers of MXFP4: in rows or turned, as the shapes of the model's matrices say.

    Those of square ones say nothing; they are stored as the others of the file."""
    shapes = {
        path: unpacked_shape(*(specs[layer.parts[part]] for part in ("blocks", "scales")))
        for path, layer in layers.items()
        if layer.scheme == MXFP4
    }
    turned = {path: (experts, columns, rows) for path, (experts, rows, columns) in shapes.items()}
    fits: dict[str, Mapping[str, tuple[int, ...]]] = {MXFP4: shapes, MXFP4_TURNED: turned}
    ways = [way for way, made in fits.items() if all(made[path] == target.slots[path].shape for path in shapes)]
    if len(ways) != 1 or any(target.slots[path].dtype not in ("float32", "bfloat16") for path in shapes):
        return {}
    return {
        path: (
            Dequantise(
                layers[path].parts["blocks"], "uint8", target.slots[path].dtype, layers[path].parts["scales"], ways[0]
            ),
            Drop(layers[path].parts["scales"]),
            Rename(layers[path].parts["blocks"], path),
        )
        for path in shapes
    }


def _is_in_rows(layer: QuantisedLayer, context: Context) -> bool:
    """Return whether the codes are in row order, and not in one of those that bitsandbytes had for older processors."""
    if "weight_format" not in layer.parts:
        return True
    spec = context.checkpoint.specs[layer.parts["weight_format"]]
    return context.settings.values and spec.dtype == "uint8" and not first_numbers(spec, 1).any()
