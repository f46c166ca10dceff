"""Finds the state_dict in a parsed object, and what belongs to it."""
