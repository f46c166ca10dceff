"""FIT107 quantised-weights: codes of quantised weights instead of the weights that the model wants.

## What it finds
Weights that another library stores as integers or 8-bit floats with scales, recognised by their names: bitsandbytes
(`SCB`, `weight.absmax`, `weight.quant_state…`), GPTQ and AWQ (`qweight`, `qzeros`, `scales`), compressed-tensors
(`weight_packed`, `weight_scale`), HQQ (`W_q`), EXL2 and EXL3 (`q_weight`, `trellis`), Quanto (`weight._data`), MLX
(whole numbers with `scales` and `biases`), torchao in safetensors (`_weight_qdata`), MXFP4 of gpt-oss (`…_blocks`,
`…_scales`), NVFP4 (`weight_scale_2` or `weight_global_scale`), 8-bit weights with `weight_scale`, `weight_scale_inv` or
ComfyUI's `scale_weight`, and 8-bit weights with any other key called a scale. An error if the model wants plain floats,
or if `--dtype` does and the formula is known; otherwise, without a model, a note.

## Why it matters
The codes often have the shape of the weights: `load_state_dict` silently converts them to floats, and the layer is off
by its scale. Dropping the scales as unexpected keys makes that permanent.

## Fix safety
Unsafe: `--unsafe-fixes` multiplies codes by their scales if the formula is known:

- bitsandbytes int8, in row order;
- bitsandbytes NF4 and FP4, also with double quantisation, bit for bit as its `dequantize_4bit` does;
- 8-bit codes with one scale for the matrix, for each row, or for each square of 128;
- NVFP4, bit for bit as modelopt and compressed-tensors do; not ComfyUI's, which has the scales in another order;
- MXFP4, bit for bit as transformers does, if the model's shapes show whether matrices are transposed.

Nothing is written from other formats, because the file lacks something that the formula needs: the packing order of the
codes, or whether zero points were stored less one (GPTQ). The same goes for layers whose scales do not fit their codes,
and codes without scales. Load them with the library that wrote them, dequantise, and save the result. Scales follow
their codes if these are renamed.

## Example
    ckptfix repair int8.pth --model my_models:net --unsafe-fixes
    # multiply the codes of 224 keys by their scales (bitsandbytes int8)
    ckptfix repair nf4_folder --dtype bfloat16 --unsafe-fixes -o model.safetensors

## Sources
- https://arxiv.org/abs/2208.07339, https://arxiv.org/abs/2305.14314, and `bitsandbytes/functional.py`
  (`int8_vectorwise_dequant`, `dequantize_4bit`)
- https://huggingface.co/deepseek-ai/DeepSeek-V3 (`weight_scale_inv`, squares of 128)
- https://github.com/ModelCloud/GPTQModel (the two formats of GPTQ, which differ in the zero points)"""

from collections.abc import Iterator, Mapping

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import BLOCKS, FOUR_BITS, INT8, MXFP4, MXFP4_TURNED, NVFP4, Dequantise, Drop, Edit, Rename
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.target import PARAMETER, Slot, Target
from ckptfix.reading.configs import model_config
from ckptfix.rules.quantised_layers import CODES, DEQUANTISE, SCALES, QuantisedLayer, wanted_layers
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.dequantising import QuantState, quant_state, scale_steps
from ckptfix.values.scan import first_numbers

_LACKS = "ckptfix cannot dequantise them"
_OTHER_SHAPE = "the model's shapes differ from those in their `quant_state`"


def quantised_weights(rule: Rule, context: Context) -> Iterator[Finding]:
    """Propose to dequantise the weights that the target wants as plain floats, or refuse to write them."""
    specs = context.checkpoint.specs
    layers = wanted_layers(specs, context.target)
    if not layers:
        return
    schemes = ", ".join(dict.fromkeys(layer.scheme for layer in layers.values()))
    states = _quant_states(layers, context)
    target = context.target or _as_asked(layers, states, context)
    cures = {path: _cure(path, layer, context, states, target) if target else () for path, layer in layers.items()}
    if context.target is not None:
        cures.update(_unpacked(layers, context.target))
    if known := [path for path in layers if cures[path]]:
        made = f"multiplies them and rounds to that dtype{_config(context)}"
        yield rule.finding(
            Level.ERROR,
            f"the weights of {counted(len(known), 'layer')} are stored as codes with separate scales",
            keys=[key for path in known for key in layers[path].parts.values()],
            evidence={"formats": schemes},
            fix=Fix.unsafe(edit for path in known for edit in cures[path]),
            remedies=(Remedy.of(made, unsafe_fixes=True),),
            blocks=Blocks.FILLING | Blocks.WRITING,
        )
    others: dict[str, list[str]] = {}  # the layers that are not dequantised, by reason
    for path in layers:
        if not cures[path]:
            others.setdefault(_reason(states.get(path), context.target), []).append(path)
    for reason, paths in others.items():
        yield rule.finding(
            Level.ERROR if context.target else Level.NOTE,
            f"the weights of {counted(len(paths), 'layer')} are quantised ({schemes}){reason}",
            keys=[key for path in paths for key in layers[path].parts.values()],
            remedies=advise(DEQUANTISE) if context.target else (),
            blocks=Blocks.FILLING | Blocks.WRITING if context.target else Blocks.NOTHING,
        )


