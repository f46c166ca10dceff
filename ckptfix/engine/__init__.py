"""Runs the rules, applies a plan, compares the written file with it, and delivers it."""
