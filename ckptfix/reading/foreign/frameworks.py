"""Models of other frameworks, told by the structure of their bytes where no signature at the start names them.

ONNX, TensorFlow, Core ML and Caffe save protocol buffers (https://protobuf.dev/programming-guides/encoding/), JAX's
Flax saves MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md). A file counts as one only where its
fields fill it from the first byte to the last and those that the model cannot be without are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ckptfix.bytes.sources import Content

_MOST_FIELDS = 50_000
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
"""What ends a table of LevelDB (``table/format.h``), the form of a TensorFlow checkpoint's index."""

_FLAX_ARRAY = re.compile(rb"(\xc7.|\xc8..|\xc9.{4})\x01\x93[\x90-\x9f\xdc]", re.DOTALL)
"""An extension of type 1 that holds shape, dtype and bytes (``flax/serialization.py``)."""

PYTORCH = "look for a PyTorch or safetensors file where it came from"
TENSORFLOW = f"load it with TensorFlow and save its weights from there, or {PYTORCH}"
FLAX = f"load it with Flax (flax.serialization.msgpack_restore) and save its arrays from there, or {PYTORCH}"
CORE_ML = f"it cannot be turned back into a PyTorch model; {PYTORCH}"


class _Field(NamedTuple):
    """A field of a protocol buffer: its number, its wire type, and where its value lies."""

    number: int
    wire: int
    start: int
    stop: int


def name_model(content: Content) -> str | None:
    """What a model of another framework is, with the remedy, as a clause behind the file's name; None for others."""
    if bytes(content.buffer[-8:]) == _TABLE_MAGIC:
        return f"the index of a TensorFlow checkpoint, whose weights are in its .data files; {TENSORFLOW}"
    if _is_flax(content):
        return f"a MessagePack file of Flax (JAX), not a PyTorch checkpoint; {FLAX}"
    if _is_onnx(content):
        return (
            "an ONNX model, not a PyTorch checkpoint: a graph whose weights need not have the names of a state_dict;"
            f" run it with onnxruntime, or {PYTORCH}"
        )
    fields = _fields(content)
    first = {field.number: field for field in reversed(fields)}
    numbers = first.keys()
    wires = {(field.number, field.wire) for field in fields}
    if {(1, 0), (2, 2)} == wires and _is_meta_graph(content, first[2]):
        return f"a SavedModel of TensorFlow, not a PyTorch checkpoint; {TENSORFLOW}"
    is_core_ml = {(1, 0), (2, 2)} < wires and all(number in (1, 2, 10) or number >= 200 for number in numbers)
    if is_core_ml and _fields(content, first[2].start, first[2].stop):
        return f"a Core ML model, not a PyTorch checkpoint; {CORE_ML}"
    if (1, 2) in wires and 100 in numbers and _is_text(content, first[1]):
        return f"a model of Caffe, not a PyTorch checkpoint; convert it with a tool for Caffe models, or {PYTORCH}"
    if numbers <= {1, 2, 3, 4} and (1, 2) in wires and _is_node(content, first[1]):
        return f"a frozen graph of TensorFlow, not a PyTorch checkpoint; {TENSORFLOW}"
    if fields and _is_meta_graph(content, _Field(0, 2, 0, len(content))):
        return f"the graph of a TensorFlow checkpoint (.meta), without its weights; {TENSORFLOW}"
    return None


def _is_meta_graph(content: Content, field: _Field) -> bool:
    """Whether a field is a MetaGraphDef (``meta_graph.proto``): facts about a graph and the graph, node by node."""
    fields = _fields(content, field.start, field.stop)
    graph = next((part for part in fields if part.number == 2), None)
    nodes = _fields(content, graph.start, graph.stop) if graph is not None else []
    is_meta = fields and fields[0].number == 1 and all(part.wire == 2 and part.number <= 7 for part in fields)
    return bool(is_meta and nodes and nodes[0].number == 1 and _is_node(content, nodes[0]))


def _is_onnx(content: Content) -> bool:
    """Whether the content is a ModelProto (``onnx/onnx.proto``): a version of the format, and a graph.

    The graph comes late and is nearly all of the file, which may be cut short in it."""
    seen: set[int] = set()
    for field in _walk(content, 0, len(content)):
        is_version = field.number == 1 and field.wire == 0 and field.stop - field.start == 1
        if not seen and not is_version:
            return False
        if field.number == 7 and field.wire == 2:
            graph = next(_walk(content, field.start, min(field.stop, len(content))), None)
            is_whole = field.stop <= len(content)
            return graph is not None and graph.wire == 2 and (is_whole or 2 in seen) and _is_onnx_rest(content, field)
        if field.number not in (1, 2, 3, 4, 5, 6, 8, 14, 20, 25, 26):
            return False
        if field.number == 2 and not _is_text(content, field):
            return False
        seen.add(field.number)
    return False


def _is_onnx_rest(content: Content, graph: _Field) -> bool:
    if graph.stop >= len(content):
        return True
    rest = _fields(content, graph.stop, len(content))
    return bool(rest) and all(field.number in (2, 3, 4, 5, 6, 8, 14, 20, 25, 26) for field in rest)


def _is_flax(content: Content) -> bool:
    head = bytes(content.buffer[: 1 << 16])
    size = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    is_map = 0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)
    is_key = head[size : size + 1] == b"\xd9" or b"\xa1" <= head[size : size + 1] <= b"\xbf"
    return is_map and is_key and _FLAX_ARRAY.search(head) is not None


def _is_node(content: Content, field: _Field) -> bool:
    """Whether a field is a NodeDef (``node_def.proto``): a name and an operation, and what these may have with them."""
    fields = _fields(content, field.start, field.stop)
    texts = {part.number for part in fields if part.number in (1, 2) and _is_text(content, part)}
    return texts == {1, 2} and all(part.wire == 2 and part.number <= 7 for part in fields)


def _is_text(content: Content, field: _Field) -> bool:
    text = bytes(content.buffer[field.start : min(field.stop, field.start + 200)])
    return field.wire == 2 and field.stop > field.start and text.isascii() and text.decode("ascii").isprintable()


def _fields(content: Content, start: int = 0, stop: int | None = None) -> list[_Field]:
    """The fields that fill a range from its start to its end; none where it is no message."""
    stop = len(content) if stop is None else stop
    fields = []
    for field in _walk(content, start, stop):
        fields.append(field)
        if len(fields) > _MOST_FIELDS:
            return []
    return fields if fields and fields[-1].stop == stop else []


def _walk(content: Content, start: int, stop: int) -> Iterator[_Field]:
    """Field after field of a message, as far as it is one; the last may reach beyond the end."""
    while start < stop:
        key, at = _varint(content, start)
        number, wire = key >> 3, key & 7
        end = at
        if wire == 0:
            _, end = _varint(content, at)
        elif wire == 2:
            length, at = _varint(content, at)
            end = at + length
        elif wire in (1, 5):
            end = at + (8 if wire == 1 else 4)
        if number == 0 or wire not in (0, 1, 2, 5) or end <= start or (wire == 0 and end == at):
            return
        yield _Field(number, wire, at, end)
        start = end


def _varint(content: Content, start: int) -> tuple[int, int]:
    """A number of seven bits to the byte and where it ends; nothing and the start itself where there is none."""
    value = 0
    for index, byte in enumerate(bytes(content.buffer[start : start + 10])):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, start + index + 1
    return 0, start
