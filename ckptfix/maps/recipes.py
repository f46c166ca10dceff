"""Which parameter each position of an optimizer's state belongs to, for one order of parameters.

The file itself may say so (``named_by_itself``). Otherwise a ``Recipe``, the way in which a trainer or script divides
parameters into groups, gives the group of each parameter of a ``Layout``, and fits if the sizes of the groups and the
shapes of the moments do (``namings``). For custom scripts, recipes are generated from the sizes and rows of an
``Optimizer``. ``rules.position_names`` chooses the orders to try."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, product
from struct import unpack
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.objects import MANY
from ckptfix.core.parts import Shape
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import bare
from ckptfix.maps.names import by_number
from ckptfix.maps.optimizer_states import Optimizer, fits, logical_shape, values_in


class Layout(Struct, frozen=True):
    """The parameters of a model in the order of ``named_parameters()``, and, if known, its modules' class names and the
    layer of each parameter as timm counts them."""

    shapes: Mapping[str, Shape]
    modules: Mapping[str, str] | None = None
    layers: Mapping[str, int] | None = None

    def is_norm(self, key: str, *kinds: str) -> bool:
        """Return whether a parameter belongs to a norm: by the class of its module, else by whether the module's weight
        is 1-d."""
        module, _, leaf = key.rpartition(".")
        if self.modules is not None and module in self.modules:
            return any(kind in self.modules[module] for kind in kinds or ("Norm",))
        return leaf in ("weight", "bias", "gamma", "beta") and len(self.shapes.get(f"{module}.weight", (0, 0))) == 1

    def is_table(self, key: str) -> bool:
        """Return whether a parameter belongs to an embedding: by the class of its module, else by its name."""
        known = (self.modules or {}).get(key.rpartition(".")[0])
        return "Embedding" in known if known is not None else re.search("emb|wte|wpe", bare(key)) is not None


HF_FILE = "trainer_state.json"
_HF_PATTERNS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
_UNDECAYED = re.compile(
    r"(^|\.|_)(pos_embed|(cls|dist|reg|mask)_token|absolute_pos_embed|\w*relative_position_bias_table)$"
)
_MAE_UNDECAYED = frozenset({"pos_embed", "cls_token", "dist_token"})
OUTER = re.compile(r"embed|wte|wpe|(^|[._])head($|\.)")  # embeddings and heads, which scripts with Muon leave to Adam
_STEM = re.compile(r"cls_token|mask_token|reg_token|pos_embed|patch_embed|norm_pre")
_BLOCK = re.compile(r"(.*\.)?(blocks|layers?|h)\.(\d+)\.")


def _is_flat(layout: Layout, key: str) -> bool:
    return len(layout.shapes[key]) <= 1


def _decays_in_hf(layout: Layout, key: str) -> bool:
    module = key.rpartition(".")[0]
    is_layer_norm = layout.modules is not None and layout.modules.get(module) == "LayerNorm"
    return not (is_layer_norm or _HF_PATTERNS.search(bare(key).lower()))


def _decays_in_timm(layout: Layout, key: str) -> bool:
    return not (_is_flat(layout, key) or bare(key).endswith(".bias"))


def _decays_in_vit(layout: Layout, key: str) -> bool:
    return _decays_in_timm(layout, key) and _may_decay(layout, key)


def _may_decay(layout: Layout, key: str) -> bool:
    return not _UNDECAYED.search(key)


def _layer(key: str) -> int:
    """Return the number of a parameter's block, -1 before the blocks, and ``MANY`` after them."""
    name = bare(key)
    block = _BLOCK.match(name)
    return -1 if _STEM.match(name) else int(block[3]) if block else MANY


def _layer_in_timm(layout: Layout, key: str) -> int:
    """Return the layer by the model, else as ``_layer``, but with the norm after the blocks in the last one."""
    if layout.layers is not None:
        return layout.layers[key]
    if not bare(key).startswith("norm"):
        return _layer(key)
    return max((layer for layer in map(_layer, layout.shapes) if layer < MANY), default=MANY)


