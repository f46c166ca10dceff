"""What is in a zoo: files and folders as items, recognised by content, and the names of their outputs."""
