"""What an error message means, and what to do about it.

``explain(text)`` finds the message in a text, the record that knows it, and fills in what the message says. The records
lie in ``records``, one for each message.
"""

from ckptfix.explain.case import Verdict, judge
from ckptfix.explain.explanation import Explanation, Subject, explain
from ckptfix.explain.nearest import nearest

__all__ = ["Explanation", "Subject", "Verdict", "explain", "judge", "nearest"]
