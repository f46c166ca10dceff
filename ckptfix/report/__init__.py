"""What a check or a repair found and did, put into words: for the terminal, as JSON, for GitHub, and as a page."""
