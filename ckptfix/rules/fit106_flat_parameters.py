"""FIT106 flat-parameters: weights that FSDP flattened; the target has their names and shapes.

## What it finds
The flat parameters (`_flat_param`) of FSDP 1 after the ranks of a `LOCAL_STATE_DICT` were merged, and, with
`use_orig_params`, named weights with one dimension. Each flat parameter holds all parameters of the modules below it
that are not in a deeper flat parameter, in the order of `named_parameters()`, tied ones once. With `--salvage`, the
masters of ZeRO 1 and 2 whose model states are lost have names and one dimension, too.

## Why it matters
Only FSDP with the same wrapping and number of GPUs loads such weights.

## Fix safety
The number of elements has to match for each flat parameter, and no value changes. If the numbers do not match, there is
no fix: the target is another model, or is wrapped differently. Named weights are reshaped with any target.

Flat parameters are safe with `--model`, whose code has the order of the weights. With `--like FILE`, they are safe if
the file's keys are in the order of the model: its modules come in the same order as in the `_metadata` of the ranks,
and its keys are not sorted. Otherwise the fix needs `--unsafe-fixes`:

- If the keys are sorted, as in safetensors files, the modules are taken in the order of `_metadata`, and each weight
  before its bias, as in all modules of torch. There is no fix for a module with other parameters: their order is only
  in its code.
- Without `_metadata`, keys that are not sorted are taken in the file's order. For sorted keys there is no fix: nearly
  every weight would get another one's values.

## Example
    ckptfix repair output/model_final.rank_0.pth --model my_models:dinov2 -o model.pth
    # blocks.0._flat_param [7087872] → blocks.0.norm1.weight [768], blocks.0.norm1.bias [768], …

## Sources
- https://github.com/facebookresearch/dinov2/issues/487, /544
- https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_flat_param.py"""

from collections.abc import Iterable, Iterator, Sequence

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.edits import Assemble
from ckptfix.core.facts import Kind
from ckptfix.core.finding import MODEL, Applicability, Blocks, Finding, Fix, Level, Remedy, advise, counted
from ckptfix.core.parts import Part, full
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.core.wrappers import strip_segments
from ckptfix.reading.folders.rank_shards import FLAT
from ckptfix.rules.rule import Context, Rule

_BY_MODEL = Remedy.of("has the order of the weights in its code", model=MODEL)


def flat_parameters(rule: Rule, context: Context, target: Target) -> Iterator[Finding]:
    """Take the weights out of flat parameters, and give flattened weights their shapes."""
    checkpoint = context.checkpoint
    edits: list[Assemble] = []
    taken, odd, unordered = [], {}, []
    order = _Order(checkpoint, target)
    for flat, names in _held(checkpoint, target, order).items():
        spec, total = checkpoint.specs[flat], sum(target.slots[name].numel for name in names)
        if total != spec.numel:
            odd[flat] = {"file": spec.numel, "target": total}
            continue
        if not order.has(names):
            unordered.append(flat)
            continue
        taken.append(flat)
        start = 0
        for name in names:
            shape = target.slots[name].shape or ()
            stop = start + target.slots[name].numel
            edits.append(Assemble(name, spec.dtype, shape, (Part(flat, ((start, stop),), full(shape), shape),)))
            start = stop
    if edits:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(edits), 'weight')} flattened into {counted(len(taken), 'parameter')} of FSDP",
            keys=taken,
            fix=Fix(tuple(edits), Applicability.SAFE if order.is_certain else Applicability.UNSAFE),
            remedies=() if order.is_certain else (Remedy.of(order.assumed, unsafe_fixes=True), _BY_MODEL),
            blocks=Blocks.FILLING,
        )
    if unordered:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(unordered), 'flat parameter')} of FSDP in model order, but the target's keys are sorted by "
            "name",
            keys=unordered,
            remedies=(_BY_MODEL,),
            blocks=Blocks.FILLING,
        )
    if odd:
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(odd), 'flat parameter')} of FSDP whose number of elements differs from the target's",
            keys=odd,
            evidence={"elements": odd},
            remedies=advise("name the trained model, including the modules that it was wrapped in"),
            blocks=Blocks.FILLING,
        )
    if reshapes := list(_flattened(checkpoint, target)):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(reshapes), 'weight')} flattened to one dimension",
            keys=[edit.key for edit in reshapes],
            fix=Fix.safe(reshapes),
        )


