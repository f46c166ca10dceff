"""Folders of ranks, where each process of a distributed training saved its part. One module per framework."""
