"""``lightning:PKG.MOD:CLASS``: builds a LightningModule, as ``load_from_checkpoint`` does, from the arguments that
Lightning saved in the checkpoint. They are read inertly, so only plain data reaches the class."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.objects import Global, Opaque
from ckptfix.core.spec import TensorSpec
from ckptfix.errors import Opt, TargetError, UsageError
from ckptfix.writing.plain import has_plain_form, plain_root

PREFIX = "lightning:"
# The key of the saved arguments among those of the builder; not an identifier, so no argument has this name.
_SAVED = "of the checkpoint"

# The keys that releases of Lightning use for them, the newest last.
_PLACES = ("hparams", "module_arguments", "hyper_parameters")


def with_saved_arguments(arguments: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the arguments of ``--model-args`` with those that Lightning saved, for ``build_class``.

    Objects that are not plain data are left out, and so are tensors."""
    if arguments and not isinstance(arguments, Mapping):
        raise UsageError(Opt("model_args"), ": a Lightning module takes its arguments by name; give an object")
    raw: Mapping[Any, Any] = checkpoint.root if isinstance(checkpoint.root, Mapping) else {}
    plain = plain_root(checkpoint)[0] if raw else {}
    saved: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for place in _PLACES:
        before, after = _fields(raw.get(place)), plain.get(place)
        if isinstance(after, Mapping):
            saved |= {str(key): after[key] for key, value in before.items() if key in after and _is_data(value)}
            left_out |= {
                str(key): _kind(value) for key, value in before.items() if key not in after or not _is_data(value)
            }
    name = raw.get("hparams_name")
    # The child process gets them as JSON, which turns tuples into lists, so do the same here.
    kept = {
        "values": json.loads(json.dumps(saved)),
        "left out": left_out,
        "name": name if isinstance(name, str) else None,
    }
    return {**dict(arguments), _SAVED: kept}


def _fields(value: Any) -> Mapping[Any, Any]:
    """Return the members of a dict or a Namespace."""
    fields = value.attributes if isinstance(value, Opaque) else value
    return fields if isinstance(fields, Mapping) else {}


def _kind(value: Any) -> str:
    """Describe an argument that is left out: its class, or the global that it names."""
    if isinstance(value, Opaque | Global):
        return str(value.cls if isinstance(value, Opaque) else value)
    return "a tensor" if isinstance(value, TensorSpec) else f"a {type(value).__name__} with objects in it"


def remarks_on(arguments: Any) -> tuple[str, ...]:
    """Return a remark on arguments that keep the class's defaults because they are objects in the file."""
    kept = arguments.get(_SAVED) if isinstance(arguments, Mapping) else None
    lost = {key: kind for key, kind in kept["left out"].items() if key not in arguments} if kept else {}
    if not lost:
        return ()
    named = ", ".join(f"{key} ({kind})" for key, kind in lost.items())
    return (f"arguments that are objects in the file are left at the class's defaults: {named}",)


def _is_data(value: Any) -> bool:
    """Return whether JSON can hold a value completely once it is plain data."""
    if isinstance(value, Opaque):
        return has_plain_form(value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_data(member) for key, member in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    return value is None or isinstance(value, bool | int | float | str)


def build_class(made: Any, given: Mapping[str, Any], **more: Any) -> Any:
    """Build a LightningModule from the saved arguments that the class takes, or from all of them as one argument, with
    the user's arguments in their place. Raises ``TargetError`` if a required argument was saved as an object."""
    saved = more.pop(_SAVED, {"values": {}, "left out": {}, "name": None})
    accepted = inspect.signature(made).parameters
    values = {saved["name"]: saved["values"]} if saved["name"] in accepted else saved["values"]
    if not any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        values = {key: value for key, value in values.items() if key in accepted}
    values = {**values, **given, **more}
    for key, kind in saved["left out"].items():
        if key in accepted and key not in values and accepted[key].default is inspect.Parameter.empty:
            spec = f"{PREFIX}{made.__module__}:{made.__qualname__}"
            raise TargetError(
                Opt("model", spec),
                f" needs {key}, which is an object ({kind}) in the file, and objects are never built from a file; "
                f"write a function that builds the model, and name it: ",
                Opt("model", f"{made.__module__}:FUNCTION"),
            )
    model = made(**values)
    if hasattr(model, "configure_model"):
        model.configure_model()  # large models create their layers there
    return model