def _ultralytics(layout: Layout, key: str) -> str:
    return "bias" if "bias" in key else "norm" if layout.is_norm(key) or "logit_scale" in key else "weight"


class Recipe(Struct, frozen=True):
    """How a trainer groups parameters: ``label`` returns the group of a parameter. The groups are in the given
    ``order``, including empty ones, else in the order of first appearance."""

    name: str
    label: Callable[[Layout, str], Hashable]
    order: tuple[Hashable, ...] = ()
    is_mixed: bool = False  # whether the groups belong to two methods, which keep different state
    within: Callable[[Iterable[str]], list[str]] | None = None
    """Sorts the parameters within groups, if not in the order of the model."""
    is_own: bool = False  # whether it is a custom one: its labels are pairs of a part of the model and a parameter kind
    sign: str = ""
    """What only this trainer leaves with the optimizer: a file, an entry of the checkpoint, an option of groups."""
    is_signed: bool = False  # whether its groups always have the sign
    rises: Callable[[Any], tuple[float, float]] | None = None
    """Maps a group's label to numbers with which its learning rate and weight decay increase, if they do."""

    def groups(self, layout: Layout) -> list[tuple[Hashable, list[str]]]:
        """Return each group's label and parameters."""
        groups: dict[Any, list[str]] = {label: [] for label in self.order}
        for key in self.listed(layout):
            groups.setdefault(self.label(layout, key), []).append(key)
        return list(groups.items())

    def listed(self, layout: Layout) -> Iterable[str]:
        """Return the parameters of a layout in the order within groups."""
        return self.within(layout.shapes) if self.within else layout.shapes

    def agrees(self, labels: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the hyperparameters of the groups are consistent with these labels."""
        if self.is_signed and not all(self.sign in group for group in groups):
            return False
        if self.rises is _decaying and len({tuple(_without_decay(group).items()) for group in groups}) > 1:
            return False
        if self.rises is _layered and len({layer for layer, _ in labels}) < 2:
            return False  # without numbered blocks, it would only be by decay
        ranks = list(map(self.rises, labels)) if self.rises is not None else []
        for which, names in enumerate((("lr_scale", "lr"), ("weight_decay",))):
            numbers = (next((group[name] for name in names if name in group), None) for group in groups)
            pairs = zip(ranks, map(number_of, numbers), strict=False)
            known = [(rank[which], number) for rank, number in pairs if isinstance(number, (int, float))]
            if any(low < high and more > less for (low, more), (high, less) in product(known, repeat=2)):
                return False
        return True

    def signs(self, optimizer: Optimizer) -> bool:
        """Return whether the groups have the option that only this trainer sets."""
        return bool(self.sign) and all(self.sign in group for group in optimizer.groups)

    def place_of(self, new: Layout | None, groups: Iterable[Hashable]) -> tuple[Hashable, ...]:
        """Return the group of each new parameter: the index of one of ``groups``, or the label of another group."""
        places = {label: place for place, label in enumerate(groups)}
        labels = [self.label(new, key) for key in new.shapes] if new is not None else []
        return tuple(places.get(label, (label,)) for label in labels)


def _without_decay(group: Mapping[str, Any]) -> dict[str, Hashable]:
    names = ("lr", "initial_lr", "betas", "momentum", "eps")
    return {name: number_of(group[name]) for name in names if name in group}


def number_of(value: object) -> Hashable:
    """Return a hashable value to compare options or counts by: the number in a 0-d tensor, or the plain value."""
    if isinstance(value, TensorSpec):
        if value.storage is None or value.numel != 1:
            return value.dtype, id(value)
        start, stop = value.extent
        stored = bytes(value.storage.source.read(start, stop))
        form = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(value.dtype)
        return unpack(form, stored)[0] if form else (value.dtype, stored)
    return value if isinstance(value, (int, float, str, type(None))) else repr(value)


def _decaying(label: Any) -> tuple[float, float]:
    return 0, label


def _layered(label: tuple[float, float]) -> tuple[float, float]:
    return label


PLAIN = Recipe("model.parameters()", lambda layout, key: 0)
EACH = Recipe("detectron2", lambda layout, key: key)


def _is_decayed_in_mingpt(layout: Layout, key: str) -> bool:
    return bare(key).endswith("weight") and not _is_flat(layout, key) and not layout.is_table(key)


RECIPES = (
    PLAIN,
    Recipe("Hugging Face Trainer", _decays_in_hf, (True, False), sign=HF_FILE, rises=_decaying),
    Recipe(
        "Hugging Face Trainer before names counted",
        lambda layout, key: not (layout.is_norm(key, "LayerNorm", "RMSNorm") or "bias" in key),
        (True, False),
        sign=HF_FILE,
        rises=_decaying,
    ),
    Recipe("decay for matrices, none for the rest", lambda *of: not _is_flat(*of), (True, False), rises=_decaying),
    Recipe("timm", _decays_in_timm, (False, True), rises=_decaying),
    Recipe("timm with no_weight_decay", _decays_in_vit, (False, True), rises=_decaying),
    Recipe("timm with only no_weight_decay", _may_decay, (False, True), rises=_decaying),
    Recipe("DETR", lambda layout, key: "backbone" in key, (False, True)),
    Recipe(
        "hidden matrices first, as of Muon",
        lambda layout, key: not (_is_flat(layout, key) or OUTER.search(key)),
        (True, False),
        is_mixed=True,
    ),
    Recipe("minGPT, by name", _is_decayed_in_mingpt, (True, False), within=sorted, rises=_decaying),
    *(
        Recipe(name, _ultralytics, order, sign="train_args", rises=lambda label: (0, label == "weight"))
        for name, order in (
            ("ultralytics", ("bias", "weight", "norm")),
            ("ultralytics 8.4", ("weight", "norm", "bias")),
        )
    ),
    EACH,
    Recipe("detectron2, groups reduced", lambda layout, key: layout.is_norm(key)),
    Recipe("BEiT without layer-wise decay", _decays_in_vit, sign="lr_scale", is_signed=True, rises=_decaying),
    Recipe(
        "layer-wise decay of BEiT and MAE",
        lambda layout, key: (_layer(key), _decays_in_vit(layout, key)),
        sign="lr_scale",
        rises=_layered,
    ),
    Recipe(
        "layer-wise decay of MAE",
        lambda layout, key: (_layer(key), not (_is_flat(layout, key) or key in _MAE_UNDECAYED)),
        sign="lr_scale",
        rises=_layered,
    ),
    Recipe(
        "layer-wise decay of timm",
        lambda layout, key: (_layer_in_timm(layout, key), _may_decay(layout, key) and not _is_flat(layout, key)),
        sign="lr_scale",
        rises=_layered,
    ),
)
"""The recipes of trainers in use. Each is confirmed by the sizes of the groups and the shapes of the moments.

Sources: ``transformers/trainer.py`` and ``trainer_pt_utils.py``; ``timm/optim/_param_groups.py``; ``optim_factory.py``
of BEiT; ``util/lr_decay.py`` of MAE; ``engine/trainer.py`` of ultralytics; ``solver/build.py`` of detectron2;
``main.py`` of DETR."""

PartOf = Callable[[str], Hashable]
KindOf = Callable[[Layout, str], Hashable]
Order = Callable[[Iterable[str]], list[str]]
_NUMBERED = re.compile(r"(.*?\.\d+)\.")
_LISTED = re.compile("bias|norm|bn|embed|token")
_PARTS: Mapping[str, PartOf] = {
    "": lambda key: 0,
    "part": lambda key: bare(key).partition(".")[0],
    "kind of part": lambda key: bare(key).partition(".")[0].rstrip("0123456789"),
    "inner part": lambda key: ".".join(bare(key).split(".")[:-1][:2]),
    "numbered layer": lambda key: found[1] if (found := _NUMBERED.match(bare(key))) else bare(key).partition(".")[0],
    "layer": _layer,
    "module": lambda key: key.rpartition(".")[0],
}
_KINDS: Mapping[str, KindOf] = {
    "": lambda layout, key: 0,
    "biases": lambda layout, key: bare(key).endswith("bias"),
    "names with bias": lambda layout, key: "bias" in key,
    "vectors": _is_flat,
    "norms": lambda layout, key: layout.is_norm(key),
    "norms and biases": lambda layout, key: layout.is_norm(key) or "bias" in key,
    "norms, biases and tables": lambda layout, key: _LISTED.search(bare(key)) is not None,
    "tables": lambda layout, key: layout.is_table(key),
    "norms and biases each": lambda layout, key: 2 if "bias" in key else layout.is_norm(key),
    **{recipe.name: recipe.label for recipe in RECIPES if recipe not in (PLAIN, EACH)},
}
"""What custom scripts group by: parts of a model (``_PARTS``), and kinds of parameters (``_KINDS``)."""


def _heads_first(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: not re.search(r"head|classif|(^|\.)fc", bare(key)))


def _biases_last(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: bare(key).endswith("bias"))


def _from_the_last(part: PartOf, keys: Iterable[str]) -> list[str]:
    places: dict[Hashable, int] = {}
    for key in keys:
        places.setdefault(part(key), -len(places))
    return sorted(keys, key=lambda key: places[part(key)])


def _reverse(keys: Iterable[str]) -> list[str]:
    return list(keys)[::-1]


_BY_NAME: Mapping[str, Order] = {", by name": sorted, ", by name and number": by_number}
_IN_REVERSE: Mapping[str, Order] = {
    ", in reverse": _reverse,
    ", by name in reverse": partial(sorted, reverse=True),
    **{f", by {part} in reverse": partial(_from_the_last, of) for part, of in _PARTS.items() if part},
}
_IN_GROUPS: Mapping[str, Order] = {**_BY_NAME, ", in reverse": _reverse}
_RARE: Mapping[str, Order] = {**_IN_REVERSE, **_BY_NAME, ", heads first": _heads_first, ", biases last": _biases_last}
"""Orders that few scripts use, and that are only tried on request."""
ORDERS_BY_NAME = (*_BY_NAME.values(), _IN_REVERSE[", by part in reverse"])  # orders that a rename may change


def own_recipes(layout: Layout, optimizer: Optimizer, new: Layout | None, is_rare: bool) -> Iterator[Recipe]:
    """Yield custom recipes whose groups have the optimizer's sizes, including a single group. Orders that agree on the
    layout may differ on the ``new`` one. ``is_rare`` yields the rare orders instead of the usual ones."""
    sizes = optimizer.sizes
    if sum(map(bool, sizes)) == 1:
        orders = dict(_RARE if is_rare else {**_BY_NAME, ", heads first": _heads_first})
        if not is_rare and by_number(layout.shapes) == list(layout.shapes):
            del orders[", by name"]  # with many equal numbered layers, the model's order is the likely one
        places = tuple(0 if size else (None, place) for place, size in enumerate(sizes))
        for name, within in _differing(layout, new, orders):
            yield replace(PLAIN, name=PLAIN.name + name, within=within, order=places)
        return
    if max(sizes) == 1:
        for name, within in _differing(layout, new, _RARE if is_rare else {**_BY_NAME, **_IN_REVERSE}):
            yield replace(EACH, name=f"a group for each parameter{name}", within=within)
    yield from own_groups(layout, optimizer, new, _RARE if is_rare else _IN_GROUPS)


def own_groups(
    layout: Layout, optimizer: Optimizer, new: Layout | None = None, orders: Mapping[str, Order] = _IN_GROUPS
) -> Iterator[Recipe]:
    """Yield custom recipes whose groups have the optimizer's sizes: by parts, by kinds, or by both. The groups may be
    in any order, with their parameters in one of ``orders`` or that of the model: each combination that fits the
    shapes is a recipe. Orders that agree on the layout may differ on the ``new`` one."""
    sizes, shapes = sorted(filter(None, optimizer.sizes)), list(layout.shapes.values())
    parts = dict(_PARTS)
    kinds = {kind: [of(layout, key) for key in layout.shapes] for kind, of in _KINDS.items()}
    if max(sizes) == 1:  # grouping by module and kind would give one group per parameter, in any order
        parts, kinds = {"part": parts["part"]}, {"": kinds[""]}
    places: dict[str, list[Hashable]] = {part: [of(key) for key in layout.shapes] for part, of in parts.items()}
    words = list(map(_words, layout.shapes))
    for word, count in Counter(chain.from_iterable(words)).items():
        if count < len(words) and not word.isdecimal():
            parts[f"{word} or not"] = partial(_is_in, word)
            places[f"{word} or not"] = [word in each for each in words]
            parts[f"{word} in names"] = partial(_has, word)
            places[f"{word} in names"] = [word in bare(key) for key in layout.shapes]
    numbers = {key: number for number, key in enumerate(layout.shapes)}
    lists = [
        (name, within, [numbers[key] for key in (within or list)(layout.shapes)])
        for name, within in chain([("", None)], _differing(layout, new, orders))
    ]
    arranged: dict[Hashable, list[list[int]]] = {}  # cached, because many parts and kinds make the same groups
    few = [[name for name, labels in each.items() if len(set(labels)) <= len(sizes)] for each in (places, kinds)]
    for part, kind in sorted(product(*few), key=lambda pair: all(pair)):  # the simpler ones first
        labels = list(zip(places[part], kinds[kind], strict=True))
        if sorted(Counter(labels).values()) != sizes:
            continue
        what = " and ".join(filter(None, (part and f"by {part}", kind and f"{kind} apart")))
        of = partial(_label, parts[part], _KINDS[kind])
        for name, within, order in lists:
            groups: dict[Hashable, list[int]] = {}
            for number in order:
                groups.setdefault(labels[number], []).append(number)
            form = tuple(map(tuple, groups.values()))
            if form not in arranged:
                arranged[form] = list(islice(_arranged([[shapes[n] for n in each] for each in form], optimizer), 2))
            for arrangement in arranged[form]:
                members = (list(groups)[place] for place in arrangement)
                chosen = tuple(next(members) if size else (None, place) for place, size in enumerate(optimizer.sizes))
                yield Recipe(f"groups of one's own, {what}{name}", of, chosen, within=within, is_own=True)


def _differing(layout: Layout, new: Layout | None, orders: Mapping[str, Order]) -> Iterator[tuple[str, Order]]:
    """Yield the orders that differ from the model's, and from each other, on at least one of two layouts."""
    if new is not None and have_lost_a_prefix(layout.shapes, new.shapes):
        new = None
    layouts = [list(each.shapes) for each in (layout, new) if each is not None]
    known = [layouts]
    for name, within in orders.items():
        if (order := list(map(within, layouts))) not in known:
            known.append(order)
            yield name, within


def have_lost_a_prefix(old: Iterable[str], new: Iterable[str]) -> bool:
    """Return whether the new names are the old ones without a common prefix, such as that of a Lightning module. Orders
    by part then differ only on the old names, which no script intends."""
    before, after = list(map(bare, old)), list(map(bare, new))
    return len(before) == len(after) and len(set(map(str.removesuffix, before, after))) == 1


def may_list(optimizer: Optimizer, shapes: Iterable[Shape]) -> bool:
    """Return whether parameters of these shapes, in this order, can be divided into groups that fit the optimizer's."""
    forms: dict[tuple[Any, ...], int] = {}  # groups with the same remaining rows count as one
    ahead: list[tuple[Mapping[str, Any], int]] = []

    def after(rows: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of a sequence of remaining rows."""
        if not rows:
            return -1
        key = (*(tuple((name, logical_shape(value)) for name, value in values_in(rows[0])),), after(rows[1:]))
        if key not in forms:
            forms[key] = len(ahead)
            ahead.append((rows[0], key[-1]))
        return forms[key]

    found = {tuple(sorted(after(list(map(optimizer.row, group["params"]))) for group in optimizer.groups))}
    for shape in shapes:
        fitting = {number for state in found for number in state if number >= 0 and fits(ahead[number][0], shape)}
        found = {
            tuple(sorted((*state[:at], ahead[number][1], *state[at + 1 :])))
            for state in found
            for at, number in enumerate(state)
            if number in fitting
        }
        if len(found) > LIMIT:
            return True
    return bool(found)


LIMIT = 1_000  # steps of a search for orders of groups, whose number grows factorially in files with few moments


def _arranged(groups: Sequence[Sequence[Shape]], optimizer: Optimizer) -> Iterator[list[int]]:
    """Yield the orders in which groups of parameters of these shapes fit the optimizer's groups; two of those that only
    swap groups of equal shapes."""
    alike: dict[tuple[Shape, ...], list[int]] = {}
    for number, shapes in enumerate(groups):
        alike.setdefault(tuple(shapes), []).append(number)
    rows = [[optimizer.row(number) for number in group["params"]] for group in optimizer.groups if group["params"]]
    fitting = [[form for form in alike if len(form) == len(each) and all(map(fits, each, form))] for each in rows]
    stack: list[list[tuple[Shape, ...]]] = [[]]  # the shapes of the first groups of the optimizer
    for _ in range(LIMIT):
        if not stack:
            return
        chosen = stack.pop()
        if len(chosen) < len(fitting):
            free = [form for form in fitting[len(chosen)] if chosen.count(form) < len(alike[form])]
            stack += ([*chosen, form] for form in reversed(free))
            continue
        for first in (0, 1) if len(alike) < len(chosen) else (0,):  # two in which equal groups have different places
            left = {form: [*numbers[first:], *numbers[:first]] for form, numbers in alike.items()}
            yield [left[form].pop() for form in chosen]


def _is_in(word: str, key: str) -> bool:
    return word in _words(key)


def _has(word: str, key: str) -> bool:
    return word in bare(key)


def _words(key: str) -> set[str]:
    """Return the names of the modules that contain a parameter, with and without trailing digits."""
    names = bare(key).split(".")[:-1]
    return {*names, *(name.rstrip("0123456789") for name in names)} - {""}


def _label(part: PartOf, kind: KindOf, layout: Layout, key: str) -> tuple[Hashable, Hashable]:
    return part(key), kind(layout, key)


NAMED, KEYED = "param_names", "names in the place of numbers"  # sources of certain names


class Naming(Struct, frozen=True):
    """The names of an optimizer's ids, and where they come from.

    ``recipe`` is None if the names are in the file itself. ``own_shapes`` counts the parameters with a unique shape;
    all others are only identified by their order."""

    names: Mapping[Any, str]
    source: str
    recipe: Recipe | None = None
    moments: int = 0
    own_shapes: int = 0

    @property
    def is_certain(self) -> bool:
        """Whether the file itself has the names."""
        return self.source in (NAMED, KEYED)


def stored_names(optimizer: Optimizer) -> dict[Any, str] | None:
    """Return the names of the ids that are in the state itself, None if it has none."""
    if optimizer.is_keyed:
        return {number: number for number in optimizer.ids}
    found: dict[Any, str] = {}
    for group in optimizer.groups:
        names = group.get("param_names")
        if not isinstance(names, list) or len(names) != len(group["params"]):
            return None
        found |= zip(group["params"], names, strict=True)
    return found if found and all(isinstance(name, str) for name in found.values()) else None


def named_by_itself(optimizer: Optimizer, keys: Mapping[str, TensorSpec]) -> list[Naming]:
    """Return the naming by the names in the state, as some of ``keys``; empty if it has no names, or one is not among
    the keys. There are several if the names may also be those inside a submodule, and the moments fit both."""
    names = stored_names(optimizer)
    if names is None:
        return []
    of_bare = {bare(key): key for key in keys}
    own = {number: bare(name) for number, name in names.items()}
    first = next(iter(own.values()))
    found: list[dict[Any, str]] = []
    for prefix in sorted(key.removesuffix(first) for key in of_bare if key == first or key.endswith(f".{first}")):
        known = {number: of_bare[prefix + name] for number, name in own.items() if prefix + name in of_bare}
        if len(set(known.values())) == len(names) and (not prefix or found):
            found.append(known)
    fitting = [
        known for known in found if all(fits(optimizer.row(number), keys[key].shape) for number, key in known.items())
    ]
    source = KEYED if isinstance(next(iter(names)), str) else NAMED
    moments = sum(bool(_moments(optimizer.row(number))) for number in names)
    return [Naming(known, source, moments=moments) for known in fitting or found[:1]]


def namings(
    optimizer: Optimizer, layout: Layout, new: Layout | None = None, of_trainers: bool = False, is_rare: bool = False
) -> Iterator[Naming]:
    """Yield a naming for each recipe under which the optimizer has exactly the parameters of the layout.

    Custom recipes that agree, also on the groups of ``new`` parameters, are yielded once, and not at all with
    ``of_trainers`` or if a trainer has signed the groups. ``is_rare`` yields only the recipes with rare orders."""
    sizes = optimizer.sizes
    if sum(sizes) != len(layout.shapes):
        return
    rows = [optimizer.row(number) for number in optimizer.ids]
    moments = sum(map(bool, map(_moments, rows)))
    counts = Counter(layout.shapes.values())
    unique = sum(counts[shape] == 1 for shape in layout.shapes.values())
    is_mixed = len({frozenset(row) for row in rows if row}) > 1

    def named(recipe: Recipe) -> Iterator[tuple[Hashable, Naming]]:
        if recipe.order and len(recipe.order) != len(sizes):
            return  # such a recipe has the same number of groups for every model, even if some are empty
        made = recipe.groups(layout)
        order = list(chain.from_iterable(keys for _, keys in made))
        is_like = [len(keys) for _, keys in made] == list(sizes)
        if not is_like or not recipe.agrees([label for label, _ in made], optimizer.groups):
            return
        if all(fits(row, layout.shapes[key]) for row, key in zip(rows, order, strict=True)):
            names = dict(zip(optimizer.ids, order, strict=True))
            # With one parameter per group, the place of a new group follows from the order of the parameters.
            places = recipe.name if recipe.label is EACH.label else recipe.place_of(new, dict(made))
            listed = tuple(recipe.listed(new)) if new is not None else ()
            yield (order, places, listed), Naming(names, recipe.name, recipe, moments, unique)

    found = list(chain.from_iterable(named(recipe) for recipe in RECIPES if is_mixed or not recipe.is_mixed))
    signed = [naming for _, naming in found if naming.recipe is not None and naming.recipe.signs(optimizer)]
    if not is_rare:
        yield from signed or (naming for _, naming in found)
    if signed or of_trainers or not moments:
        return  # without moments, nothing confirms custom groups
    outcomes = [outcome for outcome, _ in found]
    for recipe in own_recipes(layout, optimizer, new, is_rare):
        for outcome, naming in named(recipe):
            if outcome not in outcomes:
                outcomes.append(outcome)
                yield naming


def _moments(row: Mapping[str, Any]) -> list[Any]:
    return [value for _, value in values_in(row) if logical_shape(value)]
