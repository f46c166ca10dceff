"""Which globals of a pickle run code, and which only construct the values of a checkpoint.

This does not protect ckptfix itself, whose reader resolves no globals, but users who load the file elsewhere. A list of
dangerous names is never complete, so names are allowed instead: of the standard library, torch and numpy, a pickle may
call only the names in ``trusted_globals.txt``, whichever Python runs this. Globals that it names without a call (an
activation function, a type) may be any plain function of these packages. Names of other packages are taken for classes
of the user's own code: nothing is known about them, and an attack cannot rely on them being installed. Of these, only
names that cannot be classes are errors.

For other lists of dangerous names: https://github.com/mmaitre314/picklescan, https://github.com/trailofbits/fickling."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Global, Opaque
from ckptfix.errors import HostileError, UnreadableError

PICKLE = "pickle"  # the place of a remark about the pickle of the file itself
# Builds a `torch.fx.GraphModule` from code that the file stores as text.
STORED_CODE = "torch.fx.graph_module.reduce_graph_module"
GRAPH_CODE = "the code of a torch.fx graph"  # the name of that code in edits
_NAMED = 4

# Modules of Python 2 that were renamed, and C modules with the functions of another module.
MODULE_ALIASES = {
    **{"__builtin__": "builtins", "exceptions": "builtins", "copy_reg": "copyreg"},
    **dict.fromkeys(("UserDict", "UserList", "UserString"), "collections"),
}
_RENAMED = {
    **MODULE_ALIASES,
    **{"_operator": "operator", "_functools": "functools", "_abcoll": "collections.abc"},
    **{"ConfigParser": "configparser", "thread": "_thread"},
}
_MOVED = r"^torch\.(?:nn\.(?:quantized|intrinsic|qat|quantizable)|quantization)(?=\.)"
# Classes of other releases of torch, which are not listed by name and of no use to an attack. Not `GraphModule`, which
# compiles code when it is called, and is never pickled as a call of its class.
_TORCH_CLASS = r"torch\.(nn|optim|ao|distributions|jit\.Lowered(Module|Wrapper))(\.\w+)*\.(?!\w*GraphModule$)_?[A-Z]\w*"

_NUMBER = (
    r"numpy\.(u?int|float|complex|bool|str|bytes|datetime|timedelta|void|long|half)[a-z]*\d*_?|numpy\.dtypes\.\w+DType"
)
_REBUILDER = r"(?i)_*(\w*unpickle|re_?build|reconstruct|new_?obj|new_\w*index)"
_SPECIAL = r"__\w+__"

# Names of torch and numpy, in any module, that read or write files or build code.
_LOADERS = frozenset(
    "load save from_file fromfile tofile dump memmap load_library import_ir_module hub package compile FileStore "
    "TCPStore DataSource PyTorchFileReader PyTorchFileWriter".split()
)


@cache
def _lists(file: str) -> dict[str, frozenset[str]]:
    """Return the lists of names in a file beside this module, by title; indented lines continue a list."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    lines = (line.partition(": ") for line in text.replace("\n  ", " ").splitlines() if not line.startswith("#"))
    return {title: frozenset(names.split()) for title, _, names in lines}


def _names(title: str) -> frozenset[str]:
    return _lists("names_of_code.txt")[title]


@lru_cache(maxsize=1 << 10)  # asked for every call of a pickle, most of which are of the same few functions
def canonical(name: str) -> str:
    """Return the name under which a global is looked up: as in Python 3, numpy 1 and current torch."""
    root, dot, rest = name.partition(".")
    name = f"{_RENAMED.get(root, root)}{dot}{rest}".replace("numpy._core.", "numpy.core.")
    if name.startswith("torch.tensor."):  # until torch 1.8
        return f"torch._tensor.{name.removeprefix('torch.tensor.')}"
    return f"torch.ao.{name[6:]}" if re.match(_MOVED, name) else name


def is_trusted(name: str) -> bool:
    """Return whether a checkpoint may call a global, such as ``collections.OrderedDict``."""
    name, trusted = canonical(name), _lists("trusted_globals.txt")
    parts = name.split(".")
    places = range(len(parts) - 1, 0, -1)  # zoneinfo: ZoneInfo._unpickle
    if any(".".join(parts[place:]) in trusted.get(".".join(parts[:place]), ()) for place in places):
        return True
    is_number = re.fullmatch(_NUMBER, name) is not None or name.removeprefix("torch.") in DTYPES
    return is_number or re.fullmatch(_TORCH_CLASS, name) is not None


