"""Where in what was parsed the state_dict is, and what belongs to it."""
