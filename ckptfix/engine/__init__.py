"""Running the rules, applying a plan, comparing the written file with it, and delivering it."""
