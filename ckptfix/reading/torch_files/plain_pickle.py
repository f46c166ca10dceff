"""What ``pickle.dump`` writes: a pickle alone, with the tensors in it as arrays of numpy or as small files of torch."""

from __future__ import annotations

import io
import pickletools
import warnings
from itertools import zip_longest
from typing import Any, NamedTuple

from ckptfix.bytes.limits import bounded_keys
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Global, Opaque, holds_tensors
from ckptfix.errors import UnreadableError
from ckptfix.reading.pickles.arrays import NumpyArray, arrays_in
from ckptfix.reading.pickles.payload import payload_remarks
from ckptfix.reading.pickles.stream import PickleEndError
from ckptfix.reading.pickles.torch_pickle import StoragePickle
from ckptfix.reading.weights.document import Document

NAME = "pickle"


def read_whole(content: Content, pickles: StoragePickle, root: Any) -> Document:
    """Return the document of a plain pickle that was read to its end.

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
    """Return the document of what a plain pickle holds before the damage that ``error`` met; None for nothing."""
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


# What a module has of its weights and of the modules in it, in this order.
_MODULE = frozenset({"_parameters", "_buffers", "_modules"})
_NOTHING = Global("", "")  # what no value is
_LONG = 16  # bytes of a value that may be the data of a tensor

_DATA = frozenset({
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE", "BINUNICODE8", "UNICODE", "BINSTRING",
    "STRING",
})  # fmt: skip
_KEEPS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})


class Before(NamedTuple):
    """What is whole before the damage at a byte; ``key`` is the name of the value that the damage is in, and
    ``has_more`` says whether tensors may have followed it."""

    root: Any
    damage: int
    key: str | None
    has_more: bool


def first_break(data: bytes) -> tuple[int, int] | None:
    """Return where the first string that is not kept under a number begins and ends, in a pickle that keeps others."""
    strings = _long_strings(data)
    unkept = [(start, stop) for start, stop, is_kept in strings if not is_kept]
    return unkept[0] if unkept and len(strings) > 3 * len(unkept) else None


def _long_strings(data: bytes) -> list[tuple[int, int, bool]]:
    """Return the values of a pickle that may be the data of tensors: start, end, and whether the pickle keeps it."""
    stream = io.BytesIO(data)
    found: list[tuple[int, int, bool]] = []
    begin = None  # of a long string, while it is not known whether it is kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that no string has by right
        try:
            for opcode, value, place in pickletools.genops(stream):
                if begin is not None:
                    found.append((begin, place or 0, opcode.name in _KEEPS))
                is_long = opcode.name in _DATA and isinstance(value, (str, bytes, bytearray)) and len(value) >= _LONG
                begin = place if is_long else None
        except (ValueError, OverflowError):
            if begin is not None:
                found.append((begin, stream.tell(), False))
    return found


def read_before(pickles: StoragePickle, data: bytes) -> Before | None:
    """Return what is whole of a damaged plain pickle; None if no tensor is, or nothing shows where the damage is."""
    unkept = first_break(data)
    try:
        pickles.run(data if unkept is None else data[: unkept[1]])
    except UnreadableError:
        runs, at = pickles.end.runs, pickles.end.at
        key = _unfinished_key(runs)
        root = fold(runs, pickles.path)
        if holds_tensors(root) or next(arrays_in(root), None) is not None:
            has_more = len(runs) > 1 or len(runs[0]) > 1  # else the pickle lacks only its STOP
            return Before(root, at if unkept is None else unkept[0], key, has_more)
    return None


def _unfinished_key(runs: list[list[Any]]) -> str | None:
    """Return the key of the innermost dict whose value is not whole; in a module, it is only a part of a name."""
    if any(isinstance(value, str) and value in _MODULE for run in runs for value in run):
        return None
    for outer, run in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
        if outer and isinstance(outer[-1], dict):
            pairs = zip_longest(run[::2], run[1::2], fillvalue=_NOTHING)
            return next((key for key, value in pairs if isinstance(key, str) and not _is_whole(value)), None)
    return None


def fold(runs: list[list[Any]], path: str) -> Any:
    """Return the dict, list or object at the bottom of the stack with all that was whole in it, if there is one."""
    for outer, run in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
        _settle(run)
        if outer:
            _fill(outer[-1], run, path)
    bottom = runs[0]
    _settle(bottom)
    for target, key, value in zip(bottom[::2], bottom[1::2], bottom[2::2], strict=False):
        _fill(target, [key, value], path)
    return bottom[0] if bottom and isinstance(bottom[0], (dict, list, Opaque)) else None


def _settle(run: list[Any]) -> None:
    """Give objects at the end of a run the state that was being made for them, as that of a module and its parts."""
    while len(run) > 1 and isinstance(run[-2], Opaque) and run[-2].state is None and isinstance(run[-1], dict):
        owner, state = run[-2], run.pop()
        if not _MODULE.isdisjoint(state):
            state.update((name, {}) for name in _MODULE - state.keys())
        owner.state = state


def _fill(target: Any, values: list[Any], path: str) -> None:
    """Put the whole values of an open run into what it is for. Those of a tuple or of a call are lost with it."""
    if isinstance(target, list):
        target.extend(value for value in values if _is_whole(value))
    elif isinstance(target, dict):
        for key, value in zip(values[::2], values[1::2], strict=False):
            parts = key if isinstance(key, tuple) else (key,)
            if not all(isinstance(part, (str, int)) for part in parts) or not _is_whole(value):
                return
            bounded_keys([key], path)
            target[key] = value


def _is_whole(value: Any) -> bool:
    """Return whether a value is complete: neither a class without arguments nor an object without its state."""
    if isinstance(value, NumpyArray):
        return value.dtype is not None
    return not isinstance(value, Global) and not (isinstance(value, Opaque) and not value.args and not value.state)
