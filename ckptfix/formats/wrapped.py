"""Archives and compressed files around a checkpoint."""

from __future__ import annotations

from ckptfix.formats.sources import Content


def unwrap(content: Content, member: str | None = None) -> Content:
    """The checkpoint inside of a compressed file or archive; the content itself where there is nothing around it."""
    return content
