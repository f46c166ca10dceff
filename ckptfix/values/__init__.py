"""One streaming pass over the weights: the figures that the value rules read. Needs numpy, never torch."""

from ckptfix.values.scan import TensorStatistics
from ckptfix.values.statistics import Statistics

__all__ = ["Statistics", "TensorStatistics"]
