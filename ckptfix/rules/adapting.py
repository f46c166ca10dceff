"""Tensors of the right name and another shape that a known formula makes fit: which they are, and which recipe of
``--adapt`` is for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.adaptations import (
    HEAD,
    IN_CHANS,
    INFLATE,
    PATCH_EMBED,
    POS_EMBED,
    RECIPES,
    VOCAB,
    WINDOW_BIAS,
    Adaptation,
    Grid,
)
from ckptfix.core.edits import PAD_TARGET, Adapt
from ckptfix.core.finding import Placeholder, Remedy, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.errors import Opt, UsageError
from ckptfix.rules.class_maps import class_rows, is_of_boxes
from ckptfix.values.adapted_tensors import is_of_blocks, patch

Shape = tuple[int, ...]
Pairs = dict[str, tuple[Shape, Shape]]  # by key the shape in the file and that in the model

# Segments of keys that hold position embeddings; `pos_head` and `pos_tag` do not.
POSITIONS = re.compile(
    r"(?:^|[._])(?:wpe(?=\.|$)|(?:abs(?:olute)?_|rel_)?pos(?:ition(?:al|s)?)?"
    r"(?:_?emb(?:ed(?:ding)?s?)?\d*(?=[._]|$)|(?:_(?:[dhtwxy]|ids|table|(?:bias|enc)\w*))?(?=\.|$)))",
    re.IGNORECASE,
)

_BIAS_TABLES = re.compile(r"(?:^|[._])rel(?:ative)?_pos(?:ition)?_bias_table$", re.IGNORECASE)
# In one direction, from one end to the other, as in SAM, MViT and BoTNet.
_DISTANCES = re.compile(r"(?:^|[._])(?:rel_pos_[hwt]|(?:height|width)_rel)$")
_HEADS_FIRST = re.compile(r"(?:^|\.)attention_biases$")
_PATCHES = re.compile(
    r"(?:^|[._])(?:patch_?(?:emb\w*|conv)|embed_patches|conv_proj|patchify)(?:[._]|$)"
    r"|(?:visual\.conv1|embed(?:s|dings)\.proj(?:ection)?)\.weight$",
    re.IGNORECASE,
)
# What embeddings of words are called, in models whose configuration does not say the size of their vocabulary.
_WORDS = re.compile(
    r"wte|shared|lookup(?:_table)?|tokens_embed|(?:(?:word|tok(?:en)?|sub_?word|text|char|vocab|src|tgt|source|target|"
    r"in(?:put)?|out(?:put)?|enc(?:oder)?|dec(?:oder)?)s?_)*emb(?:ed(?:d(?:ing|er))?)?s?"
    r"(?:_in|(?:_text)?_tokens(?:_per_layer)?|_table|_layer|_matrix)?",
    re.IGNORECASE,
)
_NO_WORDS = re.compile(
    r"token_type|segment|patch|time|label|class|y_emb|quant|codebook|(?:^|[._])vq|speaker|item|user|entit|relation|"
    r"product|node|graph|categor|feature",
    re.IGNORECASE,
)
# Queries of DETR have no order. Coordinates, and distances that are not those of patches, keep their rows' meaning.
_NO_PLACES = re.compile(
    r"quer(?:y|ies)_|(?:^|[._])(?:rel(?:ative)?_pos(?:ition)?(?!\w*table|_[hwt]$)|[xyhw]_pos|relative_att)|\.pe_[kv]\.",
    re.IGNORECASE,
)
_NO_HEADS = re.compile(
    r"token_type|segment|relative|bucket|distance|quer|(?<!class_)(?<!box_)emb|quant|codebook|expert|router|gate|att|"
    r"merger|latent|(?:^|[._])(?:bn|\w*norm)|project(?:ion|or)|pooler|sampl|memory|conv_out|points_scale",
    re.IGNORECASE,
)
_IMAGES = re.compile(r"(?:^|[._])(?:visual|vision\w*|vit|image\w*|pos_embed|pos_embedding)(?:[._]|$)", re.IGNORECASE)

# Of the rows or the columns of images, or of the moments of videos.
_ONE_AXIS = re.compile(r"(?:^|[._])(?:rows?|col(?:umn)?s?|temporal|time|frames?|mit)(?=[._])", re.IGNORECASE)

# What classes around a table are called; that of a text is not named for images if its model is, as in GroupViT.
_OWNERS = re.compile("Vision|Image|ViT(?!.*(?:Text|Decoder))|Text|Decoder|Language")
_OF_IMAGES = frozenset(("Vision", "Image", "ViT"))

# Parameters of tokens that come before the patches, and may have positions of their own, in that order.
_TOKENS = {
    "class": ("cls_token", "class_token", "class_embedding"),
    "distillation": ("dist_token", "distillation_token"),
    "register": ("reg_token", "reg_tokens", "register_tokens"),
}

# Those of YOLOS come after the patches, and no recipe is for them.
_LAST_TOKENS = ("detection_tokens", "det_token")

_OF_TEXTS = ("linear", "cut")  # the recipes for positions in one direction

_MOST_TOKENS = 16
_MOST_CHANNELS = 64  # channels of the file's input beyond which a convolution is not the first one of a model
_MOST_SIGNALS = 12  # the same over time only, where more are the bands of a spectrum and have an order
_BY_LIBRARY = {"timm": "timm", "torchvision": "torchvision", "open_clip": "timm", "transformers": "plain"}
# Modules of transformers that resample their tables otherwise than most; none for those that no recipe is like.
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
    (re.compile("(Muse|Inkling)\\w+|IdeficsVisionEmbeddings"), ""),
    (re.compile("(Beit|Data2VecVision)RelativePositionBias"), "bilinear"),
)
# The recipe for position embeddings of each library, by its package, or by the keys that it writes.
_BY_NAME = (
    (re.compile(r"(?:^|\.)encoder\.pos_embedding$"), "torchvision"),
    (re.compile(r"(?:^|\.)position_embeddings?(?:\.weight)?$"), "plain"),
)


class Case(Struct, frozen=True):
    """Tensors that one recipe makes fit.

    ``recipes`` are those that can, the one of the model's own library first, whose name is ``library`` if it is known.
    ``words`` say what the shapes mean. ``grids`` are that of the file and that of the model, for tables of positions,
    and ``unclear`` says why they are not known. ``keeps_last``: the last row of a vocabulary is none of its words."""

    name: str
    shapes: Pairs
    recipes: tuple[str, ...]
    words: str
    library: str = ""
    grids: tuple[Grid, Grid] | None = None
    unclear: str = ""
    keeps_last: bool = False


def differ_by_ones(one: Shape, other: Shape) -> bool:
    """Return whether the longer shape is the shorter one with axes of one element after it, or before it."""
    short, long = sorted((one, other), key=len)
    ones = (1,) * (len(long) - len(short))
    return bool(ones) and long in (short + ones, ones + short)


def parts_of_ranks(shapes: Mapping[str, tuple[Shape, Shape]]) -> int:
    """Return in how many parts all tensors are divided, some by rows and some by columns, as tensor parallelism does;
    0 if they are not."""
    parts, axes = set(), set()
    for file, wanted in shapes.values():
        differing = [axis for axis, (old, new) in enumerate(zip(file, wanted, strict=False)) if old != new]
        if len(file) != len(wanted) or len(differing) != 1 or wanted[differing[0]] % (file[differing[0]] or 1):
            return 0
        axes.add(differing[0])
        parts.add(wanted[differing[0]] // (file[differing[0]] or 1))
    return parts.pop() if len(parts) == 1 and {0, 1} <= axes else 0


class Misfits(Struct, frozen=True):
    """The keys of another shape, and what says of what kind they are: the model, all tensors of the file, what was
    given for ``--adapt``, and the grid ``stored`` in the configuration beside the file. ``fixed`` are tables of
    sinusoids, of which no row is another's for other positions."""

    shapes: Pairs
    target: Target
    tensors: Mapping[str, Shape]
    given: Sequence[Adaptation] = ()
    stored: Grid | None = None
    fixed: Collection[str] = ()

    def cases(self) -> list[Case]:
        """Return the cases among them. Grids that were given count where the target does not know its own."""
        found: dict[str, Pairs] = {}
        for key, (old, new) in self.shapes.items():
            named = next((asked.name for asked in self.given if asked.keys != "*" and fnmatchcase(key, asked.keys)), "")
            if name := _kind(key, old, new, self.target, named):
                found.setdefault(name, {})[key] = (old, new)
        if turned := self._of_other_sides():
            found.setdefault(POS_EMBED, {}).update(turned)
        rest = {key: pair for key, pair in self.shapes.items() if not any(key in group for group in found.values())}
        words, longer = self._vocabulary(rest)
        if words:
            found[VOCAB] = words
        if heads := self._heads({key: pair for key, pair in rest.items() if key not in words}):
            found[HEAD] = heads
        made: list[Case] = []
        for name, group in found.items():
            is_of_grids = name in (POS_EMBED, WINDOW_BIAS)
            made += self._tables(name, group) if is_of_grids else _plain_cases(name, group, longer)
        return made

    def _of_other_sides(self) -> Pairs:
        """Return the tables of as many positions as the model's, of which the user says a grid with other sides: 10x6
        and 6x10."""
        found: Pairs = {}
        for key, shape in self.tensors.items() if any(asked.old for asked in self.given) else ():
            asked = chosen(POS_EMBED, key, RECIPES[POS_EMBED], self.given)
            if asked is None or asked.old is None or len(shape) not in (2, 3) or not self.target.accepts(key, shape):
                continue
            table = _Table(POS_EMBED, key, shape, shape, self)
            new = table.grid_of_model or asked.new
            if new and new != asked.old and math.prod(new) == math.prod(asked.old) and POSITIONS.search(key):
                found[key] = (shape, shape)
        return found

    def _vocabulary(self, shapes: Pairs) -> tuple[Pairs, set[str]]:
        """Return the embeddings of words, and what has as many rows as they: output layers and their biases; and which
        of the embeddings have a row more than the vocabulary, which stays the last one: that before the first word of
        Moshi and MusicGen."""
        by_rows = {
            key: pair
            for key, pair in shapes.items()
            if len(pair[0]) == len(pair[1]) in (1, 2) and pair[0][0] != pair[1][0] and pair[0][1:] == pair[1][1:]
        }
        patterns = [asked.keys for asked in self.given if asked.name == VOCAB and asked.keys != "*"]
        named = {key for key in by_rows if any(fnmatchcase(key, keys) for keys in patterns)}
        tables = {
            key: (old[0], new[0])
            for key, (old, new) in by_rows.items()
            if len(old) == 2 and (key in named or _is_of_words(key, new[0], self.target))
        }
        heads = {(old[0], new[0]) for key, (old, new) in by_rows.items() if key not in tables} - {*tables.values()}
        longer = {
            key: (old - 1, new - 1)
            for key, (old, new) in tables.items()
            if not {new} & self.target.vocabularies
            and ((old - 1, new - 1) in heads or {new - 1} & self.target.vocabularies)
        }
        sizes = {*tables.values(), *longer.values()}
        # Models such as BART have a bias [1, words].
        return {
            key: (old, new)
            for key, (old, new) in shapes.items()
            if (key in by_rows and (old[0], new[0]) in sizes)
            or (len(old) == len(new) == 2 and old[0] == new[0] == 1 and (old[1], new[1]) in sizes)
        }, {*longer}

    def _heads(self, rest: Pairs) -> Pairs:
        """Return the output layers whose classes are others, if nothing but the number of classes can be the reason.

        One of as many classes is among them if its keys were named."""
        heads = {
            key: (old, new)
            for key, (old, new) in rest.items()
            if len(old) == len(new) > 0 and old[1:] == new[1:] and not _NO_HEADS.search(key)
            if not re.search("Emb|Norm", (self.target.modules or {}).get(key.rpartition(".")[0], ""))
            if not {*new[:1]} & self.target.vocabularies
        }
        named = [each.keys for each in self.given if each.name == HEAD and each.keys != "*"]
        heads |= {
            key: (shape, shape)
            for key, shape in self.tensors.items()
            if any(fnmatchcase(key, keys) for keys in named) and self.target.accepts(key, shape) and shape
        }
        return heads if len(heads) >= len(rest) or any(each.name == HEAD for each in self.given) else {}

    def _tables(self, name: str, shapes: Pairs) -> Iterator[Case]:
        """Yield a case for the tables of each pair of grids, and of each order of recipes."""
        found: dict[tuple[tuple[str, ...], str, tuple[Grid, Grid] | str], list[_Table]] = {}
        for key, (old, new) in shapes.items():
            table = _Table(name, key, old, new, self)
            if table.is_of_videos:
                words = f"{old[-2]} positions in the file and {new[-2]} in the model, for each patch of each moment"
                yield Case(name, {key: (old, new)}, (), f"{words}; no library has a function that resizes them")
            if not table.recipes[0]:
                continue
            known = table.grids(chosen(name, key, table.recipes[0], self.given))
            found.setdefault((*table.recipes, known), []).append(table)
        for (recipes, library, known), tables in found.items():
            first, group = tables[0], {table.key: (table.old, table.new) for table in tables}
            if isinstance(known, str):
                right = first.grids(None)  # if the user's are not
                grids = None if isinstance(right, str) else right
                yield Case(name, group, recipes, known, library, grids, unclear=known)
            else:
                yield Case(name, group, recipes, first.words(*known), library, grids=known)


