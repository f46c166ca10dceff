"""What FIT101, FIT102 and FIT103 ask of a whole file: whether it belongs to another model, and how its leftover tensors
may hold the missing ones."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice

from ckptfix.core.buffers import is_buffer_name, modules_of, split_key
from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import PRUNING, SPECTRAL_NORM, WEIGHT_NORM, Assemble, Drop, Edit, Fill
from ckptfix.core.finding import advise, counted
from ckptfix.core.parts import Shape
from ckptfix.core.target import Target
from ckptfix.core.wording import first_names
from ckptfix.reading.folders.rank_shards import FLAT
from ckptfix.rules.fit109_reparametrised_weight import forms_of, in_parts
from ckptfix.rules.quantised_layers import DEQUANTISE, wanted_layers
from ckptfix.rules.rule import Context

_LAYER = re.compile(r"([^.]+(?:\.(?!\d+\.)[^.]+)*)\.(\d+)\.")  # the first number is the layer's
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")

MANY = 8  # least number of missing tensors whose shapes are not all among the leftover ones by chance
LAYERS = 4  # least number of layers of a stack that differ on both sides; fewer may be a detector's heads
DEEPEST = 32  # modules kept per key: a crafted key can have any number of segments
_OTHER = "a parametrization"
MOST = 0.5  # a file that lacks this share of a model's parameters belongs to another model
IN_FLAT = "the weights are in the flat parameters (FIL105, FIT106)"
NAME_THE_MODEL = advise("name the model that the file belongs to: the file lacks most parameters of this one")


def numel_of_parameters(target: Target) -> dict[str, int]:
    """Return the numel of each parameter; tied ones count once."""
    return {key: target.slots[key].numel for key in target.names if target.slots[key].is_parameter}


def untrained(checkpoint: Checkpoint, target: Target) -> dict[str, int]:
    """Return the numel of the target's parameters that the file lacks in their shape; tied ones count once."""
    specs, names = checkpoint.specs, target.names
    return {
        key: numel
        for key, numel in numel_of_parameters(target).items()
        if not any(name in specs and target.accepts(name, specs[name].shape) for name in names[key])
    }


def is_of_another_model(checkpoint: Checkpoint, target: Target, adaptable: Collection[str] = ()) -> bool:
    """Return whether the file lacks at least half of the target's parameters, not counting ``adaptable`` keys."""
    total = sum(numel_of_parameters(target).values())
    lost = sum(numel for key, numel in untrained(checkpoint, target).items() if key not in adaptable)
    return total > 0 and lost >= MOST * total


def are_flat(keys: Iterable[str]) -> bool:
    """Return whether any of the keys is a flat parameter of FSDP."""
    return any(key.rpartition(".")[2] in FLAT for key in keys)


