"""Rooms are layers: imports run one way, and work on names does without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ckptfix
from ckptfix.rules import RULES

PACKAGE = Path(ckptfix.__file__).parent

LAYERS = (
    "errors core maps bytes reading writing values rules known engine modules smoke report goal repairing "
    "resuming loading comparison explain zoo callbacks cli"
).split()
"""The rooms, from the bottom up. A module imports from its own room and from those before it; ``comparison``,
``explain`` and ``zoo`` do not import each other."""

LEVEL = {room: level for level, room in enumerate(LAYERS)}

BESIDE = {"comparison", "explain", "zoo"}

LOOSE = 9
"""Modules that may lie at the top of the package."""

# Making a hundred dataclasses took a third of the time to the first answer; Structs of msgspec take a tenth of it.
HEAVY = {"torch", "numpy", "safetensors", "rich", "jinja2", "fsspec", "ray", "dataclasses"}
AT_THE_TOP = {"modules/converting": {"torch"}}
"""The modules and rooms that may import a heavy package at the top."""


def names() -> list[str]:
    return sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    """``reading/pickles/inert`` and ``reading/__init__`` are of the room ``reading``."""
    return module.partition("/")[0]


@cache
def imports(module: str) -> tuple[tuple[str, bool], ...]:
    """The modules that a module imports, inside functions and for typing too; True for those at its top."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return tuple(_imports(tree, True))


def _imports(node: ast.AST, at_top: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, at_top) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                own = (PACKAGE.parent / f"{child.module}.{alias.name}".replace(".", "/")).with_suffix(".py")
                yield f"{child.module}.{alias.name}" if own.is_file() else str(child.module), at_top
        is_late = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        yield from _imports(child, at_top and not is_late)


def own_imports() -> Iterator[tuple[str, str]]:
    """Which module of the package imports which."""
    for module in names():
        for name, _ in imports(module):
            if name == "ckptfix" or name.startswith("ckptfix."):
                path = name.removeprefix("ckptfix").strip(".").replace(".", "/")
                yield module, path if (PACKAGE / f"{path}.py").is_file() else f"{path}/__init__".strip("/")


def test_every_room_has_a_layer():
    assert {room(module) for module in names()} - {"__init__", "__main__"} == LEVEL.keys()


def test_few_modules_are_outside_of_rooms():
    assert len([module for module in names() if "/" not in module]) <= LOOSE


def test_imports_run_one_way():
    wrong = set()
    for module, name in own_imports():
        here, there = room(module), room(name)
        if here == there or "__init__" in (here, there) or here == "__main__":
            continue
        if LEVEL[there] > LEVEL[here] or {here, there} <= BESIDE:
            wrong.add((module, name))
    assert wrong == set()


def test_no_circular_imports():
    graph: dict[str, set[str]] = {}
    for module, name in own_imports():
        if name != "__init__":  # the API is for users; its imports are for typing
            graph.setdefault(module, set()).add(name)
    graph.pop("__init__", None)
    try:
        assert list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_command_line_imports_the_package_itself():
    assert {room(module) for module, name in own_imports() if name == "__init__"} <= {"cli"}


def test_heavy_packages_are_imported_where_they_are_used():
    for module in names():
        allowed = AT_THE_TOP.get(module, AT_THE_TOP.get(room(module), set()))
        heavy = {name.partition(".")[0] for name, at_top in imports(module) if at_top} & HEAVY
        assert heavy <= allowed, module


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
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "rich", "safetensors"}))
"""


def test_work_on_names_imports_no_torch():
    """A check, and a repair that only changes names: parse, rules, write, comparison."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stderr, done.stdout.split()) == ("", [])


def test_no_two_classes_share_a_name():
    classes = Counter(
        node.name
        for module in names()
        if room(module) != "callbacks"  # one for each framework, all of the same name
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []


OF_MESSAGES = "explain/"
"""What explains messages of other programs says which rules find their cause in a file."""


def test_no_room_but_the_rules_names_a_rule():
    codes = {rule.code for rule in RULES}
    codes |= {code[:length] for code in codes for length in (3, 4)}  # families of rules are theirs too
    named = {
        f"{module}: {node.value}"
        for module in names()
        if room(module) != "rules" and not module.startswith(OF_MESSAGES)
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in codes
    }
    assert named == set()
    assert not [each for each in own_imports() if re.match(r"rules/[a-z]{3}\d", each[1]) and room(each[0]) != "rules"]
