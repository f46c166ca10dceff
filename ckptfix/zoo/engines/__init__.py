"""What runs the jobs of a migration: processes of this machine, or a cluster."""

from ckptfix.zoo.engines.engine import Engine

__all__ = ["Engine"]
