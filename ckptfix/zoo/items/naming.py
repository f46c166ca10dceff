"""What the written file of a checkpoint is called."""

from __future__ import annotations

import re
from difflib import get_close_matches
from posixpath import normpath
from string import Formatter

from ckptfix.errors import UsageError

MIRRORED = "{folder}/{stem}{suffix}"
"""The template that mirrors the tree of the sources."""

FIELDS = {
    "folder": "the folder below the root",
    "stem": "the name without its suffix",
    "suffix": "the suffix, that of the format where one is given",
    "name": "the source's own name",
}
"""What a template may hold."""

_PACKING = re.compile(r"(?:\.(?:gz|bz2|xz|zip))+$", re.IGNORECASE)
_INDEX = re.compile(r"\.index\.json$", re.IGNORECASE)
_SUFFIX = re.compile(
    r"(?:\.(?:pth|pt|ckpt))?\.tar$"
    r"|\.(?:safetensors|pth|pt|ckpt|bin|pkl|pickle|th|t7|ptl|jit|chkpt|checkpoint|model|mdl|weights|params|torch|dat)$",
    re.IGNORECASE,
)


def output_name(name: str, form: str | None = None, template: str = MIRRORED, *, is_folder: bool = False) -> str:
    """The name of the output for a source of this name, both below their roots.

    ``form`` is the format that is written, ``pth`` or ``safetensors``, None where it is that of the source. A packed
    file is unpacked, and the shards of an index, or a folder, become one file. Raises ``UsageError`` where the
    template leads out of the root.
    """
    folder, _, own = name.rpartition("/")
    stem, suffix = split_suffix(own, is_folder=is_folder)
    if form == "safetensors":
        suffix = ".safetensors"
    elif not suffix or suffix.lower() == ".safetensors":
        suffix = ".pth" if form == "pth" or (is_folder and not suffix) else suffix
    made = normpath(template.format(folder=folder, stem=stem, suffix=suffix, name=own).lstrip("/"))
    if made in ("", ".", "..") or made.startswith("../"):
        raise UsageError(f"output = {template!r} names no file below the destination for {name}; write {MIRRORED!r}")
    return made


def split_suffix(name: str, *, is_folder: bool = False) -> tuple[str, str]:
    """The stem and the suffix of a checkpoint's name. ``v1.5`` has none; ``model.pth.tar.gz`` has ``.pth.tar``."""
    bare = _INDEX.sub("", name) if is_folder else _PACKING.sub("", name) or name
    match = _SUFFIX.search(bare)
    return (bare, "") if match is None or match.start() == 0 else (bare[: match.start()], match[0])


def check_template(template: str) -> None:
    """Raises ``UsageError`` where a template of an output's name cannot be meant."""
    try:
        fields = [(name, form, conversion) for _, name, form, conversion in Formatter().parse(template)]
    except ValueError as error:
        raise UsageError(f"output = {template!r} is no template ({error}); write {MIRRORED!r}") from error
    for name, form, conversion in fields:
        if name is not None and (name not in FIELDS or form or conversion):
            close = get_close_matches(name, FIELDS, 1)
            hint = (
                f"did you mean {{{close[0]}}}?" if close else "there are " + ", ".join(f"{{{one}}}" for one in FIELDS)
            )
            raise UsageError(f"output = {template!r}: there is no {{{name}}}; {hint}")
    if template.startswith("/") or ".." in template.split("/"):
        raise UsageError(f"output = {template!r} leads out of the destination; name a place below it")
    output_name("a/b.pth", None, template)
