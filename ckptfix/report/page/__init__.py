"""The report as a page: one HTML file that holds everything it shows, and loads nothing from the network.

A page is built from manifest records and lines of weights.jsonl as plain mappings, so it can be built again from the
files of a migration, and shows one checked file in the same way as ten thousand migrated ones."""

from ckptfix.report.page.entries import record_of, record_of_error
from ckptfix.report.page.rendering import page_file, page_pieces

__all__ = ["page_file", "page_pieces", "record_of", "record_of_error"]
