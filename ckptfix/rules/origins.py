"""Second of five steps for an optimizer: what a plan changes of the parameters.

Takes the checkpoint before and after a plan, the plan, and the target. Returns a ``Change``: the parameters before and
after, where each tensor of the result comes from (``trace``), and the possible orders of an optimizer's parameters, the
file's and the model's, because it knows them only by position."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice, permutations, product
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field

from ckptfix.core.buffers import is_buffer_name, layers_of, modules_of
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.edits import Assemble, Drop, Edit, Rename, Tie, Zero
from ckptfix.core.parts import Part, Shape
from ckptfix.core.plan import Plan
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.core.wrappers import bare
from ckptfix.maps.names import by_number, concepts, kind, segments
from ckptfix.maps.recipes import HF_FILE, Layout
from ckptfix.reading.configs import model_config
from ckptfix.rules import RENAMED_LAYERS

_NUMBERS = r"[0-9]+"
_NORM = re.compile(r"(^|\.|(?<!batch)_|layer)(ln|norm)[0-9]*(_\w+)?$", re.IGNORECASE)


class Origin(NamedTuple):
    """The origin of a tensor of the result: the tensor ``key`` of the file, perhaps in another ``shape``, or the
    ``parts`` of several; nothing if the file had no such tensor. ``is_trained`` is whether it has their values."""

    key: str = ""
    shape: Shape = ()
    parts: tuple[Part, ...] = ()
    is_trained: bool = True

    @property
    def sources(self) -> list[str]:
        """The tensors of the file from which it is made."""
        return [self.key] if self.key else list(dict.fromkeys(part.source for part in self.parts))


NEW = Origin(is_trained=False)


def trace(plan: Plan, keys: Iterable[str], is_asked: bool = True) -> dict[str, Origin]:
    """Return the origin of each key after a plan; ``keys`` are those before it.

    Unless the user asked for the map of layers, a few layers whose new names have nothing in common with the old ones
    may be others, and count as new."""
    origins = {key: Origin(key) for key in keys}
    dropped: dict[str, Origin] = {}
    for step in plan.steps:
        names = {edit.key: edit.to for edit in step.edits if isinstance(edit, Rename)}
        used = {part.source for edit in step.edits if isinstance(edit, Assemble) for part in edit.parts}
        used |= {edit.key for edit in step.edits if isinstance(edit, Drop)}
        dropped |= {key: origins[key] for key in used if key in origins}
        after = {names.get(key, key): origin for key, origin in origins.items() if key not in used}
        for edit in step.edits:
            if isinstance(edit, Assemble) and edit.is_reshape:
                before = origins.get(edit.key, NEW)
                after[edit.key] = before._replace(shape=edit.shape, is_trained=before.is_trained and bool(before.key))
            elif isinstance(edit, Assemble):
                after[edit.key] = _assembled(edit, origins)
            elif not (edit.keeps_values or _is_negligible(edit)) and (key := getattr(edit, "key", None)) is not None:
                name = names.get(key, key)
                after[name] = after.get(name, dropped.get(name, NEW))._replace(is_trained=False)
        for edit in step.edits:
            if isinstance(edit, Tie):
                after[edit.key] = after.get(edit.to, NEW)
        if not is_asked and 2 * len(step.edits) < len(origins) and step.rule == RENAMED_LAYERS.code:
            for edit in step.edits:
                name = edit.to if isinstance(edit, Rename) else edit.key if isinstance(edit, Assemble) else ""
                if name and not any(_words(source) & _words(name) for source in after[name].sources):
                    after[name] = NEW
        origins = after
    return origins


def _words(key: str) -> set[str]:
    """Return the concepts in a key, without its role in its module (weight, bias)."""
    path = segments(key)
    return set(chain.from_iterable(map(concepts, path[: -1 if kind(path) else None])))


def _is_negligible(edit: Edit) -> bool:
    """Return whether an edit changes values by less than a training step does, like zeroing subnormal values."""
    return isinstance(edit, Zero) and edit.which == "subnormal"


def _assembled(edit: Assemble, origins: Mapping[str, Origin]) -> Origin:
    """Return the origin of an assembled tensor. Parts of tensors that were assembled before have no short form."""
    before = {part.source: origins.get(part.source, NEW) for part in edit.parts}
    parts = tuple(part for part in edit.parts if before[part.source].key)
    parts = tuple(Part(before[part.source].key, part.box, part.place, part.view, part.axes) for part in parts)
    is_trained = all(origin.is_trained and origin.key and not origin.shape for origin in before.values())
    return Origin(shape=edit.shape, parts=parts, is_trained=is_trained)


class Change(Struct, frozen=True, dict=True):
    """The parameters of a checkpoint before and after a plan, as an optimizer sees them."""

    before: Mapping[str, TensorSpec]
    after: Mapping[str, TensorSpec]
    origins: Mapping[str, Origin]
    target: Target | None = None
    kinds: Mapping[str, bool] = field(default_factory=dict)
    """Which tensors of the file are parameters, where the model has them."""
    is_ordered: bool = True
    """Whether the file keeps model order, which safetensors and sorted files do not."""
    is_by_name: bool = False  # whether its keys are in alphabetical order, which may also be model order
    live: Sequence[Sequence[str]] | None = None
    """The parameters of each group of the optimizer that is to load the state, if there is one."""
    signs: Collection[str] = ()  # the entries and neighbouring files that only one trainer writes
    is_current: bool = False
    """Whether the model's release of transformers wrote the file, so that only the saved names differ."""
    is_wide: bool = False  # whether a tensor only named like a buffer (``masked_spec_embed``) counts
    is_tied: bool = False
    """Whether copies of tied tensors (made by ``.cpu()`` on each tensor) count as one parameter."""

    @classmethod
    def of(
        cls, before: Checkpoint, after: Checkpoint, plan: Plan, target: Target | None, is_asked: bool = True
    ) -> Change:
        """Return the change that a plan makes. ``is_asked`` is whether the user wants layers under other names."""
        origins = trace(plan, before.specs, is_asked)
        known = {key: origins.get(key, NEW) for key in after.specs}
        kinds = {
            source: target.slots[key].is_parameter
            for key, origin in known.items()
            for source in origin.sources
            if target is not None and target.modules is not None and key in target.slots
        }
        is_by_name = _is_by_name(list(before.specs))
        is_ordered = not (before.format.endswith("safetensors") or (is_by_name and _is_sorted(before)))
        is_current = _is_current(before, target)
        signs = {HF_FILE} if (Path(before.path).parent / HF_FILE).is_file() else set()
        if isinstance(before.root, Mapping):
            signs.update(name for name in before.root if isinstance(name, str))
        return cls(
            before.specs, after.specs, known, target, kinds, is_ordered, is_by_name, signs=signs, is_current=is_current
        )

    @property
    def model(self) -> Target | None:
        """The target if it is a model: only a model knows the order of its parameters."""
        return self.target if self.target is not None and self.target.modules is not None else None

    @cached_property
    def parameters(self) -> dict[str, TensorSpec]:
        """The parameters before the edits, tied ones once."""
        kinds = self.kinds
        wide = self.is_wide
        left_out = self.aliases if self.is_tied else ()
        found = {
            key: spec
            for key, spec in self.before.items()
            if key not in left_out and kinds.get(key, may_learn(key, spec, None, wide))
        }
        return _once(found, ())

    @cached_property
    def result(self) -> dict[str, TensorSpec]:
        """The parameters after the edits, tied ones once, in model order if there is a model."""
        found = {key: spec for key, spec in self.after.items() if may_learn(key, spec, self.target, self.is_wide)}
        if self.model is None or not found.keys() <= self.model.slots.keys():
            return _once(found, ())  # only a model with all of them knows their order
        return _once({key: found[key] for key in self.model.slots if key in found}, self.model.ties, as_filed=False)

    def of_model(self, shapes: Mapping[str, Shape]) -> Layout:
        """Return the layout of the result's parameters."""
        if self.model is None:
            return Layout(shapes)
        count = self.model.layers if self.layers is not None else None
        return Layout(shapes, self.model.modules, None if count is None else count())

    @property
    def new_order(self) -> tuple[str, ...]:
        """The result's keys in model order if its parameters are in another order."""
        parameters = self.result
        if self.model is None or [key for key in self.after if key in parameters] == list(parameters):
            return ()
        rank = {key: place for place, key in enumerate(self.model.slots)}
        return tuple(sorted(self.after, key=lambda key: rank.get(key, len(rank))))

    @property
    def modules(self) -> dict[str, str] | None:
        """The classes of the file's modules, from the model's; None without a model.

        A module that the model lacks has the class of those with other numbers, ``h.11.ln_1`` that of ``h.0.ln_1``;
        without such a module, one that is named like a norm is a norm."""
        if self.model is None or self.model.modules is None:
            return None
        found = {
            source.rpartition(".")[0]: self.model.modules[module]
            for key, origin in self.origins.items()
            if (module := key.rpartition(".")[0]) in self.model.modules  # keys that are to be dropped have no module
            for source in origin.sources
            if (len(self.after[key].shape) < 2) == (len(self.before[source].shape) < 2)
        }
        alike = {re.sub(_NUMBERS, "0", module): name for module, name in found.items()}
        for module in {key.rpartition(".")[0] for key in self.before} - found.keys():
            if name := alike.get(re.sub(_NUMBERS, "0", module)) or ("LayerNorm" if _NORM.search(module) else ""):
                found[module] = name
        return found

    @cached_property
    def layers(self) -> Mapping[str, int] | None:
        """timm's layer number of each of the file's parameters; None unless the model has all of them."""
        if self.model is None or self.model.layers is None:
            return None
        numbers = self.model.layers()
        found = {key: numbers[bare(key)] for key in self.before if bare(key) in numbers}
        for key in numbers.keys() & self.origins.keys():
            found |= dict.fromkeys(self.origins[key].sources, numbers[key])
        return found if self.parameters.keys() <= found.keys() else None

    @cached_property
    def model_orders(self) -> list[list[str]]:
        """The file's parameters in model order, once for each possible place of lost modules.

        Empty if the trained model had another order: layers of another implementation, or modules that moved. Lost
        blocks were among those with other numbers; any other lost module may have been anywhere within its parent."""
        if self.model is None or not self.result.keys() <= self.model.slots.keys():
            return []  # the result's order is unknown too
        rank = {key: place for place, key in enumerate(self.model.slots)}
        places: dict[str, list[int]] = {}
        left: set[str] = set()
        result = list(self.result)
        kept = {parent for key in result for parent in modules_of(key)}
        for key in result:
            sources, place = self.origins[key].sources, rank[key]
            if len(sources) > 1 or not (self.is_current or all(_is_renamed_alike(one, key) for one in sources)):
                return []
            for source in sources:
                places.setdefault(source, []).append(place)
                left.update({*modules_of(source)} - {*modules_of(key)})
        if left & kept:
            return []  # a module was split: some of its parameters moved
        parameters = self.parameters
        known = [key for key in parameters if key in places]
        order = sorted(known, key=lambda key: places[key][0])
        if order != sorted(known, key=lambda key: places[key][-1]):
            return []
        if len(order) == len(parameters):
            return [order]
        if self.is_ordered and not (self.is_by_name and self.reorders):
            return []
        order, gone = _with_blocks(order, [key for key in parameters if key not in places])
        return _with_modules(order, gone)

    @property
    def aliases(self) -> set[str]:
        """The tensors of the file that the model has under an earlier name too, tied."""
        result = {source for key in self.result for source in self.origins[key].sources}
        tied = (key for group in (self.model.ties if self.model else ()) for key in group if key in self.origins)
        return {source for key in tied for source in self.origins[key].sources} - result

    @property
    def frozen(self) -> Collection[str]:
        """The parameters of the result that require no gradient in the model."""
        return self.target.frozen if self.target is not None else ()

    @cached_property
    def cold(self) -> list[set[str]]:
        """The file's frozen parameters, if any; and these together with lost ones whose remaining neighbours are all
        frozen."""
        kept = {source: key for key in self.result for source in self.origins[key].sources}
        cold = {source for source, key in kept.items() if key in self.frozen}
        if not cold:
            return []
        around: dict[str, bool] = {}
        for source in kept:
            for parent in modules_of(source):
                around[parent] = around.get(parent, True) and source in cold
        gone = {
            key
            for key in self.parameters.keys() - kept.keys()
            if (parents := [each for each in modules_of(key) if each in around]) and around[parents[-1]]
        }
        return [cold, cold | gone] if gone else [cold]

    @property
    def touches(self) -> bool:
        """Whether a parameter was dropped, added, reordered or changed: a rename moves no position."""
        result, parameters = [self.origins[key] for key in self.result], [Origin(key) for key in self.parameters]
        return result != parameters if self.is_ordered else set(result) != set(parameters)

    @property
    def reorders(self) -> bool:
        """Whether the model orders the file's parameters unlike the file, if the file has an order of its own."""
        place = {key: number for number, key in enumerate(self.parameters)}
        found = [place[key] for result in self.result for key in self.origins[result].sources if key in place]
        return self.is_ordered and self.model is not None and found != sorted(found)


