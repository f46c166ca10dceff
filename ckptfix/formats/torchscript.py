"""TorchScript archives, which torch.jit.save writes: their weights, without their code.

Since 1.3 ``data.pkl`` holds the modules as objects of classes ``__torch__…``, whose sources under ``code/`` list the
parameters (``__parameters__``) and, since 1.6, the buffers (``__buffers__``). From 1.3 to 1.5 a buffer is a tensor that
is no parameter; torch's own loader of today drops those. Torch 1.0 to 1.2 wrote ``model.json`` instead: see
``torchscript_json``. Layout: https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/docs/serialization.md
"""

from __future__ import annotations

import ast
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfix.checkpoint import Remark, TensorSpec
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.formats.document import Document
from ckptfix.formats.objects import Opaque
from ckptfix.formats.payload import payload_remarks
from ckptfix.formats.sources import Content
from ckptfix.formats.torch_archive import TorchArchive, read_member, storage_pickle
from ckptfix.formats.torch_zip import open_archive
from ckptfix.formats.torchscript_json import read_json
from ckptfix.formats.tree import tensors_in
from ckptfix.formats.zip_directory import is_torchscript, member_names

NAME = "torchscript"
DEPTH_LIMIT = 200
VISIT_LIMIT = 200_000
"""Modules, each counted once for every name it has."""
_SOURCE_LIMIT = 64 << 20
_CLASS = re.compile(r"^class ([^\s(:]+)\((\w+)\):\n", re.MULTILINE)
_LISTED = re.compile(r"^  (__parameters__|__buffers__) = (\[[^\]\n]*\])$", re.MULTILINE)


def sniff(content: Content) -> bool:
    """Whether the content is a zip archive with the members of torch.jit.save."""
    return bytes(content.buffer[:4]) == b"PK\x03\x04" and is_torchscript(member_names(content))


def read(content: Content, nesting: int = 0) -> Document:
    """The document of a TorchScript file: its weights as a state_dict. None of its code is compiled or run."""
    if any(f"/{name}".endswith("/data.pkl") for name in member_names(content)):
        return read_archive(open_archive(content))
    return _document(content.path, *read_json(open_archive(content, "model.json")), set())


def read_archive(archive: TorchArchive) -> Document:
    """The document of the members of an archive of torch 1.3 or later.

    Raises ``UnreadableError`` where the module has no weights under names, as a frozen one has none."""
    pickles = storage_pickle(archive, ("data",))
    root, _ = pickles.run(read_member(archive, "data.pkl"))
    entries, remarks = _Walk(archive.path, _classes(archive)).gather(root)
    constants = storage_pickle(archive, ("constants",))
    frozen, _ = constants.run(read_member(archive, "constants.pkl")) if "constants.pkl" in archive.members else ((), 0)
    if not entries:
        # Freezing turns the weights into constants of the code, which have numbers in the place of names.
        count = sum(1 for _ in tensors_in(frozen))
        reason = f"was frozen: its {count} weights are constants without names" if count else "has no weights"
        raise UnreadableError(f"{archive.path}: a TorchScript module that {reason}; use the file that it was made from")
    # A class of TorchScript is never imported by Python, whatever it is called.
    names = {name for name in pickles.names | constants.names if not name.startswith("__torch__.")}
    return _document(archive.path, entries, remarks, names)


def _document(path: str, entries: OrderedDict[str, Any], remarks: list[Remark], names: set[str]) -> Document:
    remarks = [Remark(NAME, ".", "a TorchScript archive"), *remarks, *payload_remarks(names)]
    return Document(path, NAME, entries, None, names, remarks)


@dataclass(frozen=True)
class ScriptClass:
    """What the source of a class says: whether it is a module, its parameters, and its buffers where it lists them."""

    is_module: bool
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] | None = None


