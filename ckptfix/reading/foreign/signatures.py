"""The known files and folders that are not checkpoints, from ``signatures.toml``."""

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptfix.core.config import parse_toml

# Tables of folders and archives: those whose files look like checkpoints but are only parts of one, and those without
# any PyTorch checkpoint.
PARTS, BUNDLES = "parts", "bundles"

_NUMBER, _LETTER = r"[\x80-\xff]{0,4}[\0-\x7f]", r"[\x20-\x7e]"
_NODE = rf"\n{_NUMBER}\n{_NUMBER}{_LETTER}"
_SHORT = {
    "<V>": _NUMBER,
    "<T>": _LETTER,
    "<NODE>": _NODE,
    "<META>": rf"\n{_NUMBER}.{{0,64}}?\x12{_NUMBER}{_NODE}{_LETTER}",
}

PART = re.compile(
    r"(^|/)(\.metadata|[^/]*\.distcp|(common|meta)\.pt|[^/]*\.pkl|[^/]*(_states|_rng)\.pt|serialized_\w+\.\w+|data/.*|constants/.*|code/.*)$"
)


class Signature(Struct, frozen=True):
    """The pattern of a file's bytes from position ``at`` on, what the file is, and what to do."""

    what: str
    remedy: str
    begins: re.Pattern[bytes]
    at: int = 0


@cache
def _known() -> dict[str, Any]:
    return parse_toml(Path(__file__).with_name("signatures.toml"))


def remedy(name: str) -> str:
    """Return the text of a remedy by its name in ``[remedies]``; any other text unchanged."""
    text: str = _known()["remedies"].get(name, name)
    return text


def name_text(text: str) -> str | None:
    """Return what a text is, with the remedy, if it begins like one of ``[texts]``; None otherwise."""
    known = (entry for entry in _known()["texts"] if re.match(entry["begins"], text))
    return next((f"{entry['what']}; {remedy(entry['remedy'])}" for entry in known), None)


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the signatures of known files, in the order in which they are tried."""
    made = []
    for entry in _known()["files"]:
        begins = entry["begins"]
        for short, pattern in _SHORT.items():
            begins = begins.replace(short, pattern)
        compiled = re.compile(begins.encode("ascii"), re.DOTALL)
        made.append(Signature(entry["what"], remedy(entry["remedy"]), compiled, entry.get("at", 0)))
    return tuple(made)


def name_bundle(names: Collection[str], table: str) -> str | None:
    """Return what a folder or archive with files of these names is, with the remedy; None if no entry of the table
    fits."""
    for entry in _known()[table]:
        if all(any(_ends_with(name, pattern) for name in names) for pattern in entry.get("holds", ())) and (
            "only" not in entry or (names and all(_ends_with(name, entry["only"]) for name in names))
        ):
            return f"{entry['what']}; {remedy(entry['remedy'])}"
    return None


def _ends_with(name: str, pattern: str) -> bool:
    """Return whether the last segments of a path match a pattern."""
    return re.search(rf"(^|/)({pattern})$", name) is not None