def _kind(key: str, old: Shape, new: Shape, target: Target, named: str) -> str:
    """Return the kind of a tensor by its name, or as the user named it, and its shapes; empty if it is of no kind.

    A vocabulary is not among them."""
    differing = [axis for axis, sizes in enumerate(zip(old, new, strict=False)) if sizes[0] != sizes[1]]
    if len(new) == 5 and len(old) == 4:
        return INFLATE if new[:2] == old[:2] and new[3:] == old[2:] else ""
    if len(old) != len(new):
        return ""
    if named == WINDOW_BIAS or _BIAS_TABLES.search(key):
        is_grid = len(old) == 3 and differing[:1] != [0]  # [heads, rows, columns], as in MaxViT
        return WINDOW_BIAS if is_grid or (len(old) == 2 and differing == [0]) else ""
    if _HEADS_FIRST.search(key):
        return WINDOW_BIAS if len(old) == 2 and differing == [1] else ""
    kind = (target.modules or {}).get(key.rpartition(".")[0], "") if key.endswith(".weight") else ""
    is_named = POSITIONS.search(key) and not (_NO_PLACES.search(key) or re.search("Linear|Conv|Norm", kind))
    if named == POS_EMBED or is_named:
        if any(f"{key.rpartition('.')[0]}.{name}".lstrip(".") in target.slots for name in _LAST_TOKENS):
            return ""
        is_table = (len(old) == 2 and differing == [0]) or (len(old) == 3 and differing == [1] and old[0] == 1)
        # In two dimensions, with the channels before or after them: if two equal sides stay, the channels differ.
        kept = [size for size, other in zip(old[1:], new[1:], strict=True) if size == other]
        is_map = len(old) == 4 and old[0] == new[0] == 1 and (old[1] == new[1]) != (old[3] == new[3])
        is_map = is_map and len(set(kept)) == len(kept)
        return POS_EMBED if is_table or is_map or is_of_blocks(old, new) else ""
    is_patch = _PATCHES.search(key) and (len(old) > 2 or "patch" in key.lower())  # others may project words
    if differing and differing[0] >= max(len(old) - 2, 1) and (named == PATCH_EMBED or is_patch):
        return PATCH_EMBED if patch(old) and patch(new) else ""
    if (
        len(old) >= 3
        and differing == [1]
        and old[1] <= _MOST_CHANNELS
        and not _is_of_pixels(old[1], new[1])
        and (named == IN_CHANS or (_is_input(new, target) and (len(old) > 3 or max(old[1], new[1]) <= _MOST_SIGNALS)))
    ):
        return IN_CHANS
    return ""


