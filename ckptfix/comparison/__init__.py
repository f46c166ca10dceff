"""What is different between two checkpoints: names, specs, values, ties, ``_metadata`` and what lies beside them."""

from ckptfix.comparison.compare import diff
from ckptfix.comparison.difference import Difference

__all__ = ["Difference", "diff"]
