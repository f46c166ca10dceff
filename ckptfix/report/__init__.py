"""What a check or a repair found and did, and how to show it."""

from ckptfix.report.model import Coverage, Report
from ckptfix.smoke.result import SmokeResult

__all__ = ["Coverage", "Report", "SmokeResult"]
