"""The report as a page: one HTML file that holds everything it shows and asks no network for anything.

A page is made of manifest records and lines of weights as plain mappings, so it can be made again at any time from the
files that a migration leaves, and tells one checked file in the same way as ten thousand migrated ones.
"""

from ckptfix.report.page.accounts import account_of, account_of_error
from ckptfix.report.page.rendering import render_page, write_page
from ckptfix.report.page.saving import check_page_file, save_page

__all__ = ["account_of", "account_of_error", "check_page_file", "render_page", "save_page", "write_page"]
