"""Compares two checkpoints: names, specs, values, ties, ``_metadata`` and everything outside the state_dict."""

from ckptfix.comparison.compare import diff
from ckptfix.comparison.difference import Difference, difference_lines
from ckptfix.core.display import Form, show_as
from ckptfix.report.display import text_lines

show_as(Difference, Form(lambda difference: text_lines(difference_lines(difference))))

__all__ = ["Difference", "diff"]
