"""Raw bytes: where they lie in a file, and how they are read, mapped, proved and copied."""
