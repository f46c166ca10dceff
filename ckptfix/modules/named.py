"""Builds models by their name in a library: ``timm:resnet50[num_classes=10]``.

A name is ``SCHEME:NAME``, optionally with keyword arguments in brackets; they are plain data, and nothing is evaluated.
A scheme is a function from the name to a builder, which makes the model from keyword arguments, without pretrained
weights. It raises ``LookupError`` with a sentence for an unknown name. Other packages add schemes as entry points of
the group ``ckptfix.models``."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.core.lazy import torch
from ckptfix.core.likeness import SIZE_ARGUMENTS
from ckptfix.errors import CkptfixError, Opt, TargetError

ModelBuilder = Callable[..., Any]  # builds a model from keyword arguments


def timm(name: str) -> ModelBuilder:
    """``timm:NAME``, or ``timm:FOLDER`` with a config.json as timm writes it."""
    library = importlib.import_module("timm")
    if Path(name).is_dir():
        return _without_weights(library.create_model, f"local-dir:{name}", pretrained=False)
    _known("timm", name.partition(".")[0], library.list_models())
    return _without_weights(library.create_model, name, pretrained=False)


def torchvision(name: str) -> ModelBuilder:
    """``torchvision:NAME``, with or without its module: ``detection.ssd300_vgg16``."""
    library = importlib.import_module("torchvision.models")
    module, _, own = name.removeprefix("models.").rpartition(".")
    own = _known("torchvision", f"quantized_{own}" if module == "quantization" else own, library.list_models())
    build = library.get_model_builder(own)
    accepted = inspect.signature(build).parameters
    return _without_weights(build, **{key: None for key in ("weights", "weights_backbone") if key in accepted})


def _without_weights(build: ModelBuilder, *words: Any, **without: Any) -> ModelBuilder:
    """Return a builder that never fetches weights, even if its arguments ask for them, because the file has them."""
    return lambda **options: build(*words, **{**options, **without})


def transformers(name: str) -> ModelBuilder:
    """``transformers:FOLDER`` with a config.json that names the class; or ``transformers:CLASS`` with the fields of its
    configuration, ``config=FOLDER``, or both."""
    library = importlib.import_module("transformers")
    if (place := _config_in(name)) is not None:
        (named, *_) = json.loads(place.read_text(encoding="utf-8")).get("architectures") or ["AutoModel"]
        return partial(_of_transformers, getattr(library, named, library.AutoModel), config=str(place))
    made = getattr(library, _known("transformers", name, dir(library), _OR_FOLDER))
    if not (hasattr(made, "_from_config") or (hasattr(made, "from_config") and name.startswith("Auto"))):
        raise LookupError(f"{name} of transformers is not a model")
    return partial(_of_transformers, made)


def _of_transformers(made: Any, config: str | None = None, **fields: Any) -> Any:
    from transformers import AutoConfig

    if config is not None:
        options = {"return_unused_kwargs": True, "trust_remote_code": False}
        found, unknown = AutoConfig.from_pretrained(str(_config_given(config)), **options, **fields)
        unknown.pop("trust_remote_code", None)
    elif not hasattr(made, "config_class"):
        raise TypeError(f"{made.__name__} takes any architecture: add config=FOLDER")
    else:
        unknown = fields.keys() - made.config_class().to_dict().keys()
        found = made.config_class(**fields)
    if unknown:
        raise TypeError(f"{type(found).__name__} has no field {', '.join(sorted(unknown))}")
    if hasattr(made, "_from_config"):
        return made._from_config(found)
    return made.from_config(found, trust_remote_code=False)


def diffusers(name: str) -> ModelBuilder:
    """``diffusers:FOLDER`` with the config.json of one model, such as the unet of a pipeline; or ``diffusers:CLASS``
    with its arguments, ``config=FOLDER``, or both."""
    library = importlib.import_module("diffusers")
    if Path(name, "model_index.json").is_file():
        parts = sorted(place.parent.name for place in Path(name).glob("*/config.json"))
        raise LookupError(f"{name} is a pipeline; name one of its models: {', '.join(f'{name}/{p}' for p in parts)}")
    if (place := _config_in(name)) is None:
        made = getattr(library, _known("diffusers", name, dir(library), _OR_FOLDER))
        if not (hasattr(made, "from_config") and hasattr(made, "load_state_dict")):
            raise LookupError(f"{name} of diffusers is not a model")
        return partial(_of_diffusers, made)
    if (named := json.loads(place.read_text(encoding="utf-8")).get("_class_name")) is None:
        return transformers(name)  # the text encoder of a pipeline
    return partial(_of_diffusers, getattr(library, _known("diffusers", named, dir(library))), config=str(place))


def _of_diffusers(made: Any, config: str | None = None, **fields: Any) -> Any:
    if config is None:
        return made(**fields)
    if unknown := fields.keys() - inspect.signature(made.__init__).parameters.keys():
        raise TypeError(f"{made.__name__} has no argument {', '.join(sorted(unknown))}")
    return made.from_config({**json.loads(_config_given(config).read_text(encoding="utf-8")), **fields})


def open_clip(name: str) -> ModelBuilder:
    """``open_clip:NAME``."""
    library = importlib.import_module("open_clip")
    own = _known("open_clip", name.replace("/", "-"), library.list_models())

    def build(**options: Any) -> Any:
        # pretrained_text is True by default, for text towers from the hub, and the device moves the model.
        without = {"pretrained": None, "pretrained_text": False}
        return library.create_model(own, **{"device": torch.get_default_device(), **options, **without})

    return build


def smp(name: str) -> ModelBuilder:
    """``smp:ARCHITECTURE``, a model of segmentation_models_pytorch."""
    library = importlib.import_module("segmentation_models_pytorch")
    models = {key: made for key, made in vars(library).items() if hasattr(made, "load_state_dict")}
    made = models[_known("segmentation_models_pytorch", name, models)]

    def build(**options: Any) -> Any:
        encoder = str(options.get("encoder_name", "tu-"))
        if not encoder.startswith("tu-"):  # encoders of timm
            _known("segmentation_models_pytorch", encoder, library.encoders.get_encoder_names(), kind="encoder")
        return made(**{**options, "encoder_weights": None})

    return build


def torchaudio(name: str) -> ModelBuilder:
    """``torchaudio:NAME``, a function or class of torchaudio.models."""
    library = importlib.import_module("torchaudio.models")
    own = _known("torchaudio", name.removeprefix("models."), [key for key in dir(library) if key[0] != "_"])
    made: ModelBuilder = getattr(library, own)
    return made


def ultralytics(name: str) -> ModelBuilder:
    """``ultralytics:FILE.yaml``, the user's own file or one in the package."""
    library = importlib.import_module("ultralytics")
    if not name.endswith((".yaml", ".yml")):
        raise LookupError(f"{name} is not a model's YAML file, like yolov8n.yaml")
    tasks = importlib.import_module("ultralytics.nn.tasks")
    try:
        described = tasks.yaml_model_load(name)
    except FileNotFoundError as error:
        raise LookupError(f"ultralytics has no {name}, and there is no such file") from error
    # YOLO maps tasks to classes, but can only be constructed from a file.
    classes = library.YOLO.task_map.fget(library.YOLO.__new__(library.YOLO))
    return partial(classes[tasks.guess_model_task(described)]["model"], name, verbose=False)


