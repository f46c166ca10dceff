"""Objects on the pipes between the driver and its workers.

They are pickled, which is right here alone: both ends are ours, and no byte of a file that came from elsewhere is ever
unpickled. What a file says travels inside as text and numbers."""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def framed(content: object) -> bytes:
    """The object as a frame."""
    data = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read_frame(pipe: BinaryIO) -> Any:
    """The next object. Raises ``EOFError`` where the other end is gone, also in the middle of a frame."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return pickle.loads(_exactly(pipe, length))


def write_frame(pipe: BinaryIO, frame: bytes) -> None:
    """Write a frame to a pipe without a buffer."""
    rest = memoryview(frame)
    while rest:
        rest = rest[pipe.write(rest) :]


def _exactly(pipe: BinaryIO, count: int) -> bytes:
    blocks = []
    while count:
        block = pipe.read(count)  # of a pipe without a buffer, what is there
        if not block:
            raise EOFError("the other end of the pipe is gone")
        blocks.append(block)
        count -= len(block)
    return b"".join(blocks)
