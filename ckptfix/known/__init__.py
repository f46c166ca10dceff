"""Architectures of well-known libraries by their structure, without the libraries."""
