"""Pickles, read by an interpreter that runs none of their code."""