def other_layout(context: Context, target: Target) -> str:
    """Return a remedy that says how the leftover tensors of the file may hold the missing ones; empty if they do not
    seem to. A key whose stored shape the user gave up is not missing."""
    checkpoint, known = context.checkpoint, target.slots.keys() | target.entries
    given_up = {edit.key for edit in context.plan.edits if isinstance(edit, Drop)}
    filled = {edit.key for edit in context.plan.edits if isinstance(edit, Fill)}  # they were missing too
    if wanted_layers(checkpoint.specs, target):
        return DEQUANTISE
    others = {key: spec for key, spec in checkpoint.specs.items() if key not in known}
    if are_flat(checkpoint.entries.keys() - known):
        return IN_FLAT
    views = {spec.view if spec.storage is not None else key: key for key, spec in reversed(others.items())}
    firsts = set(views.values())
    left = {key: spec.shape for key, spec in others.items() if key in firsts}  # tied ones count once
    gone = {
        key: slot.shape
        for key, slot in target.slots.items()
        if (key not in checkpoint.entries or key in filled) and key not in given_up and slot.shape is not None
    }
    # The layers' names before peft added an adapter, and before it wrapped the model.
    plain = [key.replace(".base_layer.", ".") for key in left if ".base_layer." in key]
    adapted = {*plain, *(key.removeprefix("base_model.model.") for key in plain)}
    if number := sum(key in adapted for key in gone):
        return (
            f"{counted(number, 'weight')} of the file with an unmerged adapter: merge it first, by its configuration "
            "or with the library that made it, and repair the result"
        )
    for norm in (WEIGHT_NORM, SPECTRAL_NORM, PRUNING, _OTHER):
        if number := sum(_has_parts(left, key, norm) for key in gone):
            lacks = norm == SPECTRAL_NORM and any(is_singular(f"{key[:-2]}_v", left) for key in left)
            how = " with strict=False (`_v` is missing), run it once in training mode" if lacks else ""
            return (
                f"the file has {counted(number, 'weight')} as {norm} splits it: load it into the model with {norm} "
                f"applied{how}, remove {norm}, and save the model again"
            )
        if number := sum(_has_parts(gone, key, norm) for key in left):
            return (
                f"the model has {norm} applied to {counted(number, 'weight')} that the file has whole: load the file "
                f"before applying {norm}"
            )
    parts = [key for keys in in_parts(left).values() for key in keys]
    if any(left[key] in gone.values() for key in parts):  # a part has the weight's shape, but is not the weight
        return (
            f"{counted(len(in_parts(left)), 'weight')} of the file in parts ({first_names(parts)}), as weight_norm, "
            "spectral_norm and pruning store them, but not under the model's names: rename them with --rename OLD=NEW"
        )
    if message := _beside_moved(context.plan.edits, left, gone) or _renamed(left, gone) or _renamed_within(left, gone):
        return message
    modules = list(_rearranged(left, gone))
    if not modules:
        wanted = [key for key in gone if target.slots[key].is_parameter]
        return _repacked(left, gone) or _of_other_version(left, wanted)
    path, mine, theirs = modules[0]
    return (
        f"{counted(len(modules), 'module')} may have the missing weights in another layout, like fused or split "
        f"projections: {_shown(path, mine)} in the file has as many elements as {_shown(path, theirs)} of the target; "
        "convert them with the model's code"
    )


def _beside_moved(edits: Iterable[Edit], left: Mapping[str, Shape], gone: Mapping[str, Shape]) -> str:
    """Return the advice if a weight was moved without its bias, like DINOv3's fused bias, which has rows for keys
    too."""
    moved = {split_key(edit.key)[0]: edit.parts[0].source for edit in edits if isinstance(edit, Assemble)}
    for key in gone:
        module, leaf = split_key(key)
        if module in moved and (source := split_key(moved[module])[0] + leaf) in left:
            return (
                f"{source} has no place, and {key} is missing, which belongs to it: load it with the model's own code"
            )
    return ""


def _renamed(left: Mapping[str, Shape], gone: Mapping[str, Shape]) -> str:
    """Return the advice if the missing tensors have the shapes of the leftover ones."""
    shapes, wanted = Counter(left.values()), Counter(gone.values())
    is_distinctive = any(len(shape) > 1 for shape in wanted) and (shapes == wanted or len(gone) >= MANY)
    if not is_distinctive or not wanted <= shapes:
        return ""
    if {_NUMBER.sub("", key) for key in gone} <= {_NUMBER.sub("", key) for key in left}:
        return (
            f"check the numbers first: {next(iter(left))} is left over and {next(iter(gone))} missing; if the two "
            "sides count from different numbers, the keys that match are wrong too"
        )
    alone = [key for key, shape in gone.items() if shapes[shape] == wanted[shape] == 1]
    pairs = [f"{next(name for name in left if left[name] == gone[key])} of {key}" for key in alone[:1]]
    return (
        f"the leftover keys have the shapes of the missing ones{''.join(f' ({pair})' for pair in pairs)}: rename them "
        "as the code that loads such files does (in transformers: from_pretrained)"
    )


def _renamed_within(left: Mapping[str, Shape], gone: Mapping[str, Shape]) -> str:
    """Return the advice if a leftover tensor in the same module has the missing one's shape, or only names differ."""
    places, wanted = ({_place(*item): item[0] for item in side.items()} for side in (left, gone))
    if places.keys() == wanted.keys() and len(places) == len(left) == len(gone) > 0:
        place, key = next(iter(wanted.items()))
        return (
            f"{counted(len(gone), 'missing tensor')} may be in the file under another name: {places[place]} has the "
            f"shape and the numbers of {key}; if it is the same tensor, rename it with --rename OLD=NEW"
        )
    beside: dict[tuple[str, Shape], list[str]] = defaultdict(list)
    for key, shape in left.items():
        beside[key.rpartition(".")[0], shape].append(key)
    twins = {key: beside.get((key.rpartition(".")[0], shape)) for key, shape in gone.items() if math.prod(shape) > 1}
    found = [(key, others) for key, others in twins.items() if "." in key and others]
    if not found:
        return ""
    key, others = found[0]
    return (
        f"{counted(len(found), 'missing tensor')} may be in the file under another name in the same module: "
        f"{' or '.join(others[:3])} has the shape of {key}; if it is the same tensor, rename it with --rename OLD=NEW"
    )


