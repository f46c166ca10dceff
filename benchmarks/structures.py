"""Writes the table of known structures, ``ckptfix/known/structures.bin``.

``python -m benchmarks.structures timm torchvision …`` builds every model of these libraries on the meta device, and
replaces their models in the table; other libraries stay. So libraries that cannot be installed together are gathered
one after the other.

A model is built with its defaults, then with numbers of classes, input channels and words that no layer has (primes):
sizes that are multiples of them are written as ``c``, ``4c``, ``i`` or ``v`` in the table. It is built once more for
larger images, which shows the tables of positions."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import signal
import sys
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ckptfix.core.target import BUFFER, Target, target_from_module
from ckptfix.known.table import (
    PATH,
    SKETCH,
    Items,
    KnownStructures,
    expanded,
    fixed,
    hashes_of,
    is_passing,
    starred,
    text_of,
)

CLASSES, CHANNELS, WORDS = 1009, 1013, 1_000_003
MARKS = {"classes": ("c", CLASSES), "channels": ("i", CHANNELS), "words": ("v", WORDS)}
SECONDS, KEYS = 60, 20_000
"""Models that take longer to build, or have more tensors, are left out."""

Build = Callable[..., torch.nn.Module]
"""Builds a model. Accepts ``classes``, ``channels``, ``words`` and ``image``, if the model does."""

Models = Iterator[tuple[str, Build, int]]
"""Names, builders, and the default size of images, 0 without one."""


# ---- libraries


def timm_models() -> Models:
    import timm

    def build(name: str, image: int = 0, **given: int) -> torch.nn.Module:
        arguments: dict[str, Any] = _renamed(given, classes="num_classes", channels="in_chans")
        if image:
            arguments["img_size"] = image
        return timm.create_model(name, **arguments)

    for name in timm.list_models():
        settings = timm.get_pretrained_cfg(name)
        yield name, partial(build, name), settings.input_size[-1] if settings is not None else 0


def torchvision_models() -> Models:
    from torchvision import models

    def build(name: str, image: int = 0, quantize: bool = False, **given: int) -> torch.nn.Module:
        arguments: dict[str, Any] = {"weights": None, **({"quantize": True} if quantize else {})}
        if image:
            arguments["image_size"] = image
        if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
            arguments["weights_backbone"] = None
        return models.get_model(name, **arguments, **_renamed(given, classes="num_classes"))

    # A quantised model is a float model with the same names until it is converted. Only ViT accepts a size of images.
    for name in models.list_models():
        is_quantised = name.startswith("quantized_")
        yield name, partial(build, name, quantize=True) if is_quantised else partial(build, name), 224


def transformers_models() -> Models:
    import transformers

    def build(cls: Any, image: int = 0, **given: int) -> torch.nn.Module:
        config = cls.config_class()
        if image:
            config.image_size = image
        for name, value in _renamed(given, classes="num_labels", channels="num_channels", words="vocab_size").items():
            if name not in ("num_labels",) and not isinstance(getattr(config, name, None), int):
                raise TypeError(f"no {name}")
            setattr(config, name, value)
        return cls(config)

    for name in sorted(dir(transformers)):
        with suppress(Exception):  # what needs a package that is not installed
            cls = getattr(transformers, name)
            if (
                isinstance(cls, type)
                and issubclass(cls, transformers.PreTrainedModel)
                and cls.config_class is not None
                and not name.endswith(("PreTrainedModel", "PretrainedModel"))
            ):
                size = getattr(cls.config_class(), "image_size", 0)
                yield name, partial(build, cls), size if isinstance(size, int) else 0


def diffusers_models() -> Models:
    import diffusers

    def build(cls: Any, **given: int) -> torch.nn.Module:
        return cls(**_renamed(given, channels="in_channels"))

    for name in sorted(dir(diffusers)):
        with suppress(Exception):  # what needs a package that is not installed
            cls = getattr(diffusers, name)
            if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and cls is not diffusers.ModelMixin:
                yield name, partial(build, cls), 0


def open_clip_models() -> Models:
    import open_clip

    def build(name: str, image: int = 0) -> torch.nn.Module:
        # It would choose the CPU as its device.
        return open_clip.create_model(
            name,
            device="meta",
            force_image_size=image or None,
            load_weights=False,
            pretrained_image=False,
            pretrained_text=False,
        )

    for name in open_clip.list_models():
        size = open_clip.get_model_config(name)["vision_cfg"].get("image_size", 0)
        yield name, partial(build, name), size if isinstance(size, int) else 0


def smp_models() -> Models:
    import segmentation_models_pytorch as smp

    def build(decoder: str, encoder: str, **given: int) -> torch.nn.Module:
        names = _renamed(given, classes="classes", channels="in_channels")
        return getattr(smp, decoder)(encoder_name=encoder, encoder_weights=None, **names)

    decoders = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus PAN UPerNet Segformer DPT".split()
    encoders = (
        *smp.encoders.get_encoder_names(),
        *"tu-convnext_tiny tu-vit_base_patch16_224 tu-vit_base_patch16_224.augreg_in21k".split(),
        *"tu-mobilenetv3_large_100".split(),
    )
    return (
        (f"{decoder}-{encoder}", partial(build, decoder, encoder), 0) for decoder in decoders for encoder in encoders
    )


def torchaudio_models() -> Models:
    from torchaudio import models

    for name in dir(models):
        if name[0].islower() and inspect.isfunction(maker := getattr(models, name)):
            yield name, maker, 0


def segment_anything_models() -> Models:
    from segment_anything import sam_model_registry

    return ((name, build, 0) for name, build in sam_model_registry.items() if name != "default")


def dinov2_models() -> Models:
    from dinov2.hub import backbones

    for name in dir(backbones):
        if name.startswith("dinov2_"):
            yield name, partial(getattr(backbones, name), pretrained=False), 0


LIBRARIES: dict[str, tuple[str, Callable[[], Models]]] = {
    "timm": ("timm", timm_models),
    "torchvision": ("torchvision", torchvision_models),
    "transformers": ("transformers", transformers_models),
    "diffusers": ("diffusers", diffusers_models),
    "open_clip": ("open_clip_torch", open_clip_models),
    "smp": ("segmentation_models_pytorch", smp_models),
    "torchaudio": ("torchaudio", torchaudio_models),
    "segment_anything": ("segment-anything", segment_anything_models),
    "dinov2": ("dinov2", dinov2_models),
}


def _renamed(given: Mapping[str, int], **names: str) -> dict[str, int]:
    if unknown := given.keys() - names.keys():
        raise TypeError(f"takes no {', '.join(unknown)}")
    return {names[name]: value for name, value in given.items()}


# ---- one model

Dim = int | str
Entry = tuple[str, tuple[Dim, ...], str, bool]
"""Key, shape, dtype, and whether it is a buffer."""


class Structure(NamedTuple):
    """What models with the same structure share; ``tokens`` are as in the table."""

    tokens: tuple[tuple[str, str], ...]
    transient: tuple[str, ...]
    others: tuple[str, ...]
    ties: tuple[tuple[str, ...], ...]


Structures = dict[Structure, list[tuple[str, Mapping[str, int]]]]
"""The models of each structure with their default sizes."""


def gather(build: Build, image: int) -> tuple[Structure, dict[str, int]]:
    """Return the structure of a model and its default sizes."""
    base = _target(build)
    plain = _entries(base)
    marked, sizes = plain, dict[str, int]()
    choices: list[tuple[str, ...]] = [
        ("classes", "channels", "words"),
        ("classes", "channels"),
        ("classes", "words"),
        ("channels", "words"),
        ("classes",),
        ("channels",),
        ("words",),
    ]
    for chosen in choices:
        with suppress(Exception):  # it accepts no such argument, or cannot be built with it
            other = _entries(_target(partial(build, **{each: MARKS[each][1] for each in chosen})))
            found = [(key, _marked(shape, chosen), dtype, buffer) for key, shape, dtype, buffer in other]
            if (solved := _sizes(found, plain)) is not None:
                marked, sizes = found, solved
                break
    if "i" not in "".join(str(size) for _, shape, _, _ in marked for size in shape):
        marked, sizes = _with_stem(marked, sizes)
    with suppress(Exception):  # it accepts no size of images
        larger = {key: shape for key, shape, _, _ in _entries(_target(partial(build, image=2 * image or None)))}
        usual = {key: shape for key, shape, _, _ in plain}
        if larger.keys() == usual.keys() and larger != usual and image:
            marked = [
                (key, _with_image(shape, usual.get(key, ()), larger.get(key, ())), dtype, buffer)
                for key, shape, dtype, buffer in marked
            ]
            sizes["s"] = image
    tokens = tuple((key, _token(shape, dtype, buffer)) for key, shape, dtype, buffer in marked)
    return Structure(tokens, tuple(sorted(base.transient)), tuple(sorted(base.entries)), base.ties), sizes


def _target(build: Callable[[], torch.nn.Module]) -> Target:
    signal.alarm(SECONDS)
    try:
        with torch.device("meta"):
            target = target_from_module(build())
    except (NotImplementedError, RuntimeError):  # it computes with its weights while it is built
        target = target_from_module(build())
    finally:
        signal.alarm(0)
    if len(target.slots) > KEYS:
        raise ValueError(f"{len(target.slots)} tensors")
    return target


def _entries(target: Target) -> list[Entry]:
    return [(key, slot.shape or (), slot.dtype, slot.kind == BUFFER) for key, slot in target.slots.items()]


def _marked(shape: Sequence[Dim], chosen: Iterable[str]) -> tuple[Dim, ...]:
    return tuple(_mark(int(size), [MARKS[each] for each in chosen]) for size in shape)


def _mark(size: int, marks: Iterable[tuple[str, int]]) -> Dim:
    for letter, prime in marks:
        if size and size % prime == 0:
            return f"{size // prime if size != prime else ''}{letter}"
        if size == prime + 1:
            return f"{letter}+1"
    return size


def _with_image(shape: tuple[Dim, ...], usual: tuple[Dim, ...], larger: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the shape with sizes that depend on the image written as the default, and that for one twice as large."""
    if not len(shape) == len(usual) == len(larger):
        return shape
    return tuple(size if one == two else f"{one}s{two}" for size, one, two in zip(shape, usual, larger, strict=True))


