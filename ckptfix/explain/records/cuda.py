"""Failures on the GPU. They are told late: the line in the traceback is seldom the one that failed."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

_DEBUGGING = "https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution"
_BLOCKING = Advice(
    "Run once more with CUDA_LAUNCH_BLOCKING=1 in front of the command: then the traceback ends at the line that"
    " failed."
)
_ON_CPU = Advice(
    "runs the model on the CPU: if it passes, the file is good and the fault is the GPU's or the input's",
    "ckptfix repair {FILE} --model {MODEL} --device cpu",
)
_RESTART = Advice("Start a new process (restart the kernel of a notebook): CUDA stays broken in this one.")

CUDA = (
    Record(
        name="device-assert",
        example="RuntimeError: CUDA error: device-side assert triggered",
        patterns=(
            r"device-side assert",
            r"thread: \[[\d,]+\] Assertion `[^`']{1,200}[`'] failed",
        ),
        cause="An index is out of range: a class label not below the number of classes that the model puts out, or a"
        " token id not below the size of the vocabulary. A checkpoint with another head or vocabulary than the data"
        " makes it so.",
        advice=(
            Advice("shows what to compare", code="print(labels.min(), labels.max(), model(x).shape)"),
            Advice("Run on the CPU once: there the message names the index."),
            Advice("shows the shapes of the head and the embedding in the file", "ckptfix inspect {FILE}"),
            _BLOCKING,
            _RESTART,
        ),
        source=_DEBUGGING,
        codes=("FIT103",),
    ),
    Record(
        name="illegal-access",
        example="RuntimeError: CUDA error: an illegal memory access was encountered",
        patterns=(
            r"illegal memory access was encountered",
            r"CUDA error: (?:misaligned address|unspecified launch failure|an illegal instruction was encountered)",
            r"cuda runtime error \((?:77|4)\)",
        ),
        cause="Code on the GPU touched memory that is not its own: an index out of range, an extension that was"
        " compiled for another torch or GPU, tensors on two GPUs in one kernel, or a faulty card. The line that is"
        " named may be another than the one that failed.",
        advice=(_BLOCKING, _ON_CPU, _RESTART),
        source=_DEBUGGING,
    ),
    Record(
        name="cudnn",
        example="RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        patterns=(
            r"CUDNN_STATUS_(?P<status>(?!ALLOC)\w+)",
            r"Unable to find a valid cuDNN algorithm",
            r"cuDNN (?:version|library).{0,60}(?:incompatib|mismatch|does not match)",
        ),
        cause="A cuDNN kernel failed ({status}). Mostly the GPU's memory was full, the driver, CUDA and cuDNN do not"
        " belong together, or an earlier failure on the GPU shows here. A checkpoint seldom has to do with it.",
        advice=(
            Advice("tells whether cuDNN is at fault", code="torch.backends.cudnn.enabled = False"),
            Advice("Try a batch of 1, and look at nvidia-smi for other programs on the GPU."),
            _BLOCKING,
            _ON_CPU,
        ),
        source="https://pytorch.org/docs/stable/backends.html#torch-backends-cudnn",
        unknown={"status": "no algorithm was found"},
    ),
    Record(
        name="cublas",
        example="RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa,"
        " opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`",
        patterns=(r"CUBLAS_STATUS_(?P<status>(?!ALLOC)\w+)",),
        cause="A matrix product failed on the GPU ({status}): often an index out of range in an embedding just before"
        " it, a full memory, or a torch that was built for another CUDA.",
        advice=(_BLOCKING, Advice("Run on the CPU once: there an index out of range is named."), _ON_CPU),
        source=_DEBUGGING,
    ),
    Record(
        name="extension-out-of-date",
        example="error: 'AT_CHECK' was not declared in this scope",
        patterns=(
            r"\bAT_CHECK\b",
            r"\bTHCState\b",
            r"THC/\w+\.(?:h|cuh)",
            r"THCudaMalloc|THCudaFree|THCCeilDiv|THCudaCheck",
            r"DeprecatedTypeProperties",
        ),
        cause="A C++ or CUDA extension was written for an older torch: AT_CHECK went in 1.5, THC in 1.11. The"
        " checkpoint is not concerned.",
        advice=(
            Advice("replaces AT_CHECK(x, …)", code="TORCH_CHECK(x, ...)"),
            Advice(
                "replaces the THC headers and what came from them",
                code="#include <ATen/cuda/CUDAContext.h>  // and c10::cuda::CUDACachingAllocator::raw_alloc for"
                " THCudaMalloc",
            ),
            Advice("replaces tensor.type() in AT_DISPATCH_…", code="tensor.scalar_type()"),
            Advice("Or use a newer fork, or the operator of torchvision.ops."),
        ),
        source="https://github.com/pytorch/pytorch/releases/tag/v1.11.0",
    ),
    Record(
        name="extension-of-other-torch",
        example="ImportError: /site-packages/nms_cuda.so: undefined symbol: _ZN2at6detail10noopDeleteEPv",
        patterns=(
            r"undefined symbol: (?P<symbol>_Z\w*(?:2at|3c10|5torch|caffe2)\w*)",
            r"undefined symbol: (?P<symbol>(?-i:TH(?!Cuda)P?[A-Z][a-z])\w+)",
        ),
        cause="A compiled extension belongs to another torch than the one that is installed ({symbol} is not in it).",
        advice=(
            Advice(
                "Build it anew in this environment: pip install --no-cache-dir --force-reinstall PACKAGE, or setup.py."
            ),
        ),
        source="https://pytorch.org/tutorials/advanced/cpp_extension.html",
    ),
    Record(
        name="torchvision-of-other-torch",
        example="RuntimeError: operator torchvision::nms does not exist",
        patterns=(
            r"operator torchvision::nms does not exist",
            r"Could not run 'torchvision::(?P<operator>\w+)'",
            r"'?torchvision(?:\.\w+)?'? has no attribute '(?:nms|_C|extension)'",
            r"No module named '?torchvision\._C",
            r"Couldn't load custom C\+\+ ops",
            r"Unknown builtin op: torchvision::",
            r"'torch\.ops\.torchvision' has no attribute|_OpNamespace' 'torchvision' object has no attribute",
        ),
        cause="torchvision does not belong to the torch that is installed, or is a build for the CPU beside one for"
        " CUDA, so its compiled operators (nms and others) are missing. The checkpoint is not concerned.",
        advice=(
            Advice("says which two meet", code="print(torch.__version__, torchvision.__version__)"),
            Advice(
                "Install the pair that belongs together, in one command: pip install -U torch torchvision (see the"
                " table)."
            ),
        ),
        source="https://github.com/pytorch/vision#installation",
    ),
)
