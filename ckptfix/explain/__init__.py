"""What an error message means, and what to do about it. The known messages are in ``messages.toml``."""

from ckptfix.explain.advice import MessageContext
from ckptfix.explain.explanation import Explanation, explain, nearest
from ckptfix.explain.format import Verdict, judge

__all__ = ["Explanation", "MessageContext", "Verdict", "explain", "judge", "nearest"]
