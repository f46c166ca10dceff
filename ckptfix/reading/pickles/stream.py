"""The byte stream of a pickle, from memory or from a file, and the strings of Python 2 in it.

Sizes in the stream are claims: they are checked before bytes are read."""

from ckptfix.bytes.files import Buffer
from ckptfix.errors import UnreadableError

_WINDOW = 1 << 16  # bytes of a file that are read at a time


class MalformedError(ValueError):
    """A value of a pickle is invalid in its place. The message is a phrase for the user."""


class UnknownError(MalformedError):
    """A value of a pickle has a name from a later release of torch."""


class BrokenPickleError(UnreadableError):
    """A pickle cannot be read from ``position`` on."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class PickleEndError(BrokenPickleError):
    """The stream ends at ``position``."""


class NoOpcodeError(BrokenPickleError):
    """The byte at ``position`` is not an opcode."""


class PickleStream:
    """A reader of ``data`` from ``position`` on. Raises ``PickleEndError`` if it ends early.

    ``window`` are the bytes in memory (all, or a part of a file), and ``place`` is the index of the next one."""

    def __init__(self, data: Buffer, path: str, position: int) -> None:
        self.path = path
        self._data, self._size = data, len(data)
        self.window, self._start, self.place = (data, 0, position) if isinstance(data, bytes) else (b"", position, 0)

    @property
    def position(self) -> int:
        """The offset of the next byte in the data."""
        return self._start + self.place

    def refill(self) -> None:
        """Read the next window after all bytes in memory were used."""
        self._start, self.place = self.position, 0
        self.window = self._data[self._start : self._start + _WINDOW]
        if not self.window:
            raise PickleEndError(
                f"{self.path}: the pickle ends before its STOP; the file is cut short: fetch it again", self._start
            )

    def take(self, count: int) -> bytes:
        place, start = self.place, self.position
        if 0 <= count <= len(self.window) - place:
            self.place = place + count
            return self.window[place : place + count]
        if count < 0 or count > self._size - start:
            raise PickleEndError(
                f"{self.path}: {count} bytes are claimed at offset {start}, but only {self._size - start} are left; "
                "the file is cut short or damaged: fetch it again",
                start,
            )
        self.window, self._start, self.place = b"", start + count, 0
        return self._data[start : start + count]

    def byte(self) -> int:
        return self.take(1)[0]

    def unsigned(self, width: int) -> int:
        """Return the next little-endian unsigned integer of ``width`` bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        end = self.window.find(b"\n", self.place)
        if end >= 0:
            return self.take(end + 1 - self.place)[:-1]
        end = self._data.find(b"\n", self.position)
        if end < 0:
            raise PickleEndError(
                f"{self.path}: a line of the pickle does not end; the file is cut short: fetch it again", self.position
            )
        return self.take(end + 1 - self.position)[:-1]


class Utf8Text(str):
    """Text from a string of Python 2 that is UTF-8 and not ASCII."""

    __slots__ = ()


def python2_text(raw: bytes) -> str:
    """Decode a string of Python 2, which may be text or binary data.

    ``torch.load`` decodes all of them as UTF-8 and refuses a file if one is not, so UTF-8 becomes the same names as in
    torch, as ``Utf8Text``. Anything else is decoded as Latin-1, which keeps every byte: the data of numpy arrays are
    such strings too."""
    if not raw.isascii():
        try:
            return Utf8Text(raw, "utf-8")
        except UnicodeDecodeError:
            pass
    return raw.decode("latin-1")


def raw_bytes(text: str, errors: str = "strict") -> bytes:
    """Return the bytes that ``python2_text`` decoded. Raises ``UnicodeEncodeError`` for any other text."""
    return text.encode("utf-8" if isinstance(text, Utf8Text) else "latin-1", errors)
