"""The fixed table of inert values that represent calls in a pickle. This is the pickle boundary.

A call of one of torch's rebuild functions becomes a ``TensorSpec``, containers of the standard library become
themselves, and a numpy array becomes a ``NumpyArray`` that keeps its bytes. Every other call becomes an ``Opaque``
object. No entry of the table imports or runs anything that the file names, and none can be added from outside.

Sources: ``torch/_utils.py`` and ``torch/serialization.py`` (the rebuild functions of torch 0.1 to 2.13),
``numpy/core/multiarray``."""

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptfix.bytes.limits import bounded_keys, shown
from ckptfix.bytes.sources import MemoryBytes
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.facts import Fact, Kind
from ckptfix.core.objects import Global, Opaque, tensors_in
from ckptfix.core.spec import Quantizer, Storage, TensorSpec
from ckptfix.errors import hostile
from ckptfix.reading.folders.rank_shards import local_part
from ckptfix.reading.pickles.arrays import NumpyArray, bfloat16_again
from ckptfix.reading.pickles.claims import EXPANDED_LIMIT, TypedStorage, checked, dtype_name, sizes
from ckptfix.reading.pickles.payload import canonical, is_graph_code, is_known, is_union, spelled, wrapped_call
from ckptfix.reading.pickles.stream import MalformedError, raw_bytes

NAME_LIMIT = 1000  # characters of a dotted name that getattr builds

# Calls that iterate over their arguments.
_CONSUMERS = frozenset(
    "builtins.list builtins.tuple builtins.set builtins.frozenset builtins.dict builtins.bytes builtins.bytearray "
    "builtins.enumerate builtins.zip collections.deque collections.Counter collections.OrderedDict".split()
)

# Calls that reach this point only if their first argument is not a global, or if torch did not write the pickle.
_CALLERS = frozenset(
    "torch._tensor._rebuild_from_type torch._tensor._rebuild_from_type_v2 copyreg._reconstructor copyreg.__newobj__ "
    "torch.fx.graph_module.reduce_package_graph_module torch.fx.graph_module.reduce_deploy_graph_module".split()
)

# Calls of sympy that take text without evaluating it.
_OF_TEXTS = frozenset(
    "sympy.core.symbol.Symbol sympy.core.symbol.Dummy sympy.core.symbol.Wild sympy.core.symbol.Str "
    "sympy.core.numbers.Float sympy.core.function._rebuild_undef sympy.polys.matrices.domainmatrix.DomainMatrix".split()
)

# Classes of tensors that `weights_only` knows.
_PLAIN_TENSORS = frozenset(
    "torch.Tensor torch.nn.parameter.Parameter torch.nested._internal.nested_tensor.NestedTensor".split()
)

_OF_GEOOPT = "geoopt.tensor._rebuild_manifold_tensor"  # called with a keyword, by a `functools.partial`

_NO_KEYWORDS: Mapping[str, Any] = {}
_NO_BITS: Mapping[str, bool] = {}  # shared, because a file may have a hundred thousand tensors


def _is_simple(part: Any) -> bool:
    """Return whether a value may be a part of another tensor: a strided tensor with a storage."""
    return isinstance(part, TensorSpec) and part.storage is not None and not part.parts and part.quantizer is None