def spelled(function: Global) -> str:
    """Return the name by which a global is judged. It is ``module:alias.name`` if the first part is not a class but a
    module that the module imported (``torch.nn.parallel.distributed:logging.FileHandler``), which no pickler writes."""
    module, (first, dot, _) = function.module, function.name.partition(".")
    is_class = len(first) > 2 and first.lstrip("_")[:1].isupper()  # `F` and `_C` are modules
    is_alias = dot and not is_class and is_known(module.partition(".")[0]) and not is_trusted(f"{module}.{first}")
    return f"{module}:{function.name}" if is_alias else str(function)


def is_known(root: str) -> bool:
    """Return whether a package is one whose names are listed here, so that others of its names are not trusted."""
    return root.lstrip("_") in _names("stdlib") or root in ("torch", "numpy") or root in _names("harmful")


def is_payload(name: str) -> bool:
    """Return whether a global (``posix.system``) is one that no checkpoint names, even without a call."""
    parts = canonical(name).split(".")
    root, inner = parts[0], parts[1:-1]
    if is_trusted(name):
        return False
    if any(re.fullmatch(_SPECIAL, part) for part in parts[1:]):
        return True
    if any(part.lstrip("_") in _names("anywhere") for part in inner) or (
        ":" in name and is_known(root.partition(":")[0])
    ):
        return True
    above = {".".join(parts[:depth]) for depth in range(2, len(parts) + 1)}
    if above & _names("callers") and not above & _names("backends"):
        return True
    if root in ("torch", "numpy"):
        if parts[-1] in _LOADERS:
            return True
        return inner[:1] != ["ops"] and any(
            part.lstrip("_") in _names("stdlib") | {"testing", "tests"} and part not in _names("torch_modules")
            for part in inner
        )
    if not is_known(root) or not parts[-1] or len(parts) < 2:
        return False
    if root in _names("common") and not inner and parts[-1][:1].isupper() and canonical(name) not in _names("callers"):
        return False
    if root in _names("nameable") and not inner and not parts[-1].startswith("_"):
        return root == "builtins" and parts[-1] in _names("builtins")
    return not is_trusted(".".join(parts[:-1]))  # a method or member of a class: re.RegexFlag.DOTALL


def runs_code(name: str) -> bool:
    """Return whether calling a global (``pathlib.Path.write_text``) does more than construct a value.

    ``functools.partial()`` is a call of a result of ``functools.partial``."""
    root, _, rest = canonical(name).partition(".")
    if "__setstate__" in rest:
        return True
    if not rest or not (is_known(root) or root in _names("packages")):
        return False
    if name.endswith("()"):
        return True
    last = rest.rpartition(".")[2]
    if root in _names("packages"):
        is_class = last.lstrip("_")[:1].isupper() or last.endswith(("_matrix", "_array"))
        is_class |= name.startswith("sympy.functions.")  # the functions of sympy are classes
        return not (is_class or re.match(_REBUILDER, last) or is_trusted(name))
    if root in _names("common") and last == rest and last[:1].isupper():
        return canonical(name) in _names("callers")
    return not is_trusted(name)


def wrapped_call(made: Opaque) -> tuple[object, tuple[Any, ...], dict[str, Any]] | None:
    """Return the function, arguments and keywords that a ``functools.partial`` holds; None for any other object.

    The state that ``partial.__setstate__`` takes replaces all three."""
    if made.cls.name != "partial" or canonical(str(made.cls)) != "functools.partial":
        return None
    if isinstance(made.state, tuple):
        function, args, kwargs = made.state[:3] if len(made.state) == 4 else (None, (), {})
    else:
        function, args, kwargs = made.args[0] if made.args else None, made.args[1:], dict(made.kwargs)
    is_complete = isinstance(args, tuple) and isinstance(kwargs, dict | None)
    return (function, args, kwargs or {}) if is_complete else (None, (), {})


def is_union(function: Global, args: tuple[object, ...]) -> bool:
    """Return whether a call is ``functools.reduce(operator.or_, …)``, the pickle of the type ``int | str``."""
    if not args or not isinstance(args[0], Global) or canonical(str(args[0])) != "operator.or_":
        return False
    return canonical(str(function)) in ("functools.reduce", "builtins.reduce")


