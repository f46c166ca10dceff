"""The way of one item, in a worker or on another node: fetched, treated or copied, proven, and staged for its place."""
