"""What ``pickle.dump`` writes: a pickle alone, with the tensors in it as arrays of numpy or as small files of torch."""

from __future__ import annotations

from typing import Any

from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.pickles.stream import PickleEndError
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.pickles.unfinished import first_break, read_before
from ckptfix.reading.weights.document import Document

NAME = "pickle"


def read_whole(content: Content, pickles: StoragePickle, root: Any) -> Document:
    """The document of a plain pickle that was read to its end.

    Raises ``UnreadableError`` if bytes are missing or too many, and nothing shows where."""
    if pickles.storages:
        raise UnreadableError(
            f"{content.path}: the data.pkl of a torch file, whose tensors are in other files beside it; name the"
            " folder that holds them all, or the file before it was unpacked"
        )
    if pickles.end.has_misfits or pickles.end.has_gaps:
        if first_break(bytes(content.buffer[:])) is not None and (damaged := read_damaged(content, pickles, None)):
            return damaged
        if pickles.end.has_misfits:
            raise UnreadableError(
                f"{content.path}: is damaged: bytes are missing in its pickle, or too many, and nothing shows which of "
                "its tensors are whole; fetch it again"
            )
    return _document(content, pickles, root, [])


def read_damaged(content: Content, pickles: StoragePickle, error: UnreadableError | None) -> Document | None:
    """The document of what a plain pickle holds before its damage, which ``error`` met; None if that is nothing."""
    if pickles.storages or (before := read_before(pickles, bytes(content.buffer[:]))) is None:
        return None
    damage = (
        Fact.of(Kind.PICKLE_CUT, end=error.position)
        if isinstance(error, PickleEndError)
        else Fact.of(Kind.PICKLE_DAMAGED, start=before.damage)
    )
    document = _document(content, pickles, before.root, [damage])
    if before.key is not None:
        document.lost = {before.key: None}
    if before.has_more:
        document.remarks.append(Fact.of(Kind.UNNAMED_LOSS, lost=f"bytes {before.damage} to {len(content)}"))
    return document


def _document(content: Content, pickles: StoragePickle, root: Any, damage: list[Fact]) -> Document:
    remarks = [*payload_remarks(pickles.names), Fact(Kind.PLAIN_PICKLE)]
    return Document(content.path, NAME, root, None, pickles.names, remarks, damage)
