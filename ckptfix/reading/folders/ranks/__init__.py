"""Folders of ranks: each process of a distributed training saved its part. One module a framework, one merger."""
