"""Lets torchvision's models import with the CPU build of torch, which has no torchvision operators.

Python runs this file at startup if its folder is in `PYTHONPATH`; `tests/conftest.py` puts it there, also for child
processes. The schemas are defined only when torchvision is first imported, since importing torch takes a second.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Operators:
    """A finder that defines the schemas of torchvision's operators, and leaves the import to the other finders."""

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
    """Do non-maximum suppression, so that detectors run: return the indices of the kept boxes, the best first."""
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


# The definitions live as long as this object.
LIBRARY: Any = None
# In a worker of pytest-xdist, this file has run at startup before conftest.py runs it.
if not any(getattr(finder, "__name__", "") == _Operators.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Operators)
