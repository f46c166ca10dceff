"""Batch migration of old model zoos: ``ckptfix migrate``."""
