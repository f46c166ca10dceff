"""Which known architecture a state_dict is, as data: how well it fits, and what is different."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field, to_builtins


class Fit(Enum):
    """How well a state_dict fits a known architecture. All but the last name it."""

    EXACT = "exact"  # every key and shape is that of the model, with sizes that its arguments choose
    HEADLESS = "headless"  # every key and shape is, and those that depend on the number of classes are not there
    # Every key and shape is, except for those of the head, which another one takes the place of.
    OTHER_HEAD = "other-head"
    # The keys under a prefix are those of the model, perhaps without its head; other keys are beside them.
    PART = "part"
    # Every key and shape is that of one layer of the model, with at least half of its tensors, and without the layer's
    # own name.
    PIECE = "piece"
    NEAR = "near"  # most keys and shapes are: this is not the model, but nothing known is nearer


class Likeness(Struct, frozen=True):
    """A known architecture that a state_dict is or is like.

    ``names`` are the models of this structure, such as ``timm/resnet50``, the plainest first, and ``versions`` the
    releases of their libraries that were looked at. ``prefix`` is what the keys have before the names of the model, or
    the wrapper's segments in them; ``outside`` counts the keys without it. ``sizes`` are the arguments of the first
    model that give these shapes, by the names that ``--like known:NAME[…]`` takes, where they are not its defaults.
    ``missing``, ``added`` and ``differing`` are keys of the model, of the file (without the prefix), and of both in
    another shape; ``matching`` of ``tensors`` keys of the model are in the file as they are. ``renamed`` has first
    segments of the file's keys with those that the model has instead, and ``others`` are the models beside this one."""

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
        """Whether the model is known, and not only a near one."""
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


KNOWN = "known:"  # what a target begins with that comes from the table of known architectures


# What the libraries call the sizes. Only timm builds a model without its head.
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
    """Return arguments as they follow the name of a model: ``[num_classes=10]``; nothing if there are none."""
    return f"[{','.join(f'{name}={size}' for name, size in sizes.items())}]" if sizes else ""
