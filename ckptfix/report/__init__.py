"""What a check or a repair found and did, and how to show it."""

from ckptfix.report.model import Coverage, Report

__all__ = ["Coverage", "Report"]
