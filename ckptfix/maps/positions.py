"""Which position of an optimizer's state is which parameter.

``torch.optim`` numbers parameters. Their names are in the file itself (``param_names``, or names in the place of
numbers), or follow from the order of ``named_parameters()`` and the way in which a trainer puts parameters into groups:
a recipe. A recipe fits if each group has as many parameters as it says, and each moment the shape of its parameter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, product
from math import prod
from struct import unpack
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint, PathPart, is_inside, path_name, value_at
from ckptfix.core.objects import DEPTH, MANY, Opaque, is_flat_optimizer, tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import bare

Shape = tuple[int, ...]
NAMED, KEYED = "param_names", "names in the place of numbers"  # what makes names certain


# The hyperparameter of Adagrad with which the sums of its squared gradients begin.
INITIAL = "initial_accumulator_value"
SCALARS = frozenset(("step", "mu_product"))  # what is one number for a parameter of any shape
_BEGINNINGS: Mapping[str, float | str] = {
    **dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"), 0),
    **dict.fromkeys(("grad_avg", "acc_delta", "exp_inf", "prev"), 0),
    "mu_product": 1,
    "sum": INITIAL,
    "step_size": "lr",
}
"""What torch's optimizers begin with: a number, or the hyperparameter that is one."""


class Optimizer(Struct, frozen=True):
    """The state of an optimizer in a container: a row for each id, and the groups of ids."""

    path: tuple[PathPart, ...]
    state: Mapping[Any, Any]
    groups: tuple[Mapping[str, Any], ...]
    is_flat: bool = False  # whether the file has it in flat keys: `state.fc.weight.exp_avg`

    @property
    def name(self) -> str:
        """Its place in the container: ``optimizer``, ``optimizer_states[0]``."""
        return path_name(self.path)

    @property
    def label(self) -> str:
        """How a sentence names it: ``the optimizer``, ``the optimizer in optimizer_states[0]``."""
        return "the optimizer" if self.name == "optimizer" else f"the optimizer in {self.name}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of parameters of each group."""
        return tuple(len(group["params"]) for group in self.groups)

    @property
    def ids(self) -> list[Any]:
        """The ids of all groups, one after another."""
        return [number for group in self.groups for number in group["params"]]

    @property
    def is_keyed(self) -> bool:
        """Whether names are in the place of numbers, so that their order means nothing."""
        return bool(self.ids) and all(isinstance(number, str) for number in self.ids)

    @property
    def is_joint(self) -> bool:
        """Whether the state is of all parameters together, as that of LBFGS: it follows no change of one of them."""
        return any("prev_flat_grad" in self.row(number) for number in self.ids)

    def row(self, number: Any) -> Mapping[str, Any]:
        """Return what is kept of a parameter; empty if it never had a gradient."""
        row = self.state.get(number)
        return row if isinstance(row, Mapping) else {}


def optimizer_of(value: object, path: tuple[PathPart, ...] = ()) -> Optimizer | None:
    """Return an optimizer's ``state_dict``, None for any other value."""
    if not isinstance(value, Mapping):
        return None
    if is_flat_optimizer(value):
        return _from_flat(value, path)
    state, groups = value.get("state"), value.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not groups:
        return None
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        return None
    found = Optimizer(path, state, tuple(groups))
    ids = found.ids
    is_usual = all(type(number) in (int, str) for number in ids) and len(set(map(str, ids))) == len(ids)
    return found if is_usual else None


def _from_flat(value: Mapping[Any, Any], path: tuple[PathPart, ...]) -> Optimizer | None:
    """Return the optimizer of flat keys, with a group for each parameter, as the options are kept."""
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, kept in value.items():
        part, _, rest = str(key).partition(".")
        name, _, option = rest.rpartition(".")
        if part not in parts or not name:
            return None
        parts[part].setdefault(name, {})[option] = kept
    groups = tuple({**options, "params": [name]} for name, options in parts["param_groups"].items())
    return (
        Optimizer(path, parts["state"], groups, is_flat=True)
        if parts["state"].keys() <= parts["param_groups"].keys()
        else None
    )


