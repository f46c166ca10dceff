"""FIL108 unmerged-adapter: weights with an adapter that is not merged yet.

## What it finds
With `--adapter`, the tensors of the file that the adapter changes, and by how much. Without it:

- a model saved with an adapter inside, with names like `q_proj.base_layer.weight`, `lora_A` and `lora_B`;
- a file that is only an adapter: its type, its rank, and the layers that it changes. An error if it fits no base: a
  matrix is missing, or the configuration does not fit;
- a file that is loaded along with a model: a textual inversion embedding, a hypernetwork, a Control-LoRA, an IP-Adapter
  or an adapter of AdapterHub.

An adapter with only initial values (a matrix of zeros, scales of one) changes nothing: a note if it is fresh, a warning
if the file says that it was trained.

## Why it matters
The file's weights are from before the fine-tuning. A strict load fails because of the names, and a non-strict one
silently gives the base model. An adapter alone is not a model.

## Fix safety
Unsafe, and only on request: `--adapter` changes stored values. The result is bit-identical to peft's
`merge_and_unload()` on AMD processors and Intel processors with AVX-512 (on others the last bit can differ), without
the model and its memory. The names, ranks and shapes of all layers are checked before anything is written, and an
incomplete adapter is refused.

If the base's name in a hub's cache differs from the one that the adapter was trained on, nothing is written without
`--accept FIL108`. A `config.json` with another name is only a warning, because it may name the model that the base was
trained from. Without `--adapter` nothing is merged: the scale of the product is only in `adapter_config.json`.

## Example
    ckptfix repair model.safetensors --adapter my_lora
    ckptfix repair whole.pth --adapter my_lora/adapter_config.json

## Sources
- https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
- https://arxiv.org/abs/2106.09685 (LoRA), https://arxiv.org/abs/2402.09353 (DoRA)
- https://arxiv.org/abs/2205.05638 (IA3), https://arxiv.org/abs/2309.14859 (LoHa and LoKr)"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, sqrt
from pathlib import Path

from ckptfix.core.adapter_methods import METHODS
from ckptfix.core.buffers import modules_of
from ckptfix.core.checkpoint import IN_MEMORY, Checkpoint
from ckptfix.core.edits import MergeAdapter
from ckptfix.core.finding import Blocks, Finding, Fix, Level, Placeholder, Remedy, advise, counted
from ckptfix.core.wording import first_names
from ckptfix.errors import AdapterError, Opt
from ckptfix.reading.adapter_checks import UNMERGED, check_alone, companion, foreign_type, is_foreign, open_adapter
from ckptfix.reading.adapters import FETCH, Adapter, adapter_in
from ckptfix.reading.configs import CONFIG, config_beside, config_file, model_config
from ckptfix.rules.merging import Merge, edits_within, find_merge, merge_edits, plain_name
from ckptfix.rules.rule import Context, Rule
from ckptfix.values.decode import is_plain
from ckptfix.values.merged_tensors import is_merged, matrix, sampled_change
from ckptfix.values.optimizer import was_stepped
from ckptfix.values.roles import is_float32_in_t5

_BASE = ".base_layer."
_SAMPLED = 2  # tensors with a name at each end of the model whose change is measured: for 7B, all would take 1.5 s
_SHOWN = 7  # kinds of layers whose change the message lists; with more, it gives the least and the most


def unmerged_adapter(rule: Rule, context: Context) -> Iterator[Finding]:
    """Merge what ``--adapter`` names; else report an adapter in the file."""
    checkpoint, settings = context.checkpoint, context.settings
    if settings.adapter:
        if not is_merged(checkpoint):
            yield from _merge(rule, context)
        return
    config = None if checkpoint.format == IN_MEMORY else config_beside(checkpoint.path)
    adapter = adapter_in(checkpoint, config=config)
    if one := companion(checkpoint):
        name, does, _ = one
        yield rule.finding(Level.NOTE, f"{name}, not a model; it {does}")
        return
    if (other := foreign_type(adapter)) and all(is_foreign(adapter, key) for key in checkpoint.entries):
        if other in UNMERGED:
            does = f"it {UNMERGED[other]}"
        elif other in METHODS:
            does = f"a merge needs its {CONFIG}"
        else:
            does = "only the library that trained it can merge it"
        yield rule.finding(Level.NOTE, f"an adapter of the type {other}, not a model; {does}")
        return
    if other in METHODS and any(_BASE in key for key in checkpoint.specs):
        yield rule.finding(
            Level.WARNING,
            f"holds an adapter of the type {other} inside its base, never merged",
            keys=[key for key in checkpoint.specs if is_foreign(adapter, key) and _BASE not in key],
            remedies=(Remedy.of("merges it: name the file saved with the adapter", adapter=Placeholder(CONFIG)),),
            blocks=Blocks.FILLING,
        )
        return
    if not adapter.layers:
        return
    kind, has_base = _kind(adapter), _has_base(checkpoint, adapter)
    idle = _idle(context, adapter, has_base=has_base)
    if not has_base:
        yield from _alone(rule, context, adapter, kind, is_idle=bool(idle))
    else:
        yield rule.finding(
            Level.WARNING,
            f"holds {kind} inside its base, never merged",
            keys=[key for layer in adapter.layers for key in layer.keys.values()],
            remedies=(_with_config(checkpoint.path, adapter),),
            blocks=Blocks.FILLING,
        )
    if idle:
        is_stepped = was_stepped(checkpoint.root)
        yield rule.finding(
            Level.WARNING if is_stepped else Level.NOTE,
            f"all layers of the adapter have their initial values: it changes nothing"
            f"{', though the file says that it was trained' if is_stepped else ' yet'}",
            keys=idle,
            remedies=advise("use the adapter from another step") if is_stepped else (),
        )


def _idle(context: Context, adapter: Adapter, *, has_base: bool) -> tuple[str, ...]:
    """Return the keys whose values (zeros, scales of one) make every layer change nothing; none if a layer does."""
    specs = adapter.checkpoint.specs
    own = {key: specs[key] for layer in adapter.layers for key in layer.keys.values()}
    if not context.settings.values or any(".modules_to_save." in key if has_base else key not in own for key in specs):
        return ()
    figures = context.statistics_of(own)
    found: list[str] = []
    for layer in adapter.layers:
        known = {role: figures[key] for role, key in layer.keys.items() if key in figures}
        zero = [role for role, each in known.items() if each.all_zero and role not in _REPLACING]
        ones = [role for role, each in known.items() if role == "scale" and each.minimum == each.maximum == 1]
        if not (zero or ones) or not {*layer.keys} & {*_ADDED, *_REPLACING} <= {*zero}:
            return ()
        found += [layer.keys[role] for role in (*zero, *ones)]
    return tuple(found)


_ADDED = ("bias", "diff", "diff_b")  # roles that change a tensor by themselves, not in a product
_REPLACING = ("tokens", "norm", "norm_bias")  # roles whose zeros, too, change a tensor


def _has_base(checkpoint: Checkpoint, adapter: Adapter) -> bool:
    """Return whether the file also has the base: the weight of each adapted layer, and other weights."""
    stored = [key for key in checkpoint.specs if _BASE in key and key.endswith("weight")]
    bases = {key.partition(_BASE)[0] for key in stored}
    shared = {key for layer in adapter.layers for role, key in layer.keys.items() if role.startswith("base_model.")}
    adapted = {key for layer in adapter.layers for key in layer.keys.values()} - shared
    within = (any(map(bases.__contains__, modules_of(key))) for key in adapted)
    others = (key for key in checkpoint.specs if key not in adapted and _BASE not in key)
    return bool(bases) and all(within) and any(key.endswith(".weight") for key in others)


def _alone(rule: Rule, context: Context, adapter: Adapter, kind: str, *, is_idle: bool) -> Iterator[Finding]:
    """Report what an adapter is if the file holds nothing else."""
    own = {*adapter.saved.values(), *(key for layer in adapter.layers for key in layer.keys.values())}
    others = [key for key in context.checkpoint.entries if key not in own and key.rpartition(".")[2] == "weight"]
    if adapter.method is not None:
        others = [key for key in others if not key.startswith("base_model.")]
    if others and (not adapter.config or adapter.method is not None):
        return  # a model that has low-rank layers itself
    targets = Counter(_last(layer.module) for layer in adapter.layers if not layer.is_kohya)
    names = first_names(list(targets))
    zero = _zero_ranks(adapter) if context.settings.values and not is_idle else {}
    dead = sum(zero.values())
    verb = "does" if dead == 1 else "do"
    ranked = [layer for layer in adapter.layers if adapter.with_rank(layer) is not None]
    is_scaled = adapter.config or all(
        "alpha" in layer.keys or layer.is_of_comfy or layer.is_of_diffusers for layer in ranked
    )
    yield rule.finding(
        Level.NOTE,
        f"{kind} for {counted(len(adapter.layers), 'layer')}{f' ({names})' * bool(names)}"
        f"{f', trained on {adapter.base}' * bool(adapter.base)}, without a model"
        f"{'' if is_scaled else '; a merge needs its lora_alpha, which is not in the file'}"
        f"{f'; {dead} of its ranks {verb} nothing' * bool(zero)}",
        keys=zero,
        evidence={"zero ranks": zero} if zero else {},
    )
    try:
        check_alone(adapter)
    except AdapterError as error:
        yield rule.finding(Level.ERROR, str(error).removeprefix(f"{context.checkpoint.path}: "))


def _zero_ranks(adapter: Adapter) -> dict[str, int]:
    """Return how many ranks of each layer are zero, by the key of its second matrix."""
    found = {}
    for layer in adapter.layers:
        specs = [spec for role in ("A", "B") if (spec := adapter.spec(layer, role)) is not None]
        if len(specs) < 2 or not all(len(spec.shape) > 1 and spec.numel and is_plain(spec) for spec in specs):
            continue
        (ranks, *_), (outputs, of_second, *_) = (spec.shape for spec in specs)
        if ranks != of_second:
            continue
        one, two = (matrix(spec, adapter.checkpoint.path) for spec in specs)
        dead = ~(one.any(1) & two.reshape(outputs, ranks, -1).any((0, 2)))
        if number := int(dead.sum()):
            found[layer.keys["B"]] = number
    return found


def _merge(rule: Rule, context: Context) -> Iterator[Finding]:
    checkpoint, settings = context.checkpoint, context.settings
    adapters = [open_adapter(text, checkpoint) for text in settings.adapter]
    path, count = Counter(adapter.path for adapter in adapters).most_common(1)[0]
    if count > 1:
        total = sum(adapter.weight for adapter in adapters if adapter.path == path)
        raise AdapterError(
            f"{path}: given {count} times; give it once, with the sum of the weights: ",
            Opt("adapter", f"{path}={total:g}"),
        )
    if len(adapters) == 1 and not adapters[0].path:
        edits = tuple(edits_within(checkpoint, adapters[0], context.target))
        merge = Merge()
    else:
        merge = find_merge(checkpoint, adapters, settings.unmerge, context.target)
        edits = tuple(merge_edits(checkpoint, merge, settings.unmerge))
    merges = [edit for edit in edits if isinstance(edit, MergeAdapter)]
    changed = tuple(edit.key for edit in merges)
    if context.settings.values:
        _refuse_non_finite(context, adapters, merges)
    sizes = _changes(context, adapters, merges) if context.settings.values else {}
    elsewhere = "".join(
        f"; {counted(number, 'layer')} for {name} {'is' if number == 1 else 'are'} left out"
        for name, number in merge.left.items()
    )
    if merge.resized:
        key, words = next(iter(merge.resized.items()))
        elsewhere += f"; the vocabulary of {checkpoint.specs[key].shape[0]} becomes one of {words}"
    if merge.tied:
        elsewhere += (
            f"; {first_names(sorted(merge.tied))} changes too, because it is tied to a tensor that the adapter changes"
        )
    if settings.unmerge and merges:
        # The change, its sum and the difference are rounded once each.
        units = max(len(edit.deltas) for edit in merges) * 3 / 2
        elsewhere += f"; each value is the base's to {units:g} units in the last place of the largest number involved"
    if number := sum(edit.dtype == "float16" and is_float32_in_t5(edit.key) for edit in merges):
        elsewhere += (
            f"; {number} of them (wo of T5) stay float16; peft merges them in float32, as transformers loads them"
        )
    names = " and ".join(f"{_kind(adapter)}{_origin(adapter, checkpoint.path)}" for adapter in adapters)
    is_idle = bool(sizes) and not any(sizes.values()) and len(sizes) == len({_group(key) for key in changed})
    one, many = ("is taken off", "are taken off") if settings.unmerge else ("changes", "change")
    verb = "would change nothing in" if is_idle else one if len(adapters) == 1 else many
    for adapter in adapters:
        if other := _other_base(adapter, checkpoint):
            own, is_certain = other
            yield rule.finding(
                Level.WARNING,
                f"{adapter.label} was trained on {adapter.base}, and the base is {own}"
                f"{', or was trained from it, according to its config.json' * (not is_certain)}",
                remedies=(
                    Remedy.of(f"give the base {adapter.base}"),
                    Remedy.of("merges it anyway, if both have the same weights", accept=(rule.code,)),
                ),
                blocks=Blocks.WRITING if is_certain and not rule.code.startswith(settings.accept) else Blocks.NOTHING,
            )
    yield rule.finding(
        Level.WARNING if is_idle or merge.tied else Level.NOTE,
        f"{names} {verb} {counted(len(changed), 'tensor')}{'' if is_idle else _in_words(sizes)}{elsewhere}",
        keys=changed,
        evidence={**({"change": sizes} if sizes else {}), **({"left": merge.left} if merge.left else {})},
        fix=Fix.requested(edits),
    )


def _refuse_non_finite(context: Context, adapters: Sequence[Adapter], merges: Sequence[MergeAdapter]) -> None:
    """Raise ``AdapterError`` for a NaN or infinity in an adapter: a product spreads one over whole rows of the base."""
    for adapter in adapters:
        used = {key for edit in merges for each in edit.deltas if each.adapter == adapter.path for key in each.factors}
        figures = context.statistics_of({key: adapter.checkpoint.specs[key] for key in sorted(used)})
        bad = [key for key in sorted(used) if key in figures and figures[key].nonfinite]
        if bad:
            words = f"{counted(len(bad), 'tensor')} of the adapter {'has' if len(bad) == 1 else 'have'} NaN or infinity"
            raise adapter.refused(f"{words}, such as {bad[0]}, which a merge would spread over the base", FETCH)


def _origin(adapter: Adapter, base: str) -> str:
    """Return an adapter's place in words, with the base that it names if that may be another one."""
    if not adapter.path:
        return ""
    if (is_own := adapter.is_trained_on(base)) is not None:
        other = f"another file, {adapter.base}: the same weights in another format, or different ones"
        return f" ({adapter.label}, trained on {'this very file' if is_own else other})"
    is_other = bool(adapter.base) and Path(adapter.base).name.lower() not in base.lower()
    return f" ({adapter.label}{f', trained on {adapter.base}' * is_other})"


