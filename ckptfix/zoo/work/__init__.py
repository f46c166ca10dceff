"""The way of one item, in a worker or on another node: fetched, repaired or copied, hashed, and put in place."""
