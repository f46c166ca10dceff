"""The edits of a checkpoint: each kind of change, as data."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, to_builtins

from ckptfix.core.adapter_methods import METHODS
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.parts import Part, Shape, Size, full

if TYPE_CHECKING:
    DTypeName = str
else:
    DTypeName = Literal[tuple(DTYPES)]


def _one_of(*names: str) -> Meta:
    return Meta(pattern=rf"\A({'|'.join(names)})\Z")


# Limits on what a plan may ask for, checked when it is read, because a forged size would exhaust memory.
MOST_ZEROS = 1 << 27  # elements of a tensor of zeros, which is used for counters and small tensors
MOST_ADAPTED = 1 << 31  # elements of an adapted tensor
MOST_TIMES = 1 << 20  # ratio of an adapted tensor's size to the original's


class Edit(Struct, frozen=True, tag_field="edit", forbid_unknown_fields=True):
    """One change of a checkpoint, as data: it can be printed, converted to JSON and back, and never holds a callback.

    ``keeps_values`` tells whether the elements of its ``key`` stay the trained ones, perhaps in another place; if not,
    the optimizer's state of that parameter no longer belongs to its values."""

    keeps_values: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The name of the edit's kind in JSON."""
        return str(self.__struct_config__.tag)

    def to_json(self) -> dict[str, Any]:
        """Return the edit as a JSON object; ``edit`` names its kind."""
        data: dict[str, Any] = to_builtins(self)
        return data


class Rename(Edit, frozen=True, tag="rename"):
    """Rename an entry; the ``_metadata`` of its modules follows.

    It is not an ``Assemble`` of one whole part, because the entry need not be a tensor and may be changed in the same
    step, and because 10,000 renames apply in 14 ms and take 1 MB of JSON, where parts took 400 ms and 2 MB."""

    keeps_values: ClassVar[bool] = True
    key: str
    to: str


class RenameModule(Edit, frozen=True, tag="rename-module"):
    """Move a row of ``_metadata`` to another module path, if the keys have the right names already."""

    keeps_values: ClassVar[bool] = True
    module: str
    to: str


class Drop(Edit, frozen=True, tag="drop"):
    """Remove an entry."""

    keeps_values: ClassVar[bool] = True
    key: str


class Fill(Edit, frozen=True, tag="fill"):
    """Add a tensor that the file lacks.

    ``origin`` says where the values come from: ``zeros``, ``target`` (the model's own initialisation), ``formula`` (the
    same, if it is computed and not random), ``donor`` (the file of ``--fill FILE``, under ``donor_key``), ``adapter``
    (``donor_key`` is its path, a colon, and the key), ``tie`` (the old values of the file's tensor that it was tied to;
    ``donor_key`` is a colon and its key), or ``part`` (another set of weights in the file; ``donor_key`` is its name, a
    colon, and the key)."""

    key: str
    dtype: DTypeName
    shape: Shape
    origin: Annotated[str, _one_of("zeros", "target", "donor", "adapter", "tie", "part", "formula")]
    donor_key: str | None = None

    def __post_init__(self) -> None:
        if self.origin == "zeros" and prod(self.shape) > MOST_ZEROS:
            raise ValueError(f"a tensor of zeros has {MOST_ZEROS:,} elements at most")


class Replace(Edit, frozen=True, tag="replace"):
    """Replace the values of a tensor; its key, dtype and shape stay.

    ``origin`` says where the new values come from: ``zeros`` and ``ones`` (the statistics of a fresh norm), ``data``
    (statistics measured on the file ``source``), ``target`` and ``donor`` as in a fill, or ``twin``: the key ``source``
    in another set of weights of the same file, which ``place`` names; without a place, in the same state_dict."""

    key: str
    dtype: DTypeName
    shape: Shape
    origin: Annotated[str, _one_of("zeros", "ones", "data", "target", "donor", "twin")]
    source: str | None = None
    place: str | None = None


