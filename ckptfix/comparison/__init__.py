"""What is different between two checkpoints: names, specs, values, ties, ``_metadata`` and what lies beside them."""

from ckptfix.comparison.compare import diff
from ckptfix.comparison.difference import Difference
from ckptfix.core.display import Form, show_as
from ckptfix.report.display import text_lines


def _lines(difference: Difference) -> list[str]:
    from ckptfix.comparison.lines import difference_lines

    return text_lines(difference_lines(difference))


show_as(Difference, Form(_lines))

__all__ = ["Difference", "diff"]
