"""Which globals a pickle names only to run code.

No checkpoint needs them; a file that does is built as an attack, or by somebody who did not know better. The list
follows the ones that picklescan and fickling keep (https://github.com/mmaitre314/picklescan,
https://github.com/trailofbits/fickling), but nothing here protects ckptfix itself: its reader resolves no global at
all. It protects those who load the file elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckptfix.core.facts import Fact, Kind
from ckptfix.errors import HostileError, UnreadableError
from ckptfix.reading.pickles.executors import runs_code

MODULES = frozenset(
    """os posix nt posixpath ntpath subprocess commands pty popen2 sys shutil socket _socket ssl http urllib urllib2
    requests httplib ftplib telnetlib smtplib socketserver asyncio multiprocessing threading _thread signal ctypes
    _ctypes cffi runpy importlib imp _imp pkgutil zipimport codeop pdb bdb cProfile timeit doctest pydoc venv ensurepip
    pip idlelib lib2to3 webbrowser antigravity tempfile fileinput linecache pickle _pickle cPickle cloudpickle dill
    joblib shelve marshal sqlite3 _sqlite3 gc nturl2path atexit _posixsubprocess _frozen_importlib
    _frozen_importlib_external _multiprocessing tarfile zipfile concurrent xmlrpc wsgiref cgitb unittest resource
    aiohttp fsspec _interpreters _xxsubinterpreters _testcapi _testinternalcapi""".split()
)
"""Top-level modules of which no checkpoint needs anything."""

HARMLESS = frozenset({"joblib.numpy_pickle.NumpyArrayWrapper", "torch._dynamo.decorators._DimRange"})
"""Classes in such modules that hold values alone: joblib writes one for each array, torch one for a ragged dimension of
a nested tensor.
"""

ANYWHERE = frozenset("os posix nt subprocess sys runpy importlib ctypes shutil socket pty builtins pickle".split())
"""Modules that give an attack away wherever they stand in a dotted name: ``torch.serialization.os.system``."""

BUILTINS = frozenset(
    "eval exec execfile compile open file __import__ apply input raw_input setattr delattr globals locals vars "
    "breakpoint exit quit reload __build_class__".split()
)
"""Built-in functions that no checkpoint needs. ``getattr`` is what Python 3.11 pickles enums with; its result is judged
instead.
"""

FUNCTIONS = frozenset(
    """torch.load torch.save torch.jit.load torch.jit.jit_module_from_flatbuffer torch.hub torch.serialization.load
    torch.package torch.utils.cpp_extension torch.classes.load_library torch.ops.load_library torch.distributed.rpc
    torch.utils.collect_env torch.utils.bottleneck torch._inductor torch._dynamo torch.fx._graph_module
    torch.utils._config_module torch.utils.data.datapipes.utils numpy.load numpy.save numpy.loadtxt numpy.savetxt
    numpy.fromfile numpy.genfromtxt numpy.memmap numpy.f2py numpy.testing numpy.lib.npyio numpy.distutils
    pandas.read_pickle pandas.io types.CodeType types.FunctionType operator.attrgetter operator.methodcaller
    operator.call _operator.attrgetter _operator.methodcaller _operator.call
    copyreg.add_extension copy_reg.add_extension
    sympy.sympify sympy.core.sympify.sympify sympy.parsing sympy.lambdify sympy.utilities.lambdify
    code.InteractiveInterpreter code.InteractiveConsole code.interact profile.run profile.Profile
    trace.Trace weakref.finalize logging.config torch.jit.unsupported_tensor_ops torch.jit._serialization
    torch.fx.graph_module._forward_from_src torch.multiprocessing torch.utils.model_zoo torch._C.import_ir_module
    torch._ops._Ops torch._ops.load_library
    io.open_code io.open io.FileIO _io.FileIO _io.open site.main platform.popen inspect.getattr_static""".split()
)
"""Names, or their beginnings, that load other files, build code, or call by name, in modules that are harmless
otherwise.
"""


COMPILER = ("convert_frame", "eval_frame", "hooks", "repro")
"""Modules of ``torch._dynamo`` whose classes ``torch.save(torch.compile(model))`` writes."""

STORED_CODE = "torch.fx.graph_module.reduce_graph_module"
"""What builds a ``torch.fx.GraphModule`` from code that the file holds as text."""

GRAPH_CODE = "the code of a torch.fx graph"
"""How an edit names that code."""

_NAMED = 4


def is_payload(name: str) -> bool:
    """Whether a global (``posix.system``) is there only to run code."""
    if name in HARMLESS:
        return False
    parts = name.split(".")
    if parts[:2] == ["torch", "_dynamo"] and parts[2:3] and parts[2] in COMPILER and parts[-1][:1].isupper():
        return False
    if parts[0] in MODULES or any(part in ANYWHERE for part in parts[1:-1]):
        return True
    if parts[0] in ("builtins", "__builtin__"):
        return parts[-1] in BUILTINS
    return any(".".join(parts[:depth]) in FUNCTIONS for depth in range(2, len(parts) + 1))


def name_calls(called: Iterable[str]) -> set[str]:
    """Of the globals that a pickle calls those that do more than to construct a value, each with ``()`` behind it."""
    return {f"{name.removesuffix('()')}()" for name in called if runs_code(name)}


def payload_remarks(names: Iterable[str]) -> list[Fact]:
    """One remark for each global that is there only to run code. A name that ends in ``()`` was called to do so.

    A graph of torch.fx whose stored code calls operations alone gets a remark of its own kind, ``stored-code``.
    """
    names = set(names)
    found = {name.removesuffix("()") for name in names if is_payload(name) or name.endswith("()")}
    remarks = [Fact.of(Kind.PAYLOAD, "pickle", name=name) for name in sorted(found)]
    if STORED_CODE in names - found:
        remarks.append(Fact.of(Kind.STORED_CODE, "pickle", name=STORED_CODE))
    return remarks


@contextmanager
def refusing_payload(path: str, names: set[str]) -> Iterator[None]:
    """What is read in the block may fail; where ``names``, the globals of its pickles, hold a payload, the error says
    that first, as ``HostileError``: nobody should fetch such a file again.
    """
    try:
        yield
    except UnreadableError as error:
        payload = [fact.data["name"] for fact in payload_remarks(names) if fact.kind is Kind.PAYLOAD]
        if not payload:
            raise
        raise HostileError(
            f"{path}: the file is built to run code when it is loaded: it names {', '.join(payload[:_NAMED])} (FIL901);"
            " do not load it with anything, get it from a source that you trust (nor can it be read: ",
            *error.without(f"{path}: "),
            ")",
        ) from error