NON_FINITE, SUBNORMAL = "non-finite", "subnormal"


class Zero(Edit, frozen=True, tag="zero"):
    """Set all ``non-finite`` or all ``subnormal`` numbers of a tensor to zero; the others stay unchanged."""

    key: str
    dtype: DTypeName
    which: Annotated[str, _one_of(NON_FINITE, SUBNORMAL)]


class Tie(Edit, frozen=True, tag="tie"):
    """Add a key that shares the tensor, and so the storage, of another key of the same checkpoint."""

    keeps_values: ClassVar[bool] = True
    key: str
    to: str


class Cast(Edit, frozen=True, tag="cast"):
    """Convert a tensor to another dtype."""

    keeps_values: ClassVar[bool] = True
    key: str
    before: DTypeName
    dtype: DTypeName


INT8, FOUR_BITS, BLOCKS = "bitsandbytes int8", "bitsandbytes 4-bit", "scaled codes"
# Each byte holds two 4-bit numbers, the low half first; each 16 bytes of a row share a scale, a power of two. The
# matrices of experts may be transposed on reading, as transformers does for gpt-oss.
MXFP4, MXFP4_TURNED = "MXFP4", "MXFP4, turned"
NVFP4 = "NVFP4"  # the same numbers, with a float8_e4m3fn scale per 8 bytes, and a scale for the whole


class Dequantise(Edit, frozen=True, tag="dequantise"):
    """Multiply the codes of a matrix by the scales under the key ``source``: one per tensor, one per row, or one per
    block of 128 x 128. ``scheme`` is the name of the format, which defines the factor of the scales and the other
    tensors that go with the codes."""

    key: str
    before: DTypeName
    dtype: DTypeName
    source: str
    scheme: Annotated[str, _one_of(INT8, FOUR_BITS, BLOCKS, MXFP4, MXFP4_TURNED, NVFP4)]


class Assemble(Edit, frozen=True, tag="assemble"):
    """Build a tensor from parts of others, which are consumed: reshaped, split, fused, stacked or transposed layers.

    The ``Assemble`` edits of a step use each element of their source tensors exactly once."""

    keeps_values: ClassVar[bool] = True
    key: str
    dtype: DTypeName
    shape: Shape
    parts: Annotated[tuple[Part, ...], Meta(min_length=1)]

    @classmethod
    def reshape(cls, key: str, dtype: str, before: Shape, shape: Shape) -> Assemble:
        """Return the edit that reshapes a tensor."""
        return cls(key, dtype, shape, (Part.whole(key, before, shape),))

    @property
    def is_reshape(self) -> bool:
        """Whether the edit only changes the shape: same key, and all elements in the same order."""
        return [(part.source, part.place, part.axes) for part in self.parts] == [(self.key, full(self.shape), ())]


PAD_TARGET = "vocab=pad:target"  # the recipe that adds rows of the model's own initial values


class Adapt(Edit, frozen=True, tag="adapt"):
    """Compute a tensor of another shape by a recipe of ``--adapt``: ``pos_embed=timm``.

    ``source`` is the key in the file, which stays there if it differs from ``key``. ``grids`` are the rows and columns
    of the file's table and of the new one. ``rows`` are the rows of the file's tensor to take, in order; an index one
    past the last means the mean of all rows."""

    key: str
    source: str
    recipe: str
    dtype: DTypeName
    before: Shape
    shape: Shape
    grids: Shape = ()
    rows: Shape = ()

    def __post_init__(self) -> None:
        old, new = prod(self.before), prod(self.shape)
        if new > min(MOST_ADAPTED, MOST_TIMES * old):
            raise ValueError(f"a tensor of {old} elements cannot become one of {new}")
        axes = len(self.grids) // 2
        if self.grids and (prod(self.grids[:axes]) > old or prod(self.grids[axes:]) > new):
            raise ValueError("the grids do not fit the shapes")

    @property
    def untrained(self) -> int:
        """Number of elements of the new tensor that are the model's initial values."""
        return max(prod(self.shape) - prod(self.before), 0) if self.recipe == PAD_TARGET else 0


