"""What an error message means, and what to do about it. What is known of messages is in ``messages.toml``."""

from ckptfix.explain.case import Verdict, judge
from ckptfix.explain.explanation import Explanation, Subject, explain, nearest

__all__ = ["Explanation", "Subject", "Verdict", "explain", "judge", "nearest"]
