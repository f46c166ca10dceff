"""What an object of a class comes to as plain data.

Known classes of the standard library, numpy, torch.optim and the common configuration packages get the form that a
reader of the file would write by hand; any other becomes a dict of what it held, with its class's name."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ckptfix.core.objects import Global, Opaque
from ckptfix.reading.pickles.arrays import dtype_label, numpy_type
from ckptfix.reading.pickles.inert import MODULE_ALIASES
from ckptfix.reading.pickles.stream import raw_bytes

_LONGEST_RANGE = 10_000
_RENAMED = {"long": "int", "unicode": "str", "xrange": "range"}
_OPTIMIZER = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)\w+\.\w+")


def today(name: Global) -> str:
    """The name of a class or function as Python 3 has it; torch.save writes many under that of Python 2."""
    module = MODULE_ALIASES.get(name.module, name.module)
    return f"{module}.{_RENAMED.get(name.name, name.name) if module == 'builtins' else name.name}"


def known_form(value: Opaque) -> Callable[[Opaque], Any] | None:
    """What makes the natural form of a known class, whether Python 2 or 3 named it; None for an unknown one."""
    return _KNOWN.get(f"{MODULE_ALIASES.get(value.cls.module, value.cls.module)}.{value.cls.name}")


def natural_form(value: Opaque) -> Any:
    """What an object of a class held, in the form that comes nearest to it. Its members are not converted yet."""
    name = str(value.cls)
    if (known := known_form(value)) is not None:
        return known(value)
    if name.startswith("pathlib."):
        return _path(value)
    if name.startswith("omegaconf."):
        attributes = value.attributes
        return attributes.get("_content", attributes.get("_val", dict(attributes)))
    if _OPTIMIZER.fullmatch(name) and (made := _optimizer(value.attributes)):
        return made
    held = [part for part in (value.args, value.kwargs, value.items, value.pairs, value.state) if part]
    if value.pairs and not value.items and (not value.state or value.attributes):
        return {**value.pairs, **value.attributes}
    if value.items and not value.pairs and not value.state:
        return list(value.items)
    if value.attributes and len(held) == 1:
        return dict(value.attributes)
    if not held:
        return name if not value.args else {}
    fields = {
        "args": value.args,
        "kwargs": dict(value.kwargs),
        "items": value.items,
        "pairs": value.pairs,
        "state": value.state,
    }
    return {"class": name, **{field: part for field, part in fields.items() if part}}


def _path(value: Opaque) -> str:
    """A path, whose pickle has its parts: the first is the root or drive."""
    separator = "\\" if "Windows" in value.cls.name else "/"
    parts = [str(part) for part in value.args]
    first = parts[0] if parts else ""
    return first + ("" if first.endswith(separator) or len(parts) < 2 else separator) + separator.join(parts[1:])


def _optimizer(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """``Optimizer.state_dict()``: parameters by their number; None where an object is no optimizer."""
    groups, state = attributes.get("param_groups"), attributes.get("state")
    state = state.pairs if isinstance(state, Opaque) else state
    if not isinstance(groups, list) or not isinstance(state, dict):
        return None
    numbers: dict[int, int] = {}
    packed = []
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return None
        packed.append({**group, "params": [numbers.setdefault(id(spec), len(numbers)) for spec in group["params"]]})
    if any(id(spec) not in numbers for spec in state):
        return None
    return {"state": {numbers[id(spec)]: row for spec, row in state.items()}, "param_groups": packed}


_SCALARS = {
    "f8": "d",
    "f4": "f",
    "f2": "e",
    "i8": "q",
    "i4": "i",
    "i2": "h",
    "i1": "b",
    "u8": "Q",
    "u4": "I",
    "u2": "H",
    "u1": "B",
    "b1": "?",
    "c8": "ff",
    "c16": "dd",
}


def _numpy_scalar(value: Opaque) -> Any:
    code, order = numpy_type(value.args[0]) if value.args else ("", "<")
    data = value.args[1] if len(value.args) > 1 else None
    if isinstance(data, str):
        data = raw_bytes(data, "replace")
    sign = ">" if order == ">" else "<"
    form = _SCALARS.get(code)
    if isinstance(data, bytes):
        if form is not None and len(data) == struct.calcsize(f"={form}"):
            numbers = struct.unpack(f"{sign}{form}", data)
            return complex(*numbers) if code[0] == "c" else numbers[0]
        if code[:1] == "U" and not len(data) % 4:
            return data.decode("utf-32-be" if sign == ">" else "utf-32-le", "replace").rstrip("\0")
        if code[:1] == "S":
            return data.rstrip(b"\0")
    return {"class": "numpy.generic", "dtype": dtype_label(value.args[0]) if value.args else "", "data": data}


def _bytes(value: Any) -> bytes | None:
    data = raw_bytes(value, "replace") if isinstance(value, str) else value
    return data if isinstance(data, bytes) else None


def _moment(value: Opaque) -> Any:
    """``datetime.datetime`` and ``date`` from the bytes of their pickle, in ISO 8601."""
    data = _bytes(value.args[0]) if value.args else None
    if data is None or len(data) not in (4, 10):
        return {"class": str(value.cls), "args": list(value.args)}
    text = f"{data[0] << 8 | data[1]:04}-{data[2] & 0x7F:02}-{data[3]:02}"
    if len(data) == 10:
        text += f"T{_clock(data[4:])}"
    return _zoned(value, text)


def _time(value: Opaque) -> Any:
    """``datetime.time``: hour, minute, second and three bytes of microseconds; the top bit is the fold."""
    data = _bytes(value.args[0]) if value.args else None
    if data is None or len(data) != 6:
        return {"class": str(value.cls), "args": list(value.args)}
    return _zoned(value, _clock(bytes([data[0] & 0x7F]) + data[1:]))


def _clock(data: bytes) -> str:
    microsecond = data[3] << 16 | data[4] << 8 | data[5]
    return f"{data[0]:02}:{data[1]:02}:{data[2]:02}" + (f".{microsecond:06}" if microsecond else "")


def _zoned(value: Opaque, text: str) -> Any:
    """A moment with its offset from UTC, where it has one; as a record where its zone is a name."""
    if len(value.args) < 2 or value.args[1] is None:
        return text
    zone = value.args[1]
    offset = _timezone(zone) if isinstance(zone, Opaque) and str(zone.cls) == "datetime.timezone" else None
    if isinstance(offset, str):
        return f"{text}{offset}"
    return {"class": str(value.cls), "local": text, "tzinfo": zone}


def _timezone(value: Opaque) -> Any:
    """``datetime.timezone`` as an offset from UTC: ``+02:00``."""
    delta = value.args[0] if value.args else None
    seconds = _timedelta(delta) if isinstance(delta, Opaque) else None
    if not isinstance(seconds, float) or abs(seconds) >= 86_400 or seconds % 60:
        return {"class": str(value.cls), "args": list(value.args)}
    minutes = int(abs(seconds)) // 60
    return f"{'-' if seconds < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"


def _timedelta(value: Opaque) -> Any:
    """``datetime.timedelta`` in seconds."""
    if len(value.args) != 3 or any(type(part) is not int or abs(part) > 1 << 40 for part in value.args):
        return {"class": str(value.cls), "args": list(value.args)}
    days, seconds, microseconds = value.args
    return ((days * 86_400 + seconds) * 1_000_000 + microseconds) / 1_000_000


def _range(value: Opaque) -> Any:
    """The numbers of a range, or its arguments where they are too many."""
    if 1 <= len(value.args) <= 3 and all(type(bound) is int for bound in value.args) and value.args[2:] != (0,):
        numbers = range(*value.args)
        if not numbers[_LONGEST_RANGE:]:
            return list(numbers)
    return {"class": "range", "args": list(value.args)}


def _uuid(value: Opaque) -> Any:
    number = value.attributes.get("int")
    return f"{number:032x}" if type(number) is int and 0 <= number < 1 << 128 else dict(value.attributes)


def _partial(value: Opaque) -> Any:
    """``functools.partial``, whose state is ``(function, args, keywords, attributes)``."""
    if not isinstance(value.state, tuple) or len(value.state) != 4:
        return {"class": "functools.partial", "args": value.args, "state": value.state}
    function, args, keywords, attributes = value.state
    fields = {"function": function, "args": args, "keywords": keywords, "attributes": attributes}
    return {"class": "functools.partial", **{name: part for name, part in fields.items() if part}}


def _pattern(value: Opaque) -> Any:
    return dict(zip(("pattern", "flags"), value.args, strict=False))


def _mapping(value: Opaque) -> Any:
    return dict(value.pairs)


_KNOWN: Mapping[str, Callable[[Opaque], Any]] = {
    "argparse.Namespace": lambda value: dict(value.attributes),
    "types.SimpleNamespace": lambda value: dict(value.attributes),
    "collections.defaultdict": _mapping,
    "collections.deque": lambda value: (
        list(value.args[0]) if value.args and isinstance(value.args[0], list) else list(value.items)
    ),
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.dtype": dtype_label,
    "datetime.datetime": _moment,
    "datetime.date": _moment,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "zoneinfo.ZoneInfo._unpickle": lambda value: value.args[0] if value.args else "",
    "uuid.UUID": _uuid,
    "fractions.Fraction": lambda value: "/".join(map(str, value.args)) or "0",
    "decimal.Decimal": lambda value: str(value.args[0]) if value.args else "0",
    "functools.partial": _partial,
    "re._compile": _pattern,
    "builtins.slice": lambda value: {"class": "slice", "args": list(value.args)},
    "builtins.range": _range,
    "builtins.xrange": _range,
    "builtins.object": lambda value: {},
    # Configurations that are dicts or lists; beside their pairs they keep no more than how they may be used.
    "yacs.config.CfgNode": _mapping,
    "fvcore.common.config.CfgNode": _mapping,
    "detectron2.config.config.CfgNode": _mapping,
    "box.box.Box": _mapping,
    "box.config_box.ConfigBox": _mapping,
    "box.box_list.BoxList": lambda value: value.attributes.get("items", list(value.items)),
}
