"""What ``pickle.dump`` writes: a pickle alone, with the tensors in it as arrays of numpy or as small files of torch."""

from __future__ import annotations

from typing import Any

from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.pickles.resuming import Salvaged, first_break, resume
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.pickles.unfinished import PickleEndError
from ckptfix.reading.weights.document import Document

NAME = "pickle"


def read_whole(content: Content, pickles: StoragePickle, root: Any) -> Document:
    """The document of a plain pickle that was read to its end.

    Raises ``UnreadableError`` where bytes are missing or too many, and nothing shows where."""
    if pickles.storages:
        raise UnreadableError(
            f"{content.path}: the data.pkl of a torch file, whose tensors are in other files beside it; name the"
            " folder that holds them all, or the file before it was unpacked"
        )
    if pickles.is_suspicious:
        data = bytes(content.buffer[:])
        if first_break(data) is not None and (salvaged := resume(pickles, data)) is not None:
            return _salvaged(content, pickles, salvaged)
        if pickles.has_misfits:
            raise UnreadableError(
                f"{content.path}: is damaged: bytes are missing in its pickle, or too many, and nothing shows which of "
                "its tensors are whole; fetch it again"
            )
    return _document(content, pickles, root)


def read_damaged(content: Content, pickles: StoragePickle, error: UnreadableError) -> Document | None:
    """The document of what is whole of a plain pickle that cannot be read to its end; None where nothing is."""
    if pickles.storages or (salvaged := resume(pickles, bytes(content.buffer[:]))) is None:
        return None
    end = error.position if isinstance(error, PickleEndError) else None
    return _salvaged(content, pickles, salvaged, end)


def _salvaged(content: Content, pickles: StoragePickle, salvaged: Salvaged, end: int | None = None) -> Document:
    damage = [
        Fact.of(Kind.PICKLE_GAP, start=start, stop=stop) for start, stop in salvaged.places if stop < len(content)
    ]
    if len(damage) < len(salvaged.places):
        start = salvaged.places[-1][0]
        damage.append(
            Fact.of(Kind.PICKLE_CUT, end=end) if end is not None else Fact.of(Kind.PICKLE_DAMAGED, start=start)
        )
    document = _document(content, pickles, salvaged.root, damage)
    document.lost = dict.fromkeys(salvaged.keys)
    document.remarks += [
        Fact.of(Kind.UNNAMED_LOSS, lost=f"bytes {start} to {stop}") for start, stop in salvaged.unnamed
    ]
    return document


def _document(content: Content, pickles: StoragePickle, root: Any, damage: list[Fact] | None = None) -> Document:
    remarks = [*payload_remarks(pickles.names), Fact(Kind.PLAIN_PICKLE)]
    return Document(content.path, NAME, root, None, pickles.names, remarks, damage or [])
