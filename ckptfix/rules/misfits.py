"""Tensors with the right name and another shape that a known formula makes fit: the recipes of ``--adapt`` to offer,
and the edits that it asks for."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

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
    chosen,
)
from ckptfix.core.edits import PAD_TARGET, Adapt
from ckptfix.core.finding import Placeholder, Remedy, counted
from ckptfix.core.parts import Shape
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.errors import Opt, UsageError
from ckptfix.rules.class_maps import class_rows, is_of_boxes
from ckptfix.rules.position_tables import (
    HEADS_FIRST,
    POSITIONS,
    Pairing,
    PositionTable,
    is_last_tokens,
    is_square,
    size,
    window,
)
from ckptfix.values.adapted_tensors import is_of_blocks, patch

Pairs = dict[str, tuple[Shape, Shape]]  # by key, the shapes in the file and in the model

_BIAS_TABLES = re.compile(r"(?:^|[._])rel(?:ative)?_pos(?:ition)?_bias_table$", re.IGNORECASE)
_PATCHES = re.compile(
    r"(?:^|[._])(?:patch_?(?:emb\w*|conv)|embed_patches|conv_proj|patchify)(?:[._]|$)"
    r"|(?:visual\.conv1|embed(?:s|dings)\.proj(?:ection)?)\.weight$",
    re.IGNORECASE,
)
# Names of word embeddings, for models whose configuration does not give the size of the vocabulary.
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
_COPY_OF_PEFT = re.compile(r"\.(?:modules_to_save\.[^.]+|modules_to_save|original_module|base_layer)$")
# DETR's queries have no order. Rows for coordinates, or for distances other than between patches, keep their meaning.
_NO_PLACES = re.compile(
    r"quer(?:y|ies)_|(?:^|[._])(?:rel(?:ative)?_pos(?:ition)?(?!\w*table|_[hwt]$)|[xyhw]_pos|relative_att)|\.pe_[kv]\.",
    re.IGNORECASE,
)
# Tables that no library resizes, and what their rows are: in Mllama, and in Wav2Vec2-BERT and BERT with relative keys.
_UNRESIZED = {
    re.compile(r"(?:^|[._])tile_(?:\w+_)?embedding\."): "positions of the tiles of an image",
    re.compile(r"(?:^|\.)distance_embedding\.weight$"): "rows for distances between positions",
}
_NO_HEADS = re.compile(
    r"token_type|segment|relative|bucket|distance|quer|(?<!class_)(?<!box_)emb|quant|codebook|expert|router|gate|att|"
    r"merger|latent|(?:^|[._])(?:bn|\w*norm)|project(?:ion|or)|pooler|sampl|memory|conv_out|points_scale",
    re.IGNORECASE,
)

_MOST_CHANNELS = 64  # most input channels of a model's first convolution
_MOST_SIGNALS = 12  # the same for 1d convolutions, where more channels are the ordered bands of a spectrum


class Case(Struct, frozen=True):
    """Tensors that one recipe makes fit.

    ``recipes`` are the possible ones, that of the model's own library first; ``library`` is its name if known.
    ``words`` say what the shapes mean. ``grids`` are the file's and the model's, for tables of positions, and
    ``unclear`` says why they are unknown; ``by_hand`` is the form of those that the user has to give. ``keeps_last``:
    the last row of a vocabulary is not a word."""

    name: str
    shapes: Pairs
    recipes: tuple[str, ...]
    words: str
    library: str = ""
    grids: tuple[Grid, Grid] | None = None
    unclear: str = ""
    by_hand: str = ""
    keeps_last: bool = False


def differ_by_ones(one: Shape, other: Shape) -> bool:
    """Return whether two shapes differ only in axes of one element, all leading or all trailing."""
    short, long = sorted((one, other), key=len)
    ones = (1,) * (len(long) - len(short))
    return bool(ones) and long in (short + ones, ones + short)


def parts_of_ranks(shapes: Mapping[str, tuple[Shape, Shape]]) -> int:
    """Return into how many parts all tensors are split, by rows and by columns, as in tensor parallelism; 0 if not."""
    parts, axes = set(), set()
    for file, wanted in shapes.values():
        differing = [axis for axis, (old, new) in enumerate(zip(file, wanted, strict=False)) if old != new]
        if len(file) != len(wanted) or len(differing) != 1 or wanted[differing[0]] % (file[differing[0]] or 1):
            return 0
        axes.add(differing[0])
        parts.add(wanted[differing[0]] // (file[differing[0]] or 1))
    return parts.pop() if len(parts) == 1 and {0, 1} <= axes else 0


class Misfits(Struct, frozen=True):
    """The keys whose shape differs, with the evidence of their kind: the model, the file, and ``--adapt``."""

    shapes: Pairs
    pairing: Pairing
    given: Sequence[Adaptation] = ()

    @property
    def target(self) -> Target:
        return self.pairing.target

    def cases(self) -> list[Case]:
        """Return the cases. Given grids count if the target does not know its own."""
        found: dict[str, Pairs] = {}
        unresized: dict[str, Pairs] = {}
        for key, (old, new) in self.shapes.items():
            named = next((asked.name for asked in self.given if asked.keys != "*" and fnmatchcase(key, asked.keys)), "")
            what = next((words for pattern, words in _UNRESIZED.items() if pattern.search(key)), "")
            if what and not named:
                unresized.setdefault(what, {})[key] = (old, new)
            elif name := _kind(key, old, new, self.target, named):
                found.setdefault(name, {})[key] = (old, new)
        if turned := self._of_other_sides():
            found.setdefault(POS_EMBED, {}).update(turned)
        known = {key for group in (*found.values(), *unresized.values()) for key in group}
        rest = {key: pair for key, pair in self.shapes.items() if key not in known}
        words, longer = self._vocabulary(rest)
        if words:
            found[VOCAB] = words
        if heads := self._heads({key: pair for key, pair in rest.items() if key not in words}):
            found[HEAD] = heads
        why = "no library has a function to resize them"
        made = [Case(POS_EMBED, group, (), f"{what}; {why}") for what, group in unresized.items()]
        for name, group in found.items():
            is_of_grids = name in (POS_EMBED, WINDOW_BIAS)
            made += self._tables(name, group) if is_of_grids else _plain_cases(name, group, longer)
        return made

    def _of_other_sides(self) -> Pairs:
        """Return the tables with the model's number of positions whose grid has other sides according to the user."""
        found: Pairs = {}
        for key, shape in self.pairing.tensors.items() if any(asked.old for asked in self.given) else ():
            asked = chosen(POS_EMBED, key, RECIPES[POS_EMBED], self.given)
            if asked is None or asked.old is None or len(shape) not in (2, 3) or not self.target.accepts(key, shape):
                continue
            table = PositionTable(POS_EMBED, key, shape, shape, self.pairing)
            new = table.grid_of_model or asked.new
            if new and new != asked.old and math.prod(new) == math.prod(asked.old) and POSITIONS.search(key):
                found[key] = (shape, shape)
        return found

    def _vocabulary(self, shapes: Pairs) -> tuple[Pairs, set[str]]:
        """Return the word embeddings with the output layers and biases of as many rows; and the embeddings with one row
        more than the vocabulary, which stays last, such as the start token of Moshi and MusicGen."""
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
        """Return the output layers for other classes, and those that the user names; none unless they explain all."""
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
            for key, shape in self.pairing.tensors.items()
            if any(fnmatchcase(key, keys) for keys in named) and self.target.accepts(key, shape) and shape
        }
        return heads if len(heads) >= len(rest) or any(each.name == HEAD for each in self.given) else {}

    def _tables(self, name: str, shapes: Pairs) -> Iterator[Case]:
        """Yield a case for the tables of each pair of grids and each order of recipes."""
        found: dict[tuple[tuple[str, ...], str, tuple[Grid, Grid] | str], list[PositionTable]] = {}
        for key, (old, new) in shapes.items():
            table = PositionTable(name, key, old, new, self.pairing)
            if table.is_of_videos:
                words = f"{old[-2]} positions in the file and {new[-2]} in the model, one per patch and frame"
                yield Case(name, {key: (old, new)}, (), f"{words}; no library has a function to resize them")
            if not table.recipes[0]:
                continue
            known = table.grids(chosen(name, key, table.recipes[0], self.given))
            found.setdefault((*table.recipes, known), []).append(table)
        for (recipes, library, known), tables in found.items():
            first, group = tables[0], {table.key: (table.old, table.new) for table in tables}
            if isinstance(known, str):
                right = first.grids(None)  # if the user's grids are wrong
                grids = None if isinstance(right, str) else right
                by_hand = ":".join(["ROWSxCOLUMNS"] * (1 if first.grid_of_model else 2))
                yield Case(name, group, recipes, known, library, grids, unclear=known, by_hand=by_hand)
            else:
                yield Case(name, group, recipes, first.words(*known), library, grids=known)


