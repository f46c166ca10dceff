"""Which known architecture a state_dict has, as data: how well it fits, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field, to_builtins


class Fit(Enum):
    """How well a state_dict fits a known architecture. All except ``NEAR`` identify it."""

    EXACT = "exact"  # every key and shape is the model's, with sizes that its arguments set
    HEADLESS = "headless"  # the same, but the tensors that depend on the number of classes are missing
    OTHER_HEAD = "other-head"  # the same, but with another head
    PART = "part"  # the keys under a prefix are the model's, perhaps without its head; there are others
    PIECE = "piece"  # the keys are those of one layer, without its name, which has at least half of the model's tensors
    NEAR = "near"  # most keys and shapes are the model's, and no other known model is nearer


class Likeness(Struct, frozen=True):
    """A known architecture that matches a state_dict, or is nearest to it.

    ``names`` are the models of this structure, such as ``timm/resnet50``, the plainest first, and ``versions`` the
    releases of their libraries in the table. ``prefix`` is what precedes the model's names in the keys, or the segments
    of a wrapper in them; ``outside`` counts the keys without it. ``sizes`` are the arguments of the first model that
    give these shapes, by the names that ``--like known:NAME[…]`` takes, without those that are defaults. ``missing``
    are keys that only the model has, ``added`` keys that only the file has (without the prefix), and ``differing`` keys
    of both whose shapes differ; ``matching`` of the model's ``tensors`` keys are in the file with their shape.
    ``renamed`` maps first segments of the file's keys to the model's, and ``others`` are further models in the file."""

    names: tuple[str, ...]
    fit: Fit
    versions: Mapping[str, str]
    prefix: str = ""
    outside: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    matching: int = 0
    tensors: int = 0
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    renamed: Mapping[str, str] = {}
    others: tuple[Likeness, ...] = ()

    @property
    def is_named(self) -> bool:
        """Whether the model is identified, and not only near."""
        return self.fit is not Fit.NEAR

    @property
    def target(self) -> str:
        """The first model with its sizes, as ``--like`` takes it: ``known:timm/resnet50[num_classes=10]``."""
        return f"{KNOWN}{self.names[0]}{bracketed(self._wanted)}"

    @property
    def model(self) -> str | None:
        """The same as ``--model`` takes it, with the library installed: ``timm:resnet50[num_classes=10]``.

        None if the library has no argument for one of the sizes."""
        library, _, name = self.names[0].partition("/")
        arguments = SIZE_ARGUMENTS.get(library)
        sizes = self._wanted
        if arguments is None or not sizes.keys() <= arguments.keys() or (self.is_headless and library != "timm"):
            return None
        own: dict[str, object] = {arguments[size]: value for size, value in sizes.items()}
        if library == "smp":
            name, _, encoder = name.partition("-")
            own = {"encoder_name": encoder, **own}
        return f"{library}:{name}{bracketed(own)}"

    @property
    def is_headless(self) -> bool:
        return self.fit is Fit.HEADLESS or (
            self.fit is Fit.PART and bool(self.missing) and not (self.added or self.differing)
        )

    @property
    def _wanted(self) -> dict[str, int]:
        return dict(self.sizes) | ({"num_classes": 0} if self.is_headless else {})

    def to_json(self) -> dict[str, Any]:
        others = [other.to_json() for other in self.others]
        return {**to_builtins(self), "others": others, "target": self.target, "model": self.model}


KNOWN = "known:"  # prefix of a target from the table of known architectures

# The libraries' names of the sizes. Only timm builds a model without its head.
SIZE_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "timm": {"num_classes": "num_classes", "in_chans": "in_chans", "img_size": "img_size"},
    "torchvision": {"num_classes": "num_classes", "img_size": "image_size"},
    "transformers": {
        "num_classes": "num_labels",
        "in_chans": "num_channels",
        "vocab_size": "vocab_size",
        "img_size": "image_size",
    },
    "diffusers": {"in_chans": "in_channels"},
    "open_clip": {"img_size": "force_image_size"},
    "smp": {"num_classes": "classes", "in_chans": "in_channels"},
    "torchaudio": {},
}


def bracketed(sizes: Mapping[str, object]) -> str:
    """Return the arguments in the form that follows a model's name: ``[num_classes=10]``; empty if there are none."""
    return f"[{','.join(f'{name}={size}' for name, size in sizes.items())}]" if sizes else ""
