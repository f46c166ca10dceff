"""Checkpoints in several files."""
