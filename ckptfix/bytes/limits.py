"""What reading one file may spend: limits that no real checkpoint meets and that keep a crafted one in bounds.

A byte of a pickle can ask for 56 bytes of memory (an empty list), so what is made is counted by what Python says that
it takes. It ends at four times the file, or at 64 MB where that is more. The bound is a trade-off. Honest data takes
more than four times its bytes as well: a log of a row for each step takes 8 to 13 times as much, hundreds of thousands
of small tensors 4 to 9 times, and to refuse one of these is worse than to spend memory on a crafted file. So a file
may take up to sixteen times its size, 256 MB at most, or ten times, 1 GB at most; a file of empty lists still ends at
a third of what it asks for. What a small file was packed from counts up to eight times the packed size.

A pickle of a few bytes can also name one object many times over: whatever copies an object, hashes it or shows it has
to be bounded, or a small file takes all time (memo bombs, colliding keys, calls that copy the same list again and
again). Nothing here depends on what the objects mean."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from sys import getsizeof
from typing import Any

from ckptfix.errors import HostileError, hostile

MEMORY = 64 << 20  # bytes that the parsed form of a small file may take
MEMORY_SHARE = 4  # how many times its size the parsed form of a large file may take

# The same for a file that is not large, and the bytes at which that ends: rows of numbers, and small tensors.
DENSE_SHARES = ((16, 256 << 20), (10, 1 << 30))

# How many times a packed file what is in it counts; it may expand to anything. Logs and names pack five to one.
PACKING = 8

# Opcodes, beyond half the size of the file, that its pickles may have: a few seconds of work. Opcodes that leave
# nothing after them cost no memory, and deflate packs a thousand of them into a byte.
STEPS = 3_000_000
SLOT = 9  # bytes of a place in a list that grows by an eighth when it is full
STORAGE = 320  # bytes of what is kept of a storage beside itself: where its bytes lie, and its places in tables
TEXT, NUMBER, LIST, DICT = 40, 32, 72, 200  # bytes of the parts of parsed JSON

# Items that the calls of a pickle may be handed to copy, beyond this many times its size: protocol 2 hands the bytes of
# each tensor over twice, as text to `_codecs.encode` and as bytes to `_load_from_bytes`.
HANDED, HANDED_SHARE = 1 << 20, 3
KEY_NODES = 256  # parts of a key of a dict: a tuple is hashed through, and a shared nested one costs 2^depth
KEY_STEPS = 5  # opcodes that a look at such a key counts as
KEY_BITS = 4096  # size of a number that is a key
NAME_DIGITS = 1000  # of a number in the name of a tensor; int() refuses more than 4,300

# Keys of one hash in one dict; each costs a look at all the others. Only numbers can be chosen to collide.
COLLISIONS = 64
_PLACES = 1 << 16  # counts of hashes that are kept, whatever the number of keys: those of many keys share one

# What a pickle can fill with any number of things, by its exact type: it makes no others.
_SIZED = frozenset((str, bytes, bytearray, list, tuple, dict, OrderedDict, set))
_PLAIN_HASH = (1 << 61) - 1  # a smaller int is its own hash


class Bounds:
    """The limits on parsing one file of ``size`` bytes. Every method raises ``HostileError`` where one is exceeded.

    ``names`` are the globals that its pickles named so far (``Document.names``): of a file that cannot be read there
    is not a document that would have them."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self._size = path, size
        self.names: set[str] = set()
        dense = (min(share * size, most) for share, most in DENSE_SHARES)
        self.limit = self.left = max(MEMORY, MEMORY_SHARE * size, *dense)
        self._steps = STEPS + size // 2
        self._handed = HANDED_SHARE * size + HANDED
        self._hashes: Counter[int] = Counter()
        self._keys = self._sets = 0

    def unpack(self, size: int) -> None:
        """Allow for what is packed in the file: ``size`` bytes, as far as they are no bomb's."""
        believed = Bounds(self.path, max(self._size, min(size, PACKING * self._size)))
        self.left += max(0, believed.limit - self.limit)
        self._steps, self._handed = max(self._steps, believed._steps), max(self._handed, believed._handed)
        self.limit = max(self.limit, believed.limit)

    def spend(self, nbytes: int) -> None:
        """Count bytes of memory."""
        self.left -= nbytes
        if self.left < 0:
            raise HostileError(
                f"{self.path}: reading what is in it, before any tensor, would take more than {self.limit >> 20} MB of "
                "memory, which no checkpoint of its size needs; do not use this file, or, if you made it, save its "
                "weights alone"
            )

    def step(self, count: int, waiting: int) -> None:
        """Count opcodes that were run, and see that the values which wait on the stack find room."""
        self._steps -= count
        if self._steps < 0:
            raise hostile(self.path, "its pickle never ends and builds nothing")
        if SLOT * waiting > self.left:
            self.spend(SLOT * waiting)

    def make(self, made: Any) -> Any:
        """Return the new value itself, counted."""
        self.left -= getsizeof(made) + 8
        if self.left < 0:
            self.spend(0)
        return made

    def fill(self, owner: Any, how: Callable[[Any], Any], values: Any) -> None:
        """Put values into a container by one of its methods, and count what it grows by."""
        before = getsizeof(owner)
        how(values)
        self.spend(getsizeof(owner) - before)

    def expect_json(self, raw: str | bytes) -> None:
        """Count what a JSON text will take, by its brackets, quotes and commas."""
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
        """Return the value of a JSON text, once it is known to find room; ``pairs`` and ``constant`` are the hooks of
        ``json.loads`` for objects and for NaN and infinity.

        Raises ``ValueError`` and ``RecursionError`` as it does."""
        self.expect_json(raw)
        return json.loads(raw, object_pairs_hook=pairs, parse_constant=constant)

    def hand(self, *values: Any) -> None:
        """Count what a call is handed and may copy. Short arguments are shared by honest pickles too."""
        for value in values:
            if type(value) in _SIZED and len(value) > 64:
                self._handed -= len(value)
        if self._handed < 0:
            raise HostileError(
                f"{self.path}: the calls of its pickle copy more than the pickle holds, over and over; do not use "
                "this file"
            )

    def key(self, key: Any, owner: int) -> Any:
        """Return the key itself, once it is known that it can be put in bounded time into the dict or set that
        ``owner``, a number, identifies."""
        if type(key) is str or key is None or (type(key) is int and -_PLAIN_HASH < key < _PLAIN_HASH):
            return key
        bounded_key(key, self.path)
        if isinstance(key, (tuple, frozenset, complex, int)):
            place = hash((owner, hash(key))) % _PLACES
            self._keys += 1
            self._steps -= KEY_STEPS
            self._hashes[place] += 1
            # An honest dict may have any number of keys: they lie evenly.
            if self._hashes[place] > COLLISIONS + 4 * self._keys // _PLACES:
                raise hostile(
                    self.path, "the keys of a dict are chosen to have one hash, so that it takes for ever to fill"
                )
        return key

    def keys(self, keys: Iterable[Any]) -> list[Any]:
        """Return the keys of one new dict or set, each of them bounded."""
        self._sets += 1
        return [self.key(key, -self._sets) for key in keys]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ``ValueError`` if it has a key twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        doubled, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {doubled!r:.60} is in it twice")
    return made


def bounded_key(key: Any, path: str) -> Any:
    """Return the key itself, once it is known that it can be hashed and shown in bounded time."""
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
    """Return a value of a file in a message: short, and had in bounded time whatever it is."""
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:40])
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    return f"a {type(value).__name__}"
