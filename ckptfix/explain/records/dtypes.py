"""Messages about element types."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

_SAME = Advice("gives both the model's type", code="x = x.to(next(model.parameters()).dtype)")
_FLOAT = Advice("runs in 32 bits", code="model = model.float()")
_TYPE = r"(?:c10::)?\w+"

DTYPES = (
    Record(
        name="dtype-mismatch",
        example="RuntimeError: expected scalar type Half but found Float",
        patterns=(
            r"expected scalar type (?P<one>\w+) but found (?P<other>\w+)",
            r"Expected object of scalar type (?P<one>\w+) but got scalar type (?P<other>\w+)",
            rf"Input type \((?P<one>{_TYPE}|unsigned char)\) and (?:weight|bias) type \((?P<other>{_TYPE}|unsigned"
            rf" char)\)"
            r"(?<!Type\))",
            r"Input type \((?P<one>torch\.cuda\.\w+)\) and (?:weight|bias) type \((?P<other>torch\.cuda\.\w+)\)",
            r"Input type \((?P<one>torch\.(?!cuda)\w+)\) and (?:weight|bias) type \((?P<other>torch\.(?!cuda)\w+)\)",
            r"Input type \((?P<one>CUDA\w+)\) and (?:weight|bias) type \((?P<other>CUDA\w+)\)",
            r"Input type \((?P<one>CPU\w+)\) and (?:weight|bias) type \((?P<other>CPU\w+)\)",
            r"Input type \((?P<one>MPS\w+)\) and (?:weight|bias) type \((?P<other>MPS\w+)\)",
            r"must have the same dtype, but got (?P<one>\w+) and (?P<other>\w+)",
            r"mat1 and mat2 must have the same dtype",
            r"Found dtype (?P<one>\w+) but expected (?P<other>\w+)",
            r"expected (?P<one>Half|Float|Double|BFloat16|Long|Byte) tensor \(got (?P<other>Half|Float|Double"
            r"|BFloat16|Long|Byte)",
            r"expected m1 and m2 to have the same dtype, but got: (?P<one>[\w:]+) != (?P<other>[\w:]+)",
            r"Expected (?:object|a Tensor) of type torch\.(?P<one>(?!cuda)\w+) but found type"
            r" torch\.(?P<other>(?!cuda)\w+)",
            r"Expected (?:object|a Tensor) of type torch\.cuda\.(?P<one>\w+) but found type"
            r" torch\.cuda\.(?P<other>\w+)",
            r"attempting to (?:un)?scale FP16 gradients",
        ),
        cause="Two tensors that meet in one operation have different element types ({one} and {other}): a model in half"
        " precision got a 32-bit input, numpy's 64-bit numbers were not converted, or a file in half precision was"
        " loaded into a part of the model.",
        advice=(
            _SAME,
            Advice("converts what comes from numpy", code="x = torch.from_numpy(array).float()"),
            Advice("names the keys whose type is not the model's", "ckptfix check {FILE} --model {MODEL}"),
        ),
        source="https://pytorch.org/docs/stable/tensor_attributes.html#torch.dtype",
        codes=("FIT104",),
        unknown={"one": "one", "other": "another"},
    ),
    Record(
        name="half-on-cpu",
        example="RuntimeError: \"slow_conv2d_cpu\" not implemented for 'Half'",
        patterns=(r"(?<!\w)(?P<operator>\w+)\"? not implemented for '(?P<type>Half|BFloat16|ComplexHalf)'",),
        cause="This torch has no {operator} for {type} here: before 2.3 hardly any operator had half precision on the"
        " CPU, and some have none to this day. The weights are stored that way, which is no fault of the file.",
        advice=(
            _FLOAT,
            Advice("Or run on a GPU, or with a newer torch, which does more in half precision on the CPU."),
        ),
        source="https://github.com/pytorch/pytorch/issues/75458",
    ),
    Record(
        name="no-arithmetic-in-float8",
        example="NotImplementedError: \"add_stub\" not implemented for 'Float8_e4m3fn'",
        patterns=(r"(?<!\w)(?P<operator>\w+)\"? not implemented for '(?P<type>Float8\w*)'",),
        cause="torch stores numbers of 8 bits ({type}) and computes with them in a few matrix products alone, not in"
        " {operator}. The weights are stored that way, which is no fault of the file.",
        advice=(
            Advice("runs in 16 bits", code="model = model.to(torch.bfloat16)"),
            Advice("Where scales lie beside such weights, use the library that wrote them: alone they are too small."),
            Advice("shows which tensors are stored so, and their scales", "ckptfix inspect {FILE} --verbose"),
        ),
        source="https://pytorch.org/docs/stable/tensor_attributes.html#torch.dtype",
    ),
    Record(
        name="no-operator-for-type",
        example="RuntimeError: \"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
        patterns=(
            r"(?<!\w)(?P<operator>\w+)\"? not implemented for '(?P<type>Int|Long|Bool|Byte|Char|Short|UInt16|Double"
            r"|Float|torch\.\w+)'",
            r"Expected tensor for argument #\d+ '\w+' to have (?:one of the following )?scalar types?:? .{0,60}but"
            r" got (?P<type>[\w.]+)",
            r"expected target dtype to be .{1,40}, but got (?P<type>\w+)",
            r"expected floating point type for target with class probabilities, got (?P<type>\w+)",
        ),
        cause="An operation got a tensor of a type that it does not take ({type}): labels and token ids are to be"
        " int64, images and masks floats. The checkpoint is seldom concerned.",
        advice=(Advice("converts", code="labels = labels.long(); image = image.float() / 255"),),
        source="https://pytorch.org/docs/stable/tensor_attributes.html#torch.dtype",
    ),
    Record(
        name="half-overflow",
        example="RuntimeError: value cannot be converted to type at::Half without overflow",
        patterns=(
            r"value cannot be converted to type (?:at::|c10::)?(?P<type>Half|BFloat16|u?int\d+_t|float) without"
            r" overflow",
        ),
        cause="A constant in the code, such as -1e9 for a mask, is beyond what {type} holds (65504 for half"
        " precision).",
        advice=(Advice("is the lowest number of whatever type there is", code="torch.finfo(x.dtype).min"), _FLOAT),
        source="https://pytorch.org/docs/stable/type_info.html",
    ),
    Record(
        name="float64-on-mps",
        example="TypeError: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.",
        patterns=(r"Cannot convert a MPS Tensor to float64",),
        cause="Apple's GPUs do not compute in this type, and the file or the code has tensors of it.",
        advice=(
            Advice("converts before the move", code='model = model.float().to("mps")'),
            Advice("shows which tensors have which type", "ckptfix inspect {FILE} --verbose"),
        ),
        source="https://pytorch.org/docs/stable/notes/mps.html",
    ),
)
