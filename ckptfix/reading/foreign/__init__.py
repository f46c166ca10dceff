"""Files that are not checkpoints, or no longer one, and what they are instead."""