def detectron2(name: str) -> ModelBuilder:
    """``detectron2:CONFIG``: a YAML file, or one of detectron2's model zoo. Arguments are options of the
    configuration."""
    settings = importlib.import_module("detectron2.config")
    zoo = importlib.import_module("detectron2.model_zoo")
    place, is_own = name, Path(name).is_file()
    if not is_own:
        try:
            place = zoo.get_config_file(name)
        except RuntimeError as error:
            raise LookupError(f"there is no file {name}, nor a configuration of this name in detectron2") from error

    def build(**options: Any) -> Any:
        config = settings.get_cfg()
        # detectron2's own files contain expressions that YAML evaluates; users' files are plain data.
        config.merge_from_file(place, allow_unsafe=not is_own)
        config.merge_from_list([word for pair in options.items() for word in pair])
        config.MODEL.WEIGHTS, config.MODEL.DEVICE = "", str(torch.get_default_device())
        return importlib.import_module("detectron2.modeling").build_model(config)

    return build


# The schemes of this package, each with the name of its library for `pip install`.
SCHEMES: Mapping[str, tuple[Callable[[str], ModelBuilder], str]] = {
    "timm": (timm, "timm"),
    "torchvision": (torchvision, "torchvision"),
    "transformers": (transformers, "transformers"),
    "diffusers": (diffusers, "diffusers"),
    "open_clip": (open_clip, "open_clip_torch"),
    "smp": (smp, "segmentation-models-pytorch"),
    "torchaudio": (torchaudio, "torchaudio"),
    "ultralytics": (ultralytics, "ultralytics"),
    "detectron2": (detectron2, "git+https://github.com/facebookresearch/detectron2"),
}

_GROUP = "ckptfix.models"
_MODULES = {"smp": "segmentation_models_pytorch"}
_OR_FOLDER = "and there is no such folder with a config.json"
_SPEC = re.compile(r"(\w+):(.+?)(?:\(((?:\s*[\w.]+\s*=.*)?)\)|\[((?:\s*[\w.]+\s*=.*)?)\])?", re.DOTALL)
_JSON = {"true": True, "false": False, "null": None, "none": None}


class Name(Struct, frozen=True):
    """The parts of ``SCHEME:NAME(KEY=VALUE, …)``, or with square brackets, which need less quoting in a shell."""

    scheme: str
    name: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, spec: str) -> Name | None:
        """Parse a name; return None if it has no scheme. Raises ``TargetError`` for malformed arguments."""
        if (match := _SPEC.fullmatch(spec)) is None:
            return None
        try:
            return cls(match[1], match[2], dict(_arguments(match[3] or match[4] or "")))
        except ValueError as error:
            raise TargetError(Opt("model", spec), f": {error}; write {match[1]}:NAME[key=value,key=value]") from error