def _is_by_name(keys: list[str]) -> bool:
    return keys in (sorted(keys), by_number(keys))


def _is_sorted(checkpoint: Checkpoint) -> bool:
    """Return whether keys in alphabetical order cannot be in model order: biases come before weights, a module's own
    entries after its submodules, ``10`` before ``2``, or modules in another order than in ``_metadata``."""
    rank = {module: place for place, module in enumerate(checkpoint.metadata or ())}
    seen: set[str] = set()
    around: set[str] = set()
    last: dict[str, int] = {}
    for key in checkpoint.specs:
        *outer, module = ["", *modules_of(key)]
        leaf = key.removeprefix(f"{module}.")
        bias = key.removesuffix(leaf) + leaf.replace("weight", "bias")
        numbers = {head: int(text) for head, text, _ in layers_of(f".{key}")}
        places = {"_metadata": rank[module]} if module in rank else {}
        if (
            module in around
            or bias in seen
            or any(number < last.get(head, 0) for head, number in (numbers | places).items())
        ):
            return True
        seen.add(key)
        around.update(outer)
        last |= numbers | places
    return False


def _is_current(checkpoint: Checkpoint, target: Target | None) -> bool:
    if target is None or target.converts is None:
        return False
    from importlib.metadata import PackageNotFoundError, version  # imported late: it imports email

    with suppress(PackageNotFoundError):
        return model_config(checkpoint).get("transformers_version") == version("transformers")
    return False


