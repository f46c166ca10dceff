"""The messages of errors: options in them are worded for whoever reads them."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.core.options import flag_text
from ckptfix.errors import Opt, TargetError, UsageError

PACKAGE = Path(ckptfix.__file__).parent
FLAG = re.compile(r"--[a-z]|\bwith -[a-z]")


def raised(tree: ast.AST) -> Iterator[ast.Constant]:
    """The texts in what a module raises, and in the errors that it makes."""
    for node in ast.walk(tree):
        is_error = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error")
        if isinstance(node, ast.Raise) or is_error:
            yield from (part for part in ast.walk(node) if isinstance(part, ast.Constant))


def test_no_error_of_the_library_names_flags():
    """An option in a message is an ``Opt``, so that Python's users read arguments and not flags."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in ("cli", "zoo"):
            continue  # these two are used by the command line
        for part in raised(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part.value, str) and FLAG.search(part.value):
                found.append(f"{path.relative_to(PACKAGE)}:{part.lineno}: {part.value}")
    assert found == []


@pytest.mark.parametrize(
    ("settings", "library", "flags"),
    [
        ({"fill": "target"}, "fill='target' takes values from", "--fill target takes values from"),
        ({"replace": "VAL"}, "add fill='twin', ", "add --fill twin, "),
        ({"dtype": "float16", "values": False}, "omit values=False", "omit --no-values"),
        ({"shard_size": "much"}, "shard_size='much': ", "--shard-size much: "),
        ({"weights": "ema"}, "with weights=", "with --weights"),
        ({"model": "nowhere.at:all"}, "model='nowhere.at:all': ", "--model nowhere.at:all: "),
    ],
)
def test_the_library_names_arguments_and_the_command_line_flags(settings, library, flags, tmp_path):
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pth")
    with pytest.raises(ckptfix.CkptfixError) as caught:
        ckptfix.repair(tmp_path / "a.pth", **settings)
    assert library in str(caught.value)
    assert flags in caught.value.worded(flag_text)
    assert "--" not in str(caught.value)


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(TargetError(Opt("model", "m:f"), " raised", traceback_text="Traceback")))
    assert (str(error), error.traceback_text) == ("model='m:f' raised", "Traceback")
    assert pickle.loads(pickle.dumps(UsageError("a"))).args == ("a",)


def test_messages_can_be_combined():
    error = UsageError("a.pth: torn; add ", Opt("salvage", True))
    assert str(UsageError("b.zip: it is ", *error.without("a.pth: "))) == "b.zip: it is torn; add salvage=True"
    assert error.options == (Opt("salvage", True),)
