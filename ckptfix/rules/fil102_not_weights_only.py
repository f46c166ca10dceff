"""FIL102 not-weights-only: the file contains objects that `torch.load` refuses since 2.6.

## What it finds
- Objects other than weights: argparse.Namespace, pathlib paths, numpy scalars and arrays, OmegaConf, whole modules,
  classes of a project that no longer exists.
- Pickle protocols other than 2, plain pickles, and text of Python 2 that is not UTF-8.
- TorchScript and torch.package archives, the tar format of torch 0.1, and zip archives that torch refuses because they
  were repacked in another layout, without their version, or with a compression that torch does not support.
- fp8 tensors saved with `requires_grad` that are not Parameters: `torch.load` fails on them with `a leaf Variable that
  requires grad is being used in an in-place operation`.

## Why it matters
`torch.load` has `weights_only=True` as its default since 2.6 and stops with
`Weights only load failed … Unsupported global`; its message suggests turning the safety off. A class that moved or
disappeared fails even then: `No module named 'models'`.

## Fix safety
Safe: every tensor stays bit for bit. Plain data of known classes takes its natural form (Namespace → dict, Path → str,
numpy scalar → number, numpy array → tensor, module or TorchScript → state_dict); an object of an unknown class becomes
a dict of its contents. All are listed. Code that reads `checkpoint["args"].lr` has to use `checkpoint["args"]["lr"]`
afterwards. Python 2 text that torch refuses is read as Latin-1. Keys that are bytes become strings if there is a model
or if they are parameter names (`layer.weight`).

Some things cannot be carried over, and the finding remains:

- Packed weights of quantised recurrent layers (`torch.ScriptObject`), and tensors that a class builds from others
  (torchao's quantised weights). Nothing is written: torch.load reads the file as it is (the latter after
  `import torchao`). `--ignore FIL102` writes their parts as data, which no module loads, as a check of that file says.
- Scales that a whole model keeps as attributes of its codes (bitsandbytes). Nothing is written.
- Tensors that an unknown function builds from a storage or another tensor, as subclasses of Parameter with a pickle of
  their own have; they are kept as such data.
- Parameters of lazy modules that never ran, which are empty.

Notes list:

- what becomes plain data in the output of a folder of ranks, which only its framework loads;
- objects and functions, such as the spaces and schedules in a policy of stable-baselines3, of which the output has only
  the data: the library that saved them has to read the original file;
- the program of a TorchScript archive;
- attributes that your class stores in a module (class names, strides, a configuration), which no state_dict holds;
- keys that are numbers or tuples, and storages without a tensor, which torch.load reads.

Nested tensors cannot be written, so their file stays unchanged. `torch.load` of torch 2.15 and newer refuses them; for
an older release (`--for-torch 2.14`) they are only a note.

## Example
`{"state_dict": …, "args": Namespace(lr=0.1)}` becomes `{"state_dict": …, "args": {"lr": 0.1}}`.

## Sources
https://pytorch.org/docs/stable/notes/serialization.html#weights-only; piper#718, bark#653, open-retina#186,
SketchKit#90, ultralytics#19778."""

from ast import literal_eval
from collections.abc import Iterable, Iterator

from ckptfix.core.checkpoint import Checkpoint, path_name, value_at
from ckptfix.core.edits import Plain, renames
from ckptfix.core.facts import Kind, clause
from ckptfix.core.finding import Blocks, Finding, Fix, Level, advise, counted
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names, folded_places
from ckptfix.reading.weights.loose_tensors import own_attributes
from ckptfix.reading.weights.quantized_modules import (
    SCRIPT_OBJECT,
    composed_class,
    is_low_bit_moment,
    is_script_object,
    part_names,
    rebuilding_call,
)
from ckptfix.rules.rule import Context, Rule
from ckptfix.writing.plain import BARE_STORAGE, CONVERSIONS, is_data_class, plain_root


