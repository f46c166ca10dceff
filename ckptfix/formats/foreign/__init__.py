"""Files that are no checkpoint, or no longer one, and what they are instead."""
