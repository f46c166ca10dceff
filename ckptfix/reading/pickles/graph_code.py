"""The Python code in a pickled ``torch.fx.GraphModule``, and whether it is what torch.fx writes.

Such a module pickles as a call with its instance dict and two texts: the source of its ``forward`` and the imports in
front of it. Loading it executes both (``torch/fx/graph_module.py``), whatever they say. What torch.fx generates are
calls of submodules, of methods of tensors and of torch's operations; any other text is there to do something else.
The text is judged by its words. It is never parsed or compiled: both can be made to exhaust the interpreter."""

from __future__ import annotations

import re
from typing import Any

from ckptfix.core.dtypes import DTYPES
from ckptfix.reading.pickles.payload import ANYWHERE, BUILTINS, PACKAGES, STDLIB, is_known, is_payload

LENGTH_LIMIT = 8 << 20
"""Characters of code that are looked at; graphs of the largest models stay far below."""

_IGNORED = re.compile(r"#[^\n]*")
_STRING = re.compile(r"(?i:\b[rbuf]{1,2})?('[^'\n\\]*(?:\\.[^'\n\\]*)*'|\"[^\"\n\\]*(?:\\.[^\"\n\\]*)*\")")
_WORDS = re.compile(r"(\.\s*)?([^\W\d]\w*(?:\.[^\W\d]\w*)*)(\s*\()?")
_IMPORT = re.compile(r"import ([\w.]+)(?: as \w+)?|from ([\w.]+) import (\w+)(?: as \w+)?|NoneType = type\(None\)")

_HARMLESS_MODULES = frozenset("math operator _operator typing collections inspect".split())
_SYNTAX = frozenset("import from lambda class global nonlocal yield while try except raise async await exec".split())
_VALUES = frozenset("strided sparse_coo contiguous_format channels_last channels_last_3d preserve_format".split())
_SPACES = ("nn", "_C", "fft", "linalg", "special", "sparse", "amp", "ao", "fx", "utils", "functional", "_nn")
_LOADERS = frozenset("load save from_file load_library import_ir_module hub package compile".split())


def is_graph_code(body: Any, imports: Any) -> bool:
    """Return whether the instance dict of a graph module and its import block hold nothing but calls of operations."""
    if not isinstance(body, dict):
        return False
    code, block = body.get("_code", body.get("code", "")), imports or ""
    if not (isinstance(code, str) and isinstance(block, str) and len(code) + len(block) <= LENGTH_LIMIT):
        return False
    return all(_is_harmless_import(line.strip()) for line in block.splitlines()) and _is_harmless_code(code)


def _is_harmless_import(line: str) -> bool:
    found = _IMPORT.fullmatch(line)
    if found is None:
        return not line
    name = found[1] or found[2]
    if name is None:
        return True
    root = name.partition(".")[0]
    if root == "torch":
        if found[3]:
            return f"{name}.{found[3]}" == "torch.device" or _is_operation(f"{name}.{found[3]}", is_called=True)
        return name in ("torch", "torch.fx", "torch.fx._pytree", "torch.utils._pytree")
    if root == "builtins":
        return found[3] is not None and found[3] not in BUILTINS
    return root in _HARMLESS_MODULES or not (is_known(root) or root in PACKAGES or is_payload(name))


def _is_harmless_code(code: str) -> bool:
    texts: list[str] = []

    def keep(found: re.Match[str]) -> str:
        texts.append(found[1])
        return "''"

    code = _IGNORED.sub("", _STRING.sub(keep, code))
    if "\\" in code or any("__" in text for text in texts):
        return False
    return all(_is_harmless_word(found) for found in _WORDS.finditer(code))


def _is_harmless_word(found: re.Match[str]) -> bool:
    name, is_called = found[2], found[3] is not None
    parts = name.split(".")
    if any(part.startswith("__") for part in parts):
        return False
    attributes = parts if found[1] else parts[1:]
    if any(part in ANYWHERE for part in attributes) or (not found[1] and parts[0] in _SYNTAX):
        return False
    if found[1] or parts[0] != "torch":
        return bool(found[1]) or parts[0] == "input" or parts[0] not in BUILTINS
    return _is_operation(name, is_called)


def _is_operation(name: str, is_called: bool) -> bool:
    """Return whether a dotted name of torch is an operation that is called, or one of the few values that stand for
    themselves: nobody needs a module of torch as a value."""
    _, *path = name.split(".")
    if not path or is_payload(name) or not _LOADERS.isdisjoint(path):
        return False
    if path[0] == "ops":
        return len(path) >= 3
    if len(path) > 1 and path[0] not in _SPACES:
        return False
    if any(part.lstrip("_") in STDLIB for part in path[:-1]):
        return False
    return is_called or path[-1] in DTYPES or path[-1] in _VALUES or path[-1][:1].isupper()