def _not_carried(rule: Rule, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Name the entries of the state_dict that no file for ``weights_only=True`` can hold as they are."""
    others = {key: entry for key, entry in checkpoint.entries.items() if not isinstance(entry, TensorSpec)}
    classes_of = {key: entry.get("class") for key, entry in others.items() if isinstance(entry, dict)}
    taken_apart = tuple(key for key, name in classes_of.items() if name == SCRIPT_OBJECT)  # as this rule writes them
    packed = taken_apart or tuple(key for key, entry in others.items() if is_script_object(entry))
    if packed:
        yield rule.finding(
            Level.ERROR,
            f"weights packed for a quantised kernel in {counted(len(packed), 'entry')} of the state_dict "
            f"({SCRIPT_OBJECT}), which no file for weights_only=True can hold: as plain data they will not load into "
            "the model",
            keys=packed,
            remedies=advise(
                "load the weights into the float model and quantise it again; the original file loads into the "
                "quantised model"
                if taken_apart
                else "keep this file: torch.load reads it with weights_only=False, for a model quantised in the same "
                "way by the same release of torch"
            ),
            blocks=Blocks.NOTHING if taken_apart else Blocks.WRITING,
        )
    composed = {key: name for key, entry in others.items() if (name := composed_class(entry))}
    if composed:
        classes = list(dict.fromkeys(composed.values()))
        package = classes[0].partition(".")[0]
        names = list(dict.fromkeys(name for key in composed for name in part_names(checkpoint.entries[key])))
        parts = f" ({', '.join(names)})" if names else ""
        is_taken_apart = all(isinstance(checkpoint.entries[key], dict) for key in composed)
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(composed), 'weight')} of {', '.join(classes)}, which only that class builds from several "
            f"tensors{parts}: as plain data they will not load into the model",
            keys=composed,
            evidence={} if is_taken_apart else {"parts": names},
            remedies=advise(
                "the tensors were taken apart when this file was written: use the original file"
                if is_taken_apart
                else f"keep this file, which torch.load reads after `import {package}`; for a file that loads without "
                f"{package}, load the model with it, dequantise it, and save its state_dict"
            ),
            blocks=Blocks.NOTHING if is_taken_apart else Blocks.WRITING,
        )
    rebuilt = {key: name for key, entry in others.items() if (name := rebuilding_call(entry))}
    if rebuilt:
        calls = ", ".join(dict.fromkeys(rebuilt.values()))
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(rebuilt), 'weight')} that only the unknown function {calls} builds: as plain data "
            "they will not load into the model",
            keys=rebuilt,
            remedies=advise(
                "if the name is misspelt, the file is damaged: fetch it again; otherwise save the model again with "
                "plain tensors"
            ),
        )
    scales = [fact.place for fact in checkpoint.remarked(Kind.SCALES_OF_CODES)]
    if scales:
        yield rule.finding(
            Level.ERROR,
            f"quantised weights whose scales are attributes of their tensors ({first_names(scales)}): the output would "
            "have their codes only",
            evidence={"attributes": scales},
            remedies=advise("load the model with the library that quantised it, and save model.state_dict()"),
            blocks=Blocks.WRITING | Blocks.USING,
        )
    empty = tuple(fact.place for fact in checkpoint.remarked(Kind.UNINITIALIZED))
    if empty:
        yield rule.finding(
            Level.WARNING,
            f"{counted(len(empty), 'tensor')} of lazy modules never got a shape or value, and cannot be written",
            keys=empty,
            remedies=advise("run the model once on an input before saving it"),
        )


# What strided and jagged nested tensors are pickled as; weights_only=True accepts both before torch 2.15.
_NESTED_REFUSED_SINCE = "2.15"
_NESTED = frozenset({"torch._utils._rebuild_nested_tensor", "torch.nested._internal.nested_tensor._rebuild_njt"})


def _is_object(edit: Plain) -> bool:
    """Return whether a conversion turns an object, a class or a function into data that does not replace it. A whole
    model is one only in a container, which its library reads."""
    if edit.after == "state_dict" and (edit.where == "." or edit.before.startswith("torch.")):
        return False
    is_class = "." in edit.before and " " not in edit.before
    is_data = edit.after == "torch.Tensor" or is_data_class(edit.before)
    return is_class and (edit.before == "functools.partial" or not is_data)


def _within(*places: str) -> tuple[str, ...]:
    """Return how the names of all places inside some places begin."""
    return tuple("" if place == "." else f"{place}{sign}" for place in places for sign in (".", "["))


def _otherwise(rule: Rule, context: Context, conversions: list[Plain], lost: Iterable[str]) -> Iterator[Finding]:
    """Note what the file has and the output lacks, or has in another form, besides the ``lost`` entries of the
    state_dict, which have findings of their own."""
    checkpoint = context.checkpoint
    attributes = own_attributes(value_at(checkpoint.root, checkpoint.container))
    on_tensors = [remark.place for remark in checkpoint.remarked(Kind.ATTRIBUTE_OF_TENSOR)]
    programs = [remark.place for remark in checkpoint.remarked(Kind.TORCHSCRIPT)]
    pickles = [remark.place for remark in checkpoint.remarked(Kind.PLAIN_PICKLE)]
    storages = [edit.where for edit in conversions if edit.before == BARE_STORAGE]
    nested = tuple(edit.where for edit in conversions if edit.before in _NESTED)
    parts = (*nested, *(path_name((*checkpoint.container, key)) for key in lost))
    for name, places, what, said in (
        ("left_out", attributes, "attribute", "of the module, which neither a state_dict nor the output has"),
        ("left_out", on_tensors, "attribute", "set on tensors by code, which the output will not have"),
        ("storages", storages, "storage", "without a tensor: torch.load reads them, but the output has tensors"),
        ("programs", programs, "program", "that torch.jit.load runs without the model's class: the output has no code"),
    ):
        if places:
            yield rule.finding(Level.NOTE, f"{counted(len(places), what)} {said}", evidence={name: places})
    if pickles:
        yield rule.finding(
            Level.NOTE,
            "code that reads this file with pickle.load needs torch.load for the output",
            evidence={"pickles": pickles},
        )
    objects: dict[str, str] = {}
    known = _within(*parts)
    inside: tuple[str, ...] = ()
    for edit in conversions:  # each object comes before what is in it
        if _is_object(edit) and edit.where not in parts and not edit.where.startswith((*known, *inside)):
            objects[edit.where], inside = edit.before, _within(edit.where)
    if objects and not checkpoint.remarked(Kind.PAYLOAD):
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(objects), 'object')} that will be plain data "
            f"({first_names(list(dict.fromkeys(objects.values())))}): code that needs the objects, such as the library "
            "that saved them, cannot read the output; keep this file for it",
            evidence={"objects": list(folded_places(objects))},
        )
    if nested:
        is_read = context.settings.is_for_torch_before(_NESTED_REFUSED_SINCE)
        how = (
            "torch.load reads this file as it is"
            if is_read
            else f"torch.load refuses this file with its default weights_only=True since {_NESTED_REFUSED_SINCE}"
        )
        yield rule.finding(
            Level.NOTE if is_read else Level.WARNING,
            f"{counted(len(nested), 'nested tensor')}: {how}, and the output would hold their component tensors "
            "instead",
            keys=nested,
            remedies=advise(
                "keep this file, and change its keys after loading"
                if is_read
                else "if you trust the file, load it with weights_only=False, and save the component tensors "
                "(tensor.unbind()) instead; for an older torch, add --for-torch 2.14"
            ),
            blocks=Blocks.WRITING,
        )


def _shown(conversions: list[Plain]) -> Iterator[tuple[str, str]]:
    """Yield each place with its conversion; the places of a long log are folded into one."""
    changes: dict[str, list[str]] = {}
    for edit in conversions:
        changes.setdefault(f"{edit.before} → {edit.after}", []).append(edit.where)
    for change, places in changes.items():
        yield from ((place, change) for place in folded_places(places))


def _text_of(name: str) -> str:
    """Return the text of a key that is bytes, given its repr; empty if it is not bytes."""
    try:
        found = literal_eval(name)
        return found.decode() if isinstance(found, bytes) else ""
    except (ValueError, SyntaxError):
        return ""


def not_weights_only(rule: Rule, context: Context) -> Iterator[Finding]:
    """Convert everything besides the weights to plain data."""
    checkpoint = context.checkpoint
    yield from (lost := list(_not_carried(rule, checkpoint)))
    names = [clause(remark) for remark in checkpoint.remarked(Kind.NON_STRING_KEY)]
    names = [name for name in names if name in checkpoint.entries]
    texts = {name: text for name in names if (text := _text_of(name)) and text not in checkpoint.entries}
    is_of_module = context.target is not None or any("." in text for text in texts.values())
    if is_of_module and names and len(texts) == len(names):
        yield rule.finding(
            Level.ERROR,
            f"{counted(len(names), 'key')} that are bytes, as in Python 2 pickles, which no module loads",
            keys=names,
            fix=Fix.safe(renames(texts)),
        )
    elif names:
        yield rule.finding(
            Level.NOTE,
            f"{counted(len(names), 'key')} of the state_dict that are not strings ({first_names(names)}): torch.load "
            "reads them, but no module has such keys, and safetensors turns them into strings",
        )
    conversions = list(plain_root(checkpoint)[1])
    yield from _otherwise(rule, context, conversions, [key for finding in lost for key in finding.keys])
    conversions = [edit for edit in conversions if edit.before not in _NESTED]
    for remark in checkpoint.remarks:
        if remark.kind in CONVERSIONS and not is_low_bit_moment(str(remark.data.get("name"))):
            before, after = CONVERSIONS[remark.kind]
            conversions.append(Plain(remark.place, before.format(clause(remark)), after))
    classes = list(dict.fromkeys(edit.before for edit in conversions if edit.before != BARE_STORAGE))
    if not classes:
        return
    from ckptfix.reading.folders.folders import OF_TRAINING  # only here: it imports what reads every kind of folder

    # Nothing loads a folder of ranks with torch.load, and its framework reads the objects.
    is_of_training = checkpoint.format in OF_TRAINING
    yield rule.finding(
        Level.NOTE if is_of_training else Level.WARNING,
        f"the output has plain data in place of {first_names(classes)}, which torch.load refuses with its default "
        "weights_only=True"
        if is_of_training
        else f"torch.load refuses this file with its default weights_only=True, because of {first_names(classes)}",
        evidence=dict(_shown(conversions)),
        fix=Fix.safe(conversions),
    )
