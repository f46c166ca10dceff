"""The texts of ``--input``, and what they mean; ``arguments`` makes the tensors.

::

    [NAME=]SHAPE               2x3x224x224                normal random numbers of the model's dtype
    [NAME=]SHAPE:int:LOW:HIGH  input_ids=2x16:int:0:1000  int64, LOW <= value < HIGH
    [NAME=]FILE                image.npy, batch.pt, batch.safetensors
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptfix.errors import UsageError

SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")
_FORMS = (
    "give a shape (2x3x224x224), integers (2x16:int:0:1000) or a file (.npy, .pt, .safetensors), "
    "each with NAME= before it for a keyword"
)


Draw = Literal["normal", "uniform", "ones", "zeros"]
"""How the numbers of a random input are made; ``uniform`` are from 0 to 1, as images are."""


@dataclass(frozen=True)
class RandomInput:
    """A tensor of random numbers: floats, or integers ``bounds[0] <= value < bounds[1]``. ``name`` None is positional.

    ``draw`` says how floats are made; of integers ``ones`` and ``zeros`` are the highest and the lowest.
    """

    shape: tuple[int, ...]
    bounds: tuple[int, int] | None = None
    name: str | None = None
    draw: Draw = "normal"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) + (f":int:{self.bounds[0]}:{self.bounds[1]}" if self.bounds else "")
        return f"{self.name}={shape}" if self.name else shape


@dataclass(frozen=True)
class FileInput:
    """The tensors of a file: one is positional (or ``name``), those of a mapping are keywords."""

    path: str
    name: str | None = None


Input = RandomInput | FileInput


def parse_inputs(texts: Iterable[str]) -> tuple[Input, ...]:
    """The inputs that these texts mean; raises ``UsageError`` of one line for the first that means nothing."""
    inputs = tuple(_parse(text) for text in texts)
    names = [given.name for given in inputs if given.name]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--input names {name!r} twice: give each argument of forward once")
    return inputs


def _parse(text: str) -> Input:
    before, equals, after = text.partition("=")
    name, value = (before, after) if equals and before.isidentifier() else (None, text)
    if value.endswith(SUFFIXES):
        if not Path(value).is_file():
            raise UsageError(f"--input {text!r}: there is no file {value!r}; check the path")
        return FileInput(value, name)
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+)((?::-?\d+)*))?", value)
    if match is None:
        raise UsageError(f"--input {text!r} is neither a shape nor a file: {_FORMS}")
    shape = tuple(int(size) for size in match[1].split("x"))
    if 0 in shape:
        raise UsageError(f"--input {text!r} has a dimension of size 0: the forward test needs at least one element")
    if match[2] is None:
        return RandomInput(shape, None, name)
    bounds = [int(bound) for bound in match[3].split(":")[1:]]
    if match[2] != "int" or len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise UsageError(f"--input {text!r} has no range of integers: write SHAPE:int:LOW:HIGH with LOW < HIGH")
    return RandomInput(shape, (bounds[0], bounds[1]), name)
