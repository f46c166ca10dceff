"""Remedies as commands: the one place where a command that the user may run is put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptfix.core.finding import Placeholder, Remedy
from ckptfix.core.options import REPAIR, command_words, flag_text
from ckptfix.errors import Opt


def command_for(source: str, choices: Mapping[str, Any], remedies: Iterable[Remedy] = ()) -> tuple[str, ...]:
    """Return the words of the repair of ``source`` with these choices and the options of these remedies."""
    return command_words(REPAIR, source, with_remedies(choices, remedies))


def with_remedies(choices: Mapping[str, Any], remedies: Iterable[Remedy]) -> dict[str, Any]:
    """Return the choices together with the options of the remedies. What the user chose stays, except for the format:
    a remedy that names one says that the other cannot hold the weights.
    """
    merged = dict(choices)
    for name, value in (option for remedy in remedies for option in remedy.options):
        if isinstance(value, tuple):
            merged[name] = list(dict.fromkeys((*merged.get(name, ()), *value)))
        elif name == "format" and merged.get(name) != value:
            merged[name] = value
            merged.pop("output", None)  # its name is that of the other format
        else:
            merged.setdefault(name, value)
    return merged


def remedy_text(remedy: Remedy, *, as_arguments: bool = False) -> str:
    """Return a remedy in words, its options as flags of the command line or as arguments of the library."""
    if not remedy.options:
        return remedy.text
    if as_arguments:
        shown = ", ".join(_argument(name, value) for name, value in remedy.options)
    else:
        shown = " ".join(flag_text(Opt(name, value)) for name, value in remedy.options)
    return f"{shown} {remedy.text}"


def remedies_text(remedies: Iterable[Remedy], *, as_arguments: bool = False) -> str:
    """Return all remedies of a finding in one line, the recommended one first."""
    return "; or ".join(remedy_text(remedy, as_arguments=as_arguments) for remedy in remedies)


def _argument(name: str, value: object) -> str:
    return f"{name}={value}" if isinstance(value, Placeholder) else str(Opt(name, value))
