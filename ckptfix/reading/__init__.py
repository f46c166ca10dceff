"""Reads bytes into a Checkpoint: one module per format. No code of a file ever runs."""
