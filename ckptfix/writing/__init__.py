"""Writes a Checkpoint to a file, completely or not at all."""
