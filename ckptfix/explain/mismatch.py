"""Parses the keys and shapes in a message of torch, transformers, fvcore or mmcv."""

import re
from collections.abc import Collection, Iterator
from itertools import chain, islice, product

from msgspec import Struct, field

from ckptfix.core.parts import Shape
from ckptfix.core.wrappers import MODULE, WRAPPER_SEGMENTS
from ckptfix.explain.text import Message


class Mismatch(Struct, frozen=True):
    """The keys and shapes that a message lists.

    ``model`` is the class that was loaded into, empty if the message does not say. ``shapes`` has the shape of each
    mismatched key in the file and in the model. ``knows_missing`` says whether the message would list missing keys, if
    there were any: torch before 0.4 stopped at the first unexpected one, and a pasted text may begin in the middle.
    ``is_cut`` says that the lists are incomplete."""

    model: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    running_statistics: tuple[str, ...] = ()
    knows_missing: bool = True
    is_cut: bool = False


_NAMES = r"""(?:\\?["'][^"']*["'](?:,\s?|\s(?=["']))?)+"""
_PLAIN_NAMES = r"[\w.]+(?:, [\w.]+)*"
_FOLDED_NAMES = r"(?: [\w.]+\.(?:\w+|\{[\w, ]+\})(?= |$))+"  # the lists of fvcore and detectron2, one key per line

_MISSING = re.compile(
    rf"Missing key\(s\) in state_dict: (?P<quoted>{_NAMES})"
    rf"|missing keys in state_dict: \"?(?:set\(\[|\{{|\[)(?P<set>[^\]}}]*)"
    rf"|missing_keys\s?=\s?\[(?P<list>[^\]]*)"
    rf"|(?:not initialized from the model checkpoint at [^\[]{{1,400}}|"
    rf"(?:unet|clip|vae) missing: (?!\['text_projection\.weight'\])|Missing"
    rf" key(?:s|\(s\))?(?: when loading model| \(\d+\))?:?\s?|model state dict but not in the checkpoint: )"
    rf"\[(?P<some>[^\]]*)"
    rf"|(?:missing keys? (?:in (?:source state_dict|checkpoint): |\((?!\d+\)))|following keys are missing: "
    rf"|Keys '(?=.+' are missing\b))(?P<plain>{_PLAIN_NAMES})"
    rf"|not found in the checkpoint:(?P<folded>{_FOLDED_NAMES})",
    re.IGNORECASE,
)
_UNEXPECTED = re.compile(
    rf"Unexpected key\(s\) in state_dict: (?P<quoted>{_NAMES})"
    r"|unexpected key \"(?P<one>[^\"]+)\" in state_dict"
    r"|unexpected_keys\s?=\s?\[(?P<list>[^\]]*)"
    r"|(?:were not used when initializing [^\[]{1,200}|unet unexpected: |model state dict but in the checkpoint: "
    r"|Unexpected key(?:s|\(s\))?(?: when loading model| \(\d+\))?:?\s?)\[(?P<some>[^\]]*)"
    rf"|unexpected key(?: in source state_dict: |s? \((?!\d+\)))(?P<plain>{_PLAIN_NAMES})"
    rf"|keys that are not used by the model:(?P<folded>{_FOLDED_NAMES})",
    re.IGNORECASE,
)
_RUNNING = re.compile(rf"Unexpected running stats buffer\(s\) (?P<quoted>{_NAMES})", re.IGNORECASE)

_SIZE = r"(?:torch\.Size\()?[\[(]([\d, ]*)[\])]\)?"
# A key, its shape in the file and in the model: of torch since 1.0 and (`of`, `where`) 0.4.1, fvcore, transformers 4,
# detectron2, diffusers and nnU-Net.
_FILE_FIRST = (
    rf"size mismatch for (?P<key>[^\s:]+): copying a param (?:with shape|of) {_SIZE} from (?:the )?checkpoint,"
    rf" (?:where )?the shape (?:in (?:the )?current model )?is {_SIZE}",
    rf"'(?P<key>[^' ]+)' (?:(?:to the model )?due to incompatible shapes:|has shape) {_SIZE} in the checkpoint but"
    rf" {_SIZE} in the model",
    rf"(?<![\w.])(?P<key>[\w.]+): found shape {_SIZE} in the checkpoint and {_SIZE} in the model",
    rf"Shape of (?P<key>\S+) in checkpoint is {_SIZE}, while shape of \S+ in model is {_SIZE}",
    rf"Cannot load (?P<key>\S+) because it has shape {_SIZE} in the checkpoint but shape {_SIZE}",
    rf"parameters of key (?P<key>\S+) is not the same\. Pretrained model: {_SIZE}; your network: {_SIZE}",
)
# The same with the model's first: of torch 0.3 and 0.4.0, CenterNet (copied by the DETR trackers), diffusers, and mmcv.
_MODEL_FIRST = (
    rf"While copying the parameter named \"?(?P<key>[^\s\",]+)\"?, whose dimensions in the model are {_SIZE} and whose"
    rf" dimensions in the checkpoint are {_SIZE}",
    rf"Skip loading parameter (?P<key>[^\s\",]+), required shape ?{_SIZE}, loaded shape ?{_SIZE}",
    rf"because (?P<key>[\w.]+) expected shape (?:tensor\(\.\.\., device='meta', size=)?{_SIZE}\)?, but got {_SIZE}",
    rf"(?<![\w.])(?P<key>[\w.]+) \| {_SIZE} \| {_SIZE}",
)
_MOST_LAYERS = 1000
_MOST_KEYS = 50_000  # of one kind: a folded name of 40 characters may stand for a billion
_CONTEXT = re.compile(r"Error\(s\) in loading state_dict for (?P<model>[\w.]+)")
_WRAPPED = re.compile(r"\w*Parallel\w*|OptimizedModule|\w*AveragedModel|\w*Engine")
_CUT = re.compile(r"[\"'],?\s*(?:\.\.\.|…)")
_QUOTED = re.compile(r"[\"']([^\"']*)[\"']")