def names_of(named: Iterable[Global], called: Iterable[str]) -> set[str]:
    """Return the globals that a pickle names, and with ``()`` appended the ``called`` ones that do more than construct
    a value."""
    return {*map(spelled, named), *(f"{name.removesuffix('()')}()" for name in called if runs_code(name))}


def payload_remarks(names: Iterable[str]) -> list[Fact]:
    """Return a remark for each global that serves only to run code, and for each other one that is not trusted, such as
    the user's own classes. A name that ends in ``()`` was called to run code.

    A graph of torch.fx whose stored code calls only operations gets the remark ``stored-code`` instead."""
    names = set(names)
    found = {name.removesuffix("()") for name in names if is_payload(name) or name.endswith("()")}
    remarks = [Fact.of(Kind.PAYLOAD, PICKLE, name=name) for name in sorted(found)]
    if STORED_CODE in names - found:
        remarks.append(Fact.of(Kind.STORED_CODE, PICKLE, name=STORED_CODE))
    others = sorted(name for name in names - found if not name.endswith("()") and not is_trusted(name))
    return remarks + [Fact.of(Kind.UNTRUSTED, PICKLE, name=name) for name in others]


@contextmanager
def refusing_payload(path: str, names: set[str]) -> Iterator[None]:
    """Turn an ``UnreadableError`` of the body into a ``HostileError`` if the globals that the file's pickles name
    (``names``) contain a payload: the advice to fetch such a file again would be wrong."""
    try:
        yield
    except UnreadableError as error:
        payload = [fact.data["name"] for fact in payload_remarks(names) if fact.kind is Kind.PAYLOAD]
        if not payload:
            raise
        raise HostileError(
            f"{path}: the file is built to run code when it is loaded: it names {', '.join(payload[:_NAMED])} (FIL901);"
            " do not load it; get it from a source that you trust (nor can it be read: ",
            *error.without(f"{path}: "),
            ")",
            runs_code=True,
        ) from error


LENGTH_LIMIT = 8 << 20  # characters of code; graphs of the largest models are far smaller
_IGNORED = r"#[^\n]*"
_STRING = r"(?i:\b[rbu]{1,2})?('[^'\n\\]*(?:\\.[^'\n\\]*)*'|\"[^\"\n\\]*(?:\\.[^\"\n\\]*)*\")"
_OF_NAME = r"\bgetattr\(([\w.]+), ''\)"  # an attribute whose name is not a Python name, such as a number
_NESTED = 64  # largest nesting of such attributes
_HIDDEN = r"\b__|__\b"
_WORDS = r"(\.\s*)?([^\W\d]\w*(?:\.[^\W\d]\w*)*)(\s*\()?"
_BLANKS = r"[^\S\n\t ]"  # some of them end a line in Python, and so a comment
_IMPORT = r"import torch(?:\.fx)?|import torch\.(?:fx|utils)\._pytree as (?:fx_)?pytree|NoneType = type\(None\)"
_FROM = r"from ([\w.]+) import (\w+)(?: as (\w+))?"

_SYNTAX = frozenset(
    "import from lambda class global nonlocal yield while for with try except raise async await exec".split()
)
_VALUES = frozenset("strided sparse_coo contiguous_format channels_last channels_last_3d preserve_format".split())
_TYPES = frozenset("inf nan device int float bool complex str list tuple dict set".split())  # and numbers
_SPACES = ("nn", "_C", "fft", "linalg", "special", "sparse", "amp", "ao", "functional", "_nn")
_BESIDE_SPACES = ("torch.fx.wrap", "torch.fx._symbolic_trace.wrap", "torch.utils.checkpoint.checkpoint")
# Methods of arrays, storages and graph modules that write files.
_WRITERS = _LOADERS - {"compile", "hub", "package"} | {"to_folder"}