def _kind(key: str, old: Shape, new: Shape, target: Target, named: str) -> str:
    """Return the kind of a tensor by its name (or the user's) and its shapes; empty if there is none."""
    differing = [axis for axis, sizes in enumerate(zip(old, new, strict=False)) if sizes[0] != sizes[1]]
    if len(new) == 5 and len(old) == 4:
        return INFLATE if new[:2] == old[:2] and new[3:] == old[2:] else ""
    if len(old) != len(new):
        return ""
    if named == WINDOW_BIAS or _BIAS_TABLES.search(key):
        is_grid = len(old) == 3 and differing[:1] != [0]  # [heads, rows, columns], as in MaxViT
        return WINDOW_BIAS if is_grid or (len(old) == 2 and differing == [0]) else ""
    if HEADS_FIRST.search(key):
        return WINDOW_BIAS if len(old) == 2 and differing == [1] else ""
    kind = (target.modules or {}).get(key.rpartition(".")[0], "") if key.endswith(".weight") else ""
    is_named = POSITIONS.search(key) and not (_NO_PLACES.search(key) or re.search("Linear|Conv|Norm", kind))
    if named == POS_EMBED or is_named:
        is_table = (len(old) == 2 and differing == [0]) or (len(old) == 3 and differing == [1] and old[0] == 1)
        is_table |= len(old) == 4 and differing == [2] and old[1] == 1 and any(map(is_last_tokens, target.slots))
        # Two dimensions and channels, first or last: if two equal sizes stay, it is the channels that differ.
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
    """Return whether inputs are the colours of neighbouring pixels, which `adapt_input_conv` of timm cannot extend."""
    pixels = stored // 3
    return wanted > stored == 3 * pixels and pixels > 1 and is_square(pixels) and wanted % pixels == 0


