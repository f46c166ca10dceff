"""The names below the destination that outputs claim, in an index."""

from __future__ import annotations

from collections.abc import Iterable

from ckptfix.zoo.index import Index, packed

_SCHEMA = """
CREATE TABLE claims (name BLOB, is_new INTEGER);
CREATE TABLE names (name BLOB PRIMARY KEY, is_contested INTEGER) WITHOUT ROWID;
"""
_SETTLE = "INSERT INTO names SELECT name, sum(is_new) + max(1 - is_new) > 1 FROM claims GROUP BY name"


class Claims:
    """Names that are claimed, and those of them that two outputs claim. ``reserved`` are names that are taken before
    any of this run is."""

    def __init__(self, reserved: Iterable[str], claimed: Iterable[str]) -> None:
        self._index = Index(_SCHEMA)
        self._index.run_many("INSERT INTO claims VALUES (?, 0)", ((packed(name),) for name in reserved))
        self._index.run_many("INSERT INTO claims VALUES (?, 1)", ((packed(name),) for name in claimed))
        self._index.run(_SETTLE)
        self._index.run("DROP TABLE claims")
        self._has_contests = self._index.one("SELECT 1 FROM names WHERE is_contested") is not None

    def close(self) -> None:
        """Let go of them."""
        self._index.close()

    def __contains__(self, name: object) -> bool:
        return self._index.one("SELECT 1 FROM names WHERE name = ?", packed(str(name))) is not None

    def is_contested(self, name: str) -> bool:
        """Whether more than one output claims a name."""
        if not self._has_contests:
            return False
        return self._index.one("SELECT 1 FROM names WHERE name = ? AND is_contested", packed(name)) is not None
