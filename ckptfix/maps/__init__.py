"""Matches the layers of two implementations, and an optimizer's positions with parameters, by names and shapes only."""