def _arguments(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of ``KEY=VALUE, …``. A value is a literal of Python or JSON, else a string. Raises
    ``ValueError`` for anything else."""
    begun = ""
    for piece in text.split(",") if text.strip() else ():
        begun += piece
        key, equals, value = (part.strip() for part in begun.partition("="))
        if not (key.replace(".", "").isidentifier() and equals and value):
            raise ValueError(f"{begun.strip()!r} is not key=value")
        try:
            yield key, _JSON[value] if value in _JSON else ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError):
            if value[0] in "([{'\"":
                begun += ","  # a comma inside the value
                continue
            yield key, value
        begun = ""
    if begun:
        raise ValueError(f"{begun.rstrip(',').strip()!r} does not end")


def configuration_files(spec: str) -> list[str]:
    """Return the paths of the configuration files that the name may refer to, whether they exist or not."""
    name = Name.of(spec)
    if name is None:
        return []
    places = [place for place in (name.name, name.arguments.get("config")) if isinstance(place, str)]
    return [file for place in places for file in (place, f"{place}/config.json")]


def named_builder(spec: str) -> ModelBuilder | None:
    """Return the builder of a model by its name; None if the text does not begin with a scheme.

    Raises ``TargetError``, a line that says what to do, if the library is not installed, or for an unknown name or
    invalid arguments. The builder raises it if the library fails to build the model."""
    name = Name.of(spec)
    if name is None:
        return None
    others = ((entry.load(), "") for entry in entry_points(group=_GROUP, name=name.scheme))
    if (found := SCHEMES.get(name.scheme) or next(others, None)) is None:
        return None
    scheme, package = found
    with _failing_as(spec, f": {name.scheme} cannot be imported: "):
        try:
            build = scheme(name.name)
        except ModuleNotFoundError as error:
            if error.name is None or "." in error.name:
                raise
            missing = package if error.name == _MODULES.get(name.scheme, name.scheme) else error.name
            raise TargetError(
                Opt("model", spec), f": {error.name} is not installed; run pip install {missing or error.name}"
            ) from error
        except LookupError as error:
            raise TargetError(Opt("model", spec), f": {error}") from error
    return partial(_built, spec, build, name.arguments)


def _built(spec: str, build: ModelBuilder, given: Mapping[str, Any], *positional: Any, **more: Any) -> Any:
    if positional:
        raise TargetError(Opt("model", spec), " takes arguments by name only; give an object to ", Opt("model_args"))
    arguments = {**given, **more}
    _check_sizes(spec, arguments)
    with _failing_as(spec, " cannot be built like this: "):
        return build(**arguments)


def _check_sizes(spec: str, arguments: Mapping[str, Any]) -> None:
    """Raise ``TargetError`` for invalid sizes, on which libraries fail with obscure errors, or not at all."""
    for size, name in SIZE_ARGUMENTS.get(spec.partition(":")[0], {}).items():
        value, least = arguments.get(name), int(size != "num_classes")
        if value is None or (type(value) is int and value >= least):
            continue
        if size != "img_size" or not isinstance(value, list | tuple):
            raise TargetError(Opt("model", spec), f": {name} has to be an integer of at least {least}, not {value!r}")


@contextlib.contextmanager
def _failing_as(spec: str, words: str) -> Iterator[None]:
    """Run code of a library, offline and without its warnings, which are about unwanted weights and other libraries.
    Whatever it raises becomes a ``TargetError`` of one line, without a traceback, which would not help the user."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with _offline(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CkptfixError:
        raise
    except Exception as error:  # the library may raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        said = " ".join(lines[: 1 + lines[0].endswith(":")])  # pydantic names the field in the first line
        raise TargetError(Opt("model", spec), f"{words}{said}") from error
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep libraries from contacting the hub, so that a name never downloads anything."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ModuleNotFoundError:
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _known(library: str, name: str, names: Iterable[str], hint: str = "", kind: str = "model") -> str:
    """Return the name if it is one of ``names``, else raise ``LookupError`` with the nearest ones."""
    if name in (known := set(names)):
        return name
    close = difflib.get_close_matches(name, sorted(known), 3)
    did_you_mean = f"; did you mean {' or '.join(close)}?" if close else ""
    if "(" in name or "[" in name:
        did_you_mean = "; write arguments as NAME[key=value,key=value]"
    raise LookupError(f"{library} has no {kind} {name}{hint and f', {hint}'}{did_you_mean}")


def _config_in(name: str) -> Path | None:
    """Return the path of a configuration, given as the file or its folder; None if it does not exist."""
    place = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    return place if place.suffix == ".json" and place.is_file() else None


def _config_given(name: str) -> Path:
    if (place := _config_in(name)) is None:
        raise TypeError(f"config={name}: there is no such folder with a config.json")
    return place
