"""Pickles, which are read by a machine that runs nothing, and written for ``weights_only``."""