# What an adapter does to a tensor, with the minimum and maximum number of factors.
FORMS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("linear", "conv", "experts"), (2, 3)),
    **{"tucker": (3, 4), "hadamard": (4, 7), "kronecker": (2, 6)},
    **dict.fromkeys(("bias", "scale", "rows", "whole"), (1, 1)),
    **{kind.lower(): method.numbers for kind, method in METHODS.items()},
    "bat": (1, 1),
}


class Delta(Struct, frozen=True, forbid_unknown_fields=True):
    """What one layer of an adapter does to a tensor.

    ``factors`` are its keys in ``adapter``, the path of a file; empty: in the checkpoint itself. ``form`` is ``linear``
    (``B @ A``), ``conv``, ``tucker`` (three convolutions; the third factor has the kernel), ``experts`` (a product per
    expert), ``hadamard`` and ``kronecker`` (LoHa and LoKr, whose factors are recognised by their names); the factors of
    each of these may be followed by DoRA's magnitude; ``bias`` (a tensor is added), ``scale`` (a product with a
    vector), ``rows`` (the rows of ``rows`` are replaced), ``whole`` (the whole tensor is), or a type of peft
    (``METHODS``; ``bat`` is a variant of MiSS), with ``number`` and ``bound`` from its configuration. ``transposed``:
    the tensor has the inputs first. ``rounds``: the change is rounded to the tensor's dtype before it is added.
    ``is_narrow``: the factors are rounded to it too. ``weight`` is the user's factor of ``scaling``. ``expert``: the
    factors belong to all experts, and this tensor is part of one: the expert's number, the number of experts, and the
    first row of the product and one past the last; the same for the parts of a fused layer. ``within``: the first row
    that changes and one past the last, in a matrix or in the rows of all experts, concatenated."""

    adapter: str
    form: Annotated[str, _one_of(*FORMS)]
    factors: tuple[str, ...]
    scaling: float = 1.0
    transposed: bool = False
    rounds: bool = False
    is_narrow: bool = False
    rows: Shape = ()
    weight: float = 1.0
    expert: Shape = ()
    within: Shape = ()
    number: int = 0
    bound: float = 0.0

    def __post_init__(self) -> None:
        fewest, most = FORMS[self.form]
        if not fewest <= len(self.factors) <= most:
            raise ValueError(f"the form {self.form} does not take {len(self.factors)} factors")
        if not all(map(isfinite, (self.scaling, self.weight, self.bound))):
            raise ValueError("the scaling, the weight and the bound have to be finite")
        if len(self.expert) not in (0, 4) or (self.expert and self.expert[0] >= self.expert[1]):
            raise ValueError("expert needs its number, the number of experts, and the first and last row")
        if len(self.within) not in (0, 2):
            raise ValueError("within needs the first and the last row")

    @property
    def has_magnitude(self) -> bool:
        """Whether the layer is DoRA, so that its last factor is a magnitude."""
        is_of_peft = self.form in ("linear", "conv") and len(self.factors) == 3
        return is_of_peft or self.has_dora_scale

    @property
    def has_dora_scale(self) -> bool:
        """Whether the layer is DoRA in the form of LyCORIS."""
        return self.factors[-1].endswith(".dora_scale")

    @property
    def source(self) -> str:
        """The adapter as the user named it: ``style=0.7``."""
        return f"{self.adapter}={self.weight:g}" if self.weight != 1 else self.adapter


class MergeAdapter(Edit, frozen=True, tag="merge-adapter"):
    """Merge layers of adapters into a tensor, one after another, or remove them again (``undo``)."""

    key: str
    dtype: DTypeName
    shape: Shape
    deltas: tuple[Delta, ...]
    undo: bool = False


