"""The text of ``--help``, without what typer puts around names."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose usage line names its arguments as their ``metavar`` does: ``PATH...`` and not ``{PATH}...``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line behind the program."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]
