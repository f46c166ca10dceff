"""The report as a page: one HTML file that holds everything it shows, and loads nothing from the network.

A page is made of manifest records and lines of weights as plain mappings, so it can be made again at any time from the
files that a migration leaves, and shows one checked file in the same way as ten thousand migrated ones."""

from ckptfix.report.page.entries import record_of, record_of_error
from ckptfix.report.page.rendering import page_file, page_pieces

__all__ = ["page_file", "page_pieces", "record_of", "record_of_error"]
