"""Names in which one bit seems to have changed: keys, entries of the container and tags of devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from string import ascii_letters

from ckptfix.core.buffers import RUNNING_STATISTICS
from ckptfix.maps.names import template

MANY = 100  # keys of a form of their own from which on the keys have no pattern that one could break
_OF_LAYERS = RUNNING_STATISTICS | {"weight", "bias"}
_OF_TRAINERS = "state_dict model_state_dict model optimizer optimizer_state_dict scheduler lr_scheduler epoch".split()

# Where a torch of any release puts tensors, those of the makers of other chips included.
_DEVICE = re.compile(r"(cpu|cuda|hip|mps|meta|xpu|hpu|npu|xla|ipu|mtia|mlu|musa|vulkan|maia|privateuseone)(:\w+)*")


def misspelt(keys: Collection[str]) -> dict[str, str]:
    """Return the keys that only one other bit keeps from a pattern of the others, with the names that have it.

    A word of a few letters may differ by a bit from another one, and a number by right."""
    known = {key: template(key) for key in keys}
    forms = Counter(known.values())
    parents = Counter([key.rpartition(".")[0] for key in known])
    leaves = Counter([key.rpartition(".")[2] for key in known])
    alone = [key for key, form in known.items() if forms[form] == 1]
    split = {key: key.rpartition(".") for key in alone}
    odd = [key for key, (parent, _, leaf) in split.items() if parents[parent] == 1 or leaves[leaf] == 1]
    found: dict[str, str] = {}
    for key in odd if len(odd) <= MANY else ():
        for name in _one_bit_from(key):
            parent, _, leaf = name.rpartition(".")
            is_same = parent == split[key][0]
            is_beside = parents[parent] > is_same and leaves[leaf] - (leaf == split[key][2]) > 1
            is_usual = leaf in _OF_LAYERS and (is_same or parents[parent] > 0)
            if name not in known and (is_beside or is_usual or forms[template(name)] > 1) and _is_slip(key, name):
                found[key] = name
    return found


def misspelt_entries(keys: Iterable[object]) -> dict[object, str]:
    """Return the keys of a container that one bit keeps from what trainers call an entry, with the names of these."""
    wrong = {other: name for name in _OF_TRAINERS for other in _one_bit_from(name)}
    return {key: wrong[key] for key in keys if key in wrong}


def odd_devices(tags: Iterable[str]) -> list[str]:
    """Return the tags that no device has, or that one bit keeps from those of torch; another maker's may be right."""
    return [
        tag
        for tag in tags
        if not _DEVICE.fullmatch(tag)
        and (not re.fullmatch(r"[A-Za-z]\w*(:\w+)*", tag) or any(map(_DEVICE.fullmatch, _one_bit_from(tag))))
    ]


def _one_bit_from(name: str) -> Iterator[str]:
    for at, char in enumerate(name):
        for bit in range(8):
            yield f"{name[:at]}{chr(ord(char) ^ 1 << bit)}{name[at + 1 :]}"


def _is_slip(key: str, name: str) -> bool:
    """Return whether two names that differ in one character are not two numbers, or two words of a few letters."""
    at = next(at for at, (one, other) in enumerate(zip(key, name, strict=True)) if one != other)
    if not name[at].isalpha():
        return not (key[at].isdigit() and name[at].isdigit())
    before, after = name[:at].rstrip(ascii_letters), name[at:].lstrip(ascii_letters)
    return len(name) - len(before) - len(after) >= 4
