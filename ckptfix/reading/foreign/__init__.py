"""Files that are not checkpoints, or no longer, and what they are instead."""
