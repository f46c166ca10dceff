"""Which layer of one implementation is which of another, inferred from names and shapes only."""