def _classes(archive: TorchArchive) -> dict[str, ScriptClass]:
    """The classes in the sources of an archive, by their full names. The sources are searched as text."""
    classes: dict[str, ScriptClass] = {}
    total = 0
    for name in archive.members:
        if not name.startswith("code/") or not name.endswith(".py"):
            continue
        source = read_member(archive, name, _SOURCE_LIMIT).decode("utf-8", "replace")
        total += len(source)
        if total > _SOURCE_LIMIT:
            raise HostileError(f"{archive.path}: more than 64 MB of TorchScript sources; do not use this file")
        package = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
        heads = list(_CLASS.finditer(source))
        stops = [*(head.start() for head in heads[1:]), len(source)]
        for head, stop in zip(heads, stops, strict=False):
            classes[f"{package}.{head[1]}"] = _class(head[2], source[head.end() : stop])
    return classes


def _class(base: str, body: str) -> ScriptClass:
    listed: dict[str, tuple[str, ...]] = {}
    for name, text in _LISTED.findall(body):
        try:
            listed.setdefault(name, tuple(str(item) for item in ast.literal_eval(text)))
        except (ValueError, SyntaxError):
            continue
    return ScriptClass(base == "Module", listed.get("__parameters__", ()), listed.get("__buffers__"))


@dataclass
class _Walk:
    """One walk over the modules of an archive. A module with two names gives its tensors under both, as in torch."""

    path: str
    classes: Mapping[str, ScriptClass]
    entries: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    left_out: list[str] = field(default_factory=list)
    guessed: bool = False
    visits: int = 0

    def gather(self, root: Any) -> tuple[OrderedDict[str, Any], list[Remark]]:
        """The state_dict below the root object, and what is to be said of it."""
        if isinstance(root, Opaque):
            self._module(root, "", 0)
        remarks = [Remark("no-metadata", ".", "module versions and non-persistent buffers are not marked in it")]
        remarks += [Remark("tensor-attribute", name, "neither parameter nor buffer") for name in self.left_out]
        if self.guessed:
            remarks.append(Remark("guessed-buffers", ".", "every tensor that is no parameter counts as a buffer"))
        return self.entries, remarks

    def _module(self, module: Opaque, prefix: str, depth: int) -> None:
        self.visits += 1
        if depth > DEPTH_LIMIT or self.visits > VISIT_LIMIT:
            raise HostileError(
                f"{self.path}: modules nested deeper than {DEPTH_LIMIT} or more than {VISIT_LIMIT}; do not use it"
            )
        listed = self.classes.get(str(module.cls), ScriptClass(True))
        pairs: dict[Any, Any] = module.attributes
        attributes = {name: value for name, value in pairs.items() if isinstance(name, str)}
        tensors = {name: value for name, value in attributes.items() if isinstance(value, TensorSpec)}
        buffers = listed.buffers
        if buffers is None:
            buffers = tuple(name for name in tensors if name not in listed.parameters)
            self.guessed |= bool(buffers)
        names = [name for group in (listed.parameters, buffers) for name in group if name in tensors]
        for name in names:
            self.entries[prefix + name] = replace(tensors[name], requires_grad=False, is_parameter=False)
        self.left_out += [prefix + name for name in tensors if name not in names]
        for name, child in attributes.items():
            if isinstance(child, Opaque) and self._is_module(child):
                self._module(child, f"{prefix}{name}.", depth + 1)
            elif isinstance(child, Opaque):
                self._packed(child, prefix + name)

    def _is_module(self, value: Opaque) -> bool:
        known = self.classes.get(str(value.cls))
        return known.is_module if known is not None else isinstance(value.state, dict)

    def _packed(self, value: Opaque, name: str) -> None:
        """The packed parameters of a quantised layer: a weight and a bias in the state of an object of torch's own."""
        state = value.state
        if str(value.cls).startswith("__torch__.torch.classes.quantized.") and isinstance(state, tuple):
            if any(isinstance(item, TensorSpec) for item in state):
                self.entries[name] = state
            return
        if next(tensors_in(value), None) is not None:
            self.left_out.append(name)