def _reason(state: QuantState | str | None, target: Target | None) -> str:
    """Return why a layer is not dequantised, as the end of the message."""
    if isinstance(state, str):
        return f", and {state}"
    if target is not None:
        return f", and {_LACKS if state is None else _OTHER_SHAPE}"
    reason = ": the library that wrote them has to prepare the model"
    return reason if state is None else f"{reason}; a repair with another dtype and unsafe fixes dequantises them"


def _config(context: Context) -> str:
    """Return what to do about the config.json next to the file if it describes quantised weights."""
    is_named = "quantization_config" in model_config(context.checkpoint)
    return "; then remove `quantization_config` from config.json" if is_named else ""


def _quant_states(layers: Mapping[str, QuantisedLayer], context: Context) -> dict[str, QuantState | str]:
    """Return the `quant_state` of each 4-bit layer of bitsandbytes, or the reason why it cannot be dequantised."""
    specs, file = context.checkpoint.specs, context.checkpoint.path
    is_read = context.settings.values
    if not is_read and context.target is None:
        return {}
    return {
        path: quant_state(f"{path}weight", specs, file) if is_read else "their `quant_state` could not be read"
        for path, layer in layers.items()
        if layer.scheme == FOUR_BITS
    }


def _as_asked(
    layers: Mapping[str, QuantisedLayer], states: Mapping[str, QuantState | str], context: Context
) -> Target | None:
    """Return a target with the weights in the dtype of ``--dtype``, for use without a model."""
    dtype, specs = context.settings.dtype, context.checkpoint.specs
    if dtype is None or DTYPES[dtype].itemsize == 1:
        return None
    shapes = {f"{path}weight": state.shape for path, state in states.items() if isinstance(state, QuantState)}
    shapes |= {f"{path}weight": layer.shape for path, layer in layers.items() if layer.scheme == NVFP4}
    keys = (*shapes, *(layer.parts["weight"] for layer in layers.values() if "weight" in layer.parts))
    slots = {key: Slot(dtype, shapes.get(key) or specs[key].shape, PARAMETER) for key in keys}
    return Target("--dtype", slots)


def _cure(
    path: str, layer: QuantisedLayer, context: Context, states: Mapping[str, QuantState | str], target: Target
) -> tuple[Edit, ...]:
    """Return the edits that dequantise a layer; none if the formula is not known."""
    specs, key = context.checkpoint.specs, f"{path}weight"
    beside = tuple(Drop(other) for part, other in layer.parts.items() if part != "weight")
    if path in states:
        state, slot = states[path], target.slots[key]
        if isinstance(state, str) or state.shape != slot.shape:
            return ()
        return Dequantise(key, specs[key].dtype, slot.dtype, f"{key}.absmax", FOUR_BITS), *beside
    if layer.scheme == NVFP4:
        codes, slot = layer.parts.get("weight_packed", key), target.slots[key]
        if slot.shape != layer.shape:
            return ()
        drops = (drop for drop in beside if drop.key != codes)
        renames = (Rename(codes, key),) if codes != key else ()
        return Dequantise(codes, "uint8", slot.dtype, f"{path}weight_scale", NVFP4), *drops, *renames
    scale = next((layer.parts[part] for part in SCALES if part in layer.parts), "")
    extra = layer.parts.keys() - {"weight", "weight_format", "input_scale", "scale_input", *SCALES}
    if scale and specs[scale].numel == 1 and specs[key].dtype.startswith("float8"):
        extra -= {"comfy_quant"}  # its other formats rotate the weights, or have a scale for each block
    if layer.scheme not in (INT8, BLOCKS) or extra or not _is_in_rows(layer, context):
        return ()
    slot = target.slots[key]
    if specs[key].shape != slot.shape or scale_steps(specs[key].shape, specs[scale].shape) is None:
        return ()
    if specs[key].dtype not in CODES or not DTYPES[specs[scale].dtype].is_float:
        return ()
    return Dequantise(key, specs[key].dtype, slot.dtype, scale, layer.scheme), *beside


def _unpacked(layers: Mapping[str, QuantisedLayer], target: Target) -> dict[str, tuple[Edit, ...]]:
    """Return the edits that unpack layers of MXFP4, transposed or not, as the shapes of the model's matrices show."""
    shapes = {path: layer.shape for path, layer in layers.items() if layer.scheme == MXFP4}
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
    """Return whether the codes are in row-major order, unlike bitsandbytes' formats for older processors."""
    if "weight_format" not in layer.parts:
        return True
    spec = context.checkpoint.specs[layer.parts["weight_format"]]
    return context.settings.values and spec.dtype == "uint8" and not first_numbers(spec, 1).any()
