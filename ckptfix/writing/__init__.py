"""From a Checkpoint to a file that appears whole or not at all."""