def _is_input(shape: Shape, target: Target) -> bool:
    """Return whether a weight has the shape of the model's first convolution; parallel ones have it too."""
    weights = (slot.shape for key, slot in target.slots.items() if key.endswith("weight") and slot.shape is not None)
    return next((each for each in weights if len(each) >= 3), None) == shape


def _is_of_words(key: str, rows: int, target: Target) -> bool:
    path, _, leaf = key.rpartition(".")
    kind = (target.modules or {}).get(path, "")
    path = _COPY_OF_PEFT.sub("", path)
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
            own = ", and an extra row that stays last" if keeps_last else ""
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
            words = f"convolutions over images in the file, and over {counted(new[2], 'frame')} too in the model"
        yield Case(name, group, recipes, words, keeps_last=keeps_last)


_SHOWN = 4  # recipes that a message names at most


def of_use(given: Sequence[Adaptation], known: Sequence[Case], done: Collection[str]) -> set[Adaptation]:
    """Return the adaptations that apply to some case, or were applied earlier (``done`` has their labels)."""
    picked = ((case, chosen(case.name, key, case.recipes, given)) for case in known for key in case.shapes)
    fitting = {asked for case, asked in picked if asked and (case.name == HEAD or asked.recipe in case.recipes)}
    return fitting | {asked for asked in given if asked.label in done}