def _with_blocks(order: Sequence[str], gone: Sequence[str]) -> tuple[list[str], list[str]]:
    """Put the parameters of lost blocks next to those of their siblings; return the order and the rest."""
    rank = {key: (float(place), 0, 0, 0) for place, key in enumerate(order)}
    left: list[str] = []
    kept: dict[str, dict[int, dict[str, int]]] = {}
    lost: dict[str, dict[int, dict[str, int]]] = {}
    for place, key in enumerate((*order, *gone)):
        for head, text, tail in layers_of(key):
            (kept if key in rank else lost).setdefault(head, {}).setdefault(int(text), {})[tail] = place
    for key in gone:
        for head, text, tail in reversed([*layers_of(key)]):  # the innermost block first
            number = int(text)
            siblings = kept.get(head, {})
            twin = next((block for block in siblings.values() if block.keys() >= lost[head][number].keys()), None)
            if number in siblings or twin is None:
                continue
            before = max((n for n in siblings if n < number), default=None)
            depth = head.count(".")  # an inner block comes before the next outer block
            if before is None:
                rank[key] = (min(siblings[min(siblings)].values()) - 0.5, depth, number, twin[tail])
            else:
                rank[key] = (max(siblings[before].values()) + 0.5, -depth, number, twin[tail])
            break
        else:
            left.append(key)
    return sorted(rank, key=rank.__getitem__), left


