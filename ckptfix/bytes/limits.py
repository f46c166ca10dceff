"""Limits on the memory and time that reading one file may take: no real checkpoint reaches them, crafted files do.

One byte of a pickle can allocate 56 bytes of memory (an empty list), so every object is counted with its size in
Python. The limit is four times the file's size, or 64 MB if that is more. It is a trade-off: honest data can take more
than that (a log with one row per step takes 8 to 13 times its bytes, hundreds of thousands of small tensors 4 to 9
times), and refusing such a file is worse than spending memory on a crafted one. So a file may also take sixteen times
its size up to 256 MB, or ten times up to 1 GB; a file of empty lists is still stopped at a third of what it asks for.
The unpacked content of a compressed file counts up to eight times the packed size.

A pickle of a few bytes can also refer to one object many times. Copying, hashing and printing objects has to be bounded
too, or a small file never ends (memo bombs, colliding keys, calls that copy the same list again and again). Nothing
here depends on what the objects mean."""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from sys import getsizeof
from typing import Any

from ckptfix.errors import HostileError, hostile

MEMORY = 64 << 20  # bytes of memory that parsing a small file may take
MEMORY_SHARE = 4  # memory that parsing a large file may take, as a multiple of its size

# Multiples allowed for smaller files, each up to a number of bytes: rows of numbers, and many small tensors.
DENSE_SHARES = ((16, 256 << 20), (10, 1 << 30))

# Unpacked size that counts, as a multiple of the packed size: a bomb expands to anything, logs and names five to one.
PACKING = 8

# Opcodes that the pickles of a file may have beyond half its size: a few seconds of work. Opcodes that leave nothing on
# the stack cost no memory, and deflate packs a thousand of them into a byte.
STEPS = 3_000_000
SLOT = 9  # bytes per item of a list, which grows by an eighth when it is full
STORAGE = 320  # bytes kept per storage beside the object itself: its place in the file, and its entries in tables
TEXT, NUMBER, LIST, DICT = 40, 32, 72, 200  # bytes of the parts of parsed JSON

# Items that the calls of a pickle may copy: this number, plus a multiple of the file's size. Protocol 2 passes the
# bytes of each tensor twice, as text to `_codecs.encode` and as bytes to `_load_from_bytes`.
COPIED, COPIED_SHARE = 1 << 20, 3
KEY_NODES = 256  # parts of a dict key: hashing a tuple visits all of it, and a nested shared one costs 2^depth
KEY_STEPS = 5  # opcodes that checking such a key counts as
KEY_BITS = 4096  # bits of a number used as a key
NAME_DIGITS = 1000  # digits of a number in the name of a tensor; int() refuses more than 4,300

# Keys with the same hash in one dict; each is compared with all others. Only numbers can be chosen to collide.
COLLISIONS = 64
_PLACES = 1 << 16  # counters of hashes; if there are more keys, several hashes share a counter

# The types that a pickle can fill with any number of items, compared exactly: a pickle makes no subclasses.
_SIZED = frozenset((str, bytes, bytearray, list, tuple, dict, OrderedDict, set))
_PLAIN_HASH = (1 << 61) - 1  # a smaller int is its own hash


