"""Recognises the architectures of well-known libraries by their structure, without importing the libraries."""