class _Order:
    """The order of a target's weights: that of its model, as far as it is known.

    ``assumed`` says what a guess relies on."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        rows: dict[str, int] = {}  # torch lists the modules in their order
        for path in checkpoint.metadata or ():
            rows.setdefault(strip_segments(path), len(rows))
        wanted = [name for name, slot in target.slots.items() if slot.is_parameter]
        places = [rows.get(name.rpartition(".")[0]) for name in wanted]
        known = [place for place in places if place is not None]
        self._is_sorted = target.modules is None and _is_sorted(target)
        self._is_known = len(known) == len(places)
        is_of_model = self._is_known and known == sorted(known) and not self._is_sorted
        self.is_certain = target.modules is not None or is_of_model
        self._place = {name: place for place, name in enumerate(target.slots)}
        self.assumed = "takes the weights in the order of the keys, which nothing confirms to be the model's"
        if self._is_known and not self.is_certain:
            ranked = sorted(wanted, key=lambda name: (rows[name.rpartition(".")[0]], name.endswith(".bias")))
            self._place |= {name: place for place, name in enumerate(ranked)}
            self._is_sorted = True
            self.assumed = "takes the modules in the order of _metadata, and each weight before its bias"

    def sort(self, names: Iterable[str]) -> list[str]:
        """Return the names in order."""
        return sorted(names, key=self._place.__getitem__)

    def has(self, names: Sequence[str]) -> bool:
        """Return whether the order of these weights is known or can be assumed."""
        if self.is_certain or not self._is_sorted or len(names) == 1:
            return True
        leaves: dict[str, set[str]] = {}
        for name in names:
            leaves.setdefault(name.rpartition(".")[0], set()).add(name.rpartition(".")[2])
        return self._is_known and all(len(each) == 1 or each == {"weight", "bias"} for each in leaves.values())


def _held(checkpoint: Checkpoint, target: Target, order: _Order) -> dict[str, list[str]]:
    """Return the names of the target's parameters that each flat parameter holds, in order."""
    flats = {
        key.rpartition(".")[0]: key
        for key, spec in checkpoint.specs.items()
        if key.rpartition(".")[2] in FLAT and len(spec.shape) == 1 and spec.is_contiguous
    }
    held: dict[str, list[str]] = {key: [] for key in flats.values()}
    for names in target.names.values() if flats else ():
        left = [name for name in names if target.slots[name].is_parameter and name not in checkpoint.entries]
        if not left:  # a buffer, or already in the file
            continue
        above = name = order.sort(left)[0]
        while above and above not in flats:
            above = above.rpartition(".")[0]
        if above in flats:
            held[flats[above]].append(name)
    return {flat: order.sort(names) for flat, names in held.items()}


def _is_sorted(target: Target) -> bool:
    """Return whether a target file's keys are sorted within each dtype, as writers of safetensors do."""
    by_dtype: dict[str, list[str]] = {}
    for name, slot in target.slots.items():
        by_dtype.setdefault(slot.dtype, []).append(name)
    return all(names == sorted(names) for names in by_dtype.values())


def _flattened(checkpoint: Checkpoint, target: Target) -> Iterator[Assemble]:
    """Yield a reshape for every weight that has its name, but only one dimension."""
    if not checkpoint.remarked(Kind.FLATTENED):
        return
    for name, slot in target.slots.items():
        spec = checkpoint.entries.get(name)
        if not isinstance(spec, TensorSpec) or slot.shape in (None, spec.shape):
            continue
        if len(spec.shape) == 1 and spec.numel == slot.numel and spec.is_contiguous:
            yield Assemble.reshape(name, spec.dtype, spec.shape, slot.shape or ())
