"""Models that fail until they run in another way, or on other numbers. Every public class is a factory."""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.smoke.models import Net

ILLEGAL = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""
ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other"
ASSERT_PRINTED = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [0,0,0], thread: [0,0,0]"
    " Assertion `srcIndex < srcSelectDimSize` failed."
)


PEBIBYTE = 1 << 50


class Hungry(Net):
    """Takes a pebibyte for each sample except the first."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        torch.empty((x.shape[0] - 1, PEBIBYTE), dtype=torch.uint8)
        return super().forward(x)


class Insatiable(Net):
    """Always takes a pebibyte."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        torch.empty(PEBIBYTE, dtype=torch.uint8)
        return super().forward(x)


class Limited(Net):
    """Takes 384 MiB of float32 for each sample, with a limit of 320 MiB above what its process has after building it:
    only one sample fits, and only in half precision.
    """

    def __init__(self) -> None:
        super().__init__()
        import resource

        torch.ones(64, 64) @ torch.ones(64, 64)  # allocates the stacks of the kernels' threads
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + (320 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        torch.zeros((x.shape[0], 96 << 20), dtype=x.dtype)
        return super().forward(x)


class Mixed(Net):
    """Has a head in float64 by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.fc.double()


class MakesDoubles(Net):
    """Its code makes a float64 constant, which meets float32 weights."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(torch.ones(2, 4, dtype=torch.float64))}


class FailsInCudnn(Net):
    """Stands in for a broken cuDNN: raises its genuine message as long as cuDNN is on."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if torch.backends.cudnn.enabled:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
        return super().forward(x)


class AlwaysFailsInCudnn(Net):
    """Stands in for a cuDNN that fails even if it is turned off."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")


class IllegalAccess(Net):
    """Stands in for a kernel with an illegal memory access: raises the genuine message, at the true line only if
    launches block.
    """

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            self._true_line()
        output = super().forward(x)
        raise RuntimeError(ILLEGAL) if output else ValueError

    def _true_line(self) -> None:
        raise RuntimeError(ILLEGAL)


class DeviceAssert(Net):
    """Stands in for an index that is out of range on the GPU: prints what the kernel prints, and raises the genuine
    message.
    """

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        print(ASSERT_PRINTED, file=sys.stderr)  # noqa: T201  as the kernel does
        raise RuntimeError(ASSERT)


class Gamma(Net):
    """Takes a root of its input, as of an image, which is NaN for negative numbers."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x**0.45)


class Detector(Net):
    """Raises its own error for images darker than its threshold, which only a trained model has."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.full((1,), -9.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not bool((x.mean(dim=(1, 2, 3)) > self.threshold).all()):
            raise ValueError("there is no object in the image")
        return super().forward(x)


class AlwaysNan(Net):
    """Divide zero by zero, for any weights."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)["logits"] * (x.sum() * 0 / 0)}


class MixedNan(Mixed):
    """The same, with a head in float64."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)["logits"] * (x.sum() * 0 / 0)}


class HalfInPart(Net):
    """Casts to half before a half-precision layer, and back after it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.half()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(self.bn(self.conv(x.half()).float()).mean(dim=(2, 3)))}


class LacksHalf(HalfInPart):
    """Stands in for an operator without a half version on the CPU, with the message of torch."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if x.dtype == torch.float16:
            raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'")
        return Net.forward(self, x)


class Masks(Net):
    """Outputs -Inf for masked classes, by design."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)["logits"]
        return {"logits": logits.masked_fill(torch.tensor([True, False]), -torch.inf)}


class Asserts(Gamma):
    """Raises for the NaN that it makes from negative numbers, or from weights that overflow."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = super().forward(x)
        if not bool(output["logits"].isfinite().all()):
            raise ValueError("the logits are not finite")
        return output
