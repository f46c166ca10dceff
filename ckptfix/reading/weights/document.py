"""What a file says before anybody asks which state_dict in it is meant: the parsed root object and facts about the
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfix.core.facts import Fact
from ckptfix.core.spec import TensorSpec


@dataclass
class Document:
    """A parsed file.

    ``root`` is the inert object tree. ``metadata`` is torch's ``_metadata`` where the format carries it outside the
    tree. ``names`` holds the globals that the file's pickles name, and once more with ``()`` after it
    those that they call to do more than to construct a value; ``remarks`` what was noticed on the way.

    A reader goes on past damage as far as that is safe. ``damage`` then says what is wrong; tensors
    whose bytes are gone lie in ``TornBytes``; and ``lost`` has keys that the tree does not hold at all, with their
    specs, or None if only the name is known. ``producer`` says what wrote the file (``torch 2.1 to 2.6``).
    ``copies`` are those of fp32 masters in the dtype of the training, by the key of the weight.
    """

    path: str
    format: str
    root: Any
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    names: set[str] = field(default_factory=set)
    remarks: list[Fact] = field(default_factory=list)
    damage: list[Fact] = field(default_factory=list)
    lost: dict[str, TensorSpec | None] = field(default_factory=dict)
    producer: str = ""
    copies: Mapping[str, TensorSpec] = field(default_factory=dict)
