"""What a state_dict has to fit: the tensors that a strict ``load_state_dict`` expects."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import Struct, field

from ckptfix.core.buffers import is_buffer_name
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.lazy import torch
from ckptfix.core.spec import TensorSpec, grouped, ties

if TYPE_CHECKING:
    from ckptfix.core.checkpoint import Checkpoint
    from ckptfix.core.parts import Parts, Shape

    Converter = Callable[[Mapping[str, Shape]], Parts]

PARAMETER, BUFFER = "parameter", "buffer"

# What `load_state_dict` raises on a misfit: torch itself, and the user's hooks and methods.
LOAD_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError)


class Slot(Struct, frozen=True):
    """A tensor that the target expects: ``kind`` is ``parameter`` or ``buffer``; a lazy parameter has shape None."""

    dtype: str
    shape: tuple[int, ...] | None
    kind: str

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter and not a buffer."""
        return self.kind == PARAMETER

    @property
    def numel(self) -> int:
        """Number of elements, 0 for a lazy parameter."""
        return 0 if self.shape is None else math.prod(self.shape)


class Target(Struct, frozen=True, dict=True):
    """The tensors that a strict load expects.

    ``slots`` are in the order of the model's own state_dict. ``entries`` are expected keys whose values are not tensors
    (packed parameters, ``_extra_state``). ``transient`` names the non-persistent buffers. ``ties`` are groups of keys
    that are one tensor. ``modules`` maps module paths to class names; None for a file. ``initial`` returns the real,
    seeded initial values, including non-persistent buffers, computed on first use; None if there are none, as for a
    file. ``is_deferred`` says that this builds a model, which is not in memory yet.
    ``library`` is the package of the model's class. ``grids`` are the rows and columns of patches of the modules that
    take images, by path, and ``windows`` those of attention windows. ``resizes`` are the paths of modules that can
    resize position embeddings. ``heads`` are the sizes of attention heads with rotary embeddings. ``vocabularies`` are
    the vocabulary sizes in the modules' configurations.
    ``remarks`` are lines worth reporting about how the target was built. ``loads`` tries a strict load of a checkpoint
    on a copy of the model, and returns the parameters that got values, or None if the load fails; it is None for a
    model without hooks of its own, the only way for a load to work although names or shapes differ.
    ``frozen`` names the parameters without ``requires_grad``. ``converts`` returns the parts that the model's own
    library would load from a file with these shapes; None if it only loads what fits. ``layers`` returns the number of
    each parameter's layer, as counted for timm's layer-wise decay; None for models of other libraries.
    ``reference`` is the checkpoint that the target was made from; None for a model."""

    label: str
    slots: Mapping[str, Slot]
    entries: frozenset[str] = frozenset()
    transient: frozenset[str] = frozenset()
    ties: tuple[tuple[str, ...], ...] = ()
    modules: Mapping[str, str] | None = None
    initial: Callable[[], Mapping[str, torch.Tensor]] | None = None
    is_deferred: bool = False
    library: str = ""
    grids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    windows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    resizes: frozenset[str] = frozenset()
    heads: frozenset[int] = frozenset()
    vocabularies: frozenset[int] = frozenset()
    remarks: tuple[str, ...] = ()
    loads: Callable[[Checkpoint], frozenset[str] | None] | None = None
    frozen: frozenset[str] = frozenset()
    converts: Converter | None = None
    layers: Callable[[], Mapping[str, int]] | None = None
    reference: Checkpoint | None = None

    @cached_property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(slot.numel * DTYPES[slot.dtype].itemsize for slot in self.slots.values())

    @cached_property
    def tie_of(self) -> Mapping[str, tuple[str, ...]]:
        """The group of each tied key."""
        return {key: group for group in self.ties for key in group}

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """All names of each tensor, by its first name in the order of the model."""
        groups: dict[tuple[str, ...], str] = {}
        for key in self.slots:
            groups.setdefault(self.tie_of.get(key, (key,)), key)
        return {key: group for group, key in groups.items()}

    def accepts(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return whether the target expects this key with this shape."""
        slot = self.slots.get(key)
        return slot is not None and slot.shape in (None, shape)


def target_from_module(module: torch.nn.Module, label: str | None = None) -> Target:
    """Return what a strict ``load_state_dict`` of a live module expects.

    ``initial`` returns the module's current values as detached tensors that share its memory; it is None for a module
    on the meta device. Errors in the module's own ``state_dict`` are passed on."""
    state = module.state_dict(keep_vars=True)
    base = torch.nn.Module  # a class may override these without `remove_duplicate`, as the losses of torchrl do
    parameters = {name for name, _ in base.named_parameters(module, remove_duplicate=False)}
    tensors = {
        key: value for key, value in state.items() if isinstance(value, torch.Tensor) and not _is_extra_state(key)
    }
    transient = {key: value for key, value in base.named_buffers(module, remove_duplicate=False) if key not in state}
    is_parameter = {key: isinstance(value, torch.nn.Parameter) or key in parameters for key, value in tensors.items()}
    has_values = not any(tensor.is_meta for tensor in tensors.values())
    return Target(
        label=label or type(module).__name__,
        slots={key: _slot_of(tensor, is_parameter[key]) for key, tensor in tensors.items()},
        entries=frozenset(state) - frozenset(tensors),
        transient=frozenset(transient),
        ties=grouped({key: _identity(tensor) for key, tensor in tensors.items()}),
        modules={path: type(child).__name__ for path, child in base.named_modules(module, remove_duplicate=False)},
        initial=cache(lambda: _values(tensors | transient)) if has_values else None,
        library=type(module).__module__.partition(".")[0],
        grids=_sizes(module, _grid),
        windows=_sizes(module, lambda child: _window(getattr(child, "window_size", None))),
        resizes=frozenset(path for path, child in module.named_modules() if _resizes(child)),
        heads=frozenset(
            2 * len(value) for key, value in transient.items() if key.endswith("inv_freq") and value.ndim == 1
        ),
        vocabularies=frozenset(
            size
            for child in module.modules()
            for name, size in getattr(vars(child).get("config"), "__dict__", {}).items()
            if _VOCABULARY.match(name) and isinstance(size, int)
        ),
        loads=cache(lambda checkpoint: _loads(module, checkpoint)) if _has_hooks(module) else None,
        layers=_layers(module),
        frozen=frozenset(key for key, tensor in tensors.items() if is_parameter[key] and not tensor.requires_grad),
    )


def _layers(module: torch.nn.Module) -> Callable[[], Mapping[str, int]] | None:
    of_timm = sys.modules.get("timm.models") if type(module).__module__.startswith("timm.") else None
    matcher, numbered = getattr(module, "group_matcher", None), getattr(of_timm, "group_parameters", None)
    return (
        None if matcher is None or numbered is None else lambda: numbered(module, matcher(coarse=False), reverse=True)
    )


def _resizes(module: torch.nn.Module) -> bool:
    """Return whether a module of transformers resizes position embeddings itself, or has a function that does."""
    is_known = type(module).__module__.startswith("transformers.")
    return is_known and any(map(_RESIZING.match, (*dir(type(module)), *vars(module))))


# Not `resize_position_embeddings`, with which a user changes the model.
_RESIZING = re.compile("_?(?:interpolat(?:e_pos|ion_mode)|resize_pos(?:_|itional)|get_(?:absolute_pos|pos_embed))")

# Names of the vocabulary size in configurations of transformers; not the numbers of token types, speakers or hashes.
_VOCABULARY = re.compile(r"(?!num_|.*(?:type_|hash))(?:\w+_)?vocab_size")


def _sizes(
    module: torch.nn.Module, size_of: Callable[[torch.nn.Module], tuple[int, ...] | None]
) -> dict[str, tuple[int, ...]]:
    sizes = {path: size_of(child) for path, child in torch.nn.Module.named_modules(module, remove_duplicate=False)}
    return {path: size for path, size in sizes.items() if size is not None}


def _grid(module: torch.nn.Module) -> tuple[int, ...] | None:
    """Return the grid of patches of a module that takes images, or videos or sounds if its configuration has their
    sizes."""
    config = getattr(vars(module).get("config"), "__dict__", {})
    of_config = grid_of(config) or ()
    return grid_of(vars(module)) or (of_config if len(of_config) > 2 or "frequency_stride" in config else None)


# The sizes of AST in transformers.
_SPECTROGRAM = ("num_mel_bins", "max_length", "frequency_stride", "time_stride", "patch_size")


def grid_of(fields: Mapping[str, object]) -> tuple[int, ...] | None:
    """Return the rows and columns of patches into which images are divided, by the attributes of a module or
    configuration; for videos, the number of time steps comes first, for spectrograms that of frequencies. None if they
    do not say."""
    for name in ("grid_size", "patches_resolution", "patch_shape", "feat_size"):
        if (grid := _pair(fields.get(name))) is not None:
            return grid
    sound = [size for name in _SPECTROGRAM if isinstance(size := fields.get(name), int) and size > 0]
    if len(sound) == len(_SPECTROGRAM):
        bins, steps, *strides, side = sound
        return tuple((size - side) // stride + 1 for size, stride in zip((bins, steps), strides, strict=True))
    image = _pair(fields.get("image_size")) or _pair(fields.get("img_size"))
    patch, tubelet = _pair(fields.get("patch_size")), _window(fields.get("tubelet_size"))
    frames = fields.get("num_frames")
    if image is not None and isinstance(frames, int) and tubelet is not None and len(tubelet) == 3:
        return frames // tubelet[0], image[0] // tubelet[1], image[1] // tubelet[2]
    if patch is None or image is None:
        return None
    return image[0] // patch[0], image[1] // patch[1]


def grid_of_config(config: Mapping[str, object], shapes: Mapping[str, Sequence[int] | None]) -> tuple[int, ...] | None:
    """Return the grid of patches by a ``config.json`` of transformers or timm, None if it does not say.

    timm's has only the size of the images; the size of the patches comes from ``shapes``, those of the tensors."""
    arguments, trained = (config.get(name) for name in ("model_args", "pretrained_cfg"))
    if not isinstance(trained, Mapping):
        parts = (config.get(name) for name in ("vision_config", "backbone_config"))
        return grid_of(next((part for part in parts if isinstance(part, Mapping)), config))
    own = arguments if isinstance(arguments, Mapping) else {}
    patches = (shape for key, shape in shapes.items() if key.endswith("patch_embed.proj.weight") and shape)
    size = trained.get("input_size")
    image = own.get("img_size") or (size[-2:] if isinstance(size, list) else None)
    return grid_of({"image_size": image, "patch_size": own.get("patch_size") or tuple(next(patches, ()))[-2:]})


def _window(value: object) -> tuple[int, ...] | None:
    """Return the sides of a window: two, or three over time and images. None if the value is not a size."""
    if isinstance(value, list | tuple) and [type(side) for side in value] == [int] * 3 and min(value) > 0:
        return tuple(value)
    return _pair(value)


def _pair(value: object) -> tuple[int, int] | None:
    """Return a size as a pair; None if it is not one or two positive integers."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
        return None
    return pair[0], pair[1]


# torch's own layers. Their hooks supply counters and the shapes of lazy layers, which the rules take into account.
_TORCH = "torch.nn.modules."


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module or one inside it customises loading."""
    plain = torch.nn.Module
    if type(module).load_state_dict is not plain.load_state_dict:
        return True
    for child in module.modules():
        if type(child)._load_from_state_dict is not plain._load_from_state_dict:
            owner = next(base for base in type(child).__mro__ if "_load_from_state_dict" in vars(base))
            if not owner.__module__.startswith(_TORCH):
                return True
        hooks = (*child._load_state_dict_pre_hooks.values(), *child._load_state_dict_post_hooks.values())
        if any(not getattr(getattr(hook, "hook", hook), "__module__", "").startswith(_TORCH) for hook in hooks):
            return True
    return False


def _loads(module: torch.nn.Module, checkpoint: Checkpoint) -> frozenset[str] | None:
    """Return the parameters that a strict load gives values, None if it fails.

    The load is tried on a copy on the meta device, where values cost nothing, and then on one full of NaN: with a hook
    that drops unknown keys every load succeeds, and only the values show what was loaded. Buffers on the meta device
    have no values to keep, so they become NaN too, or zero."""
    import copy
    import warnings

    tensors = (*module.parameters(), *module.buffers())
    on_meta: dict[int, torch.Tensor] = {
        id(tensor): torch.nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else tensor.detach().to("meta")
        for tensor in tensors
    }
    of_nan: dict[int, torch.Tensor] = {
        id(tensor): torch.nn.Parameter(torch.full(tensor.shape, math.nan, dtype=tensor.dtype), tensor.requires_grad)
        for tensor in module.parameters()
        if tensor.is_floating_point() and not _is_lazy(tensor)
    }
    of_nan |= {
        id(tensor): torch.full(tensor.shape, math.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
        for tensor in module.buffers()
        if tensor.is_meta and not _is_lazy(tensor)
    }
    for memo in (on_meta, of_nan):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that loading into a meta tensor does nothing
                trial = copy.deepcopy(module, dict(memo))
                trial.load_state_dict(checkpoint.state_dict(mmap=True), strict=True)
        except LOAD_ERRORS as error:
            if memo is of_nan or "Error(s) in loading state_dict" in str(error):
                return None
    return frozenset(
        key
        for key, tensor in trial.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
        if _is_lazy(tensor) or not tensor.is_floating_point() or not tensor.numel() or not bool(tensor.isnan().all())
    )


def target_from_checkpoint(
    checkpoint: Checkpoint,
    config: Mapping[str, object] = MappingProxyType({}),
    heads: frozenset[int] = frozenset(),
) -> Target:
    """Return the target for a checkpoint that has to fit like ``checkpoint``, whose ``config.json`` is ``config``.

    Parameters and buffers are distinguished by what the file says, else by name and dtype."""
    specs = {key: spec for key, spec in checkpoint.specs.items() if not _is_extra_state(key)}
    return Target(
        label=checkpoint.path,
        slots={key: Slot(spec.dtype, spec.shape, _kind_of(key, spec)) for key, spec in specs.items()},
        entries=frozenset(checkpoint.entries) - frozenset(specs),
        ties=ties(specs),
        library="transformers" if "transformers_version" in config else "timm" if "pretrained_cfg" in config else "",
        grids={}
        if (grid := grid_of_config(config, {k: spec.shape for k, spec in specs.items()})) is None
        else {"": grid},
        heads=heads,
        reference=checkpoint,
    )


def _is_lazy(tensor: torch.Tensor) -> bool:
    return bool(torch.nn.parameter.is_lazy(tensor))


def _is_extra_state(key: str) -> bool:
    """Return whether a key holds what ``get_extra_state`` returned, which torch does not check."""
    return key.rpartition(".")[2] == "_extra_state"


def _slot_of(tensor: torch.Tensor, is_parameter: bool) -> Slot:
    # The shape of an uninitialised tensor raises.
    shape = None if _is_lazy(tensor) else tuple(tensor.shape)
    return Slot(str(tensor.dtype).removeprefix("torch."), shape, PARAMETER if is_parameter else BUFFER)


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tied tensors: the same object, or the same view of the same storage.

    Data pointers do not work: they are 0 for every tensor that is empty or on the meta device."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or _is_lazy(tensor):
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _values(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {key: tensor.detach().cpu() for key, tensor in tensors.items() if not (_is_lazy(tensor) or tensor.is_meta)}


def _kind_of(key: str, spec: TensorSpec) -> str:
    """Return whether a tensor of a file was a parameter or a buffer, guessing if the file does not say."""
    if spec.is_parameter:
        return PARAMETER
    dtype = DTYPES[spec.dtype]
    is_real_valued = dtype.is_float or dtype.is_complex or dtype.is_quantized
    return BUFFER if is_buffer_name(key, spec.shape) or not is_real_valued else PARAMETER