def flat(state: Mapping[Any, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the flat keys of an optimizer whose ids are names."""
    found = {f"state.{name}.{what}": value for name, row in state.items() for what, value in row.items()}
    return found | {
        f"param_groups.{name}.{option}": value
        for group in groups
        for name in group["params"]
        for option, value in group.items()
        if option != "params"
    }


def optimizers_in(root: object, path: tuple[PathPart, ...] = ()) -> Iterator[Optimizer]:
    """Find the optimizers of a container, in its order."""
    found = optimizer_of(root, path)
    if found is not None:
        yield found
        return
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(root, (Mapping, list)) and (len(root) <= MANY or not path) and len(path) < DEPTH:
        members = root.items() if isinstance(root, Mapping) else enumerate(root)
    for name, member in members:
        if isinstance(name, (str, int)) and isinstance(member, (Mapping, list)):
            yield from optimizers_in(member, (*path, name))


def beginning(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the numbers that the state of a new parameter is filled with, by name; None if it begins without a state,
    or is not known to begin with one. Adagrad has one from the start on, fused SGD fails on a momentum that only some
    parameters have, and torch loads flat keys only if each parameter has all of them."""
    rows = [row for row in map(optimizer.row, optimizer.ids) if row]
    names = rows[0].keys() if rows else ()
    is_needed = optimizer.is_flat or INITIAL in group or (group.get("fused") and "momentum_buffer" in names)
    if not names or not is_needed or any(row.keys() != names for row in rows) or group.get("dampening"):
        return None
    known = {name: _BEGINNINGS.get(name) for name in names}
    values = {name: group.get(number) if isinstance(number, str) else number for name, number in known.items()}
    found = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return found if len(found) == len(names) else None


def optimizers_of(checkpoint: Checkpoint) -> list[Optimizer]:
    """Return the optimizers in a checkpoint and in the files beside it."""
    return [*optimizers_in(checkpoint.root), *optimizers_in(checkpoint.beside)]


def parts_beside(checkpoint: Checkpoint) -> Iterator[tuple[str, list[TensorSpec], bool]]:
    """Yield the parts of a file beside the state_dict: the name of each, its tensors, and whether it is an optimizer,
    which is a part by itself wherever it is."""
    optimizers = list(optimizers_in(checkpoint.root)) if checkpoint.rest else []
    for place, specs in checkpoint.rest.items():
        left = {id(spec): spec for spec in specs}
        for optimizer in optimizers:
            if is_inside(optimizer.name, place):
                own = map(id, tensors_in(value_at(checkpoint.root, optimizer.path)))
                if found := [left.pop(each) for each in own if each in left]:
                    yield optimizer.name, found, True
        if left:
            yield place, list(left.values()), False


# Recipes
# ----------------------------------------------------------------------------------------------------------------------


class Layout(Struct, frozen=True):
    """The parameters of a model in the order of ``named_parameters()``, and if known, its modules' class names, and the
    layer of each parameter as timm counts them."""

    shapes: Mapping[str, Shape]
    modules: Mapping[str, str] | None = None
    layers: Mapping[str, int] | None = None

    def is_norm(self, key: str, *kinds: str) -> bool:
        """Return whether a parameter belongs to a norm: by the class of its module, else if the module's weight is
        flat."""
        module, _, leaf = key.rpartition(".")
        if self.modules is not None and module in self.modules:
            return any(kind in self.modules[module] for kind in kinds or ("Norm",))
        return leaf in ("weight", "bias", "gamma", "beta") and len(self.shapes.get(f"{module}.weight", (0, 0))) == 1

    def is_table(self, key: str) -> bool:
        """Return whether a parameter is the table of an embedding: by the class of its module, else by its name."""
        known = (self.modules or {}).get(key.rpartition(".")[0])
        return "Embedding" in known if known is not None else re.search("emb|wte|wpe", bare(key)) is not None


HF_FILE = "trainer_state.json"
_HF_PATTERNS = r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)"
_UNDECAYED = r"(^|\.|_)(pos_embed|(cls|dist|reg|mask)_token|absolute_pos_embed|\w*relative_position_bias_table)$"
_MAE_UNDECAYED = frozenset({"pos_embed", "cls_token", "dist_token"})
OUTER = re.compile(r"embed|wte|wpe|(^|[._])head($|\.)")  # tables and heads, which scripts with Muon leave to Adam
_STEM = r"(cls_token|mask_token|reg_token|pos_embed|patch_embed|norm_pre)"
_BLOCK = r"(.*\.)?(blocks|layers?|h)\.(\d+)\."


def _is_flat(layout: Layout, key: str) -> bool:
    return len(layout.shapes[key]) <= 1


def _has_bias(key: str) -> bool:
    return bare(key).endswith(".bias")


def _decays_in_hf(layout: Layout, key: str) -> bool:
    module = key.rpartition(".")[0]
    is_layer_norm = layout.modules is not None and layout.modules.get(module) == "LayerNorm"
    return not (is_layer_norm or re.search(_HF_PATTERNS, bare(key).lower()))


def _decays_in_old_hf(layout: Layout, key: str) -> bool:
    return not (layout.is_norm(key, "LayerNorm", "RMSNorm") or "bias" in key)


def _decays_in_timm(layout: Layout, key: str) -> bool:
    return not (_is_flat(layout, key) or _has_bias(key))


def _decays_in_vit(layout: Layout, key: str) -> bool:
    return _decays_in_timm(layout, key) and _may_decay(layout, key)


def _may_decay(layout: Layout, key: str) -> bool:
    return not re.search(_UNDECAYED, key)


def _is_hidden_matrix(layout: Layout, key: str) -> bool:
    return not _is_flat(layout, key) and not OUTER.search(key)


def _layer(key: str) -> int:
    """Return the number of a parameter's block; what is before the blocks is -1, and what is after them ``MANY``."""
    name = bare(key)
    block = re.match(_BLOCK, name)
    return -1 if re.match(_STEM, name) else int(block[3]) if block else MANY


def _layer_in_timm(layout: Layout, key: str) -> int:
    """Return what the model says; else the same, with the norm after the blocks in the last one."""
    if layout.layers is not None:
        return layout.layers[key]
    if not bare(key).startswith("norm"):
        return _layer(key)
    return max((layer for layer in map(_layer, layout.shapes) if layer < MANY), default=MANY)


def _ultralytics(layout: Layout, key: str) -> str:
    return "bias" if "bias" in key else "norm" if layout.is_norm(key) or "logit_scale" in key else "weight"


class Recipe(Struct, frozen=True):
    """How a trainer groups parameters: ``label`` names the group of one. The groups are in the given ``order``, all of
    them even if empty, else in that of first appearance."""

    name: str
    label: Callable[[Layout, str], Hashable]
    order: tuple[Hashable, ...] = ()
    is_mixed: bool = False  # whether the groups are of two methods, which keep different state
    within: Callable[[Iterable[str]], list[str]] | None = None
    """In which order each group lists its parameters, if not in that of the model."""
    is_own: bool = False  # whether it is that of no trainer: its labels are a part of the model and a kind of parameter
    sign: str = ""
    """What only its trainer leaves beside the optimizer: a file, an entry of the checkpoint, an option of groups."""
    rises: Callable[[Any], tuple[float, float]] | None = None
    """What the learning rate and the weight decay of a group rise with, by its label, if they do."""

    def groups(self, layout: Layout) -> list[tuple[Hashable, list[str]]]:
        """Return each group's label and parameters."""
        groups: dict[Any, list[str]] = {label: [] for label in self.order}
        for key in self.listed(layout):
            groups.setdefault(self.label(layout, key), []).append(key)
        return list(groups.items())

    def listed(self, layout: Layout) -> Iterable[str]:
        """Return the parameters of a layout in the order in which the groups list them."""
        return self.within(layout.shapes) if self.within else layout.shapes

    def agrees(self, labels: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the hyperparameters of groups do not contradict these labels."""
        if self.rises is _decaying and len({tuple(_without_decay(group).items()) for group in groups}) > 1:
            return False
        if self.rises is _layered and len({layer for layer, _ in labels}) < 2:
            return False  # of a model without numbered blocks it would be by decay only
        ranks = list(map(self.rises, labels)) if self.rises is not None else []
        for which, names in enumerate((("lr_scale", "lr"), ("weight_decay",))):
            numbers = (next((group[name] for name in names if name in group), None) for group in groups)
            pairs = zip(ranks, map(number_of, numbers), strict=False)
            known = [(rank[which], number) for rank, number in pairs if isinstance(number, (int, float))]
            if any(low < high and more > less for (low, more), (high, less) in product(known, repeat=2)):
                return False
        return True

    def signs(self, optimizer: Optimizer) -> bool:
        """Return whether the groups have an option that only its trainer gives them."""
        return bool(self.sign) and all(self.sign in group for group in optimizer.groups)

    def place_of(self, new: Layout | None, groups: Iterable[Hashable]) -> tuple[Hashable, ...]:
        """Return in which of these groups each new parameter would be: a number, or the label of another one."""
        places = {label: place for place, label in enumerate(groups)}
        labels = [self.label(new, key) for key in new.shapes] if new is not None else []
        return tuple(places.get(label, (label,)) for label in labels)


def _without_decay(group: Mapping[str, Any]) -> dict[str, Hashable]:
    names = ("lr", "initial_lr", "betas", "momentum", "eps")
    return {name: number_of(group[name]) for name in names if name in group}


def number_of(value: object) -> Hashable:
    """Return what tells two options or counts apart: the number in a 0-d tensor, or what is no tensor itself."""
    if isinstance(value, TensorSpec):
        if value.storage is None or value.numel != 1:
            return id(value)
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
        "Hugging Face Trainer before names counted", _decays_in_old_hf, (True, False), sign=HF_FILE, rises=_decaying
    ),
    Recipe(
        "decay for matrices, none for the rest",
        lambda layout, key: not _is_flat(layout, key),
        (True, False),
        rises=_decaying,
    ),
    Recipe("timm", _decays_in_timm, (False, True), rises=_decaying),
    Recipe("timm with no_weight_decay", _decays_in_vit, (False, True), rises=_decaying),
    Recipe("timm with only no_weight_decay", _may_decay, (False, True), rises=_decaying),
    Recipe("DETR", lambda layout, key: "backbone" in key, (False, True)),
    Recipe("hidden matrices first, as of Muon", _is_hidden_matrix, (True, False), is_mixed=True),
    Recipe("minGPT, by name", _is_decayed_in_mingpt, (True, False), within=sorted, rises=_decaying),
    Recipe(
        "ultralytics",
        _ultralytics,
        ("bias", "weight", "norm"),
        sign="train_args",
        rises=lambda label: (0, label == "weight"),
    ),
    EACH,
    Recipe("detectron2, groups reduced", lambda layout, key: layout.is_norm(key)),
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
"""The recipes of trainers that are in use. Each is confirmed by the sizes of the groups and the shapes of the moments.

Sources: ``transformers/trainer.py`` and ``trainer_pt_utils.py``; ``timm/optim/_param_groups.py``; ``optim_factory.py``
of BEiT; ``util/lr_decay.py`` of MAE; ``engine/trainer.py`` of ultralytics; ``solver/build.py`` of detectron2;
``main.py`` of DETR."""

Part = Callable[[str], Hashable]
Kind = Callable[[Layout, str], Hashable]
Order = Callable[[Iterable[str]], list[str]]
_NUMBERED = re.compile(r"(.*?\.\d+)\.")
_LISTED = re.compile("bias|norm|bn|embed|token")
_PARTS: Mapping[str, Part] = {
    "": lambda key: 0,
    "part": lambda key: bare(key).partition(".")[0],
    "kind of part": lambda key: bare(key).partition(".")[0].rstrip("0123456789"),
    "inner part": lambda key: ".".join(bare(key).split(".")[:-1][:2]),
    "numbered layer": lambda key: found[1] if (found := _NUMBERED.match(bare(key))) else bare(key).partition(".")[0],
    "layer": _layer,
    "module": lambda key: key.rpartition(".")[0],
}
_KINDS: Mapping[str, Kind] = {
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
"""What scripts of their own put into groups: parts of a model, and kinds of parameters in them."""


def own_groups(layout: Layout, optimizer: Optimizer, new: Layout | None = None) -> Iterator[Recipe]:
    """Yield the recipes of scripts of their own that make groups of these sizes: by parts, by kinds, or by both. The
    groups may come in any order, and list their parameters in that of the model, by name, or in reverse: each way that
    fits the shapes is a recipe. Orders that agree on the layout may differ on the ``new`` one."""
    sizes, shapes = sorted(optimizer.sizes), list(layout.shapes.values())
    parts = dict(_PARTS)
    kinds = {kind: [of(layout, key) for key in layout.shapes] for kind, of in _KINDS.items()}
    if max(sizes) == 1:  # each module and kind apart would be a group for each parameter, in whatever order
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
    orders = [
        (name, within, [numbers[key] for key in (within or list)(layout.shapes)])
        for name, within in chain([("", None)], _differing(layout, new, {**_BY_NAME, ", in reverse": _reverse}))
    ]
    arranged: dict[Hashable, list[list[int]]] = {}  # most parts and kinds make the groups of others
    for part, kind in sorted(product(parts, kinds), key=lambda pair: all(pair)):  # the simpler one of two that agree
        labels = list(zip(places[part], kinds[kind], strict=True))
        if sorted(Counter(labels).values()) != sizes:
            continue
        what = " and ".join(filter(None, (part and f"by {part}", kind and f"{kind} apart")))
        of = partial(_label, parts[part], _KINDS[kind])
        for name, within, order in orders:
            groups: dict[Hashable, list[int]] = {}
            for number in order:
                groups.setdefault(labels[number], []).append(number)
            form = tuple(map(tuple, groups.values()))
            if form not in arranged:
                arranged[form] = list(islice(_arranged([[shapes[n] for n in each] for each in form], optimizer), 2))
            for arrangement in arranged[form]:
                chosen = tuple(list(groups)[place] for place in arrangement)
                yield Recipe(f"groups of one's own, {what}{name}", of, chosen, within=within, is_own=True)


def _by_number(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", key)])


def _heads_first(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: not re.search(r"head|classif|(^|\.)fc", bare(key)))


def _from_the_last(part: Part, keys: Iterable[str]) -> list[str]:
    places: dict[Hashable, int] = {}
    for key in keys:
        places.setdefault(part(key), -len(places))
    return sorted(keys, key=lambda key: places[part(key)])


def _reverse(keys: Iterable[str]) -> list[str]:
    return list(keys)[::-1]


_BY_NAME: Mapping[str, Order] = {", by name": sorted, ", by name and number": _by_number}
_IN_REVERSE: Mapping[str, Order] = {
    ", by name in reverse": partial(sorted, reverse=True),
    ", in reverse": _reverse,
    **{f", by {part} in reverse": partial(_from_the_last, of) for part, of in _PARTS.items() if part},
}
ORDERS_BY_NAME = (*_BY_NAME.values(), _IN_REVERSE[", by part in reverse"])  # what a rename may change


def _differing(layout: Layout, new: Layout | None, orders: Mapping[str, Order]) -> Iterator[tuple[str, Order]]:
    """Yield the orders that differ from that of the model, and from each other, on one of two layouts."""
    layouts = [list(each.shapes) for each in (layout, new) if each is not None]
    known = [layouts]
    for name, within in orders.items():
        if (order := list(map(within, layouts))) not in known:
            known.append(order)
            yield name, within


def may_list(optimizer: Optimizer, shapes: Iterable[Shape]) -> bool:
    """Return whether groups may list parameters of these shapes in this order, whatever groups they are."""
    forms: dict[tuple[Any, ...], int] = {}  # groups that have the same ahead of them count as one
    ahead: list[tuple[Mapping[str, Any], int]] = []

    def after(rows: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of what a group has ahead of it."""
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


LIMIT = 1_000  # steps of a search for orders of groups; that of a file with few moments has as many as there are orders


def _arranged(groups: Sequence[Sequence[Shape]], optimizer: Optimizer) -> Iterator[list[int]]:
    """Yield orders of groups of parameters of these shapes in which they fit those of the optimizer: of those that only
    exchange groups of equal shapes, two."""
    alike: dict[tuple[Shape, ...], list[int]] = {}
    for number, shapes in enumerate(groups):
        alike.setdefault(tuple(shapes), []).append(number)
    rows = [[optimizer.row(number) for number in group["params"]] for group in optimizer.groups]
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
        for first in (0, 1) if len(alike) < len(chosen) else (0,):  # two at which no group has the same place
            left = {form: [*numbers[first:], *numbers[:first]] for form, numbers in alike.items()}
            yield [left[form].pop() for form in chosen]


def _is_in(word: str, key: str) -> bool:
    return word in _words(key)


def _has(word: str, key: str) -> bool:
    return word in bare(key)


def _words(key: str) -> set[str]:
    """Return the names of the modules that a parameter is in, with and without the number at their end."""
    names = bare(key).split(".")[:-1]
    return {*names, *(name.rstrip("0123456789") for name in names)} - {""}


def _label(part: Part, kind: Kind, layout: Layout, key: str) -> tuple[Hashable, Hashable]:
    return part(key), kind(layout, key)


# Naming
# ----------------------------------------------------------------------------------------------------------------------


class Naming(Struct, frozen=True):
    """The names of an optimizer's ids, and how they are known.

    ``recipe`` is None if the names are in the file itself. ``own_shapes`` counts the parameters whose shape no other
    has: the rest rely on the order between them."""

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
    """Return the names that the state itself gives to its ids, None without."""
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
    """Return the naming that the state gives, in terms of these keys; none if it has none or one is not there. There
    are several if the names may be those inside of a submodule as well, and the moments fit both."""
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
    optimizer: Optimizer, layout: Layout, new: Layout | None = None, of_trainers: bool = False
) -> Iterator[Naming]:
    """Yield a naming for each recipe under which the optimizer has exactly the parameters of the layout. Of recipes of
    a script's own that agree, also on the groups of ``new`` parameters, there is one; there are none if only those
    ``of_trainers`` are asked for, or beside a recipe whose trainer has signed the groups."""
    sizes = optimizer.sizes
    if sum(sizes) != len(layout.shapes):
        return
    rows = [optimizer.row(number) for number in optimizer.ids]
    moments = sum(map(bool, map(_moments, rows)))
    counts = Counter(layout.shapes.values())
    unique = sum(counts[shape] == 1 for shape in layout.shapes.values())
    is_mixed = len({frozenset(row) for row in rows if row}) > 1

    def named(recipe: Recipe) -> Iterator[tuple[Hashable, Naming]]:
        made = recipe.groups(layout)
        order = list(chain.from_iterable(keys for _, keys in made))
        is_like = [len(keys) for _, keys in made] == list(sizes)
        if not is_like or not recipe.agrees([label for label, _ in made], optimizer.groups):
            return
        if all(fits(row, layout.shapes[key]) for row, key in zip(rows, order, strict=True)):
            names = dict(zip(optimizer.ids, order, strict=True))
            # A new group of one parameter has its place by the order in which the script goes through the model.
            places = recipe.name if recipe.label is EACH.label else recipe.place_of(new, dict(made))
            listed = tuple(recipe.listed(new)) if new is not None else ()
            yield (order, places, listed), Naming(names, recipe.name, recipe, moments, unique)

    found = list(chain.from_iterable(named(recipe) for recipe in RECIPES if is_mixed or not recipe.is_mixed))
    signed = [naming for _, naming in found if naming.recipe is not None and naming.recipe.signs(optimizer)]
    yield from signed or (naming for _, naming in found)
    if signed or of_trainers or not moments:
        return  # only moments show groups of one's own
    outcomes = [outcome for outcome, _ in found]
    own = own_groups(layout, optimizer, new)
    if len(sizes) == 1:
        orders = {**_BY_NAME, ", heads first": _heads_first}
        if _by_number(layout.shapes) == list(layout.shapes):
            del orders[", by name"]  # of many numbered layers of equal shapes: the model's order is what is meant
        lists = _differing(layout, new, orders)
        own = (replace(PLAIN, name=PLAIN.name + name, within=within) for name, within in lists)
    elif max(sizes) == 1:
        lists = _differing(layout, new, {**_BY_NAME, **_IN_REVERSE})
        each = (replace(EACH, name=f"a group for each parameter{name}", within=within) for name, within in lists)
        own = chain(each, own)
    for recipe in own:
        for outcome, naming in named(recipe):
            if outcome not in outcomes:
                outcomes.append(outcome)
                yield naming


def values_in(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what is kept of a parameter by name, with what bitsandbytes keeps in a dict of its own."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from values_in(value)
        else:
            yield str(name), value


def _moments(row: Mapping[str, Any]) -> list[Any]:
    return [value for _, value in values_in(row) if logical_shape(value)]


def logical_shape(value: object) -> Shape:
    """Return the shape of a tensor of the state, of one that a class makes of others the shape of the whole; empty for
    numbers."""
    if isinstance(value, TensorSpec):
        return value.shape
    if isinstance(value, Opaque) and value.cls.name == "_rebuild_from_type_v2" and len(value.args) > 2:
        made = value.args[2]
        size = made[2] if isinstance(made, tuple) and len(made) > 2 else ()
        return tuple(size.args[0] if isinstance(size, Opaque) and size.args else size) if size else ()
    return ()


# What bitsandbytes keeps beside a quantised moment: scales and maps of its blocks.
BLOCKWISE = re.compile(r"(absmax|qmap|new_max|max|unorm_vec|gnorm_vec)\d?")
# What Shampoo keeps of each axis; SOAP and Kron keep theirs in lists.
_OF_AXES = r"(inv_)?pre_?cond(itioner)?_?\d*"
_SLICED = frozenset(("s", "p0"))  # what Prodigy keeps of a parameter in one row, or of each of so many elements


def fits(row: Mapping[str, Any], shape: Shape) -> bool:
    """Return whether each tensor of a row may belong to a parameter of this shape: it has its shape, one element, or,
    unless it is one that has an element for each of the parameter's, that of the factored moments of Adafactor."""
    factored = {shape[:-1], (*shape[:-1], 1), (*shape[:-2], *shape[-1:]), (*shape[:-2], 1, *shape[-1:])}
    whole = {shape, (), (1,)}
    return all(
        (found := logical_shape(value)) in whole
        or (len(shape) > 1 and name not in _BEGINNINGS and found in factored)
        or (name == "state1" and found == (2, *shape))  # two averages of bitsandbytes' AdEMAMix
        or BLOCKWISE.fullmatch(name)
        or re.fullmatch(_OF_AXES, name)
        or (name in _SLICED and len(found) == 1 and found[0] <= prod(shape))
        for name, value in values_in(row)
    )


def runs_of(keys: Sequence[str]) -> Counter[str]:
    """Count the keys below each first segment: the parts of a model that have an optimizer each."""
    return Counter(bare(key).partition(".")[0] for key in keys)
