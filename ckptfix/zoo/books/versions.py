"""With what a file was migrated, and when."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from importlib import metadata


@lru_cache(maxsize=1)
def version() -> str:
    """The version of ckptfix."""
    return metadata.version("ckptfix")


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """The versions that a result depends on."""
    return {
        "ckptfix": version(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "platform": platform.platform(terse=True),
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
