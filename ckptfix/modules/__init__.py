"""Works with live models: builds them, traces their loaders, and measures their running statistics."""
