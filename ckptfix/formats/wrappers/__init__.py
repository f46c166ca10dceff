"""What lies around a checkpoint: archives and compressed files, whole or damaged."""