def read_mismatch(message: Message) -> Mismatch:
    """Return the keys and shapes of a message, from the first of its readings in which no key contains a space."""
    readings = [_read(reading) for reading in message.readings]
    for each in readings:
        keys = (*each.missing, *each.unexpected, *each.shapes)
        if keys and not any(re.search(r"\s", key) for key in keys):
            return each
    return readings[0]


def _read(text: str) -> Mismatch:
    context = _CONTEXT.search(text)
    shapes = dict(islice(_shapes(text), _MOST_KEYS))
    named, unexpected = (
        dict.fromkeys(islice(chain(_keys_in(listed, text), (key for key, _ in _rows(text, status))), _MOST_KEYS))
        for listed, status in ((_MISSING, "MISSING"), (_UNEXPECTED, "UNEXPECTED"))
    )
    missing = tuple(key for key in named if key not in shapes)  # fvcore lists skipped keys twice
    is_old = 'unexpected key "' in text and not context
    starts_before = context is not None or "missing_keys" in text or "LOAD REPORT from" in text
    is_cut = _MOST_KEYS in (len(shapes), len(named), len(unexpected)) or _CUT.search(text) is not None
    # A file rarely has all keys of a model without a wrapper, and more under the wrapper's name: the pasted text
    # leaves the missing ones out.
    is_wrapped = context is not None and _WRAPPED.fullmatch(context["model"]) is not None
    leaves_out = is_cut or (context is not None and not is_wrapped and _all_in_wrapper(unexpected))
    return Mismatch(
        model=context["model"] if context else "",
        missing=missing,
        unexpected=tuple(unexpected),
        shapes=shapes,
        running_statistics=tuple(_keys_in(_RUNNING, text)),
        knows_missing=bool(missing) or (starts_before and not is_old and not leaves_out),
        is_cut=is_cut,
    )


def _all_in_wrapper(keys: Collection[str]) -> bool:
    return bool(keys) and {MODULE, *WRAPPER_SEGMENTS}.issuperset(key.partition(".")[0] for key in keys)


# A row of the load report of transformers 5, with folded names: `layers.{0, 1}.weight`, `{0...11}`.
_ROW = re.compile(
    r"(?P<key>[\w.]+(?:\{[\w, .]+\}[\w.]*)*) \| (?P<status>MISSING|UNEXPECTED|MISMATCH)\b"
    rf"(?: \| [^|]{{0,80}}ckpt: {_SIZE} vs model: ?{_SIZE})?"
)


def _rows(text: str, status: str) -> Iterator[tuple[str, re.Match[str]]]:
    for row in _ROW.finditer(text):
        if row["status"] == status:
            for key in _unfolded(row["key"]):
                yield key, row


def _unfolded(key: str) -> Iterator[str]:
    """Yield the keys of a folded name: ``a.{0...2}.{w, b}`` names six."""
    parts = re.split(r"\{([^}]*)\}", key)  # text and braces in turn
    yield from map(
        "".join, product(*([part] if number % 2 == 0 else _names(part) for number, part in enumerate(parts)))
    )


def _names(inside: str) -> list[str]:
    names: list[str] = []
    for part in inside.split(","):
        first, dots, last = part.strip().partition("...")
        is_range = dots and first.isdecimal() and last.isdecimal()
        names += map(str, range(int(first), min(int(last), int(first) + _MOST_LAYERS) + 1)) if is_range else [first]
    return names


def _keys_in(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    for match in pattern.finditer(text):
        groups = match.groupdict()
        if groups.get("one"):
            yield groups["one"]
        elif groups.get("plain"):
            yield from groups["plain"].rstrip(".").split(", ")
        elif groups.get("folded"):
            yield from (key for name in re.split(r" (?![^{]*\})", groups["folded"][1:]) for key in _unfolded(name))
        else:
            listed = next((part for part in groups.values() if part), "")
            yield from (key for quoted in _QUOTED.findall(listed) for key in quoted.split(", "))


def _shapes(text: str) -> Iterator[tuple[str, tuple[Shape, Shape]]]:
    for key, row in _rows(text, "MISMATCH"):
        if row[3] is not None:
            yield key, (_shape(row[3]), _shape(row[4]))
    for pattern in (*_FILE_FIRST, *_MODEL_FIRST):
        for match in re.finditer(pattern, text):
            first, second = (_shape(size) for size in match.groups()[1:] if size is not None)
            if first != second:  # otherwise the copy failed for another reason
                yield match["key"], (second, first) if pattern in _MODEL_FIRST else (first, second)


def _shape(text: str) -> Shape:
    return tuple(int(size) for size in re.findall(r"\d+", text))
