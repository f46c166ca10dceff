"""The table of known structures: names, shapes, dtypes, buffers and ties of the models in well-known libraries.

``structures.bin`` is written by ``benchmarks/structures.py`` and has three parts. The index is a text with a line per
structure: its block, its line in that block, the number of tensors that are specific to it, its models. The sketches
are the smallest hashes of the tensors of each structure, also with any first segment, sorted, with the number of the
structure, so that a few hashes of a file find similar structures (min-wise hashing). The blocks are compressed texts:
each line is a module with its tensors and the lines of its children, and equal modules share a line. A lookup reads the
index, the sketches and one or two blocks.

A size that the user chooses is a letter: ``c`` classes, ``i`` input channels, ``v`` words; ``4c`` and ``c+1`` are
computed from it. ``197s785`` is 197 for images of the default size and 785 for images twice as large."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from zlib import crc32, decompress

from msgspec import Struct

from ckptfix.core.buffers import NUM_BATCHES_TRACKED, is_transient
from ckptfix.core.likeness import KNOWN
from ckptfix.core.wording import nearest
from ckptfix.errors import Opt, TargetError

if TYPE_CHECKING:
    from ckptfix.core.target import Target

PATH = Path(__file__).with_name("structures.bin")
SKETCH = 8  # hashes of a structure
WIDE = 3 * SKETCH  # hashes of a file to look up; some of its smallest hashes may belong to another head

# The user's names of the sizes.
NAMES = {"c": "num_classes", "i": "in_chans", "v": "vocab_size", "s": "img_size"}

# Scalars next to the weights in OpenAI's files.
OF_CLIP = {"input_resolution", "context_length", "vocab_size"}
_PASSING = {NUM_BATCHES_TRACKED, "n_averaged"}

_SIZE = re.compile(r"(\d*)([civ])(\+1)?|(\d+)s(\d+)")
_ITEM = re.compile(r"([^:=@~!\s]*)([:=@~!])(\S*)")
_BLOCKS = 8  # blocks in the cache
Sizes = Mapping[str, int]  # chosen sizes by letter
Items = list[tuple[str, str]]  # tensors with their tokens


class Model(Struct, frozen=True):
    """A model of a library, ``timm/resnet50``, and its default sizes."""

    name: str
    sizes: Sizes

    @property
    def library(self) -> str:
        """The package, or its short name."""
        return self.name.partition("/")[0]


class Structure(Struct, frozen=True, dict=True):
    """The common structure of some models: all names and shapes, with variables for the sizes that a user chooses.

    ``count`` is the number of tensors that are specific to the architecture. ``tokens`` has, for each tensor, its sign
    (``:`` for a parameter, ``=`` for a buffer), its shape with dots, and after a slash its dtype if that is not
    float32."""

    number: int
    count: int
    models: tuple[Model, ...]
    tokens: Mapping[str, str]
    transient: frozenset[str]
    others: frozenset[str]
    ties: tuple[tuple[str, ...], ...]

    @cached_property
    def shapes(self) -> Mapping[str, str]:
        """The shapes by key, with dots: ``64.i.7.7``."""
        return {key: _shape(token) for key, token in self.tokens.items()}

    def target(self, label: str, sizes: Sizes, usual: Sizes) -> Target:
        """Return what a strict load into the model with these sizes expects; ``usual`` are the default sizes."""
        from ckptfix.core.target import BUFFER, PARAMETER, Slot, Target  # recognition does not need it

        left_out = {key for key, shape in self.shapes.items() if sizes.get("c") == 0 and is_of_head(shape)}
        slots = {}
        for key, token in self.tokens.items():
            if key not in left_out:
                shape, _, dtype = token[1:].partition("/")
                kind = BUFFER if token[0] == "=" else PARAMETER
                slots[key] = Slot(dtype or "float32", shape_of(shape, sizes, usual), kind)
        return Target(label, slots, self.others, self.transient, self.ties)


@cache
def _shape(token: str) -> str:
    return token[1:].partition("/")[0]


def is_of_head(shape: str) -> bool:
    """Return whether a shape depends on the number of classes."""
    return "c" in shape


@cache
def is_free(shape: str) -> bool:
    """Return whether a shape depends on any size that the user chooses."""
    return not shape.replace(".", "").isdigit() and bool(shape)


def shape_of(shape: str, sizes: Sizes = MappingProxyType({}), usual: Sizes = MappingProxyType({})) -> tuple[int, ...]:
    """Return a shape of the table as numbers. Raises ``ValueError`` if images of that size do not divide into
    patches."""
    return tuple(_number(size, sizes, usual) for size in shape.split(".")) if shape else ()


def _number(size: str, sizes: Sizes, usual: Sizes) -> int:
    if size.isdigit():
        return int(size)
    factor, letter, more, one, two = _parts(size)
    if letter:
        return int(factor or 1) * sizes[letter] + bool(more)
    image, normal = sizes["s"], usual["s"]
    if image == normal:
        return int(one)
    grown = _grown(int(one), int(two), image, normal)
    if grown is None:
        raise ValueError(size)
    return grown


def _grown(one: int, two: int, image: int, normal: int) -> int | None:
    """Return a size that is ``one`` for images of size ``normal``, and ``two`` for images twice as large, for images of
    size ``image``; None if it is not an integer.

    It is the number of patches plus a constant, or of distances between patches, or linear in the image size."""
    if (rest := (4 * one - two) // 3) * 3 == 4 * one - two and 0 <= rest < one:
        top, bottom = (one - rest) * image * image, normal * normal
        return rest + top // bottom if top % bottom == 0 else None
    if side := _side(one, two):
        patches, beside = divmod(side * image, normal)
        return None if beside else one - (2 * side - 1) ** 2 + (2 * patches - 1) ** 2
    rest = 2 * one - two
    grown, beside = divmod((one - rest) * image, normal)
    return None if beside else rest + grown


def _side(one: int, two: int) -> int:
    """Return the number of patches per side, if a table has a row per distance of two patches and at most 3 more; else
    0."""
    root = isqrt(1 + 3 * (two - one)) if two > one else 0
    side = (1 + root) // 6
    return side if 0 <= one - (2 * side - 1) ** 2 == two - (4 * side - 1) ** 2 <= 3 else 0


def _parts(size: str) -> tuple[str, str, str, str, str]:
    match = _SIZE.fullmatch(size)
    assert match is not None, f"the table is broken: {size}"
    factor, letter, more, one, two = match.groups(default="")
    return factor, letter, more, one, two


def solve(shape: str, own: str, usual: Sizes) -> dict[str, int] | None:
    """Return the sizes with which a shape of the table equals ``own``; None if there are none."""
    sizes, numbers = (each.split(".") if each else [] for each in (shape, own))
    if len(sizes) != len(numbers):
        return None
    found: dict[str, int] = {}
    for size, number in zip(sizes, map(int, numbers), strict=True):
        if size.isdigit():
            if int(size) != number:
                return None
            continue
        factor, letter, more, one, two = _parts(size)
        if letter:
            value, rest = divmod(number - bool(more), int(factor or 1))
        else:
            letter, rest = "s", 0
            value = _image(int(one), int(two), number, usual["s"])
        if rest or value <= 0 or found.setdefault(letter, value) != value:
            return None
    return found


def _image(one: int, two: int, own: int, normal: int) -> int:
    """Return the image size for which a table has ``own`` rows; 0 if there is none."""
    if one == own:
        return normal
    rest = (4 * one - two) // 3
    if rest * 3 == 4 * one - two and 0 <= rest < one:
        image = isqrt((own - rest) * normal * normal // (one - rest)) if own > rest else 0
    elif side := _side(one, two):
        patches = (1 + isqrt(max(0, own - one + (2 * side - 1) ** 2))) // 2
        image = patches * normal // side
    else:
        rest = 2 * one - two
        image = (own - rest) * normal // (one - rest)
    return image if image > 0 and _grown(one, two, image, normal) == own else 0


# ---- the file


def is_passing(key: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is not specific to an architecture, because it counts batches or comes and goes between
    releases."""
    leaf = key.rpartition(".")[2]
    return leaf in _PASSING or is_transient(leaf, shape) or key in OF_CLIP


