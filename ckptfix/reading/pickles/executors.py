"""Which calls of a pickle run more than a constructor.

A list of bad names (``payload``) is never complete. What a healthy pickle *calls*, as against what it
merely names, is a class or one of a few functions that pickle itself uses. Any other function of the standard library
or of a package that everybody has installed is there to do something when the file is loaded."""

from __future__ import annotations

import re
import sys

from ckptfix.core.objects import Global

PACKAGES = frozenset(
    """torch numpy setuptools distutils pkg_resources pip yaml sklearn joblib pandas scipy fsspec tensorflow keras jax
    transformers nltk cv2 PIL h5py matplotlib hydra""".split()
)
"""Packages whose functions an attack may count on, beside the standard library."""

PYTHON_2 = frozenset("__builtin__ _winreg cPickle commands copy_reg httplib imp os2 popen2 sets urllib2".split())

CONSTRUCTORS = frozenset(
    """_codecs.encode codecs.encode codecs.decode re._compile functools.partial functools.partialmethod
    operator.itemgetter operator.getitem zoneinfo.ZoneInfo._unpickle array.array array._array_reconstructor
    logging.getLogger time.struct_time contextlib.nullcontext itertools.count itertools.cycle itertools.chain
    itertools.repeat itertools.islice itertools.product itertools.permutations itertools.combinations uuid.UUID
    torch.device torch.dtype torch.layout torch.memory_format torch.tensor torch.as_tensor torch.from_numpy torch.zeros
    torch.ones torch.empty torch.full torch.arange torch.finfo torch.iinfo
    torch.nn.backends.thnn._get_thnn_function_backend torch.jit._pickle.build_intlist torch.jit._pickle.build_tensorlist
    torch.jit._pickle.build_doublelist torch.jit._pickle.build_boollist torch.jit._pickle.build_tensor_from_id
    torch.jit._pickle.restore_type_tag
    torch.distributed.remote_device._remote_device
    torch.fx.immutable_collections.immutable_list torch.fx.immutable_collections.immutable_dict
    numpy.dtype numpy.ndarray numpy.array numpy.matrix numpy.recarray numpy.record numpy.poly1d numpy.asarray
    numpy.core.multiarray.scalar numpy.core.multiarray.ndarray numpy.core.records.recarray numpy.core.records.record
    numpy.rec.recarray numpy.rec.record numpy.ma.core._mareconstruct numpy.core._ufunc_reconstruct
    numpy.core.multiarray._reconstruct numpy.core.numeric._frombuffer""".split()
)
"""Functions and lower-case classes by which pickle itself, torch and numpy write plain objects."""

NAMESPACES = tuple(
    "collections. _collections. copyreg. datetime. decimal. fractions. enum. random. torch.return_types.".split()
)
"""The beginnings of names that construct values and nothing else."""

BUILTINS = frozenset(
    """int long float bool str unicode bytes bytearray buffer memoryview complex tuple list dict set frozenset slice
    range xrange object type getattr iter reversed enumerate zip property staticmethod classmethod super""".split()
)

_NUMBER = re.compile(r"numpy\.(u?int|float|complex|bool|str|bytes|datetime|timedelta|void|long|half)[a-z]*\d*_?")
_REBUILDER = re.compile(
    r"_*(\w*unpickle|re_?build|reconstruct|new_?obj|new_index|randomstate_ctor|\w*generator_ctor)", re.I
)
_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg", "_operator": "operator", "_functools": "functools"}


def runs_code(name: str) -> bool:
    """Whether calling a global (``pathlib.Path.write_text``) does more than to construct a value.

    ``functools.partial()`` is a call of what ``functools.partial`` gave."""
    root, _, rest = name.partition(".")
    root = _ALIASES.get(root, root)
    if not rest or not (root in sys.stdlib_module_names or root in PYTHON_2 or root in PACKAGES):
        return False
    name = f"{root}.{rest}".replace("numpy._core.", "numpy.core.")
    last = rest.rsplit(".", 1)[-1]
    if last.lstrip("_")[:1].isupper():
        return False
    if name.endswith("()"):
        return True
    if root == "builtins":
        return rest not in BUILTINS
    if name in CONSTRUCTORS or name.startswith(NAMESPACES) or _NUMBER.fullmatch(name):
        return False
    return not ((root in PACKAGES and _REBUILDER.match(last)) or _is_scipy_class(name))


def is_union(function: Global, args: tuple[object, ...]) -> bool:
    """Whether a call is how Python writes the type ``int | str``: ``functools.reduce(operator.or_, …)``."""
    return (
        str(function) in ("functools.reduce", "_functools.reduce", "__builtin__.reduce")
        and bool(args)
        and isinstance(args[0], Global)
        and str(args[0]) in ("_operator.or_", "operator.or_")
    )


def _is_scipy_class(name: str) -> bool:
    return name.startswith("scipy.sparse.") and name.endswith(("_matrix", "_array"))