def _other_base(adapter: Adapter, checkpoint: Checkpoint) -> tuple[str, bool] | None:
    """Return the base's name on a hub if the adapter was trained on one with another name, and whether that is certain.

    It is not certain from ``config.json``, which keeps the parent's name until a fine-tuned model is saved again."""
    stored, cached = model_config(checkpoint).get("_name_or_path"), _CACHED.search(checkpoint.path)
    own = f"{cached[1]}/{cached[2]}" if cached else stored
    if not (isinstance(own, str) and _HUB.fullmatch(own) and _HUB.fullmatch(adapter.base)):
        return None
    names = [own] if cached else [own, *Path(checkpoint.path).parts]
    trained_on, *others = (_VARIANT.sub("", name.rpartition("/")[2].lower()) for name in (adapter.base, *names))
    return None if trained_on in others else (own, bool(cached))


# A name on a hub, and where a hub's cache has it.
_HUB = re.compile(r"[\w-]+/[\w.-]+")
_VARIANT = re.compile(r"^meta-|-hf$|(-unsloth)?(-bnb)?-[48]bit$")  # mirrors, and what QLoRA was trained on
_CACHED = re.compile(r"models--([\w-]+)--([\w.-]+)/snapshots/")


def _changes(context: Context, adapters: Sequence[Adapter], merges: list[MergeAdapter]) -> dict[str, float]:
    """Return the size of the changes relative to the weights, by the names of modules, from some rows of the first
    tensors with each name, and of the last ones."""
    files = {adapter.path: adapter.checkpoint for adapter in adapters}
    groups: dict[str, list[MergeAdapter]] = defaultdict(list)
    for edit in merges:
        if not any(delta.form in ("whole", "rows") for delta in edit.deltas):
            groups[_group(edit.key)].append(edit)
    sizes = {}
    for name, edits in groups.items():
        sums = [0.0, 0.0]
        for edit in edits if len(edits) <= 2 * _SAMPLED else edits[:_SAMPLED] + edits[-_SAMPLED:]:
            factors = [[files[delta.adapter].specs[key] for key in delta.factors] for delta in edit.deltas]
            squares = sampled_change(context.checkpoint.specs[edit.key], edit, factors, context.checkpoint.path)
            sums = [sum(pair) for pair in zip(sums, squares, strict=True)]
        change, whole = sums
        if whole > 0 and isfinite(change / whole):
            sizes[name] = round(sqrt(change / whole), 6)
    return sizes