def fixed(tokens: Mapping[str, str]) -> dict[str, str]:
    """Return the shapes of the specific tensors that do not depend on the user's sizes."""
    shapes = {key: _shape(token) for key, token in tokens.items()}
    return {key: shape for key, shape in shapes.items() if not (is_free(shape) or is_passing(key, shape_of(shape)))}


def starred(key: str) -> str:
    """Return a name with ``*`` for its first segment: ``*.0.weight`` for ``features.0.weight`` and ``1.0.weight``."""
    return f"*.{key.partition('.')[2]}"


def text_of(key: str, shape: str) -> bytes:
    """Return a name with its shape, as the bytes to hash."""
    return f"{key} {shape}".encode(errors="surrogatepass")


def hashes_of(texts: Iterable[bytes], cut: int = 0) -> list[int]:
    """Return the hashes of texts without their first ``cut`` bytes, in ascending order."""
    return sorted({crc32(text[cut:]) * 2654435761 & 0xFFFFFFFF for text in texts})


class KnownStructures:
    """The table, whose blocks are read on demand."""

    def __init__(self, path: Path = PATH) -> None:
        self._path = path
        with path.open("rb") as file:
            index, sketches = (int(text) for text in file.readline().split()[1:])
            text = decompress(file.read(index)).decode()
            self._hashes, self._owners = array("I"), array("H")
            self._hashes.frombytes(file.read(4 * sketches))
            self._owners.frombytes(file.read(2 * sketches))
            self._start = file.tell()
        first, second, self._rows = text.split("\n", 2)
        # The version of each library from which the table was made.
        self.versions: Mapping[str, str] = dict(each.split("=") for each in first.split())
        self._ends = [int(end) for end in second.split()]
        self._lines = self._rows.split("\n")
        self._kept = lru_cache(_BLOCKS)(self._block)

    def __len__(self) -> int:
        return len(self._lines)

    def similar(self, hashes: Iterable[int]) -> Counter[int]:
        """Count how many of these hashes each structure has among its smallest."""
        found: Counter[int] = Counter()
        for value in hashes:
            at = bisect_left(self._hashes, value)
            while at < len(self._hashes) and self._hashes[at] == value:
                found[self._owners[at]] += 1
                at += 1
        return found

    def count(self, number: int) -> int:
        """Return the number of tensors that are specific to a structure."""
        return int(self._lines[number].split(" ", 3)[2])

    def names(self) -> Iterator[str]:
        """Yield every model: ``timm/resnet50``."""
        for line in self._lines:
            yield from (word.partition(";")[0] for word in line.split(" ")[3:])

    def find(self, name: str) -> tuple[Structure, Model] | None:
        """Return a model by its name, with its structure; None if it is not in the table."""
        match = re.search(rf"(?m)^.* {re.escape(name)}(?:;\S*)?(?: .*)?$", self._rows)
        if match is None:
            return None
        structure = self.structure(self._rows.count("\n", 0, match.start()))
        return structure, next(model for model in structure.models if model.name == name)

    def structure(self, number: int) -> Structure:
        block, line, count, *words = self._lines[number].split(" ")
        models: list[Model] = []
        for word in words:
            name, *sizes = word.split(";")
            own = {text[0]: int(text[1:]) for text in sizes}
            models.append(Model(name, own or (models[0].sizes if models else own)))
        lines, modules = self._kept(int(block))
        root, *ties = lines[int(line)].split(" ")
        tokens, transient, others = dict[str, str](), set[str](), set[str]()
        for key, token in expanded(lines, int(root), modules):
            if token == "~":
                transient.add(key)
            elif token == "!":
                others.add(key)
            else:
                tokens[key] = token
        groups = tuple(tuple(group.split("=")) for group in ties)
        return Structure(number, int(count), tuple(models), tokens, frozenset(transient), frozenset(others), groups)

    def _block(self, number: int) -> tuple[list[str], dict[int, Items]]:
        """Return the lines of a block, and a cache of expanded modules, which its structures share."""
        start = self._ends[number - 1] if number else 0
        with self._path.open("rb") as file:
            file.seek(self._start + start)
            packed = file.read(self._ends[number] - start)
        return decompress(packed).decode().split("\n"), {}