def _goes_through(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call of a harmless name can run other code through its arguments.

    ``list(iter(function, None))`` calls the function repeatedly, and ``list`` of an object calls its methods. ``type``
    with three arguments creates a class with any methods, ``getitem`` calls the factory of a ``defaultdict``, functions
    that rebuild a tensor or an object call their argument, and sympy evaluates text."""
    if name.startswith("sympy."):
        return name not in _OF_TEXTS and not _is_expression(args)
    if name == "fsspec.spec.make_instance":
        return not args or str(args[0]) != "fsspec.implementations.local.LocalFileSystem"
    if name in _CALLERS or name == "operator.getitem":
        return not args or not isinstance(args[0], Global)
    if name in ("builtins.iter", "builtins.type"):
        return len(args) > 1
    if name not in _CONSUMERS or not args or not isinstance(args[0], Opaque):
        return False
    root = canonical(str(args[0].cls)).partition(".")[0].lstrip("_")
    return root not in ("builtins", "collections", "itertools") and is_known(root)


def _is_expression(part: Any) -> bool:
    """Return whether a value may be part of a pickled sympy expression: a number or an expression."""
    if isinstance(part, (list, tuple)):
        return all(map(_is_expression, part))
    return part.cls.module.startswith("sympy.") if isinstance(part, Opaque) else isinstance(part, (int, float))


_WRAPPED = 8  # layers of `functools.partial`; Python itself makes one


def _globals_in(args: tuple[Any, ...]) -> Iterator[Global]:
    """Yield the globals among the arguments of a call, also in lists or wrapped by ``functools.partial``."""
    for arg in args:
        for value in arg if isinstance(arg, (list, tuple)) else (arg,):
            if not isinstance(value, (Global, Opaque)):
                continue
            for _ in range(_WRAPPED):
                if not isinstance(value, Opaque) or (held := wrapped_call(value)) is None:
                    break
                value = held[0]
            else:
                value = Global("functools", "partial()")  # more layers hide what they wrap
            if isinstance(value, Global) and value.module != "torch":  # torch.strided; torch.load is judged by name
                yield value


def _per_channel(values: Any, dtype: str) -> Any:
    """Return a list of numbers as a tensor, which later releases of torch write; any other value unchanged."""
    if not isinstance(values, list):
        return values
    data = struct.pack(f"<{len(values)}{'d' if dtype == 'float64' else 'q'}", *values)
    return TensorSpec(dtype, (len(values),), (1,), Storage("channels", MemoryBytes(data)))


class InertTable(Struct):
    """The table of inert values for the calls of one pickle, and what it met. ``nested`` reads a whole file inside the
    pickle (``_load_from_bytes``) from its bytes.

    ``foreign`` are tensor subclasses, objects in place of hooks, and ``requires_grad`` of fp8 tensors, which torch does
    not load; ``attributes`` are the names of attributes set on tensors, ``scales`` those with tensors of their own that
    are set on codes; ``derived`` are names that the pickle builds
    with ``getattr`` and the like; ``called`` are called globals that have no entry in the table. ``stored_bytes`` is
    the size of the storages so far."""

    path: str
    nested: Callable[[bytes], Any]
    foreign: dict[str, None] = field(default_factory=dict)
    attributes: dict[str, None] = field(default_factory=dict)
    scales: dict[str, None] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    _specs: dict[Any, Opaque] = field(default_factory=dict)
    _known: dict[Global, tuple[Callable[..., Any] | None, str, str]] = field(default_factory=dict)
    stored_bytes: int = 0
    _logical_bytes: int = 0

    def call(self, function: Global, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NO_KEYWORDS) -> Any:
        """Return the inert value of ``function(*args, **kwargs)``; an ``Opaque`` if the table has no entry."""
        if (known := self._known.get(function)) is None:
            name = str(function)
            usual = canonical(name)
            known = self._known[function] = _TABLE.get(name) or _TABLE.get(usual), name, usual
        handler, name, usual = known
        if handler is not None and (not kwargs or usual == _OF_GEOOPT):
            made = handler(self, *args, **kwargs)
            if made is not NotImplemented:
                return made
        if not is_union(function, args):
            self.called.add(f"{name}()" if _goes_through(usual, args) else name)
        if usual.startswith(("torch.", "numpy.")):
            # These may call their arguments: the constructor of a bit generator, the schedule of a learning rate.
            self.called.update(map(str, _globals_in((*args, *kwargs.values()))))
        return Opaque(function, args, kwargs) if kwargs else Opaque(function, args)

    def remarks(self) -> list[Fact]:
        """Return remarks on tensor subclasses and attributes of tensors."""
        found = [Fact.of(Kind.TENSOR_SUBCLASS, "state_dict", name=name) for name in self.foreign]
        found += [Fact(Kind.SCALES_OF_CODES, name) for name in self.scales]
        return found + [Fact(Kind.ATTRIBUTE_OF_TENSOR, name) for name in self.attributes]

    # torch ------------------------------------------------------------------------------------------------------------

    def tensor(
        self, storage: Any, offset: int, size: Any, stride: Any, trained: Any = 0, hooks: Any = None, more: Any = None
    ) -> Any:
        """Stand in for ``_rebuild_tensor_v2(…, requires_grad, hooks, metadata)``, and ``_rebuild_tensor`` of torch 0.1
        to 0.3."""
        if not isinstance(storage, TypedStorage):
            raise MalformedError("a tensor without a storage")
        if isinstance(hooks, Opaque) or isinstance(more, Opaque):  # tested here to save a call for every tensor
            self._note(hooks, more)
        return self._strided(storage, storage.dtype, offset, size, stride, trained, more)

    def tensor_v3(
        self, storage: Any, offset: int, size: Any, stride: Any, trained: Any, hooks: Any, dtype: Any, more: Any = None
    ) -> Any:
        """Stand in for ``_rebuild_tensor_v3``, which has an untyped storage and a dtype (uint16 and later, fp8)."""
        self._note(hooks, more)
        spec = self._strided(storage, dtype_name(dtype), offset, size, stride, trained, more)
        if spec.requires_grad:  # torch writes but cannot read it: "a leaf Variable that requires grad is being used"
            self.foreign[f"requires_grad of {spec.dtype}"] = None
        return replace(spec, requires_grad=False)

    def _note(self, *beside: Any) -> None:
        """Record objects in place of hooks or metadata, which are plain dicts. They are dropped: torch refuses them."""
        for value in beside:
            if isinstance(value, Opaque):
                self.foreign[str(value.cls)] = None

    def _strided(
        self, typed: TypedStorage, dtype: str, offset: int, size: Any, stride: Any, requires_grad: Any, metadata: Any
    ) -> TensorSpec:
        if not isinstance(requires_grad, int) or requires_grad not in (0, 1):  # TorchScript of Python 2 has numbers
            raise MalformedError(f"a tensor whose requires_grad is {shown(requires_grad)}")
        _refuse_gradient(dtype, requires_grad)
        bits = _NO_BITS
        if isinstance(metadata, dict):
            bits = {name: True for name in ("conj", "neg") if metadata.get(name) is True}
        shape, strides, storage = sizes(size), sizes(stride), typed.storage
        is_trained = bool(requires_grad)
        spec = TensorSpec(dtype, shape, strides, storage, int(offset), requires_grad=is_trained, math_bits=bits)
        # All tensors of the file together must not be a bomb of views of a few bytes.
        self._logical_bytes += checked(spec, self.path).nbytes
        if self._logical_bytes > 4 * EXPANDED_LIMIT and self._logical_bytes > 1024 * self.stored_bytes:
            raise hostile(
                self.path,
                f"its tensors would take {self._logical_bytes >> 20} MiB in memory out of {self.stored_bytes} stored "
                "bytes",
            )
        return spec

    def parameter(self, data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> Any:
        """Stand in for ``_rebuild_parameter``, also with attributes, and ``Parameter(data)`` of torch 0.1 to 0.3."""
        self._note_attributes(state)
        if not isinstance(data, TensorSpec):
            return NotImplemented
        self._note_scales(data, state)
        _refuse_gradient(data.dtype, requires_grad)
        return replace(data, is_parameter=True, requires_grad=bool(requires_grad))

    def _note_attributes(self, state: Any) -> None:
        """Record the names of attributes set on a tensor; ``state`` is its ``__dict__``, or that and its slots."""
        for part in state if isinstance(state, tuple) else (state,):
            names = map(str, part if isinstance(part, dict) else ())
            self.attributes.update(dict.fromkeys(name for name in names if not name.startswith("_")))

    def _note_scales(self, data: Any, state: Any) -> None:
        """Record attributes of codes that hold tensors, as bitsandbytes keeps the scales in a whole model."""
        if not isinstance(data, TensorSpec) or DTYPES[data.dtype].itemsize != 1 or data.dtype == "bool":
            return
        for part in state if isinstance(state, tuple) else (state,):
            held = part.items() if isinstance(part, dict) else ()
            self.scales.update(dict.fromkeys(str(name) for name, value in held if any(True for _ in tensors_in(value))))

    def variable(self, data: Any = None, *_: Any) -> Any:
        """Stand in for ``Variable(data)`` of torch 0.1 to 0.3 and ``torch.Tensor(tensor)``."""
        return data if isinstance(data, TensorSpec) else NotImplemented

    def from_type(self, function: Any, cls: Any, args: Any, state: Any = None, *_: Any) -> Any:
        """Stand in for ``_rebuild_from_type_v2``, a tensor of a subclass or with attributes, by the plain tensor."""
        if not isinstance(function, Global) or not isinstance(args, tuple):
            return NotImplemented
        if isinstance(cls, Global) and str(cls) not in _PLAIN_TENSORS:
            self.foreign[str(cls)] = None
        elif isinstance(cls, Global) and cls.name in ("Tensor", "Parameter"):
            self._note_attributes(state)
        if function.name == "_rebuild_wrapper_subclass" and len(args) > 2:
            return local_part(cls, args[2], state, self._specs)
        made = self.call(function, args)
        self._note_scales(made, state)
        return made

    def on_manifold(self, *args: Any, build_fn: Any = None) -> Any:
        """Stand in for ``_rebuild_manifold_tensor(*args, {}, class, manifold, requires_grad, build_fn=…)`` of geoopt by
        the tensor that ``build_fn(*args)`` builds."""
        if len(args) < 5 or not isinstance(build_fn, Global):
            return NotImplemented
        *inner, _, cls, _, requires_grad = args
        made = self.call(build_fn, tuple(inner))
        if not isinstance(made, TensorSpec) or not isinstance(cls, Global):
            return NotImplemented
        self.foreign[str(cls)] = None
        return replace(made, is_parameter=cls.name == "ManifoldParameter", requires_grad=bool(requires_grad))

    def quantized(
        self, storage: Any, offset: int, size: Any, stride: Any, quantizer: Any, trained: Any = False, _: Any = None
    ) -> Any:
        """Stand in for ``_rebuild_qtensor``, with ``torch.per_tensor_affine`` or one of the per-channel schemes."""
        scheme, scale, zero_point, *axis = quantizer
        # torch 1.3 and 1.4 wrote the scales, zero points and axis of each channel as lists.
        scale, zero_point = _per_channel(scale, "float64"), _per_channel(zero_point, "int64")
        axis = axis[0] if axis and isinstance(axis[0], list) else axis
        spec = self._strided(storage, storage.dtype, offset, size, stride, trained, None)
        name = scheme.name if isinstance(scheme, Global) else shown(scheme)
        if name not in ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams"):
            raise MalformedError(f"quantisation scheme {name:.60} is unknown")
        for part in (scale, zero_point):
            if not (_is_simple(part) if axis else type(part) in (int, float)):
                raise MalformedError("a quantised tensor whose scales are neither numbers nor plain tensors")
        return replace(spec, quantizer=Quantizer(name, scale, zero_point, axis[0] if axis else None))

    def sparse(self, layout: Any, data: Any) -> Any:
        """Stand in for ``_rebuild_sparse_tensor``, with COO ``(indices, values, size[, is_coalesced])`` or a compressed
        layout."""
        name = layout.name if isinstance(layout, Global) else layout if isinstance(layout, str) else ""
        name = name.removeprefix("torch.")
        if name == "sparse_coo":
            indices, values, size, *coalesced = data
            parts = {"indices": indices, "values": values}
        elif name in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"):
            compressed, plain, values, size = data
            one, other = ("row", "col") if name in ("sparse_csr", "sparse_bsr") else ("col", "row")
            parts, coalesced = {f"c{one}_indices": compressed, f"{other}_indices": plain, "values": values}, []
        else:
            return NotImplemented
        if not all(_is_simple(part) for part in parts.values()):
            raise MalformedError("a sparse tensor whose parts are not plain tensors")
        if math.prod(sizes(size)) >= 1 << 63:
            raise MalformedError("a sparse tensor of more elements than torch can count")
        return TensorSpec(
            values.dtype, sizes(size), layout=name, parts=parts, is_coalesced=bool(coalesced[0]) if coalesced else None
        )

    def meta(self, dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Any:
        """Stand in for ``_rebuild_meta_tensor_no_storage``, a tensor that was saved without values."""
        return TensorSpec(dtype_name(dtype), sizes(size), sizes(stride), requires_grad=bool(requires_grad))

    def from_numpy(self, data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
        """Stand in for ``_rebuild_device_tensor_from_numpy`` and the like: tensors of devices, saved as arrays."""
        spec = data.spec(self.path) if isinstance(data, NumpyArray) else data
        if not isinstance(spec, TensorSpec):
            return NotImplemented
        name = dtype_name(dtype)
        if name != spec.dtype:
            spec = bfloat16_again(spec, name, self.path)
        return replace(spec, requires_grad=bool(requires_grad))

    def from_bytes(self, data: Any) -> Any:
        """Stand in for ``torch.storage._load_from_bytes``: a whole torch.save file in the pickle, usually a storage."""
        if isinstance(data, str):
            data = raw_bytes(data)
        if not isinstance(data, (bytes, bytearray)):
            raise MalformedError("a torch file that is not bytes")
        return self.nested(bytes(data))

    def graph_module(self, body: Any, imports: Any = "", *_: Any) -> Any:
        """Stand in for ``torch.fx.graph_module.reduce_graph_module(instance dict, import block)`` by the module without
        its code."""
        function = Global("torch.fx.graph_module", "reduce_graph_module")
        if not is_graph_code(body, imports):
            self.called.add(str(function))
        return Opaque(Global("torch.fx.graph_module", "GraphModule"), (imports,), state=body)

    def package_graph_module(self, body: Any, *_: Any) -> Any:
        """Stand in for ``torch.fx.graph_module.reduce_package_graph_module(instance dict, name)``, as torch.package
        calls it: the code is in a file of the package. Ordinary pickles would pass an importer instead."""
        if not isinstance(body, dict):
            return NotImplemented
        return Opaque(Global("torch.fx.graph_module", "GraphModule"), state=body)

    def persistent(self, meta: Any, *_: Any) -> Any:
        """Stand in for ``torch_utils.persistence._reconstruct_persistent_obj`` of StyleGAN2-ADA and StyleGAN3: a module
        whose source is in the file beside its state. The source stays text."""
        pairs = meta.pairs if isinstance(meta, Opaque) else meta if isinstance(meta, dict) else {}
        if not isinstance(pairs.get("state"), dict) or not isinstance(pairs.get("class_name"), str):
            return NotImplemented
        return Opaque(Global("torch_utils.persistence", pairs["class_name"]), state=pairs["state"])

    # numpy ------------------------------------------------------------------------------------------------------------

    def array(self, cls: Any = None, *_: Any) -> Any:
        """Stand in for ``numpy.core.multiarray._reconstruct``: an array that is empty until its state is set."""
        if not isinstance(cls, Global):
            raise MalformedError("a numpy array of no class")
        return NumpyArray(is_plain=str(cls) == "numpy.ndarray")

    def array_from_buffer(self, data: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> Any:
        """Stand in for ``numpy.core.numeric._frombuffer`` of pickle protocol 5."""
        return NumpyArray(sizes(shape), dtype, order == "F", data)


def _refuse_gradient(dtype: str, requires_grad: Any) -> None:
    """Raise ``MalformedError`` for an integer tensor that requires a gradient: torch neither writes nor reads one."""
    if requires_grad and not (DTYPES[dtype].is_float or DTYPES[dtype].is_complex):
        raise MalformedError(f"a tensor of {dtype} that requires a gradient")


# The calls that pickle writes for values of the standard library. Each function takes the table and the arguments of
# the call, and returns the value, or NotImplemented for arguments that pickle does not write.
# ---------------------------------------------------------------------------------------------------------------------


def ordered_dict(table: InertTable, pairs: Any = ()) -> Any:
    """Return a ``collections.OrderedDict``; Python 2 passes the pairs to the call."""
    if not pairs and isinstance(pairs, (tuple, list)):
        return OrderedDict()  # the hooks of every tensor
    pairs = list(pairs.items()) if isinstance(pairs, dict) else pairs
    keys = bounded_keys([key for key, _ in pairs], table.path)
    return OrderedDict((key, value) for key, (_, value) in zip(keys, pairs, strict=True))


def new_set(kind: type, table: InertTable, values: Any = ()) -> Any:
    """Return ``set(values)`` or ``frozenset(values)``."""
    return kind(bounded_keys(values, table.path)) if isinstance(values, (list, tuple)) else NotImplemented


def new_bytearray(table: InertTable, value: Any = b"", encoding: Any = None) -> Any:
    """Return ``bytearray(…)``, which protocol 2 writes as a Latin-1 string with its encoding."""
    if isinstance(value, str):
        return bytearray(value, "latin-1")
    return bytearray(value) if isinstance(value, (bytes, bytearray)) else NotImplemented


def encoded(table: InertTable, text: Any, encoding: Any = "latin1") -> Any:
    """Return ``_codecs.encode(text, "latin1")``, the form in which protocol 2 writes bytes."""
    is_bytes = isinstance(text, str) and encoding in ("latin1", "latin-1")
    return text.encode("latin-1") if is_bytes else NotImplemented


def reconstruct(table: InertTable, cls: Any, base: Any, state: Any) -> Any:
    """Stand in for ``copyreg._reconstructor(cls, base, state)`` of protocols 0 and 1; ``state`` fills a built-in
    base."""
    if not isinstance(cls, Global):
        return NotImplemented
    made = table.call(cls, ())
    if isinstance(base, Global):
        table.called.add(str(base))
    if isinstance(made, Opaque):
        if isinstance(state, dict):
            made.own_pairs().update(state)
        elif isinstance(state, (list, tuple)):
            made.own_items().extend(state)
    return made


def attribute(table: InertTable, owner: Any, name: Any, *_: Any) -> Any:
    """Stand in for ``getattr(cls, name)``: Python 3.11 pickles enum members so, and attacks hide names of functions.

    The method ``state_dict`` of a module, saved without calling it, becomes the module."""
    if name == "state_dict" and isinstance(owner, Opaque) and "_parameters" in owner.attributes:
        return owner
    cls = owner.cls if isinstance(owner, Opaque) else owner
    if not isinstance(cls, Global) or not isinstance(name, str):
        return NotImplemented
    if len(cls.name) + len(name) > NAME_LIMIT:
        raise hostile(table.path, "getattr is called on its own result over and over")
    member = Global(cls.module, f"{cls.name}.{name}")
    table.derived.add(spelled(member))
    return member if cls is owner else NotImplemented


def ufunc(table: InertTable, module: Any, name: Any) -> Any:
    """Stand in for ``numpy.core._ufunc_reconstruct(module, name)``, which imports any name from any module."""
    if not isinstance(module, str) or not isinstance(name, str):
        return NotImplemented
    table.derived.add(spelled(found := Global(module, name)))
    return found


_TABLE: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": InertTable.tensor,
    "torch._utils._rebuild_tensor_v2": InertTable.tensor,
    "torch._utils._rebuild_tensor_v3": InertTable.tensor_v3,
    "torch._utils._rebuild_parameter": InertTable.parameter,
    "torch._utils._rebuild_parameter_with_state": InertTable.parameter,
    "torch._utils._rebuild_qtensor": InertTable.quantized,
    "torch._utils._rebuild_sparse_tensor": InertTable.sparse,
    "torch._utils._rebuild_sparse_csr_tensor": InertTable.sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": InertTable.meta,
    "torch._utils._rebuild_xla_tensor": InertTable.from_numpy,
    "torch._utils._rebuild_device_tensor_from_numpy": InertTable.from_numpy,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": InertTable.from_numpy,
    "torch._tensor._rebuild_from_type": InertTable.from_type,
    "torch._tensor._rebuild_from_type_v2": InertTable.from_type,
    "torch.nn.parameter.Parameter": InertTable.parameter,
    "torch.nn.parameter.Buffer": InertTable.variable,
    "torch.autograd.variable.Variable": InertTable.variable,
    "torch.Tensor": InertTable.variable,
    "torch._tensor.Tensor": InertTable.variable,
    "torch.storage._load_from_bytes": InertTable.from_bytes,
    "torch.serialization._get_layout": lambda table, name: (
        Global("torch", name.removeprefix("torch.")) if isinstance(name, str) else NotImplemented
    ),
    "torch.fx.graph_module.reduce_graph_module": InertTable.graph_module,
    "torch.fx.graph_module.reduce_package_graph_module": InertTable.package_graph_module,
    "torch_utils.persistence._reconstruct_persistent_obj": InertTable.persistent,
    _OF_GEOOPT: InertTable.on_manifold,
    "numpy.core.multiarray._reconstruct": InertTable.array,
    "numpy.core.numeric._frombuffer": InertTable.array_from_buffer,
    "numpy.core._ufunc_reconstruct": ufunc,
    "collections.OrderedDict": ordered_dict,
    "builtins.dict": lambda table, *args: NotImplemented if args else {},
    "builtins.list": lambda table, of=(): list(of) if isinstance(of, (list, tuple)) else NotImplemented,
    "builtins.set": partial(new_set, set),
    "builtins.frozenset": partial(new_set, frozenset),
    "builtins.complex": lambda table, real=0.0, imaginary=0.0: complex(real, imaginary),
    "builtins.bytes": lambda table, of=b"", *_: (
        bytes(of) if isinstance(of, (bytes, bytearray, list)) else NotImplemented
    ),  # protocol 2 writes empty bytes so
    "builtins.bytearray": new_bytearray,
    "builtins.getattr": attribute,
    "_codecs.encode": encoded,
    "copyreg._reconstructor": reconstruct,
    "copyreg.__newobj__": lambda table, cls, *args: (
        table.call(cls, args) if isinstance(cls, Global) else NotImplemented
    ),
}