def _group(key: str) -> str:
    """Return the name of a tensor in its block: ``q_proj``, ``q_proj.bias``, ``experts.down_proj``."""
    module, _, leaf = plain_name(key).rpartition(".")
    return f"{_last(module)}.{leaf}".removesuffix(".weight") or leaf


def _last(module: str) -> str:
    """Return the last name of a path of modules, with the numbers after it: ``to_out.0``."""
    return re.split(r"\.(?!\d+(?:\.|$))", module)[-1]


def _in_words(sizes: Mapping[str, float]) -> str:
    if not sizes:
        return ""
    if len(sizes) <= _SHOWN:
        return f": {', '.join(f'{name} by {size:.2g}' for name, size in sizes.items())} of the norm"
    least, most = min(sizes.values()), max(sizes.values())
    return f" by {least:.2g}" + (f" to {most:.2g}" if f"{least:.2g}" != f"{most:.2g}" else "") + " of their norm"


def _kind(adapter: Adapter) -> str:
    """Return an adapter's type and ranks in words, with the number of rows if a tensor holds several experts."""
    types = {layer.type for layer in adapter.layers}
    ranks: Counter[int] = Counter()
    stacked: set[int] = set()
    for layer in adapter.layers:
        if (one := adapter.with_rank(layer)) is not None and one.shape:
            try:
                rank = adapter.rank(layer)
            except AdapterError:  # the configuration is wrong, which the merge reports
                rank = one.shape[0]
            ranks[rank] += 1
            stacked |= {one.shape[0]} - {rank}
    common = ", ".join(str(rank) for rank, _ in ranks.most_common(3))
    rows = f" ({' or '.join(map(str, sorted(stacked)[:3]))} rows: one rank after another for each expert)"
    names = ("IA3", "DoRA", "LoHa", "LoKr", "LoRA", "TRAINABLE_TOKENS", "LN_TUNING")  # the first one is it
    kind = adapter.method.name if adapter.method else next(name for name in names if name in types)
    article = "an" if kind in ("IA3", "LN_TUNING", "AdaLoRA", "OFT", "HRA") else "a"
    return f"{article} {kind} adapter" + f" of rank {common}" * bool(ranks) + (rows if stacked else "")


def _with_config(path: str, adapter: Adapter) -> Remedy:
    """Return the remedy that merges an adapter inside its base, with the configuration next to the file if any."""
    file = config_file(path)
    if file is not None and (adapter.kind != "LORA" or "lora_alpha" in adapter.config):
        return Remedy.of("merges it", adapter=(str(file),))
    words = "merges it: name the file saved with the adapter that has lora_alpha"
    return Remedy.of(words, adapter=Placeholder(CONFIG))