class Bounds:
    """The limits on parsing one file of ``size`` bytes. Every method raises ``HostileError`` if one is exceeded.

    ``names`` collects the globals that its pickles name (as ``Document.names``, which a file that cannot be read does
    not have)."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self._size = path, size
        self.names: set[str] = set()
        dense = (min(share * size, most) for share, most in DENSE_SHARES)
        self.limit = self.left = max(MEMORY, MEMORY_SHARE * size, *dense)
        self._steps = STEPS + size // 2
        self._copies = COPIED_SHARE * size + COPIED
        self._hashes: Counter[int] = Counter()
        self._keys = self._sets = 0

    def unpack(self, size: int) -> None:
        """Raise the limits for a packed file of ``size`` unpacked bytes, but not by more than ``PACKING`` allows."""
        believed = Bounds(self.path, max(self._size, min(size, PACKING * self._size)))
        self.left += max(0, believed.limit - self.limit)
        self._steps, self._copies = max(self._steps, believed._steps), max(self._copies, believed._copies)
        self.limit = max(self.limit, believed.limit)

    def spend(self, nbytes: int) -> None:
        """Count bytes of memory."""
        self.left -= nbytes
        if self.left < 0:
            raise HostileError(
                f"{self.path}: parsing it, without any tensor, would take more than {self.limit >> 20} MB of memory, "
                "which no checkpoint of its size needs; do not use this file, or, if you made it, save only its weights"
            )

    def step(self, count: int, waiting: int) -> None:
        """Count executed opcodes, and check that the ``waiting`` values on the stack fit into memory."""
        self._steps -= count
        if self._steps < 0:
            raise hostile(self.path, "its pickle never ends and builds nothing")
        if SLOT * waiting > self.left:
            self.spend(SLOT * waiting)

    def make(self, made: Any) -> Any:
        """Count the memory of a new value, and return the value."""
        self.left -= getsizeof(made) + 8
        if self.left < 0:
            self.spend(0)
        return made

    def fill(self, owner: Any, how: Callable[[Any], Any], values: Any) -> None:
        """Add values to a container with its method ``how``, and count how much it grows."""
        before = getsizeof(owner)
        how(values)
        self.spend(getsizeof(owner) - before)

    def expect_json(self, raw: str | bytes) -> None:
        """Count the memory that a JSON text will take, estimated from its brackets, quotes and commas."""
        costs = {'"': TEXT, ",": NUMBER, "[": LIST, "{": DICT}
        counts = (
            (raw.count(sign) if isinstance(raw, str) else raw.count(sign.encode())) * cost
            for sign, cost in costs.items()
        )
        self.spend(sum(counts))

    def parse_json(
        self,
        raw: str | bytes,
        pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
        constant: Callable[[str], Any] | None = None,
    ) -> Any:
        """Parse a JSON text after checking its size; ``pairs`` and ``constant`` are the hooks of ``json.loads`` for
        objects and for NaN and infinity.

        Raises ``ValueError`` and ``RecursionError`` as ``json.loads`` does."""
        self.expect_json(raw)
        return json.loads(raw, object_pairs_hook=pairs, parse_constant=constant)

    def count_copies(self, *values: Any) -> None:
        """Count the arguments of a call, which it may copy. Short ones are free: honest pickles share them too."""
        for value in values:
            if type(value) in _SIZED and len(value) > 64:
                self._copies -= len(value)
        if self._copies < 0:
            raise HostileError(
                f"{self.path}: the calls of its pickle copy more than the pickle holds, over and over; do not use "
                "this file"
            )

    def key(self, key: Any, owner: int) -> Any:
        """Return the key after checking that inserting it takes bounded time. ``owner`` identifies the dict or set."""
        if type(key) is str or key is None or (type(key) is int and -_PLAIN_HASH < key < _PLAIN_HASH):
            return key
        bounded_key(key, self.path)
        if isinstance(key, (tuple, frozenset, complex, int)):
            place = hash((owner, hash(key))) % _PLACES
            self._keys += 1
            self._steps -= KEY_STEPS
            self._hashes[place] += 1
            # An honest dict may have any number of keys: their hashes are spread evenly.
            if self._hashes[place] > COLLISIONS + 4 * self._keys // _PLACES:
                raise hostile(
                    self.path, "the keys of a dict were chosen to have equal hashes, so that filling it never ends"
                )
        return key

    def keys(self, keys: Iterable[Any]) -> list[Any]:
        """Return the keys of a new dict or set after checking each."""
        self._sets += 1
        return [self.key(key, -self._sets) for key in keys]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's pairs. Raises ``ValueError`` if a key occurs twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        doubled, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {doubled!r:.60} is in it twice")
    return made


def bounded_key(key: Any, path: str) -> Any:
    """Return the key after checking that hashing and printing it takes bounded time."""
    nodes, pending = 0, [key]
    while pending:
        value = pending.pop()
        nodes += 1
        if nodes > KEY_NODES or (isinstance(value, int) and value.bit_length() > KEY_BITS):
            raise HostileError(
                f"{path}: a key of a dict is so large or nested so deeply that hashing it would not end; do not use "
                "this file"
            )
        if isinstance(value, (tuple, frozenset)):
            pending.extend(value)
    hash(key)
    return key


def bounded_keys(keys: Iterable[Any], path: str) -> list[Any]:
    return Bounds(path, 0).keys(keys)


def shown(value: Any) -> str:
    """Return a short text for a value of a file, in bounded time whatever the value is."""
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:40])
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    return f"a {type(value).__name__}"
