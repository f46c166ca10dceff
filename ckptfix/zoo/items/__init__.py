"""What lies in a zoo: its files as items, told by their bytes, and the names of what comes of them."""
