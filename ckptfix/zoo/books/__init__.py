"""What is written down of a migration, so that it goes on after any stop, and somebody can act on it."""
