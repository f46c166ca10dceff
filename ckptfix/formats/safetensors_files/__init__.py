"""The safetensors format, read and written."""