PLACEMENTS = 50_000  # most names in all orders together: two seconds of work


def _with_modules(order: list[str], gone: Sequence[str]) -> list[list[str]]:
    """Return all orders with the lost modules at each place in their parent; none if there are too many."""
    parents = {parent for key in order for parent in modules_of(key)}
    modules: dict[str, list[str]] = {}
    for key in gone:
        root = next(each for each in (*modules_of(key), key) if each not in parents)
        modules.setdefault(root, []).append(key[len(root) :])
    alike: dict[tuple[str, frozenset[str]], list[str]] = {}
    for root, tails in modules.items():
        alike.setdefault((re.sub(_NUMBERS, "0", root), frozenset(tails)), []).append(root)
    orders, limit = [order], PLACEMENTS // max(len(order), 1)
    for (_, ends), roots in alike.items():
        arranged = list(islice(_arranged(sorted(ends), limit + 1), limit + 1))
        more = (_placed(one, roots, each) for one in orders for each in arranged)
        orders = list(islice(chain.from_iterable(more), limit + 1))
        if len(orders) > limit:
            return []
    return orders


def _placed(order: list[str], roots: Sequence[str], tails: Sequence[str]) -> Iterator[list[str]]:
    """Yield the orders with lost modules or parameters after each of their siblings, and before all of them."""
    is_leaf = list(tails) == [""]
    parent = roots[0].rpartition(".")[0]
    members = dict(filter(None, (_below(key, parent) for key in order)))
    own = [name for name, is_own in members.items() if is_own]
    # A module's own parameters come before those of the modules in it.
    after = [None, *own] if is_leaf else [own[-1] if own else None, *(one for one in members if one not in own)]
    for sibling in after:
        made = list(order)
        for root in roots:
            parent = root.rpartition(".")[0]
            inside = [(at, one[0]) for at, key in enumerate(made) if (one := _below(key, parent))]
            places = [at + 1 for at, name in inside if name == sibling]
            if not inside or (sibling is not None and not places):
                break
            place = places[-1] if places else inside[0][0]
            made[place:place] = [root + tail for tail in tails]
        else:
            yield made