def _is_of_pixels(stored: int, wanted: int) -> bool:
    """Return whether inputs are the colours of neighbouring pixels, in threes, and more of each pixel are wanted, which
    timm refuses: `adapt_input_conv`."""
    pixels = stored // 3
    return wanted > stored == 3 * pixels and pixels > 1 and _is_square(pixels) and wanted % pixels == 0


def _is_input(shape: Shape, target: Target) -> bool:
    """Return whether a weight has the shape of the model's first convolution: others of its shape are beside it."""
    weights = (slot.shape for key, slot in target.slots.items() if key.endswith("weight") and slot.shape is not None)
    return next((each for each in weights if len(each) >= 3), None) == shape


def _is_of_words(key: str, rows: int, target: Target) -> bool:
    path, _, leaf = key.rpartition(".")
    kind = (target.modules or {}).get(path, "")
    if target.vocabularies:
        return "Emb" in kind and bool({rows, rows - 1} & target.vocabularies)
    around = (kind for place, kind in (target.modules or {}).items() if f"{path}.".startswith(f"{place}."))
    if (kind and "Emb" not in kind) or _NO_WORDS.search(" ".join((key, *around))):
        return False
    return bool(_WORDS.fullmatch(path.rpartition(".")[2] if leaf == "weight" else leaf))


