"""Which layers of a file are quantised, by the tensors that libraries store with the weight or instead of it."""

import re
from collections.abc import Container, Iterable, Mapping

from msgspec import Struct, field

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import BLOCKS, FOUR_BITS, INT8, MXFP4, NVFP4
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.values.dequantising import are_codes, paired_shape, unpacked_shape

# The tensors that libraries store next to the codes, or instead of the weight.
_BESIDE = re.compile(
    r"(?P<path>(.*\.)?)(?P<part>SCB|weight_format|[qQ]weight|qzeros|scales|g_idx|W_q|weight_packed|weight_shape"
    r"|weight_zero_point|_weight_(qdata|scale|zero_point|scale_and_zero|tensor_impl_\w+)|comfy_quant"
    r"|q_(weight|groups|invperm)|trellis|su|sv|suh|svh|mcg|mul1|biases"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)|weight\._(data(\._data)?|scale|shift)"
    r"|\w*scale\w*)"
)

# A part that only one format has, and the name of the format.
_NAMES = (
    ("SCB", INT8),
    ("weight.absmax", FOUR_BITS),
    ("qweight", "GPTQ or AWQ"),
    ("Qweight", "GPTQ or AWQ"),
    ("weight_packed", "compressed-tensors"),
    ("W_q", "HQQ"),
    ("weight._data", "Quanto"),
    ("weight._data._data", "Quanto"),
    ("q_weight", "EXL2"),
    ("trellis", "EXL3"),
    ("_weight_qdata", "torchao"),
    ("weight_scale_inv", BLOCKS),
    ("weight_scale", BLOCKS),
    ("scale_weight", BLOCKS),
)
MULTIPLIED = (INT8, BLOCKS, FOUR_BITS)  # the formats whose formula is known without a model
SCALES = ("SCB", "weight_scale_inv", "weight_scale", "scale_weight")

CODES = ("int8", "float8_e4m3fn", "float8_e5m2")
_OTHER = "codes with scales of another format"
_APART = "codes whose scales are under other names"

# Codes of a parameter without a suffix, such as that of all experts: MXFP4, compressed-tensors.
_PACKED = re.compile(r"(.+)_(blocks|packed)")

DEQUANTISE = "load the file with the library that wrote it, dequantise the model, and save it again"


class QuantisedLayer(Struct):
    """The keys of a quantised layer by their part of the name, and its format."""

    parts: dict[str, str] = field(default_factory=dict)
    scheme: str = ""
    shape: tuple[int, ...] = ()  # that of the weight, of NVFP4 and MXFP4


def wanted_layers(specs: Mapping[str, TensorSpec], target: Target | None) -> dict[str, QuantisedLayer]:
    """Return the quantised layers, by path, that the target wants as plain floats; all without a target."""
    return {path: layer for path, layer in _layers(specs).items() if _is_wanted(path, layer, target)}


def keys_of_codes(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys that occur only in quantised layers."""
    parts = {part for part, _ in _NAMES}
    return tuple(
        key for key in keys if ((found := _BESIDE.fullmatch(key)) and found["part"] in parts) or key.endswith("_packed")
    )


def beside_codes(module: str, keys: Container[str]) -> str | None:
    """Return the key that shows that a module is quantised; None if it is not."""
    names = (f"{module}.{part}" for part, _ in _NAMES)
    return next((name for name in names if name in keys), None)


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
        elif codes is not None and (DTYPES[codes.dtype].itemsize == 1 or are_codes(f"{path}weight", specs)):
            layer.parts["weight"] = f"{path}weight"
            is_scaled = codes.dtype in CODES and any("scale" in part for part in layer.parts)
            layer.scheme = layer.scheme or _OTHER * is_scaled
        elif layer.scheme in MULTIPLIED:
            layer.scheme = ""  # without codes: a plain weight
        key = layer.parts.get("weight_packed", f"{path}weight")
        shape = paired_shape(key, f"{path}weight_scale", specs)
        if shape and "comfy_quant" not in layer.parts:  # ComfyUI has the scales in another order
            layer.scheme, layer.shape = NVFP4, shape
    for key, codes in specs.items():
        found = _PACKED.fullmatch(key)
        if found and found[2] == "packed" and f"{found[1]}_scale" in specs:
            parts = {part: f"{found[1]}_{part}" for part in ("packed", "scale", "shape", "zero_point", "global_scale")}
            kept = {part: name for part, name in parts.items() if name in specs}
            layers[found[1]] = QuantisedLayer(kept, "compressed-tensors")
        scales = specs.get(f"{found[1]}_scales") if found else None
        if found and scales and (shape := unpacked_shape(codes, scales)):
            layers[found[1]] = QuantisedLayer({"blocks": key, "scales": f"{found[1]}_scales"}, MXFP4, shape)
    quantised = {path: layer for path, layer in layers.items() if layer.scheme}
    # Codes that were renamed without their scales would pass for weights.
    if any(f"{path}weight" not in specs for path, layer in layers.items() if not layer.parts.keys().isdisjoint(SCALES)):
        known = {key for layer in quantised.values() for key in layer.parts.values()}
        alone = [key for key, spec in specs.items() if spec.dtype in CODES and key not in known]
        quantised |= {key.removesuffix("weight"): QuantisedLayer({"weight": key}, _APART) for key in alone}
    return quantised


def companions(new: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the renames of the tensors next to renamed codes, which are recognised by their own names."""
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
    """Return whether the model wants the plain weight, and has no place for the tensors next to the codes."""
    if target is None:
        return True
    slot = target.slots.get(layer.parts.get("weight", f"{path}weight" if path.endswith(".") or not path else path))
    beside = [key for part, key in layer.parts.items() if part != "weight"]
    return (
        slot is not None
        and (DTYPES[slot.dtype].is_float and DTYPES[slot.dtype].itemsize > 1)
        and not any(key in target.slots for key in beside)
    )
