"""Let torchvision's models import beside the CPU build of torch, which has no torchvision operators.

Python runs this file at start where this folder is in `PYTHONPATH`; `tests/conftest.py` puts it there, so that the
programs that a test starts have it too. The schemas are defined when torchvision is first imported, and not before:
importing torch takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Operators:
    """Define the schemas that torchvision registers kernels for, then leave the import to the other finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(_Operators)
            import torch

            if torch.__version__.endswith("+cpu"):
                global LIBRARY
                LIBRARY = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                LIBRARY.impl("nms", _nms, "CPU")
        return None


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Non-maximum suppression, so that detectors run: the indices of the boxes that are kept, the best first."""
    import torch

    order = scores.argsort(descending=True).tolist()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    is_gone = torch.zeros(len(order), dtype=torch.bool)
    kept = []
    for index in order:
        if not is_gone[index]:
            kept.append(index)
            sides = torch.minimum(boxes[index, 2:], boxes[:, 2:]) - torch.maximum(boxes[index, :2], boxes[:, :2])
            overlap = sides.clamp(min=0).prod(dim=1)
            is_gone |= overlap > iou_threshold * (areas[index] + areas - overlap)
    return torch.tensor(kept, dtype=torch.int64)


# The definitions end with the object that made them.
LIBRARY: Any = None
# A worker of pytest-xdist has run this file at its start, when conftest.py runs it.
if not any(getattr(finder, "__name__", "") == _Operators.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Operators)