_SIZES: Mapping[str, Callable[[Shape], Shape]] = {
    VOCAB: lambda shape: shape[-1:] if shape[0] == 1 else shape[:1],
    HEAD: lambda shape: shape[:1],
    IN_CHANS: lambda shape: shape[1:2],
    PATCH_EMBED: patch,
    INFLATE: lambda shape: shape[2:-2],
}


def _plain_cases(name: str, shapes: Pairs, longer: Collection[str]) -> Iterator[Case]:
    """Yield a case for the tensors of each pair of sizes."""
    groups: dict[tuple[Shape, Shape], Pairs] = {}
    for key, (old, new) in shapes.items():
        groups.setdefault((_SIZES[name](old), _SIZES[name](new)), {})[key] = (old, new)
    for (stored, wanted), group in groups.items():
        (old, new), *_ = group.values()
        recipes = tuple(RECIPES[name])
        keeps_last = not group.keys().isdisjoint(longer)
        if name == VOCAB:
            own = ", and a row after it that stays the last" if keeps_last else ""
            words = (
                f"a vocabulary of {stored[0] - keeps_last} in the file and of {wanted[0] - keeps_last} in the model"
                f"{own}"
            )
            recipes = recipes[:1] if new < old else recipes[1:]
        elif name == HEAD:
            kind = "outputs" if is_of_boxes(next(iter(group))) or len(old) > 2 else "classes"
            words = f"{old[0]} {kind} in the file and {new[0]} in the model"
        elif name == IN_CHANS:
            words = f"{counted(old[1], 'input channel')} in the file and {new[1]} in the model"
        elif name == PATCH_EMBED:
            words = f"patches of {size(patch(old))} in the file and of {size(patch(new))} in the model"
        else:
            words = f"convolutions over images in the file, and over {counted(new[2], 'moment')} too in the model"
        yield Case(name, group, recipes, words, keeps_last=keeps_last)