def _place(key: str, shape: Shape) -> tuple[object, ...]:
    return tuple(re.findall(r"\d+", key)), key.rpartition(".")[2], shape


def is_singular(key: str, entries: Collection[str]) -> bool:
    """Return whether a key is a singular vector of spectral_norm whose partner is in the file."""
    return key.endswith("_v") and f"{key[:-2]}_u" in entries


def _has_parts(tensors: Mapping[str, Shape], key: str, norm: str) -> bool:
    module, leaf = split_key(key)
    others = ((_OTHER, [f"{module}parametrizations.{leaf}.{part}"]) for part in ("original", "original0"))
    forms = chain(forms_of(key), others)
    return any(form == norm and all(part in tensors for part in parts[:2]) for form, parts in forms)


def _repacked(left: Mapping[str, Shape], gone: Mapping[str, Shape]) -> str:
    """Return the advice if a tensor with a longer name (`weight_packed`) has as many elements as a missing one."""
    found = {key: other for other in left for key in _stems(other) if key in gone and key != other}
    same = {key: other for key, other in found.items() if math.prod(left[other]) == math.prod(gone[key]) > 1}
    if not same:
        return ""
    key, other = next(iter(same.items()))
    return (
        f"{counted(len(same), 'missing tensor')} may be in the file under a longer name: {other} has as many elements"
        f" as {key}; unpack it with the library that packed it, and save it again"
    )


def _of_other_version(left: Mapping[str, Shape], wanted: Iterable[str]) -> str:
    """Return the advice if layers of one stack have weights on each side that the other side lacks."""
    mine = _by_layer(key for key, shape in left.items() if not is_buffer_name(key, shape))
    theirs = _by_layer(wanted)
    for stack, layers in mine.items():
        if len(both := layers.keys() & theirs.get(stack, {}).keys()) >= LAYERS:
            first = next(layer for layer in layers if layer in both)
            return (
                f"{len(both)} layers of `{stack}` have weights that the other side lacks: in the file ("
                f"{layers[first]}) and in the model ({theirs[stack][first]}): name the version of the model that the"
                " file belongs to"
            )
    return ""


def _by_layer(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the first key of each layer, by the path of its stack and its number."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        if match := _LAYER.match(key):
            found[match[1]].setdefault(match[2], key)
    return found


def _stems(key: str) -> Iterator[str]:
    """Yield the names that a key may extend: its beginnings before each dot or underscore of the last two segments."""
    last = key.rfind(".", 0, max(key.rfind("."), 0)) + 1
    return (key[:at] for at in range(last, len(key)) if key[at] in "._")


def _rearranged(
    left: Mapping[str, Shape], gone: Mapping[str, Shape]
) -> Iterator[tuple[str, Mapping[str, Shape], Mapping[str, Shape]]]:
    """Yield the innermost modules with as many leftover elements as missing ones, in other shapes."""
    mine, theirs = _below(left), _below(gone)
    ours, wanted = (
        {path: sum(map(math.prod, each.values())) for path, each in side.items()} for side in (mine, theirs)
    )
    equal = {path for path, numel in ours.items() if 1 < numel == wanted.get(path)}
    innermost = equal - {above for path in equal for above in modules_of(path)}
    for path in mine:
        if path in innermost and sorted(mine[path].values()) != sorted(theirs[path].values()):
            yield path, mine[path], theirs[path]


def _below(tensors: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return the tensors below each module, by the module's path."""
    found: dict[str, dict[str, Shape]] = defaultdict(dict)
    for key, shape in tensors.items():
        for path in islice(modules_of(key), DEEPEST):
            found[path][key] = shape
    return found


def _shown(path: str, keys: Iterable[str]) -> str:
    names = [key.removeprefix(f"{path}.") for key in keys]
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{path}.{names[0]}" if len(names) == 1 else f"{path}.{{{listed}}}"
