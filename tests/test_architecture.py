"""Imports run one way, and work on names does without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ckptfix

PACKAGE = Path(ckptfix.__file__).parent

LAYERS = (
    "errors dtypes buffers progress shell",
    "geometry",
    "checkpoint config settings finding metadata",
    "target",
    "regions factory recalibration",
    "live",
    "formats tensors",
    "casting",
    "values",
    "supplies assigning transfer",
    "rules applying",
    "plan",
    "diagnosis",
    "smoke",
    "report coverage validation",
    "delivery comparison explain measuring arguments",
    "repairing",
    "loading",
    "zoo",
    "cli",
)
"""The rooms of the package, from the bottom up. A room imports from its own layer and from those below it."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms.split()}

SAME_LAYER = {
    ("formats", "tensors"),  # sparse and strided values in row-major order, made by torch; inside of functions
    ("tensors", "formats"),
    ("coverage", "report"),
}
"""The imports between rooms of one layer."""

UPWARD = {
    ("checkpoint", "tensors"),  # Checkpoint.read and state_dict hand over to torch
}
"""Imports of a room above, made inside of a function only."""

HEAVY = {"torch", "numpy", "safetensors", "rich", "typer", "jinja2", "fsspec", "xxhash", "ray"}
AT_THE_TOP = {"tensors": {"torch"}, "casting": {"torch"}, "live": {"torch"}, "cli": {"typer", "rich"}}
"""The rooms that may import a heavy package at the top of a module."""


def names() -> list[str]:
    return sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    """``formats/pickles/inert`` and ``formats/__init__`` are of the room ``formats``."""
    return module.partition("/")[0]


@cache
def imports(module: str) -> tuple[tuple[str, bool], ...]:
    """The modules that a module imports when it runs, in full, and whether the import is inside of a function."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return tuple(_imports(tree, False))


def _imports(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                own = (PACKAGE.parent / f"{child.module}.{alias.name}".replace(".", "/")).with_suffix(".py")
                yield f"{child.module}.{alias.name}" if own.is_file() else str(child.module), inside
        yield from _imports(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def own_imports() -> Iterator[tuple[str, str, bool]]:
    """Who imports whom inside of the package, by module."""
    for module in names():
        for name, inside in imports(module):
            if name == "ckptfix" or name.startswith("ckptfix."):
                yield module, name.removeprefix("ckptfix").strip(".").replace(".", "/") or "__init__", inside


def test_every_room_has_a_layer():
    rooms = {room(module) for module in names()} - {"__init__", "__main__"}
    assert rooms == LEVEL.keys()


def test_imports_run_one_way():
    wrong = []
    for module, name, inside in own_imports():
        here, there = room(module), room(name)
        if here == there or "__init__" in (here, there) or here == "__main__":
            continue
        if LEVEL[there] == LEVEL[here] and (here, there) not in SAME_LAYER:
            wrong.append(f"{module} imports {name} of its own layer")
        if LEVEL[there] > LEVEL[here] and not (inside and (here, there) in UPWARD):
            wrong.append(f"{module} imports {name} of a layer above")
    assert wrong == []


def test_no_exception_is_idle():
    used = {(room(module), room(name)) for module, name, _ in own_imports()}
    assert used >= SAME_LAYER | UPWARD


def test_only_the_command_line_imports_the_package_itself():
    assert {room(module) for module, name, _ in own_imports() if name == "__init__"} <= {"cli"}


def test_no_module_imports_itself_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, name, inside in own_imports():
        if not inside and name != "__init__":
            target = name if (PACKAGE / f"{name}.py").is_file() else f"{name}/__init__"
            graph.setdefault(module, set()).add(target)
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", names())
def test_heavy_packages_are_imported_where_they_are_used(module: str):
    allowed = AT_THE_TOP.get(room(module), set())
    heavy = {name.partition(".")[0] for name, inside in imports(module) if not inside} & HEAVY
    assert heavy <= allowed


SCRIPT = """
import json, struct, sys, tempfile, pathlib
import ckptfix
assert "ckptfix.repairing" not in sys.modules
header = {f"module.{n}.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]} for n in range(2)}
raw = json.dumps(header).encode()
file = pathlib.Path(tempfile.mkdtemp()) / "names.safetensors"
file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
report = ckptfix.check(file, values=False)
assert [finding.code for finding in report.findings] == ["KEY102"], report
reference = file.with_name("plain.safetensors")
reference.write_bytes(file.read_bytes().replace(b'"module.', b'"modulo.'))
ckptfix.check(file, like=reference, values=False).to_json()
ckptfix.repair(file, output=file.with_name("fixed.safetensors"), values=False)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "rich", "typer", "safetensors"}))
"""


def test_work_on_names_imports_no_torch():
    """A check and even a repair that changes names alone: parse, rules, write, comparison."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stderr, done.stdout.split()) == ("", [])
