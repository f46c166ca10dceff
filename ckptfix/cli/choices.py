"""What the user chose: the flags of the command line over the configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfix.core.config import Configuration

# Options that answer one question: one of them on the command line replaces all of them in the configuration.
_QUESTIONS = (("model", "model_args", "like"), ("quiet", "verbose"))


def choose(parameters: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """The options of a command by name: what was given, else what the configuration says; the rest is left out.

    ``parameters`` has every option that the command knows; None or an empty list means that it was not given.
    """
    given = {name: value for name, value in parameters.items() if value is not None and value not in ([], ())}
    known = {name: value for name, value in configuration.values.items() if name in parameters}
    for question in _QUESTIONS:
        if any(name in given for name in question if name != "model_args"):
            known = {name: value for name, value in known.items() if name not in question}
    if known.get("fill") == "target" and not {"model", "like"} & (known.keys() | given.keys()):
        del known["fill"]  # the configuration has it for the commands that have a target
    if "compare" in known and (given.get("smoke") is False or "model" not in known | given):
        del known["compare"]  # and this for those that run the model
    return {**known, **given}