def _sizes(found: list[Entry], plain: list[Entry]) -> dict[str, int] | None:
    """Return the sizes for which the marked structure equals the plain one; None if there are none."""
    sizes: dict[str, int] = {}
    usual = {key: shape for key, shape, _, _ in plain}
    for key, shape, _, _ in found:
        for size, real in zip(shape, usual.get(key, ()), strict=False):
            if isinstance(size, str):
                factor, letter, more = size.partition(size.strip("0123456789+")[0])
                sizes[letter] = (int(real) - int(more or 0)) // int(factor or 1)
    for key, shape, _, _ in found:
        if key not in usual and any("c" in str(size) for size in shape):
            sizes["c"] = 0
    return sizes if _made(found, sizes) == plain else None


def _made(found: list[Entry], sizes: Mapping[str, int]) -> list[Entry]:
    made = []
    for key, shape, dtype, buffer in found:
        if sizes.get("c") != 0 or not any("c" in str(size) for size in shape):
            made.append((key, tuple(_number(size, sizes) for size in shape), dtype, buffer))
    return made


def _number(size: Dim, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    letter = size.strip("0123456789+")[0]
    factor, _, more = size.partition(letter)
    return sizes.get(letter, 0) * int(factor or 1) + int(more or 0)


def _with_stem(entries: list[Entry], sizes: dict[str, int]) -> tuple[list[Entry], dict[str, int]]:
    """Mark the input channels of the first convolution, for a library without an argument for them."""
    entries = [*entries]
    for at, (key, shape, dtype, buffer) in enumerate(entries):
        if len(shape) >= 4 and not buffer:
            if shape[1] == 3:
                entries[at] = (key, (shape[0], "i", *shape[2:]), dtype, buffer)
                sizes = {**sizes, "i": 3}
            break
    return entries, sizes


class _TooLong(Exception):
    pass


def _stop(*_: object) -> None:
    raise _TooLong(f"more than {SECONDS} s")


def gather_library(library: str, structures: Structures, versions: dict[str, str]) -> None:
    """Replace the models of a library by those of the installed release."""
    package, models = LIBRARIES[library]
    for structure, known in [*structures.items()]:
        structures[structure] = [model for model in known if _library(model) != library]
    count = 0
    for name, build, image in models():
        try:
            structure, sizes = gather(build, image)
        except Exception as error:  # noqa: BLE001 - a model may need anything; it is left out and reported
            print(f"{library}/{name}: {type(error).__name__} {str(error)[:100]!r}", file=sys.stderr, flush=True)
            continue
        if not structure.tokens or any(_SIGNS & set(key) for key, _ in structure.tokens):
            print(f"{library}/{name}: left out", file=sys.stderr)
            continue
        count += 1
        structures.setdefault(structure, []).append((f"{library}/{name}", sizes))
    versions[library] = importlib.metadata.version(package).partition("+")[0]
    print(f"{library} {versions[library]}: {count} models", flush=True)


# ---- the table

BLOCK = 24
"""Structures per block: more make the table smaller and look-ups slower."""

_SIGNS = set(" :=@~!;\n")


class Nodes:
    """The lines of one block, in which equal modules share a line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[str, int] = {}

    def add(self, line: str) -> int:
        """Return the number of a line, adding it if it is new."""
        if line not in self._known:
            self._known[line] = len(self.lines)
            self.lines.append(line)
        return self._known[line]

    def tree(self, items: Sequence[tuple[str, str]]) -> int:
        """Return the number of the line of a module. ``items`` are its keys with their tokens."""
        words: list[str] = []
        children: dict[str, list[tuple[str, str]]] = {}
        for key, token in items:
            name, dot, rest = key.partition(".")
            if dot:
                children.setdefault(name, []).append((rest, token))
            else:
                words.append(f"{token}{name}" if token in "~!" else f"{name}{token}")
        runs: list[tuple[str, str, int]] = []
        for name, inner in children.items():
            line = self.tree(inner)
            first, last, same = runs[-1] if runs else ("", "", -1)
            if same == line and last.isdigit() and name == str(int(last) + 1):
                runs[-1] = (first, name, line)
            else:
                runs.append((name, name, line))
        words += [f"{first}@{line}" if first == last else f"{first}-{last}@{line}" for first, last, line in runs]
        return self.add(" ".join(words))


def _token(shape: Sequence[Dim], dtype: str, buffer: bool) -> str:
    text = ".".join(map(str, shape))
    return f"{'=' if buffer else ':'}{text}{'' if dtype == 'float32' else f'/{dtype}'}"


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def unpacked(table: KnownStructures) -> tuple[Structures, dict[str, str]]:
    """Return the structures of a table, and the versions of its libraries."""
    structures: Structures = {}
    for number in range(len(table)):
        found = table.structure(number)
        parts = tuple(sorted(found.transient)), tuple(sorted(found.others)), found.ties
        structures[Structure(tuple(found.tokens.items()), *parts)] = [(each.name, each.sizes) for each in found.models]
    return structures, dict(table.versions)


def packed(structures: Structures, versions: Mapping[str, str]) -> bytes:
    """Return the file of the table."""
    named = {structure: sorted(models, key=_library) for structure, models in structures.items() if models}
    ordered = sorted(named.items(), key=lambda item: _natural(item[1][0][0]))
    index, blocks, sketches = list[str](), list[bytes](), list[tuple[int, int]]()
    for start in range(0, len(ordered), BLOCK):
        nodes, modules = Nodes(), dict[int, Items]()
        roots = []
        for number, (content, models) in enumerate(ordered[start : start + BLOCK], start):
            tokens, transient, others, ties = content
            shapes = fixed(dict(tokens))
            below = [(starred(key), shape) for key, shape in shapes.items() if "." in key]
            for each in (shapes.items(), below):
                sketches += [(value, number) for value in hashes_of(text_of(*tensor) for tensor in each)[:SKETCH]]
            items = [*tokens, *((key, "~") for key in transient), *((key, "!") for key in others)]
            root = nodes.tree(items)
            if [(key, token) for key, token in expanded(nodes.lines, root, modules) if token not in "~!"] != list(
                tokens
            ):
                # Its keys are not in the order of its modules, so each is written in full.
                root = nodes.add(
                    " ".join(f"{key}{token}" if token not in "~!" else f"{token}{key}" for key, token in items)
                )
            roots.append((" ".join((str(root), *("=".join(group) for group in ties))), content, models))
        places = [nodes.add(line) for line, _, _ in roots]
        for place, (_, content, models) in zip(places, roots, strict=True):
            words, shown = [], dict[str, int]()
            for name, sizes in models:
                own = "".join(f";{letter}{size}" for letter, size in sorted(sizes.items()))
                words.append(name if sizes == shown else f"{name}{own}")
                shown = shown or sizes
            index.append(
                f"{len(blocks)} {place} {sum(not is_passing(key, ()) for key, _ in content[0])} {' '.join(words)}"
            )
        blocks.append(zlib.compress("\n".join(nodes.lines).encode(), 9))
    ends = list(accumulate(map(len, blocks)))
    head = (
        f"{' '.join(f'{name}={version}' for name, version in sorted(versions.items()))}\n{' '.join(map(str, ends))}\n"
    )
    text = zlib.compress((head + "\n".join(index)).encode(), 9)
    sketches.sort()
    hashes, owners = array("I", [value for value, _ in sketches]), array("H", [owner for _, owner in sketches])
    if sys.byteorder != "little":
        hashes.byteswap()
        owners.byteswap()
    first = f"ckptfix-structures {len(text)} {len(sketches)}\n".encode()
    return b"".join((first, text, hashes.tobytes(), owners.tobytes(), *blocks))


def _library(model: tuple[str, Mapping[str, int]]) -> str:
    return model[0].partition("/")[0]


def main() -> None:
    """Gather the libraries on the command line, one after the other."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    structures, versions = unpacked(KnownStructures())
    for library in sys.argv[1:]:
        gather_library(library, structures, versions)
        PATH.write_bytes(packed(structures, versions))
    print(f"{sum(map(bool, structures.values()))} structures, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
