"""From bytes to a Checkpoint: one module per format, and nothing of a file ever runs."""
