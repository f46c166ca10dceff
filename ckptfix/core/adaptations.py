"""The values of ``--adapt``: the name of a kind of tensor, and the recipe that resizes it.

``pos_embed=timm``, ``pos_embed@visual.*=timm:14x14:24x24``, ``vocab=pad:mean``, ``head=classes.txt``."""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from ckptfix.core.wording import nearest
from ckptfix.errors import Opt, UsageError

POS_EMBED, WINDOW_BIAS, PATCH_EMBED, IN_CHANS = "pos_embed", "window_bias", "patch_embed", "in_chans"
VOCAB, INFLATE, HEAD, DEPTH = "vocab", "inflate", "head", "depth"

# The recipes of each kind of tensor, with what they do; empty if the recipe is the user's file or list.
RECIPES: Mapping[str, Mapping[str, str]] = {
    POS_EMBED: {
        "timm": "resamples them (bicubic, antialiased), as timm and open_clip",
        "plain": "without antialiasing, as ViT and DINO in transformers",
        "dinov2": "without antialiasing and in float32, as DINOv2 in transformers",
        "siglip2": "resamples them (bilinear, antialiased), as SigLIP2 in transformers",
        "dpt": "resamples them (bilinear), as DPT in transformers",
        "radio": "resamples them (bilinear, in float32), as RADIO in transformers",
        "vilt": "resamples them (bilinear, with aligned corners), as ViLT in transformers",
        "nearest": "repeats the nearest position, as TimeSformer in transformers",
        "yolos": "without antialiasing, with the detection tokens last, as YOLOS",
        "torchvision": "with aligned corners",
        "linear": "stretches the positions",
        "cut": "keeps the first positions",
    },
    WINDOW_BIAS: {
        "swin": "resamples them (bicubic), as Swin's own code",
        "beit": "resamples them on a geometric grid, as BEiT and timm",
        "bilinear": "resamples them (bilinear), as BEiT and Data2Vec in transformers",
        "levit": "resamples them (bicubic, antialiased), as timm for TinyViT",
    },
    PATCH_EMBED: {"timm": "resamples them, so that a resized patch gives the same output"},
    IN_CHANS: {
        "timm": "repeats or sums the channels, scaled to the same sum",
        "mean": "gives each channel the mean of all, scaled to the same sum",
    },
    VOCAB: {
        "cut": "keeps the first entries",
        "pad:mean": "adds entries with the mean of all",
        "pad:zeros": "adds zeros",
        "pad:target": "adds the model's untrained initial values",
    },
    INFLATE: {
        "mean": "repeats them over time, divided by its length",
        "centre": "puts them in the middle frame, and zeros in the others",
    },
    HEAD: {},
    DEPTH: {},
}

# Kinds whose recipe may be followed by the grids of the file and the model.
WITH_GRIDS = (POS_EMBED, WINDOW_BIAS)

IDLE = "idle"  # the key in a note's evidence that lists adaptations that fit nothing

Grid = tuple[int, ...]


class Adaptation(Struct, frozen=True):
    """One ``--adapt``: ``name`` is the kind of tensor, ``keys`` a pattern of the keys it applies to, ``old`` and
    ``new`` the grids of the file and the model, if given."""

    name: str
    recipe: str
    keys: str = "*"
    old: Grid | None = None
    new: Grid | None = None

    @property
    def label(self) -> str:
        """The name in the plan and the report: ``pos_embed=timm``; for files and lists, without the recipe."""
        return f"{self.name}={self.recipe}" if RECIPES[self.name] else self.name

    @property
    def text(self) -> str:
        """The user's option in its shortest form."""
        grids = ("x".join(map(str, grid)) for grid in (self.old, self.new) if grid)
        return self.with_recipe(":".join((self.recipe, *grids)))

    def with_recipe(self, recipe: str) -> str:
        return f"{self.name}{'' if self.keys == '*' else f'@{self.keys}'}={recipe}"

    def files(self) -> tuple[str, ...]:
        return tuple(self.recipe.split(",")) if self.name == HEAD else ()

    def layers(self) -> tuple[int, ...]:
        """Return the layers of the file that ``depth=0-5,8-11`` names, one for each layer of the model. Raises
        ``UsageError`` if the list is invalid."""
        found: list[int] = []
        for piece in self.recipe.split(","):
            match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", piece.strip())
            if match is None or (match[2] and int(match[2]) < int(match[1])):
                raise UsageError(
                    Opt("adapt", self.text), f": {piece!r:.40} is not a layer of the file; write them like 0-5,8-11"
                )
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
        return tuple(found)


def adaptation(text: str) -> Adaptation:
    """Parse ``NAME[@KEYS]=RECIPE[:GRID[:GRID]]``. Raises ``UsageError`` if it is invalid."""
    left, equals, right = text.partition("=")
    name, at, keys = left.partition("@")
    if name not in RECIPES or not equals or not right or (at and not keys):
        close = nearest(name, RECIPES)
        hint = f"did you mean {close}? The" if equals and close and close != name else "write it as NAME=RECIPE; the"
        raise UsageError(Opt("adapt", text), f": {hint} names are {', '.join(RECIPES)}")
    known = RECIPES[name]
    if not known:
        asked = Adaptation(name, right, keys or "*")
        if name == DEPTH:
            asked.layers()
        return asked
    if name not in WITH_GRIDS:
        recipe, grids = right, []
    else:
        recipe, *grids = right.split(":")
    if len(grids) > 2:
        raise UsageError(
            Opt("adapt", text), f": {len(grids)} grids; write those of the file and the model: 14x14:24x24"
        )
    if recipe not in known:
        close = nearest(recipe, known)
        hint = f"did you mean {close}? " if close else ""
        raise UsageError(Opt("adapt", text), f": {name} has no recipe {recipe!r:.40}; {hint}give {' or '.join(known)}")
    old, new = (*(_grid(text, grid) for grid in grids), None, None)[:2]
    return Adaptation(name, recipe, keys or "*", old, new)


def _grid(text: str, grid: str) -> Grid:
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})?", grid):
        raise UsageError(
            Opt("adapt", text),
            f": {grid!r:.40} is not a grid; write rows x columns of the file and the model: 14x14:24x24",
        )
    return tuple(map(int, grid.split("x")))


def chosen(name: str, key: str, recipes: Collection[str], given: Sequence[Adaptation]) -> Adaptation | None:
    """Return the adaptation for a key: preferably one of the fitting ``recipes``, then one that names keys. Raises
    ``UsageError`` if two fit equally well."""
    named = dict.fromkeys(each for each in given if each.name == name and fnmatchcase(key, each.keys))
    ranked = sorted(named, key=lambda each: (each.recipe not in recipes, each.keys == "*"))
    for one, other in pairwise(ranked[:2]):
        if (one.keys == "*") is (other.keys == "*") and (other.recipe in recipes or not recipes):
            both = (Opt("adapt", one.text), " and ", Opt("adapt", other.text))
            raise UsageError(*both, f" both apply to {key.rstrip('.')}; give one of them")
    return next(iter(ranked), None)


def below(folder: Path, text: str) -> str:
    """Return a value of ``--adapt`` with its files relative to ``folder``, that of the configuration file."""
    left, equals, right = text.partition("=")
    if left.partition("@")[0] != HEAD:
        return text
    return f"{left}{equals}{','.join(str(folder / name) for name in right.split(','))}"
