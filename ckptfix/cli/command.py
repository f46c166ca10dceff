"""A command as typer makes it, without what it puts around names and without what it imports for nothing."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose usage line names its arguments as their ``metavar`` does: ``PATH...`` and not ``{PATH}...``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line behind the program."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        take_texts_as_they_are(self.get_params(ctx))
        return super().parse_args(ctx, args)


def take_texts_as_they_are(parameters: list[Any]) -> None:
    """Let typer check only the values that need it.

    Typer of 0.29 has pydantic check every value of every parameter, even those that were not given, and pydantic takes
    longer to import than all else that a small task needs. A text is a text, so it is passed on.
    """
    for parameter in parameters:
        descriptor = getattr(parameter, "type_descriptor", None)  # an older typer has none, and checks by itself
        if descriptor is not None and "process_value" not in vars(parameter):
            parameter.process_value = partial(_process, parameter, parameter.process_value)


def _process(parameter: Any, check: Any, context: Any, value: Any) -> Any:
    is_absent = value is None and not parameter.required
    if not is_absent and not _is_text(parameter.type_descriptor.annotation, value):
        return check(context, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _is_text(annotation: Any, value: Any) -> bool:
    """Whether a value is a text as the annotation wants it: any, one of a few, or a list of any."""
    if annotation is str:
        return isinstance(value, str)
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    is_row = isinstance(value, (list, tuple)) and len(value) > 0
    return annotation == list[str] and is_row and all(isinstance(item, str) for item in value)
