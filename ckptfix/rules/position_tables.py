"""Tables of positions: whether they are for images or texts, their grids in the file and in the model, and the recipes
of ``--adapt`` that resample them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from msgspec import Struct

from ckptfix.core.adaptations import POS_EMBED, RECIPES, WINDOW_BIAS, Adaptation, Grid
from ckptfix.core.finding import counted
from ckptfix.core.parts import Shape
from ckptfix.core.target import Target
from ckptfix.values.adapted_tensors import is_of_blocks

# Segments of keys that hold position embeddings; `pos_head` and `pos_tag` do not.
POSITIONS = re.compile(
    r"(?:^|[._])(?:wpe(?=\.|$)|time_embed(?:dings?)?$|(?:abs(?:olute)?_|rel_)?pos(?:ition(?:al|s)?)?"
    r"(?:_?emb(?:ed(?:ding)?s?)?\d*(?=[._]|$)|(?:_(?:[dhtwxy]|ids|table|(?:bias|enc)\w*))?(?=\.|$)))",
    re.IGNORECASE,
)

# Distances along one axis, as in SAM, MViT and BoTNet.
_DISTANCES = re.compile(r"(?:^|[._])(?:rel_pos_[hwt]|(?:height|width)_rel)$")
HEADS_FIRST = re.compile(r"(?:^|\.)attention_biases$")
_IMAGES = re.compile(r"(?:^|[._])(?:visual|vision\w*|vit|image\w*|pos_embed|pos_embedding)(?:[._]|$)", re.IGNORECASE)

# Positions of the rows or columns of images, or of the frames of videos.
_ONE_AXIS = re.compile(r"(?:^|[._])(?:rows?|col(?:umn)?s?|temporal|time|frames?|mit)(?=[._])", re.IGNORECASE)

_FRAMES = re.compile(r"(?:^|\.)time_embed(?:dings)?$")  # of TimeSformer, by its own code and in transformers

# Words in the classes around a table. In GroupViT, a text class has the model's name with "ViT" in it.
_OWNERS = re.compile("Vision|Image|ViT(?!.*(?:Text|Decoder))|Text|Decoder|Language")
_OF_IMAGES = frozenset(("Vision", "Image", "ViT"))

# Parameters of tokens that come before the patches and may have positions too, in this order.
_TOKENS = {
    "class": ("cls_token", "class_token", "class_embedding"),
    "distillation": ("dist_token", "distillation_token"),
    "register": ("reg_token", "reg_tokens", "register_tokens"),
}

_OF_TEXTS = ("linear", "cut")  # the recipes for positions along one axis
_LAST = "yolos"  # the recipe for tables with detection tokens after the patches

_MOST_TOKENS = 16
_BY_LIBRARY = {"timm": "timm", "torchvision": "torchvision", "open_clip": "timm", "transformers": "plain"}
# Modules of transformers that resample their tables unlike most; an empty recipe if none matches.
_BY_MODULE = (
    (re.compile("Dinov2Embeddings|PixioEmbeddings"), "dinov2"),
    (
        re.compile("DeepseekOcr2SamVisionEncoder|RfDetrDinov2Embeddings|UnlimitedOcr(SamVisionEncoder|VisionEmb\\w+)"),
        "timm",
    ),
    (re.compile("(Siglip2|Cosmos3Edge|Tipsv2)VisionEmbeddings|VideoPrismSpatialEmbeddings"), "siglip2"),
    (re.compile("DPTViT(Hybrid)?Embeddings|Step3p7VisionEmbeddings|PvtPatchEmbeddings"), "dpt"),
    (re.compile("RadioPatchEmbeddings|HunYuanVLVisionPatchEmbed|PaddleOCRVisionEmbeddings"), "radio"),
    (re.compile("ViltEmbeddings|(Qwen[34]|CohereCompass)\\w*Vision\\w+"), "vilt"),
    (re.compile("TimesformerEmbeddings"), "nearest"),
    (re.compile("LayoutLMv3Model|Glm(4v\\w*|Image)VisionEmbeddings"), "plain"),
    (re.compile("(Muse|Inkling)\\w+|IdeficsVisionEmbeddings|ViTMAEDecoder"), ""),
    (re.compile("(Beit|Data2VecVision)RelativePositionBias"), "bilinear"),
)
# The recipe of a library, by the keys that it writes.
_BY_NAME = (
    (re.compile(r"(?:^|\.)encoder\.pos_embedding$"), "torchvision"),
    (re.compile(r"(?:^|\.)position_embeddings?(?:\.weight)?$"), "plain"),
)
_PADDING, _UNIT = 2, 8  # rows before the positions, and a divisor of the number of positions


class Pairing(Struct, frozen=True):
    """A model and a file for it: all ``tensors`` of the file, the grid ``stored`` in the config.json next to it, and
    the keys of ``fixed`` tables of sinusoids, whose rows mean fixed positions."""

    target: Target
    tensors: Mapping[str, Shape]
    stored: Grid | None = None
    fixed: Collection[str] = ()


class PositionTable(Struct, frozen=True, dict=True):
    """A table of positions, with its shapes in the file and in the model."""

    name: str
    key: str
    old: Shape
    new: Shape
    pairing: Pairing

    @property
    def target(self) -> Target:
        return self.pairing.target

    @cached_property
    def recipes(self) -> tuple[tuple[str, ...], str]:
        """The recipes, that of the model's own library first, and the name of the library."""
        library = self.target.library
        if self.name == WINDOW_BIAS and HEADS_FIRST.search(self.key):
            return ("levit",), ""
        if self.is_of_videos:
            return (), ""
        if self.name == WINDOW_BIAS:
            has_tokens = len(self.old) == 2 and not is_square(self.old[0])
            first = self.own or ("beit" if has_tokens else "swin")
            return tuple(dict.fromkeys((first, "swin", "beit", "bilinear"))), library if self.own else ""
        if self.last:
            return (_LAST,), library
        if _FRAMES.search(self.key):
            return ("nearest",), ""
        if not self.is_of_images:
            is_shorter = self.new < self.old and not _DISTANCES.search(self.key)
            is_trained = self.key not in self.pairing.fixed and self.key not in self.target.frozen
            fitting = ("cut",) * is_shorter + ("linear",) * is_trained
            return (fitting[::-1], library) if library == "open_clip" else (fitting, "")
        first = self.own or next((recipe for pattern, recipe in _BY_NAME if pattern.search(self.key)), "timm")
        recipes = dict.fromkeys((first, "timm", "plain", "torchvision", *(() if self.own else RECIPES[POS_EMBED])))
        return tuple(each for each in recipes if each not in (*_OF_TEXTS, _LAST)), library if self.own else ""

    @cached_property
    def own(self) -> str:
        """The recipe of the model's own library for the table; empty if none is known."""
        if self.last:
            return _LAST
        kinds = [(self.target.modules or {}).get(path, "") for path in self.around]
        known = (recipe for kind in kinds for pattern, recipe in _BY_MODULE if pattern.fullmatch(kind))
        if (recipe := next(known, None)) is not None:
            return recipe
        if self.name == WINDOW_BIAS:
            return "beit" if self.target.library == "timm" else ""
        if is_of_blocks(self.old, self.new):
            return "plain"
        if f"{self.around[0]}.register_tokens".lstrip(".") in self.target.slots:  # as in DINOv2 of transformers
            return "timm"
        return "" if self.is_left else _BY_LIBRARY.get(self.target.library, "")

    @property
    def is_left(self) -> bool:
        """Whether the model is from transformers and none of its modules has a function that resizes the table."""
        is_known = self.target.library == "transformers" and self.target.modules is not None
        return is_known and self.target.resizes.isdisjoint(self.around)

    @cached_property
    def around(self) -> tuple[str, str]:
        """The paths of the table's module and of its parent, which resizes an embedding."""
        path = self.key.rpartition(".")[0]
        return path, path.rpartition(".")[0]

    @property
    def is_of_videos(self) -> bool:
        """Whether the model has a position for each patch of each frame, which no library resizes."""
        return self.name == POS_EMBED and len(self.grid_of_model or ()) > 2

    @property
    def _may_be_of_videos(self) -> bool:
        """Whether the patches next to the table span several frames, and no model gives the grid."""
        patches = (shape for key, shape in self.pairing.tensors.items() if key.startswith(self.around[0]))
        is_beside = any(len(shape) == 5 and shape[2] > 1 for shape in patches)
        return self.name == POS_EMBED and self.target.modules is None and is_beside

    @cached_property
    def is_of_images(self) -> bool:
        """Whether the positions are those of image patches, not of a text."""
        if _DISTANCES.search(self.key) or (self.name == POS_EMBED and _ONE_AXIS.search(self.key)):
            return False
        if self.name == WINDOW_BIAS or len(self.old) == 4 or self.grid_of_model is not None:
            return True
        is_named = bool(_IMAGES.search(self.key)) or len(self.old) == 3
        modules = reversed([*(self.target.modules or {}).items()])
        kinds = (kind for path, kind in modules if not path or self.key.startswith(f"{path}."))
        sides = ({word in _OF_IMAGES for word in _OWNERS.findall(kind)} for kind in kinds)
        is_class = next((True in side for side in sides if len(side) == 1), False)  # names with both do not count
        # A model with a grid of patches would give it.
        return is_named or is_class or (self.target.modules is None and bool(self.tokens))

    @cached_property
    def tokens(self) -> dict[str, int]:
        """The number of tokens of each kind in the table's module or its parent."""
        path = self.key.split(".")[:-1]
        found: dict[str, int] = {}
        for around in (path, path[:-1]):
            for kind, names in _TOKENS.items():
                for name in names:
                    shape = self.pairing.tensors.get(".".join((*around, name)))
                    if shape is not None and kind not in found:
                        found[kind] = shape[1] if len(shape) == 3 else 1
        return found

    @cached_property
    def last(self) -> int:
        """The number of detection tokens, which come after the patches in each table of the model."""
        shapes = [shape for key, shape in self.pairing.tensors.items() if is_last_tokens(key)]
        return shapes[0][-2] if shapes and self.name == POS_EMBED and self.old[-1:] == shapes[0][-1:] else 0

    def _rows(self, shape: Shape) -> int:
        """Return the number of positions in a table, without those of detection tokens."""
        return shape[-2] - self.last if self.last else math.prod(shape[:-1])

    @cached_property
    def grid_of_model(self) -> Grid | None:
        """The grid of patches that the model makes of an image, if its table has a position for each patch."""
        rows, path = self._rows(self.new), self.key.rpartition(".")[0]
        others = [name for name in self.target.slots if name != self.key and POSITIONS.search(name)]
        while True:
            below = f"{path}." if path else ""
            grids = {
                grid
                for place, grid in self.target.grids.items()
                if (place == path or place.startswith(below))
                and 0 <= rows - math.prod(grid) <= _MOST_TOKENS
                # An image encoder with its own table does not give the grid of a text encoder next to it.
                and not (place and any(name.startswith(f"{place}.") for name in others))
            }
            if grids or not path:
                return grids.pop() if len(grids) == 1 else None
            path = path.rpartition(".")[0]

    def words(self, old: Grid, new: Grid) -> str:
        """Return what the shapes mean, in words."""
        remark = "; transformers has no function to resize them" * (self.is_left and not self.own)
        if self.name == WINDOW_BIAS and len(old) == len(new) == 2 and self.old[-1] == math.prod(old):
            return f"distances in a window of {size(old)} in the file and of {size(new)} in the model"
        if self.name == WINDOW_BIAS:
            return f"windows of {size(window(old))} in the file and of {size(window(new))} in the model{remark}"
        if len(old) == 1:
            return f"{old[0]} positions in the file and {new[0]} in the model"
        tokens = 0 if len(self.old) == 4 else self._rows(self.old) - math.prod(old)
        is_used = "Swinv2Embeddings" not in (self.target.modules or {}).get(self.around[0], "")
        beside = f" (and {counted(tokens, 'token' if is_used else 'row that no token uses')})" if tokens else ""
        return f"a grid of {size(old)} in the file{beside}, of {size(new)} in the model{remark}"

    def grids(self, given: Adaptation | None) -> tuple[Grid, Grid] | str:
        """Return the grids of the file and of the model, or the reason why they are unknown."""
        if is_of_blocks(self.old, self.new):
            sides = [math.isqrt(shape[1] * shape[2]) for shape in (self.old, self.new)]
            return (sides[0], sides[0]), (sides[1], sides[1])
        if len(self.old) == 4 and not self.last:
            first = 1 if self.old[3] == self.new[3] else 2  # channels last, or channels before the grid
            return self.old[first : first + 2], self.new[first : first + 2]
        if self.name == WINDOW_BIAS and len(self.old) == 3:
            return self.old[1:], self.new[1:]
        is_last = bool(HEADS_FIRST.search(self.key))
        rows, wanted = (shape[-1] if is_last else self._rows(shape) for shape in (self.old, self.new))
        hand, goal = (given.old, given.new) if given else (None, None)
        if not self.is_of_images:
            # RoBERTa, BART and OPT have two rows before the positions: 514 rows for 512.
            first = _PADDING if rows % _UNIT == wanted % _UNIT == _PADDING and not is_last else 0
            old, new = hand or (rows - first,), goal or (wanted - first,)
            if len(old) > 1 or len(new) > 1:
                return "text positions have no rows and columns"
            if rows - math.prod(old) != wanted - math.prod(new) or rows < math.prod(old):
                return f"the other positions, {rows} - {size(old)} and {wanted} - {size(new)}, differ in number"
            return old, new
        if hand is None and self.grid_of_model is None and self._may_be_of_videos:
            return f"the file's {rows} positions may include frames"
        own: Grid | None = None
        if self.name == WINDOW_BIAS and not is_last:
            own = next((self.target.windows[each] for each in self.around if each in self.target.windows), None)
            hand, goal, own = (tuple(2 * side - 1 for side in grid) if grid else None for grid in (hand, goal, own))
        elif not is_last:
            own = self.grid_of_model
        if goal is not None and own is not None and goal != own:
            return f"the model's grid is {size(self.shown(own))} and not {size(self.shown(goal))}"
        stored = self.pairing.stored if self.name == POS_EMBED else None
        if (goal := goal or own) is not None:
            tokens = wanted - math.prod(goal)
            if not 0 <= tokens <= _MOST_TOKENS:
                return f"{wanted} positions in the model are not those of a grid of {size(self.shown(goal))}"
            if hand is None and stored is not None and rows - tokens == math.prod(stored):
                hand = stored
            return self._with_tokens(rows, tokens, goal, hand)
        if hand is None and stored is not None and 0 <= rows - math.prod(stored) <= _MOST_TOKENS:
            hand, tokens = stored, rows - math.prod(stored)
            if is_square(wanted - tokens):
                return self._with_tokens(rows, tokens, (math.isqrt(wanted - tokens),) * 2, hand)
        counts = [0, *accumulate(self.tokens.values())] if self.pairing.tensors else [0, 1, 2, 5]
        if self.name == WINDOW_BIAS:
            counts = [0] if is_last else [0, 3]
        elif self.last or "SegGptEmbeddings" in (self.target.modules or {}).get(self.around[0], ""):
            counts = [1]
        fits = [tokens for tokens in counts if is_square(wanted - tokens) and (hand or is_square(rows - tokens))]
        if len(fits) != 1:
            return f"the file's {rows} positions and the model's {wanted} do not fit square grids with the same tokens"
        return self._with_tokens(rows, fits[0], (math.isqrt(wanted - fits[0]),) * 2, hand)

    def _with_tokens(self, rows: int, tokens: int, goal: Grid, hand: Grid | None) -> tuple[Grid, Grid] | str:
        """Return the grids if both tables have this number of tokens, or the reason why they are unknown."""
        points = rows - tokens
        beside = f" and {counted(tokens, 'token')}" if tokens else ""
        square = (math.isqrt(points),) * 2 if is_square(points) else None
        alike = _grid_like(goal, points) if self.name == POS_EMBED else None
        if hand is None and square and alike and square != alike:
            return f"the file's {rows} positions may be those of a grid of {size(square)} or of {size(alike)}{beside}"
        if hand is not None and math.prod(hand) != points:
            instead = f", but of one of {size(self.shown(square))}" if square else ""
            if 0 <= (others := rows - math.prod(hand)) <= _MOST_TOKENS and self.name == POS_EMBED:
                instead = f", but of one and {counted(others, 'token')}, and no recipe changes the number of tokens"
            return f"the file's {rows} positions are not those of a grid of {size(self.shown(hand))}{beside}{instead}"
        if (old := hand or square) is None:
            perhaps = f", but perhaps of one of {size(alike)}" if alike else ""
            return f"the file's {rows} positions are not those of a square grid{beside}{perhaps}"
        return old, goal

    def shown(self, grid: Grid) -> Grid:
        """Return a grid in the form in which the user gives it."""
        return window(grid) if self.name == WINDOW_BIAS else grid


def is_last_tokens(key: str) -> bool:
    """Return whether a parameter holds detection tokens, as in YOLOS."""
    return key.rpartition(".")[2] in ("detection_tokens", "det_token")


def _grid_like(goal: Grid, points: int) -> Grid | None:
    """Return the grid with this many points and the aspect ratio of ``goal``."""
    unit = [side // math.gcd(*goal) for side in goal]
    factor = math.isqrt(points // math.prod(unit))
    return tuple(side * factor for side in unit) if len(goal) == 2 and factor**2 * math.prod(unit) == points else None


def is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def size(grid: Sequence[int]) -> str:
    """Return a grid as text: ``14x14``."""
    return "x".join(map(str, grid))


def window(table: Grid) -> Grid:
    """Return the window for which a table of relative positions is made."""
    return tuple((side + 1) // 2 for side in table)
