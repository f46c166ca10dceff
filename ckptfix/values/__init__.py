"""One streaming pass over the weights: the figures that the value rules read. Needs numpy, never torch."""
