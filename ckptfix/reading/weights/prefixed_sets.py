"""Several sets of weights in one state_dict, each under a prefix of its own.

A trainer with two networks in one module saves both: `student.` and `teacher.`, `encoder_q.` and `encoder_k.`, `model.`
and `ema_model.`, or plain names beside those under `ema_model.`. The file does not show whether the model needs both,
so nothing is decided here; ``--weights PREFIX`` does."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.metadata import rename_metadata
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wrappers import bare
from ckptfix.errors import UsageError

PLAIN = "plain"  # the name of a set without a prefix, beside one with a prefix
MANGLED = "ema"  # the name of the set that mmcv's `EMAHook` writes beside the plain one: `ema_out_weight`

# Two sets are of one network if each has at least this share of the other's tensors, by name and shape.
ALIKE = 0.9
DEPTH = 3  # most segments of a prefix

# Words in the names of networks that follow another one (the leader) during training, each with the words in its place
# in the leader's name; empty if that has none. Single letters count only at the end.
_LEADERS = {
    **dict.fromkeys(("ema", "averaged", "average", "swa", "shadow", "m"), ("", "online")),
    "teacher": ("student", ""),
    "target": ("online", "context", "policy", "local", "q", ""),
    "momentum": ("online", "base", ""),
    "k": ("q",),
}


def keys_of_set(keys: Collection[str], name: str) -> dict[str, str]:
    """Return the keys of the set with this name, each with its name without the prefix; empty if there is no such set.

    The name may omit a prefix that most keys have: `teacher` for `module.teacher.`."""
    if name == PLAIN:
        copies = copied_under(keys)
        names = {key: key if copies else bare(key) for key in keys}  # a wrapper is not a set
        copies = copies or copied_under(set(names.values()))
        averaged = frozenset() if copies else _averages(keys)
        if not (copies or averaged):
            return {}
        return {key: key for key in keys if key not in averaged and not names[key].startswith(copies)}
    if mangled := _mangled(keys, name.rstrip(".")):
        return _in_place(keys, name.rstrip("."), mangled)
    prefix = f"{name.rstrip('.')}."
    for follower in {key.partition(".")[0] for key in keys}:
        mangled = _mangled(keys, follower) if is_follower(follower) and prefix in _leaders(f"{follower}.") else {}
        if mangled and _in_place(keys, follower, mangled) is not mangled:
            return {key: key for key in keys if not key.startswith(f"{follower}.")}
    if found := {key: key[len(prefix) :] for key in keys if key.startswith(prefix)}:
        return found
    outer = {key[:at] for key in keys if (at := f".{key}".find(f".{prefix}")) > 0}
    middle = sorted(keys)[len(keys) // 2] if outer else ""  # has every prefix that most keys have
    wide = [
        front
        for front in outer
        if middle.startswith(front) and 2 * sum(key.startswith(front) for key in keys) > len(keys)
    ]
    whole = f"{wide[0]}{prefix}" if len(wide) == 1 else None
    return {key: key[len(whole) :] for key in keys if key.startswith(whole)} if whole else {}


def _mangled(keys: Collection[str], name: str) -> dict[str, str]:
    """Return the keys of an averaged set whose names lost their dots, each with its original name, and those of tensors
    that are not averaged, such as buffers; empty if there is no such set.

    ``LitEma`` of latent diffusion writes ``model_ema.outweight`` for ``model.out.weight``, or for ``out.weight`` in an
    autoencoder, which it averages as a whole; mmcv's ``EMAHook`` writes ``ema_out_weight``. Their counters are not
    weights."""
    if name == MANGLED:
        forms = [("", f"{name}_", "_")]
    else:
        leaders = list(_leaders(f"{name}."))
        forms = [(leader, f"{name}.", "") for leader in (*leaders, *[""] * bool(leaders))]
    fronts = tuple(front for _, front, _ in forms)
    own = {key for key in keys if key.startswith(fronts)}
    for leader, front, sign in forms if len(own) > 1 else ():
        names = [key[len(leader) :] for key in keys if key.startswith(leader) and key not in own]
        found = {key: plain for plain in names if (key := front + plain.replace(".", sign)) in own}
        if len(found) < 2 or len(found) < ALIKE * (len(own) - 2) or 3 * len(found) <= len(names):
            continue  # in a convolution with its norm, half of the tensors are buffers
        if any("." in plain for plain in names):
            alone = set(names).difference(found.values())
            rest = {leader + plain: plain for plain in alone}
            return {key: (found | rest)[key] for key in keys if key in found or key in rest}
    return {}


def _averages(keys: Collection[str]) -> frozenset[str]:
    """Return the keys of an averaged set of all other keys, whose names lost their dots, and those of its counters."""
    for name in (MANGLED, *filter(is_follower, sorted({key.partition(".")[0] for key in keys}))):
        if own := {key for key, plain in _mangled(keys, name).items() if key != plain and plain in keys}:
            return frozenset(own if name == MANGLED else (key for key in keys if key.startswith(f"{name}.")))
    return frozenset()


def _in_place(keys: Collection[str], name: str, mangled: dict[str, str]) -> dict[str, str]:
    """Return the keys of an averaged set with the names of its network, and those of other parts of the model."""
    own, known = f"{name}.", set(keys)
    leader = next((front for front in _leaders(own) if any(front + plain in known for plain in mangled.values())), "")
    if not leader or all(key.startswith((leader, own)) for key in keys):
        return mangled
    return {
        key: leader + mangled[key] if key in mangled else key
        for key in keys
        if key in mangled or not key.startswith((leader, own))
    }


def copied_under(keys: Collection[str], sizes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return the prefixes under which most of the other keys occur again; ``sizes`` are the numbers of keys under all
    prefixes, if they are known."""
    sizes = _sizes(keys) if sizes is None else sizes
    # A prefix with at most a third of all keys cannot repeat more than half of the others.
    large = [prefix for prefix, size in sizes.items() if 3 * size > len(keys)]
    known = set(keys) if large else ()
    twins = Counter(
        [prefix for key in keys for prefix in large if key.startswith(prefix) and key[len(prefix) :] in known]
    )
    return tuple(
        prefix for prefix, number in twins.items() if 2 * number > max(sizes[prefix], len(keys) - sizes[prefix])
    )


