"""What a damaged file still holds, and what can be undone."""
