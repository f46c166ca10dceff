"""What a damaged file still holds, and which damage can be undone."""