def size(grid: Sequence[int]) -> str:
    """Return a grid as text: ``14x14``."""
    return "x".join(map(str, grid))


# ---- tables of positions


_PADDING, _UNIT = 2, 8  # rows before the positions, and of what the number of positions is a multiple


def window(table: Grid) -> Grid:
    """Return the window that a table of relative positions is for."""
    return tuple((side + 1) // 2 for side in table)


class _Table(Struct, frozen=True, dict=True):
    """A table of positions, by its shapes in the file and in the model, ``among`` what says of which grids its rows
    are."""

    name: str
    key: str
    old: Shape
    new: Shape
    among: Misfits

    @property
    def target(self) -> Target:
        return self.among.target

    @cached_property
    def recipes(self) -> tuple[tuple[str, ...], str]:
        """The recipes, that of the model's own library first, and the name of the library."""
        library = self.target.library
        if self.name == WINDOW_BIAS and _HEADS_FIRST.search(self.key):
            return ("levit",), ""
        if self.is_of_videos:
            return (), ""
        if self.name == WINDOW_BIAS:
            has_tokens = len(self.old) == 2 and not _is_square(self.old[0])
            first = self.own or ("beit" if has_tokens else "swin")
            return tuple(dict.fromkeys((first, "swin", "beit", "bilinear"))), library if self.own else ""
        if not self.is_of_images:
            is_shorter = self.new < self.old and not _DISTANCES.search(self.key)
            is_trained = self.key not in self.among.fixed and self.key not in self.target.frozen
            fitting = ("cut",) * is_shorter + ("linear",) * is_trained
            return (fitting[::-1], library) if library == "open_clip" else (fitting, "")
        first = self.own or next((recipe for pattern, recipe in _BY_NAME if pattern.search(self.key)), "timm")
        recipes = dict.fromkeys((first, "timm", "plain", "torchvision", *(() if self.own else RECIPES[POS_EMBED])))
        return tuple(each for each in recipes if each not in _OF_TEXTS), library if self.own else ""

    @cached_property
    def own(self) -> str:
        """The recipe that the model's own library has for the table; empty if it is not known to have one."""
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
        """Whether the model is one of transformers whose modules have no function that resizes the table."""
        is_known = self.target.library == "transformers" and self.target.modules is not None
        return is_known and self.target.resizes.isdisjoint(self.around)

    @cached_property
    def around(self) -> tuple[str, str]:
        """The paths of the module of the table and of that around it, which resizes an embedding."""
        path = self.key.rpartition(".")[0]
        return path, path.rpartition(".")[0]

    @property
    def is_of_videos(self) -> bool:
        """Whether the model has a position for each patch of each moment, which no library resizes."""
        return self.name == POS_EMBED and len(self.grid_of_model or ()) > 2

    @property
    def _may_be_of_videos(self) -> bool:
        """Whether the patches beside the table are of several moments, and no model says of which grid it is."""
        patches = (shape for key, shape in self.among.tensors.items() if key.startswith(self.around[0]))
        is_beside = any(len(shape) == 5 and shape[2] > 1 for shape in patches)
        return self.name == POS_EMBED and self.target.modules is None and is_beside

    @cached_property
    def is_of_images(self) -> bool:
        """Whether the positions are those of patches of an image, and not of a text."""
        if _DISTANCES.search(self.key) or (self.name == POS_EMBED and _ONE_AXIS.search(self.key)):
            return False
        if self.name == WINDOW_BIAS or len(self.old) == 4 or self.grid_of_model is not None:
            return True
        is_named = bool(_IMAGES.search(self.key)) or len(self.old) == 3
        modules = reversed([*(self.target.modules or {}).items()])
        kinds = (kind for path, kind in modules if not path or self.key.startswith(f"{path}."))
        sides = ({word in _OF_IMAGES for word in _OWNERS.findall(kind)} for kind in kinds)
        is_class = next((True in side for side in sides if len(side) == 1), False)  # one of both says nothing
        # A model that takes images for a grid says so.
        return is_named or is_class or (self.target.modules is None and bool(self.tokens))

    @cached_property
    def tokens(self) -> dict[str, int]:
        """How many tokens of each kind are beside the table, in its module or in the one around it."""
        path = self.key.split(".")[:-1]
        found: dict[str, int] = {}
        for around in (path, path[:-1]):
            for kind, names in _TOKENS.items():
                for name in names:
                    shape = self.among.tensors.get(".".join((*around, name)))
                    if shape is not None and kind not in found:
                        found[kind] = shape[1] if len(shape) == 3 else 1
        return found

    @cached_property
    def grid_of_model(self) -> Grid | None:
        """The grid of patches that the model takes an image for, if its table has a position for each."""
        rows, path = math.prod(self.new[:-1]), self.key.rpartition(".")[0]
        others = [name for name in self.target.slots if name != self.key and POSITIONS.search(name)]
        while True:
            below = f"{path}." if path else ""
            grids = {
                grid
                for place, grid in self.target.grids.items()
                if (place == path or place.startswith(below))
                and 0 <= rows - math.prod(grid) <= _MOST_TOKENS
                # That of an image encoder with a table of its own is not for the positions of a text beside it.
                and not (place and any(name.startswith(f"{place}.") for name in others))
            }
            if grids or not path:
                return grids.pop() if len(grids) == 1 else None
            path = path.rpartition(".")[0]

    def words(self, old: Grid, new: Grid) -> str:
        """Return what the shapes mean."""
        remark = "; transformers has no function that resizes them" * (self.is_left and not self.own)
        if self.name == WINDOW_BIAS and len(old) == len(new) == 2 and self.old[-1] == math.prod(old):
            return f"distances in a window of {size(old)} in the file and of {size(new)} in the model"
        if self.name == WINDOW_BIAS:
            return f"windows of {size(window(old))} in the file and of {size(window(new))} in the model{remark}"
        if len(old) == 1:
            return f"{old[0]} positions in the file and {new[0]} in the model"
        tokens = 0 if len(self.old) == 4 else math.prod(self.old[:-1]) - math.prod(old)
        beside = f" (and {counted(tokens, 'token')})" if tokens else ""
        return f"a grid of {size(old)} in the file{beside}, of {size(new)} in the model{remark}"

    def grids(self, given: Adaptation | None) -> tuple[Grid, Grid] | str:
        """Return the grid of the file and that of the model, or why they are not known."""
        if is_of_blocks(self.old, self.new):
            sides = [math.isqrt(shape[1] * shape[2]) for shape in (self.old, self.new)]
            return (sides[0], sides[0]), (sides[1], sides[1])
        if len(self.old) == 4:
            first = 1 if self.old[3] == self.new[3] else 2  # the channels are last, or before the grid
            return self.old[first : first + 2], self.new[first : first + 2]
        if self.name == WINDOW_BIAS and len(self.old) == 3:
            return self.old[1:], self.new[1:]
        is_last = bool(_HEADS_FIRST.search(self.key))
        rows, wanted = (shape[-1] if is_last else math.prod(shape[:-1]) for shape in (self.old, self.new))
        hand, goal = (given.old, given.new) if given else (None, None)
        if not self.is_of_images:
            # RoBERTa, BART and OPT have two rows before those of the positions: 514 of them are for 512.
            first = _PADDING if rows % _UNIT == wanted % _UNIT == _PADDING and not is_last else 0
            old, new = hand or (rows - first,), goal or (wanted - first,)
            if len(old) > 1 or len(new) > 1:
                return "positions of a text have no rows and columns"
            if rows - math.prod(old) != wanted - math.prod(new) or rows < math.prod(old):
                return f"the other positions, {rows} - {size(old)} and {wanted} - {size(new)}, differ in number"
            return old, new
        if hand is None and self.grid_of_model is None and self._may_be_of_videos:
            return f"the file's {rows} positions may be those of moments too"
        own: Grid | None = None
        if self.name == WINDOW_BIAS and not is_last:
            own = next((self.target.windows[each] for each in self.around if each in self.target.windows), None)
            hand, goal, own = (tuple(2 * side - 1 for side in grid) if grid else None for grid in (hand, goal, own))
        elif not is_last:
            own = self.grid_of_model
        if goal is not None and own is not None and goal != own:
            return f"the model's grid is {size(self.shown(own))} and not {size(self.shown(goal))}"
        stored = self.among.stored if self.name == POS_EMBED else None
        if (goal := goal or own) is not None:
            tokens = wanted - math.prod(goal)
            if not 0 <= tokens <= _MOST_TOKENS:
                return f"{wanted} positions in the model are not those of a grid of {size(self.shown(goal))}"
            if hand is None and stored is not None and rows - tokens == math.prod(stored):
                hand = stored
            return self._with_tokens(rows, tokens, goal, hand)
        if hand is None and stored is not None and 0 <= rows - math.prod(stored) <= _MOST_TOKENS:
            hand, tokens = stored, rows - math.prod(stored)
            if _is_square(wanted - tokens):
                return self._with_tokens(rows, tokens, (math.isqrt(wanted - tokens),) * 2, hand)
        counts = [0, *accumulate(self.tokens.values())] if self.among.tensors else [0, 1, 2, 5]
        if self.name == WINDOW_BIAS:
            counts = [0] if is_last else [0, 3]
        fits = [tokens for tokens in counts if _is_square(wanted - tokens) and (hand or _is_square(rows - tokens))]
        if len(fits) != 1:
            return (
                f"the file's {rows} positions and the model's {wanted} are not those of square grids and the same "
                "tokens"
            )
        return self._with_tokens(rows, fits[0], (math.isqrt(wanted - fits[0]),) * 2, hand)

    def _with_tokens(self, rows: int, tokens: int, goal: Grid, hand: Grid | None) -> tuple[Grid, Grid] | str:
        """Return the grids, where the file's table has the tokens of the model's."""
        points = rows - tokens
        beside = f" and {counted(tokens, 'token')}" if tokens else ""
        square = (math.isqrt(points),) * 2 if _is_square(points) else None
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
        """Return a grid as the user gives it."""
        return window(grid) if self.name == WINDOW_BIAS else grid


def _grid_like(goal: Grid, points: int) -> Grid | None:
    """Return the grid with that many points and the aspect ratio of another grid."""
    unit = [side // math.gcd(*goal) for side in goal]
    factor = math.isqrt(points // math.prod(unit))
    return tuple(side * factor for side in unit) if len(goal) == 2 and factor**2 * math.prod(unit) == points else None


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


# ---- what was asked for


def chosen(name: str, key: str, recipes: Collection[str], given: Sequence[Adaptation]) -> Adaptation | None:
    """Return the adaptation for a key: one that names keys before one for all, and one of the recipes that fit before
    one that does not. Raises ``UsageError`` if two of them fit as well."""
    named = dict.fromkeys(each for each in given if each.name == name and fnmatchcase(key, each.keys))
    ranked = sorted(named, key=lambda each: (each.recipe not in recipes, each.keys == "*"))
    for one, other in pairwise(ranked[:2]):
        if (one.keys == "*") is (other.keys == "*") and (other.recipe in recipes or not recipes):
            both = (Opt("adapt", one.text), " and ", Opt("adapt", other.text))
            raise UsageError(*both, f" are both for {key.rstrip('.')}; give one of them")
    return next(iter(ranked), None)


def of_use(given: Sequence[Adaptation], known: Sequence[Case], done: Collection[str]) -> set[Adaptation]:
    """Return the adaptations that fit a tensor of some case, or whose recipe is among those that were applied before
    (``done``)."""
    picked = ((case, chosen(case.name, key, case.recipes, given)) for case in known for key in case.shapes)
    fitting = {asked for case, asked in picked if asked and (case.name == HEAD or asked.recipe in case.recipes)}
    return fitting | {asked for asked in given if asked.label in done}


def adapt_edits(
    case: Case, given: Sequence[Adaptation], specs: Mapping[str, TensorSpec], used: Collection[Adaptation]
) -> tuple[Adapt, ...]:
    """Return the edits for those tensors of a case that were asked for.

    Raises ``UsageError`` if a recipe that is not ``used`` for others is not for them, and names the right one."""
    edits = []
    for key, (old, new) in case.shapes.items():
        asked = chosen(case.name, key, case.recipes, given)
        if asked is None:
            continue
        if case.name == HEAD:
            rows = class_rows(asked, old[0], new[0], key)
            edits.append(Adapt(key, key, asked.label, specs[key].dtype, old, new, rows=rows))
            continue
        if asked.recipe not in case.recipes:
            if asked in used:
                continue
            if not case.recipes:
                raise UsageError(Opt("adapt", asked.text), f" is not for {key}: {case.words}")
            right = Opt("adapt", asked.with_recipe(case.recipes[0]))
            raise UsageError(Opt("adapt", asked.text), f" is not for {key}: {case.words}; give ", right)
        if case.unclear:
            shown = window if case.name == WINDOW_BIAS else tuple
            by_hand = ":".join(size(shown(grid)) for grid in case.grids) if case.grids else _BY_HAND
            right = Opt("adapt", asked.with_recipe(f"{asked.recipe}:{by_hand}"))
            if asked.old is not None and not case.grids:  # they were given, and there are no better ones
                raise UsageError(Opt("adapt", asked.text), f" does not fit {key}: {case.unclear}")
            raise UsageError(
                f"{key} cannot be adapted: {case.unclear}; give the grids of the file and the model: ", right
            )
        grids = (*case.grids[0], *case.grids[1]) if case.grids else ()
        # One past the last row of the file is a new one.
        rows = (*range(min(old[0], new[0]) - 1), *[old[0]] * (new[0] - old[0]), old[0] - 1) if case.keeps_last else ()
        edits.append(Adapt(key, key, asked.label, specs[key].dtype, old, new, grids, rows))
    return tuple(edits)


_SHOWN = 4  # recipes that a message names, of all that can be given
_BY_HAND = "ROWSxCOLUMNS:ROWSxCOLUMNS"


def narrowed(case: Case) -> str:
    """Return what to say before the recipes if the file has more input channels than the model, which are left out.

    No library has a formula for that, except to one channel, and to a third where neighbouring pixels were gathered."""
    for old, new in case.shapes.values() if case.name == IN_CHANS else ():
        if old[1] > new[1] > 1 and old[1] != 3 * new[1]:
            return (
                f"name the model that the file belongs to: it has {old[1]} input channels (models for inpainting have"
                f" 9), and all but {new[1]} would be lost"
            )
    return ""


def _effect(text: str) -> str:
    """Return what ``pos_embed=timm`` does."""
    name, _, recipe = text.partition("=")
    return RECIPES[name][recipe]


def recipes_of(case: Case, target: Target, untrained: Mapping[str, int]) -> Iterator[Remedy]:
    """Yield the recipes for a case, that of the model's own library first; without the grids it makes no command.

    ``untrained`` are the parameters of the target that the file does not have in their shape, with their numel."""
    if case.name == HEAD:
        yield Remedy.of("keeps the classes that both have, by a row on each line", adapt=Placeholder("head=MAP.txt"))
        return
    if not case.recipes:
        return
    if said := narrowed(case):
        yield Remedy.of(said)
    texts = [f"{case.name}={recipe}" for recipe in case.recipes]
    first, *others = (text for text in texts[:_SHOWN] if text != PAD_TARGET or target.initial is not None)
    if case.unclear:
        yield Remedy.of("resamples the grid of the file to the model's", adapt=Placeholder(f"{first}:{_BY_HAND}"))
    elif case.library:
        also = f"; {' and '.join(others)} {'fit' if len(others) > 1 else 'fits'} too" if others else ""
        yield Remedy.of(f"{_effect(first)}, and the model is one of {case.library}{also}", adapt=(first,))
    else:
        price = tuple(
            (key, untrained[key] - math.prod(old)) for key, (old, _) in case.shapes.items() if key in untrained
        )
        for text in (first, *others):
            yield replace(Remedy.of(_effect(text), adapt=(text,)), untrained=price * (text == PAD_TARGET))