def is_graph_code(body: Any, imports: Any) -> bool:
    """Return whether the code in a graph module's instance dict and its import block only calls operations."""
    if not isinstance(body, dict):
        return False
    code, block = body.get("_code") or body.get("code", ""), imports or ""  # as torch chooses between the two
    if not (isinstance(code, str) and isinstance(block, str) and len(code) + len(block) <= LENGTH_LIMIT):
        return False
    if block and not block.endswith("\n") and not code.startswith("\n"):
        return False  # torch joins the two texts, and the code would continue the line of the last import
    lines = [line.strip() for line in block.split("\n")]
    named = {found[3] or found[2]: found[2] for line in lines if (found := re.fullmatch(_FROM, line))}
    return all(map(_is_harmless_import, lines)) and _is_harmless_code(code, named)


def _is_harmless_import(line: str) -> bool:
    found = re.fullmatch(_FROM, line)
    if found is None:
        return not line or re.fullmatch(_IMPORT, line) is not None
    module, name, _ = found.groups()
    root = module.partition(".")[0]
    if name.lstrip("_") in _names("stdlib"):
        return False  # a module that this module imported
    if root == "torch":
        return f"{module}.{name}" == "torch.device" or _is_operation(f"{module}.{name}", is_called=True)
    if root == "builtins":
        return name not in _names("builtins")
    if module in ("math", "operator", "_operator"):
        return f"operator.{name}" not in _names("callers")
    if module in ("typing", "collections", "inspect"):
        return is_trusted(f"{module}.{name}")
    return not (is_known(root) or root in _names("packages") or is_payload(f"{module}.{name}"))


def _is_harmless_code(code: str, imported: Mapping[str, str]) -> bool:
    texts: list[str] = []

    def keep(found: re.Match[str]) -> str:
        texts.append(found[1])
        return "''"

    if re.search(_BLANKS, code):
        return False
    banned = _names("anywhere") | (_WRITERS if "getattr" in code else frozenset())
    code = re.sub(_IGNORED, "", re.sub(_STRING, keep, code))
    for _ in range(_NESTED):
        code, count = re.subn(_OF_NAME, r"\1", code)
        if not count:
            break
    # A computed name, a string with another prefix than above (`f`), or a string of several lines hides its meaning.
    if re.search(r"\\|\bgetattr\b|\w''|['\"]{3}", code) or re.search("['\"]", code.replace("''", "")):
        return False
    if any(re.search(_HIDDEN, text) or text[1:-1] in banned for text in texts):
        return False
    return all(_is_harmless_word(found, imported) for found in re.finditer(_WORDS, code))


def _is_harmless_word(found: re.Match[str], imported: Mapping[str, str]) -> bool:
    """Return whether a word of the code is harmless; ``imported`` maps the names that it may use to those in their
    modules."""
    is_called, is_inner = found[3] is not None, bool(found[1])
    name = unicodedata.normalize("NFKC", found[2])  # as Python reads it
    parts = name.split(".")
    if any(part.startswith("__") for part in parts) or (not is_inner and parts[0] in _SYNTAX):
        return False
    attributes = parts if is_inner else parts[1:]
    if any(part in _names("anywhere") for part in attributes):
        return False
    is_of_self = not is_inner and parts[0] == "self" and parts[-1] != "to_folder"
    if is_called and attributes and parts[-1] in _WRITERS and not is_of_self:
        return False
    if is_inner:
        return True
    if parts[0] in imported:  # not a module, but it may be a type or a number
        own = imported[parts[0]]
        return not attributes and (is_called or own[:1].isupper() or own in _TYPES)
    if parts[0] in ("pytree", "fx_pytree"):
        return len(parts) == 2 and parts[1].startswith("tree_")
    if parts[0] == "torch":
        return _is_operation(name, is_called)
    return parts[0] not in _names("builtins") or (parts[0] == "input" and (not is_called or bool(attributes)))


def _is_operation(name: str, is_called: bool) -> bool:
    """Return whether a dotted name of torch is a called operation or a plain value, such as a dtype."""
    _, *path = name.split(".")
    if not path or is_payload(name) or not _LOADERS.isdisjoint(path):
        return False
    if path[0] == "ops":
        return len(path) >= 3
    if name in _BESIDE_SPACES or name.startswith("torch.utils._pytree.tree_"):
        return is_called
    if len(path) > 1 and path[0] not in _SPACES:
        return False
    if any(part.lstrip("_") in _names("stdlib") for part in path[:-1]):
        return False
    return is_called or path[-1] in DTYPES or path[-1] in _VALUES or path[-1][:1].isupper()
