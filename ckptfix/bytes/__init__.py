"""Ranges of files: where bytes are, and how they are read within limits, mapped, checked and copied."""