def adapt_edits(
    case: Case, given: Sequence[Adaptation], specs: Mapping[str, TensorSpec], used: Collection[Adaptation]
) -> tuple[Adapt, ...]:
    """Return the edits for the tensors of a case that were asked for.

    Raises ``UsageError``, naming the right recipe, if one does not apply to a tensor and is not ``used`` for others."""
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
            by_hand = ":".join(size(shown(grid)) for grid in case.grids) if case.grids else case.by_hand
            right = Opt("adapt", asked.with_recipe(f"{asked.recipe}:{by_hand}"))
            if asked.old is not None and not case.grids:  # the user gave grids, and no better ones are known
                raise UsageError(Opt("adapt", asked.text), f" does not fit {key}: {case.unclear}")
            whose = "the file's and the model's grids" if ":" in by_hand else "the file's grid"
            raise UsageError(f"{key} cannot be adapted: {case.unclear}; give {whose}: ", right)
        grids = (*case.grids[0], *case.grids[1]) if case.grids else ()
        # One past the file's last row means a new row.
        rows = (*range(min(old[0], new[0]) - 1), *[old[0]] * (new[0] - old[0]), old[0] - 1) if case.keeps_last else ()
        edits.append(Adapt(key, key, asked.label, specs[key].dtype, old, new, grids, rows))
    return tuple(edits)


def narrowed(case: Case) -> str:
    """Return the advice that precedes the recipes if the file has more input channels than the model, else nothing.

    No library has a formula that removes channels, except to one, or to a third if neighbouring pixels were merged."""
    for old, new in case.shapes.values() if case.name == IN_CHANS else ():
        if old[1] > new[1] > 1 and old[1] != 3 * new[1]:
            return (
                f"name the model that the file belongs to: it has {old[1]} input channels (inpainting models have 9), "
                f"and all but {new[1]} would be lost"
            )
    return ""


def _effect(text: str) -> str:
    """Return what a recipe such as ``pos_embed=timm`` does."""
    name, _, recipe = text.partition("=")
    return RECIPES[name][recipe]


def recipes_of(case: Case, target: Target, untrained: Mapping[str, int]) -> Iterator[Remedy]:
    """Yield the recipes for a case, that of the model's own library first; a placeholder if the grids are unknown.

    ``untrained`` maps the target's parameters that the file lacks in their shape to their numel."""
    if case.name == HEAD:
        yield Remedy.of("keeps the classes that both have, with one row per line", adapt=Placeholder("head=MAP.txt"))
        return
    if not case.recipes:
        return
    if said := narrowed(case):
        yield Remedy.of(said)
    texts = [f"{case.name}={recipe}" for recipe in case.recipes]
    first, *others = (text for text in texts[:_SHOWN] if text != PAD_TARGET or target.initial is not None)
    if case.unclear:
        yield Remedy.of("resamples the file's grid to the model's", adapt=Placeholder(f"{first}:{case.by_hand}"))
    elif case.library:
        also = f"; {' and '.join(others)} {'fit' if len(others) > 1 else 'fits'} too" if others else ""
        yield Remedy.of(f"{_effect(first)}, and the model is one of {case.library}{also}", adapt=(first,))
    else:
        price = tuple(
            (key, untrained[key] - math.prod(old)) for key, (old, _) in case.shapes.items() if key in untrained
        )
        for text in (first, *others):
            yield replace(Remedy.of(_effect(text), adapt=(text,)), untrained=price * (text == PAD_TARGET))