def sets_of(specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Return the names of two sets that make up most of a state_dict, of which one follows the other by its name and
    has the same tensors; empty if there are none."""
    sizes = _sizes(specs)
    if _mangled(specs, MANGLED):
        return (PLAIN, MANGLED)
    for prefix, size in sizes.items():
        if 5 * size < len(specs):
            continue  # each of two sets of similar size that make up most of it has more
        if mangled := _mangled(specs, prefix[:-1]):
            plain = next(iter(mangled.values()))
            return (next((key[:-1] for key in _leaders(prefix) if key + plain in specs), PLAIN), prefix[:-1])
        for leader in _leaders(prefix):
            few, many = sorted((size, sizes.get(leader, 0)))
            may_be_alike = few >= ALIKE * many and 2 * (few + many) > len(specs)
            if may_be_alike and _are_alike(_under(specs, leader), _under(specs, prefix)):
                return (leader[:-1], prefix[:-1])
    copies = copied_under(specs, sizes)
    if not copies and (names := {bare(key) for key in specs}) != specs.keys():
        copies = copied_under(names)
    if len(copies) != 1 or not is_follower(copies[0][:-1]):
        return ()
    bared = {bare(key): specs[key].shape for key in keys_of_set(specs, PLAIN)}
    return (PLAIN, copies[0][:-1]) if _are_alike(bared, _under(specs, copies[0])) else ()


def lost_dots(keys: Collection[str], name: str) -> bool:
    """Return whether the set with this name is an averaged one whose names lost their dots."""
    return bool(_mangled(keys, name))


def is_follower(name: str) -> bool:
    """Return whether a name is that of a network that follows another one in training, such as its average."""
    return bool(_following(name.rpartition(".")[2].split("_")))


def with_pick(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Return the checkpoint with the set of this name picked. Raises ``UsageError`` if there is none."""
    picked = keys_of_set(checkpoint.entries, name)
    if not any(isinstance(checkpoint.entries[key], TensorSpec) for key in picked):
        raise UsageError(f"{checkpoint.path}: it has no weights under {name!r}; give the prefix of one set of its keys")
    return replace(checkpoint, picked=picked)


def narrowed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with only the picked set, without its prefix; the same if none is picked."""
    if checkpoint.picked is None:
        return checkpoint
    entries = {name: checkpoint.entries[key] for key, name in checkpoint.picked.items()}
    metadata = rename_metadata(checkpoint.metadata, checkpoint.picked)
    return replace(checkpoint, entries=entries, metadata=metadata, picked=None)


def _sizes(keys: Collection[str]) -> dict[str, int]:
    modules = Counter([key[: key.rfind(".") + 1] for key in keys])  # far fewer than keys, with the same prefixes
    sizes: dict[str, int] = {}
    for module, number in modules.items():
        position = 0
        for _ in range(DEPTH):
            position = module.find(".", position) + 1
            if not position:
                break
            prefix = module[:position]
            sizes[prefix] = sizes.get(prefix, 0) + number
    return sizes


def _following(words: list[str]) -> dict[int, tuple[str, ...]]:
    """Return the positions of a follower's words in a name, each with the words of its leader."""
    known = {at: _LEADERS[word.lower()] for at, word in enumerate(words) if word.lower() in _LEADERS}
    return {at: leaders for at, leaders in known.items() if len(words[at]) > 1 or 0 < at == len(words) - 1}


def _leaders(prefix: str) -> Iterator[str]:
    """Yield the possible prefixes of the network that this one follows: `a.net.` for `a.teacher_net.`."""
    parent, dot, name = prefix[:-1].rpartition(".")
    words = name.split("_")
    for at, leaders in _following(words).items():
        for leader in leaders:
            if other := "_".join(filter(None, [*words[:at], leader, *words[at + 1 :]])):
                yield f"{parent}{dot}{other}."
                if parent:
                    yield from (f"{above}{other}." for above in _leaders(f"{parent}."))


def _under(specs: Mapping[str, TensorSpec], prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors under a prefix, by their names without it."""
    return {key[len(prefix) :]: spec.shape for key, spec in specs.items() if key.startswith(prefix)}


def _are_alike(one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether two sets of shapes are of one network. Single layers do not count: two heads of a model may be
    alike."""
    common = sum(other.get(name) == shape for name, shape in one.items())
    return common > 1 and common >= ALIKE * max(len(one), len(other)) and any("." in name for name in one)
