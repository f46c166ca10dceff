"""Archives and compressed files around a checkpoint, whole or damaged."""
