"""Where in the parsed object the state_dict is, and what belongs to it."""
