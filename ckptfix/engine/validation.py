"""Checks the settings before any work begins, and raises an error for a setting that is invalid or needs another."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ckptfix.core.adaptations import RECIPES, adaptation
from ckptfix.core.option import CHECK, LOAD, REPAIR
from ckptfix.core.options import BY_NAME, settings_of, typed_value
from ckptfix.core.rename_map import MapRule, RenameMap
from ckptfix.core.settings import FORMATS, UNIVERSAL, Settings
from ckptfix.core.wording import nearest
from ckptfix.errors import Opt, UsageError
from ckptfix.reading.opening import open_file
from ckptfix.rules import RULES

_CODE = re.compile(rf"(?:{'|'.join(sorted({rule.code[:3] for rule in RULES}))})\d{{1,3}}", re.IGNORECASE)
_DEVICE = re.compile(r"auto|cpu|mps|(?:cuda|xpu)(?::\d+)?")
LONGEST_TIMEOUT = 10**6  # seconds (eleven days); within the limits of every clock of the system
_OF_SEVERAL_TYPES = ("source_model", "rename_map", "shard_size")  # a model, a map, or a number of bytes is fine too


def checked_settings(
    given: Mapping[str, Any], model: object = None, like: object = None, function: str = REPAIR
) -> Settings:
    """Return the settings of a check or a repair, checked against the model or reference file.

    ``function`` is the library function that they were passed to. Raises ``UsageError`` for a setting that is unknown,
    invalid, or needs another setting, a model or a reference."""
    settings = parsed_settings(given, function)
    _check_target(settings, model, like)
    return settings


def parsed_settings(given: Mapping[str, Any], function: str = REPAIR) -> Settings:
    """Return the settings. Raises ``UsageError`` for one that is unknown or invalid by itself."""
    known = settings_of(function if function in (CHECK, LOAD) else REPAIR)
    defaults, own = Settings(), dict[str, Any]()
    for name, value in given.items():
        if name not in known:
            close = nearest(name, known, 0.7)
            hint = f"; did you mean {close!r}?" if close else ""
            hint = "; it is one of repair()" if name in settings_of(REPAIR) else hint
            hint = "; give map_location" if (function, name) == (LOAD, "device") else hint
            raise UsageError(f"{function}() has no setting {name!r}{hint}")
        is_free = (value is None and getattr(defaults, name) is None) or name in _OF_SEVERAL_TYPES
        own[name] = value if is_free else typed_value(BY_NAME[name], value)
    settings = Settings(**own)
    codes = {name: _codes(name, getattr(settings, name)) for name in ("select", "ignore", "accept")}
    named = tuple(_codes("replace", [name])[0] if _CODE.fullmatch(name) else name for name in settings.replace)
    settings = replace(settings, **codes, replace=named, rename_map=_rename_map(settings))
    for each in map(adaptation, settings.adapt):
        for file in each.files():
            if not Path(file).is_file():
                others = [f" or {name}={file}" for name, known in RECIPES.items() if file in known]
                hint = f"give {each.with_recipe('MAP.txt')}{''.join(others)}" if others else "check the path"
                raise UsageError(Opt("adapt", each.text), f": there is no file {file}; {hint}")
    if settings.replace and settings.fill is None:
        raise UsageError(
            Opt("replace"),
            " needs a source of values: add ",
            *(Opt("fill", "twin"), ", ", Opt("fill", "target"), " or ", Opt("fill"), " with a file"),
        )
    if settings.unmerge and not settings.adapter:
        raise UsageError(Opt("unmerge"), " needs the adapter that was merged: add ", Opt("adapter", "PATH"))
    if settings.drop_optimizer and settings.keep_optimizer:
        raise UsageError(Opt("drop_optimizer", True), " and ", Opt("keep_optimizer", True), " exclude each other")
    if settings.cast_dtype and not settings.values:
        raise UsageError(Opt("dtype"), " checks the values before casting them; omit ", Opt("values", False))

    if settings.format not in (None, *FORMATS):
        raise UsageError(Opt("format", settings.format), ": unknown format; give pth, safetensors or universal")
    if settings.format == UNIVERSAL and settings.shard_bytes is not None:
        raise UsageError(Opt("shard_size"), " and ", Opt("format", UNIVERSAL), " exclude each other")
    if not 0 < settings.timeout <= LONGEST_TIMEOUT:
        raise UsageError(Opt("timeout", settings.timeout), f": give seconds above 0 and up to {LONGEST_TIMEOUT}")
    if not _DEVICE.fullmatch(settings.device):
        raise UsageError(Opt("device", settings.device), ": not a device; give auto, cpu, cuda, cuda:1, mps or xpu")
    settings.is_for_torch_before("0")  # raises for an invalid version
    _ = settings.shard_bytes  # and for an invalid size
    return settings


def slip_of_fill(file: str) -> str | None:
    """Return what ``fill`` probably meant, if that is a word and not a file."""
    close = nearest(Path(file).name, ("target", "twin"), 0.7)
    return f"did you mean {close}?" if close else None


def _check_target(settings: Settings, model: object, like: object) -> None:
    """Raise ``UsageError`` if the settings need a model or a reference file that is not given."""
    if like is not None and not isinstance(like, (str, os.PathLike)):
        raise UsageError(
            f"like is of type {type(like).__name__}; give the path of a checkpoint, or the model itself as model"
        )
    has_factory, has_target = isinstance(model, str), model is not None or like is not None
    factory, target = Opt("model", "pkg.mod:factory"), (Opt("model"), " or ", Opt("like"))
    if model is not None and like is not None:
        raise UsageError(Opt("model"), " and ", Opt("like"), " exclude each other: give one thing to fit")
    if settings.smoke and not has_factory:
        raise UsageError("the forward test needs a factory: give ", factory)
    if settings.compare is not None and (settings.smoke is False or not has_factory):
        raise UsageError(
            *(Opt("compare"), " compares the outputs of the forward test: add ", factory),
            *(", and leave out ", Opt("smoke", False)),
        )
    if settings.compare_file is not None:
        open_file(settings.compare_file)  # raises for a wrong path before anything runs
    if settings.fill == "target" and not has_target:
        raise UsageError(Opt("fill", "target"), " takes values from a model or reference; add ", *target)
    if (file := settings.fill_file) is not None and not Path(file).exists() and (slip := slip_of_fill(file)):
        raise UsageError(Opt("fill", file), f": there is no such file; {slip}")
    if settings.fill_file is not None and not (has_target or settings.salvage or settings.replace):
        raise UsageError(
            *(Opt("fill", settings.fill_file), ": missing keys show only against a target; add ", *target),
            *(", or name the values to replace with ", Opt("replace")),
        )
    if settings.adapt and not has_target:
        raise UsageError(Opt("adapt", settings.adapt), " makes tensors fit a model or reference; add ", *target)
    if settings.source_model is not None and model is None:
        raise UsageError(Opt("source_model"), " runs along with the model that the file has to fit; add ", factory)
    if settings.recalibrate is not None and model is None:
        raise UsageError(Opt("recalibrate"), " runs data through the model; add ", factory)
    if settings.recalibrate is not None and not Path(settings.recalibrate).is_file():
        raise UsageError(Opt("recalibrate", settings.recalibrate), ": there is no such file; check the path")


def _rename_map(settings: Settings) -> RenameMap | None:
    """Return the rules of ``rename_map`` and the patterns of ``rename`` as one map, None if there are none."""
    given = settings.rename_map
    if given is None and not settings.rename:
        return None
    from ckptfix.maps.library import named_map  # most repairs need no map
    from ckptfix.maps.resolving import parsed

    rules: list[MapRule] = []
    for text in settings.rename:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            raise UsageError(Opt("rename", text), ": write it as OLD=NEW, for example encoder.*=backbone.*")
        rules.append(MapRule(old, new, by_hand=True))
    if given is not None and not isinstance(given, RenameMap):
        given = named_map(given)
    whole = RenameMap((*(given.rules if given is not None else ()), *rules), given.name if given is not None else "")
    parsed(whole)  # raises for an invalid rule
    return whole


def _codes(name: str, given: Iterable[str]) -> tuple[str, ...]:
    """Return rule codes or prefixes of codes in upper case. Raises ``UsageError`` for one that matches no rule."""
    codes = tuple(code.upper() for code in given)
    for code in codes:
        if not any(rule.code.startswith(code) for rule in RULES):
            close = nearest(code, [rule.code for rule in RULES])
            hint = f"did you mean {close}?" if close else "codes look like KEY101, BUF or VAL"
            raise UsageError(Opt(name, code), f": no rule code begins with this; {hint}")
    return codes
