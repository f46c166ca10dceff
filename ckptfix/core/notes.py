"""Converts the container around a state_dict to JSON for the ``__metadata__`` of a safetensors file, and back.

A value of a type that JSON lacks becomes ``{"ckptfix": type, "value": …}``; one that cannot be converted (a tensor of
an optimizer) is left out, and the caller gets its place."""

import base64
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ckptfix.core.checkpoint import Checkpoint, ContainerPath, path_name, value_at
from ckptfix.core.spec import TensorSpec

TAG = "ckptfix"
DEPTH_LIMIT = 200


# Limit on repeated values in a note: JSON has no references, so shared values are written at each place.
REPEATED = 100_000


class _Unstorable(Exception):
    """A value cannot be converted to JSON."""


class _Encoder:
    """Converts values to JSON, with one limit of ``REPEATED`` for the whole note. ``lost`` collects the places of those
    that cannot be converted."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.left = REPEATED
        self.seen: set[int] = set()

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return the JSON form of a plain value. Raises ``_Unstorable`` if there is none of bounded size."""
        if isinstance(value, (list, dict, tuple, set)):
            self.left -= 1 + len(value) if id(value) in self.seen else 0
            self.seen.add(id(value))
        if self.left < 0 or depth > DEPTH_LIMIT:
            raise _Unstorable
        below = depth + 1
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, (int, str)):
            return _written(value)
        if isinstance(value, list):
            return [self.encode(item, below) for item in value]
        if isinstance(value, dict):
            if all(isinstance(key, str) for key in value) and TAG not in value:
                return {_written(key): self.encode(item, below) for key, item in value.items()}
            pairs = [[self.encode(key, below), self.encode(item, below)] for key, item in value.items()]
            return {TAG: "dict", "value": pairs}
        if isinstance(value, tuple):
            return {TAG: "tuple", "value": [self.encode(item, below) for item in value]}
        if isinstance(value, (set, frozenset)):
            return {TAG: "set", "value": [self.encode(item, below) for item in sorted(value, key=repr)]}
        if isinstance(value, complex):
            return {TAG: "complex", "value": [value.real, value.imag]}
        if isinstance(value, (bytes, bytearray)):
            return {TAG: type(value).__name__, "value": base64.b64encode(value).decode("ascii")}
        raise _Unstorable

    def around(self, value: Any, path: ContainerPath, at: ContainerPath = ()) -> Any:
        """Return the tree down to the state_dict, encoded member by member, so that a value that cannot be converted
        loses only its own branch."""
        if not path:
            return None
        encoded = []
        for name, member in value.items() if isinstance(value, dict) else enumerate(value):
            if name == path[0]:
                encoded.append([name, self.around(member, path[1:], (*at, name))])
            else:
                try:
                    encoded.append([self.encode(name), self.encode(member)])
                except _Unstorable:
                    self.lost.append(path_name((*at, name)))
                    if not isinstance(value, dict):
                        encoded.append([name, None])  # later members keep their index
        return {TAG: "dict" if isinstance(value, dict) else "list", "value": encoded}


def _written(value: Any) -> Any:
    """Return the text or number. Raises ``_Unstorable`` for lone surrogates and numbers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1024:
        raise _Unstorable
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Unstorable from error
    return value


def encode_container(checkpoint: Checkpoint, root: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the note for the container around a state_dict, and the places that cannot be converted.

    ``root`` is the plain object tree with None in place of the state_dict. The note includes entries of the state_dict
    that are not tensors."""
    note: dict[str, Any] = {}
    encoder, kept_entries = _Encoder(), dict[str, Any]()
    lost = encoder.lost
    for key, value in checkpoint.entries.items():
        if not isinstance(value, TensorSpec):
            try:
                kept_entries[key] = encoder.encode(value)
            except _Unstorable:
                lost.append(key)
    if kept_entries:
        note["entries"] = kept_entries
    state_dict = value_at(root, checkpoint.container)
    apart = state_dict if isinstance(state_dict, dict) else {}  # entries do not include an optimizer among the weights
    lost += [path_name((*checkpoint.container, key)) for key in map(str, apart) if key not in checkpoint.entries]
    if checkpoint.container:
        note["path"] = list(checkpoint.container)
        note["root"] = encoder.around(root, checkpoint.container)
    ties = len({spec.view for spec in checkpoint.specs.values()}) < len(checkpoint.specs)
    if ties or kept_entries:
        note["order"] = [key for key in checkpoint.entries if key in checkpoint.specs or key in kept_entries]
    return note, lost


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "dict": lambda value: {_decode(key): _decode(item) for key, item in value},
    "list": lambda value: [_decode(item) for _, item in value],
    "tuple": lambda value: tuple(_decode(item) for item in value),
    "set": lambda value: {_decode(item) for item in value},
    "complex": lambda value: complex(*value),
    "bytes": lambda value: base64.b64decode(value),
    "bytearray": lambda value: bytearray(base64.b64decode(value)),
}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        decoder = _DECODERS.get(value.get(TAG, ""))
        return decoder(value["value"]) if decoder else {key: _decode(item) for key, item in value.items()}
    return value


def restore_container(state_dict: OrderedDict[str, Any], note: Mapping[str, Any]) -> Any:
    """Return the object tree of a note with the state_dict in its place, or the state_dict itself if the note has no
    tree or is invalid."""
    try:
        for key, value in note.get("entries", {}).items():
            if not isinstance(state_dict.get(key), TensorSpec):
                state_dict[key] = _decode(value)
        order = note.get("order")
        if isinstance(order, list) and len(order) == len(state_dict) and set(order) == set(state_dict):
            for key in order:
                state_dict.move_to_end(key)
        path = note.get("path", [])
        if not path:
            return state_dict
        root = _decode(note["root"])
        value_at(root, path[:-1])[path[-1]] = state_dict
        return root
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError):
        # The note was edited by hand; the weights are complete without it.
        return state_dict