def expanded(lines: list[str], line: int, modules: dict[int, Items]) -> Items:
    """Return the tensors of a module and its children, each with its token; ``modules`` caches expanded children."""
    items: Items = []
    for name, sign, rest in _ITEM.findall(lines[line]):
        if sign == "@":
            if (child := int(rest)) not in modules:
                modules[child] = expanded(lines, child, modules)
            first, dash, last = name.partition("-")
            names = map(str, range(int(first), int(last) + 1)) if dash and first.isdigit() else (name,)
            items += [(f"{each}.{key}", token) for each in names for key, token in modules[child]]
        else:
            items.append((name or rest, f"{sign}{rest}" if sign in ":=" else sign))
    return items


@cache
def table() -> KnownStructures:
    """Return the table that ships with ckptfix."""
    return KnownStructures()


def known_target(spec: str) -> Target:
    """Return what a strict load into a known model expects; ``spec`` is ``timm/resnet50[num_classes=10]``.

    Raises ``TargetError`` for an unknown model or invalid sizes."""
    name, bracket, rest = spec.partition("[")
    label = f"{KNOWN}{spec}"
    found = table().find(name)
    if found is None:
        close = nearest(name, table().names(), 0.4)
        versions = ", ".join(f"{library} {version}" for library, version in table().versions.items())
        hint = f"did you mean {close}" if close else "the names are like timm/resnet50"
        raise TargetError(Opt("like", label), f": no known model is called {name} ({versions}); {hint}")
    structure, model = found
    letters = {argument: letter for letter, argument in NAMES.items()}
    sizes = dict(model.sizes)
    if bracket and not rest.endswith("]"):
        raise TargetError(Opt("like", label), ": the bracket is not closed")
    for argument in filter(None, rest.removesuffix("]").split(",")):
        own, _, value = (part.strip() for part in argument.partition("="))
        letter = letters.get(own, "")
        if letter not in sizes:
            takes = ", ".join(f"{NAMES[each]}={size}" for each, size in sizes.items()) or "none"
            raise TargetError(Opt("like", label), f": {own} is not an argument of {name}; it takes {takes}")
        least = int(letter != "c")
        if not (value.isascii() and value.isdigit() and int(value) >= least):
            given = value or "nothing"
            raise TargetError(Opt("like", label), f": {own} has to be an integer of at least {least}, not {given}")
        sizes[letter] = int(value)
    try:
        return structure.target(label, sizes, model.sizes)
    except ValueError as error:
        raise TargetError(
            Opt("like", label), f": images of {sizes['s']} do not divide into patches; those of {model.sizes['s']} do"
        ) from error
