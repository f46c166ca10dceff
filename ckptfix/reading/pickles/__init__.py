"""Pickles, read by an interpreter that runs nothing."""
