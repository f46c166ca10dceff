"""One streaming pass over the weights: the statistics that the value rules read. Needs numpy, never torch."""
