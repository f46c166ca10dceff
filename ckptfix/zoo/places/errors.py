"""What goes wrong at a place."""

from __future__ import annotations

from ckptfix.errors import CkptfixError


class PlaceError(CkptfixError):
    """A place, or a file of it, cannot be listed, read or written."""


class AbsentError(PlaceError):
    """There is no such file, folder or bucket."""


class ForbiddenError(PlaceError):
    """Whoever runs this has no right to it."""


class NoSpaceError(PlaceError):
    """The disk has not enough room for a file."""


class TransferError(PlaceError):
    """A transfer failed as often as it was tried."""
