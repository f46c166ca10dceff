"""The nouns: data that the other rooms hand to one another. Nothing here reads a file or knows a rule."""
