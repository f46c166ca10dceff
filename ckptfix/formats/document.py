"""What a file says before anybody asks which state_dict in it is meant: the parsed root object and facts about the
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfix.checkpoint import Remark


@dataclass
class Document:
    """A parsed file.

    ``root`` is the inert object tree. ``metadata`` is torch's ``_metadata`` where the format carries it outside the
    tree. ``names`` holds the globals that the file's pickles name, ``remarks`` what was noticed on the way."""

    path: str
    format: str
    root: Any
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    names: set[str] = field(default_factory=set)
    remarks: list[Remark] = field(default_factory=list)