def _below(key: str, parent: str) -> tuple[str, bool] | None:
    """Return the member of a module that a key belongs to, and whether it is the module's own parameter."""
    inside = key[len(parent) + 1 :] if parent else key
    if parent and not key.startswith(f"{parent}."):
        return None
    name, dot, _ = inside.partition(".")
    return name, not dot


def _arranged(tails: Iterable[str], limit: int) -> Iterator[list[str]]:
    """Yield the possible orders of a module's parameters, its own first, a weight before its bias."""
    children: dict[str, list[str]] = {}
    for tail in tails:
        name, dot, rest = tail.removeprefix(".").partition(".")
        children.setdefault(name, []).append(dot + rest)
    own = [name for name, rest in children.items() if rest == [""]]
    inner = [name for name in children if name not in own]
    firsts = [sorted(own, reverse=True)] if set(own) <= {"weight", "bias"} else permutations(own)
    nexts = [sorted(inner, key=int)] if all(map(str.isdecimal, inner)) else permutations(inner)
    of_children = {name: list(islice(_arranged(children[name], limit), limit)) for name in inner}
    # product() keeps its arguments in memory, so they are cut first.
    for first, then in product(islice(firsts, limit), islice(nexts, limit)):
        for parts in product(*(of_children[name] for name in then)):
            found = list(first)
            found += [name + rest for name, part in zip(then, parts, strict=True) for rest in part]
            yield [f".{one}" if one else "" for one in found]


def _is_renamed_alike(old: str, new: str) -> bool:
    """Return whether at most two segments of a key differ, as in a later release of the same model."""
    ours, theirs = old.split("."), new.split(".")
    while ours and theirs and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    return len(ours) <= 2


def may_learn(key: str, spec: TensorSpec, target: Target | None, is_wide: bool = False) -> bool:
    """Return whether a tensor is a parameter by its name, its dtype and the target."""
    from ckptfix.values.roles import is_buffer

    dtype = DTYPES[spec.dtype]
    is_known = target is not None and target.modules is not None and key in target.slots
    is_other = is_buffer_name(key, spec.shape) if is_wide and not is_known else is_buffer(key, spec, target)
    return (dtype.is_float or dtype.is_complex) and not is_other


def _once(
    specs: Mapping[str, TensorSpec], ties: Sequence[Sequence[str]], as_filed: bool = True
) -> dict[str, TensorSpec]:
    """Keep only the first name of each tensor: of these ties, and with ``as_filed`` also of those in the file."""
    tied = {key: tuple(group) for group in ties for key in group}
    seen: set[Hashable] = set()
    found: dict[str, TensorSpec] = {}
    for key, spec in specs.items():
        names: list[Hashable] = [spec.view] if as_filed and spec.storage is not None and spec.numel else [key]
        names += [tied[key]] if key in tied else []
        if seen.isdisjoint(names):
            found[key] = spec
        seen.update(names)
    return found