WEIGHT_NORM, SPECTRAL_NORM, PRUNING = "weight_norm", "spectral_norm", "pruning"
PARAMETRIZATIONS = {WEIGHT_NORM: 1, SPECTRAL_NORM: 2, PRUNING: 1}  # number of tensors in addition to the weight


class Fold(Edit, frozen=True, tag="fold"):
    """Compute a weight from the tensors of a parametrization: ``key`` has the weight's shape, and ``sources`` are the
    other tensors. ``form`` names the parametrization of torch, and ``dim`` the axis that its norm keeps; -1 for a norm
    over all."""

    key: str
    dtype: DTypeName
    shape: Shape
    form: Annotated[str, _one_of(*PARAMETRIZATIONS)]
    sources: tuple[str, ...]
    dim: Annotated[int, Meta(ge=-1)] = 0

    def __post_init__(self) -> None:
        if len(self.sources) != PARAMETRIZATIONS[self.form]:
            raise ValueError(f"the form {self.form} does not take {len(self.sources)} sources")
        if self.dim >= max(len(self.shape), 1):
            raise ValueError(f"a tensor of {len(self.shape)} axes has no axis {self.dim}")


class Plain(Edit, frozen=True, tag="plain"):
    """Convert an object of a class to plain data that ``torch.load(weights_only=True)`` accepts.

    ``where`` is its place in the container (``args``), ``before`` its class, ``after`` what it becomes (``dict``,
    ``str``)."""

    keeps_values: ClassVar[bool] = True
    where: str
    before: str
    after: str


class Retag(Edit, frozen=True, tag="retag"):
    """Change the device tag of tensors saved from ``device`` (``cuda:3``), which may not exist on another machine."""

    keeps_values: ClassVar[bool] = True
    device: str
    to: str = "cpu"


class Rewrite(Edit, frozen=True, tag="rewrite"):
    """Write the file again from its intact parts. ``cause`` is what was wrong with it."""

    keeps_values: ClassVar[bool] = True
    cause: str


class Disarm(Edit, frozen=True, tag="disarm"):
    """Drop everything except the tensors of the state_dict, so that nothing is left that could run."""

    keeps_values: ClassVar[bool] = True
    payload: str


class Regroup(Edit, frozen=True, tag="regroup", omit_defaults=True):
    """Give the optimizer at ``where`` new groups of parameters; the ``Moments`` edits of the same step fill them.

    ``like`` has, for each group, the number of the old group whose hyperparameters it takes. ``order`` is the model's
    order of keys, which the state_dict takes too, so that positions still follow the order of the file. ``layout`` is
    that of the old optimizer (``Optimizer.layout``), without which another one would get the states of other layers."""

    keeps_values: ClassVar[bool] = True
    where: str
    like: Shape
    order: tuple[str, ...] = ()
    layout: str = ""


class Moments(Edit, frozen=True, tag="moments", omit_defaults=True):
    """Append a parameter, ``key`` in the result, to a group of an optimizer.

    Its state is that of the old id ``source``, with elementwise tensors reshaped to ``shape`` if that is given, or is
    assembled from ``parts`` of the states of several ids. Without any of these it starts without state; ``shape`` is
    then the parameter's, for optimizers that need an initial state."""

    keeps_values: ClassVar[bool] = True
    where: str
    group: Size
    key: str
    source: str | None = None
    shape: Shape = ()
    parts: tuple[Part, ...] = ()


class Omit(Edit, frozen=True, tag="omit"):
    """Drop what is at a place of the container outside the weights."""

    keeps_values: ClassVar[bool] = True
    where: str


# Every kind of edit by its name in JSON.
EDITS: Mapping[str, type[Edit]] = {str(edit.__struct_config__.tag): edit for edit in Edit.__subclasses__()}


def renames(new: Mapping[str, str]) -> tuple[Edit, ...]:
    """Return the ``Rename`` edits for a map of old keys to new ones; unchanged keys need none."""
    return tuple(Rename(key, name) for key, name in new.items() if key != name)
