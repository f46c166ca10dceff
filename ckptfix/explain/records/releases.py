"""Messages of one release of torch that meets the files or the code of another."""

from __future__ import annotations

import pickletools

from ckptfix.explain.record import Advice, Record

_OLDER = "|".join(str(ord(each.code)) for each in pickletools.opcodes if each.proto < 2)
"""The instructions of pickle that protocol 2 did not bring."""

_LEGACY = Advice("writes the form that torch before 1.6 reads", "ckptfix repair {FILE} --for-torch 1.4.0")

RELEASES = (
    Record(
        name="file-newer-than-torch",
        example="RuntimeError: version_ <= kMaxSupportedFileFormatVersion INTERNAL ASSERT FAILED at"
        " inline_container.cc:132, please report a bug to PyTorch. Attempted to read a PyTorch file with version 3,"
        " but the maximum supported version for reading is 2. Your PyTorch installation may be too old.",
        patterns=(
            r"kMaxSupportedFileFormatVersion",
            r"Attempted to read a PyTorch file with version (?P<version>\d+)",
            r"is a zip archive \(did you mean to use torch\.jit\.load\(\)\?\)",
            r"Can't get attribute '_rebuild_(?:tensor_v2|tensor_v3|parameter|qtensor|device_tensor\w*)' on <module"
            r" 'torch\._utils'",
        ),
        cause="The file is in the form of a newer torch than the one that reads it: torch saves zip archives since"
        " 1.6.",
        advice=(
            _LEGACY,
            Advice(
                "saves the old form, where the newer torch is at hand",
                code="torch.save(state_dict, path, _use_new_zipfile_serialization=False)",
            ),
        ),
        source="https://github.com/pytorch/pytorch/releases/tag/v1.6.0",
    ),
    Record(
        name="torch-too-old-to-load",
        example="ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we"
        " now require users to upgrade torch to at least v2.6 in order to use the function. This version restriction"
        " does not apply when loading files with safetensors. See the vulnerability report here"
        " https://nvd.nist.gov/vuln/detail/CVE-2025-32434",
        patterns=(r"CVE-2025-32434", r"upgrade torch to at least v?2\.6"),
        cause="Before torch 2.6 a file could run code even with weights_only=True, so transformers refuses to open"
        " torch files with an older torch. safetensors files are not concerned.",
        advice=(
            Advice(
                "turns the file into safetensors without running anything of it",
                "ckptfix repair {FILE} --format safetensors -o model.safetensors",
            ),
            Advice("Or upgrade: pip install -U torch (2.6 or later)."),
        ),
        source="https://nvd.nist.gov/vuln/detail/CVE-2025-32434",
    ),
    Record(
        name="mmap-of-old-file",
        example="RuntimeError: mmap can only be used with files saved with"
        " `torch.save(_use_new_zipfile_serialization=True), please torch.save your checkpoint with this option in"
        " order to use mmap.",
        patterns=(r"mmap can only be used with files saved with",),
        cause="The file has the form of torch before 1.6, in which the tensors' bytes cannot be mapped.",
        advice=(Advice("writes the present form", "ckptfix repair {FILE} --format pth -o remade.pth"),),
        source="https://pytorch.org/docs/stable/generated/torch.load.html",
    ),
    Record(
        name="old-numpy",
        example="ModuleNotFoundError: No module named 'numpy._core'",
        patterns=(
            r"No module named '?numpy\._core",
            r"No module named '?numpy\.core\.(?:multiarray|_multiarray_umath)",
        ),
        cause="The file holds numpy values under a name of another numpy: 2.0 moved numpy.core to numpy._core.",
        advice=(
            Advice("writes them as plain numbers and tensors, which need no numpy", "ckptfix repair {FILE}"),
            Advice("Or install the numpy of the one who saved the file: pip install 'numpy>=2' (or 'numpy<2')."),
        ),
        source="https://numpy.org/doc/stable/numpy_2_0_migration_guide.html",
        codes=("FIL102",),
    ),
    Record(
        name="python-2-pickle",
        example="UnicodeDecodeError: 'ascii' codec can't decode byte 0xb8 in position 0: ordinal not in range(128)",
        patterns=(r"'ascii' codec can't decode byte",),
        frames=(r"serialization\.py.{0,400}unpickler\.load\(\).{0,200}UnicodeDecodeError: 'utf-?8'",),
        cause="If torch.load or pickle stands in the traceback: the file was pickled by Python 2, whose strings Python"
        " 3 takes for ASCII or UTF-8 text, or it is damaged. If not, a text with other letters was opened"
        " without encoding='utf-8'.",
        advice=(
            Advice("writes a copy that any Python reads", "ckptfix repair {FILE}"),
            Advice("reads the file as it is", code='torch.load({path}, encoding="latin1", weights_only=False)'),
        ),
        source="https://docs.python.org/3/library/pickle.html#pickle.load",
        codes=("FIL102",),
    ),
    Record(
        name="newer-pickle-protocol",
        example="ValueError: unsupported pickle protocol: 5",
        patterns=(
            r"unsupported pickle protocol: (?P<protocol>\d+)",
            r"Unsupported operand (?P<operand>149|140|147|148|143|144|150)\b",
        ),
        cause="The file was saved with a newer pickle protocol (pickle_protocol=4 or 5) than the reader takes: an old"
        " Python knows none of them, and torch.load with weights_only=True only those up to 3.",
        advice=(
            Advice("writes the same with protocol 2, which all readers take", "ckptfix repair {FILE}"),
            Advice(
                "saves it so, where the program that writes is yours",
                code="torch.save(obj, path)  # no pickle_protocol",
            ),
        ),
        source="https://docs.python.org/3/library/pickle.html#data-stream-format",
        codes=("FIL102",),
    ),
    Record(
        name="older-pickle-protocol",
        example="_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported operand 112",
        patterns=(rf"Unsupported operand (?:{_OLDER})\b",),
        cause="torch.load with weights_only=True does not know this instruction. The file is a pickle of the protocols"
        " 0 or 1, or a text that begins as one does (an error page, a message).",
        advice=(
            Advice("says which of them it is", "ckptfix check {FILE}"),
            Advice("writes the same with protocol 2, which all readers take", "ckptfix repair {FILE}"),
        ),
        source="https://docs.python.org/3/library/pickle.html#data-stream-format",
        codes=("FIL102",),
    ),
    Record(
        name="argument-of-newer-torch",
        example="TypeError: 'weights_only' is an invalid keyword argument for Unpickler()",
        patterns=(
            r"'(?P<argument>weights_only|mmap)' is an invalid keyword argument for (?:Unpickler\(\)|this function)",
            r"\bload\(\) got an unexpected keyword argument '(?P<argument>weights_only|mmap)'",
            r"load_state_dict\(\) got an unexpected keyword argument '(?P<argument>assign)'",
        ),
        cause="The torch that runs is older than the argument {argument}: torch.load has weights_only since 1.13 and"
        " mmap since 2.1, load_state_dict has assign since 2.1. The checkpoint is not concerned.",
        advice=(
            Advice("Leave the argument out, or upgrade: pip install -U torch"),
            Advice(
                "makes a file that runs no code in any torch, where weights_only was to see to that",
                "ckptfix repair {FILE} --format safetensors -o weights.safetensors",
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.load.html",
    ),
    Record(
        name="old-whole-model",
        example="torch.nn.modules.module.ModuleAttributeError: 'Upsample' object has no attribute"
        " 'recompute_scale_factor'",
        patterns=(
            r"'(?P<module>\w+)' object has no attribute '(?P<attribute>recompute_scale_factor|padding_mode|approximate"
            r"|_non_persistent_buffers_set|_reversed_padding_repeated_twice|_is_full_backward_hook|_backward_pre_hooks"
            r"|_forward_hooks_with_kwargs|_forward_hooks_always_called|_state_dict_pre_hooks"
            r"|_load_state_dict_post_hooks"
            r"|_load_state_dict_pre_hooks|batch_first|norm_first|_qkv_same_embed_dim|track_running_stats|_buffers"
            r"|ceil_mode|divisor_override|_trace)'",
        ),
        cause="A whole model was saved (torch.save(model)) by another release, whose {module} had no {attribute} yet."
        " Such a file keeps the attributes of the old classes; a state_dict does not depend on them.",
        advice=(
            Advice(
                "takes the state_dict out of the old model, without its code",
                "ckptfix repair {FILE} --format pth -o weights.pth",
            ),
            Advice(
                "loads it into a model that this release builds",
                code='model.load_state_dict(torch.load("weights.pth"))',
            ),
        ),
        source="https://github.com/ultralytics/yolov5/issues/6948",
    ),
    Record(
        name="zero-dim-index",
        example="IndexError: invalid index of a 0-dim tensor. Use `tensor.item()` in Python or `tensor.item<T>()` in"
        " C++ to convert a 0-dim tensor to a number",
        patterns=(r"invalid index of a 0-dim tensor",),
        cause="Code from before torch 0.4 takes the number out of a loss with loss.data[0]. It has no dimension to"
        " index since then. The checkpoint is not concerned.",
        advice=(Advice("gets the number", code="loss.item()  # in place of loss.data[0]"),),
        source="https://pytorch.org/blog/pytorch-0_4_0-migration-guide/",
    ),
    Record(
        name="zero-dim-iteration",
        example="TypeError: iteration over a 0-d tensor",
        patterns=(r"iteration over a 0-d tensor", r"len\(\) of a 0-d tensor"),
        cause="A tensor without dimensions, a single number, is taken for a list of them: often the sum or the mean of"
        " a batch, or a batch of one from which squeeze() took all dimensions. The checkpoint is not concerned.",
        advice=(
            Advice("gets the number", code="x.item()"),
            Advice("makes a list of one of it", code="x.unsqueeze(0)"),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.Tensor.item.html",
    ),
    Record(
        name="old-ffi",
        example="ImportError: torch.utils.ffi is deprecated. Please use cpp extensions instead.",
        patterns=(r"torch\.utils\.ffi is deprecated", r"No module named '?torch\.utils\.ffi"),
        cause="The code builds its C extension in a way that torch 1.0 removed. The weights are not concerned.",
        advice=(
            Advice(
                "Look for a pure Python version of the operator (torchvision.ops has nms and roi_align), or a newer"
                " fork."
            ),
            Advice("makes its weights fit the newer code", "ckptfix repair {FILE} --model {MODEL}"),
        ),
        source="https://pytorch.org/tutorials/advanced/cpp_extension.html",
    ),
    Record(
        name="gone-from-torch",
        example="ModuleNotFoundError: No module named 'torch._six'",
        patterns=(
            r"No module named '?(?P<gone>torch\._six)",
            r"cannot import name '(?P<gone>load_state_dict_from_url)' from 'torchvision\.models\.utils'",
            r"No module named '?(?P<gone>torchvision\.models\.utils)",
            r"cannot import name '(?P<gone>container_abcs|string_classes|int_classes)' from 'torch\._six'",
        ),
        cause="The code uses {gone}, which newer releases removed. The checkpoint is not concerned.",
        advice=(
            Advice("is where load_state_dict_from_url is now", code="from torch.hub import load_state_dict_from_url"),
            Advice(
                "stands in for torch._six",
                code="import collections.abc as container_abcs; string_classes, inf = str, float('inf')",
            ),
        ),
        source="https://github.com/pytorch/pytorch/pull/94709",
    ),
)
