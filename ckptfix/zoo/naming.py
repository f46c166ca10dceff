"""Names of files: which ones a pattern of ``zoo.toml`` matches, and the name of the output for a checkpoint.

torch.hub, torchvision and timm put the first 8 or more digits of the file's SHA-256 after the last ``-`` of its name
(``resnet50-19c8e357.pth``), and ``load_state_dict_from_url(check_hash=True)`` compares them. A repaired file has other
content, so it gets another name."""

import re
from collections.abc import Iterable
from posixpath import normpath
from string import Formatter

from ckptfix.core.finding import Finding, Level, advise
from ckptfix.core.settings import UNIVERSAL
from ckptfix.core.wording import nearest
from ckptfix.errors import UsageError
from ckptfix.rules import named

MIRRORED = "{folder}/{stem}{suffix}"  # the template that mirrors the tree of the sources

# The fields of a template: the folder relative to the root, the name without its suffix, the suffix (that of the format
# if one is given), and the source's own name.
FIELDS = ("folder", "stem", "suffix", "name")

# `m.tar.gz` is an archive of files, `m.pth.tar.gz` a compressed checkpoint named `m.pth.tar`.
_PACKING = re.compile(r"(?:(?<!\.pth)(?<!\.pt)(?<!\.ckpt)\.tar(?=\.)|\.(?:t?gz|t?bz2|t?xz|t?zst|zip))+$", re.IGNORECASE)
# The first rank of one of several saves in a folder. Other numbers may be the rank of a LoRA in the name of a folder.
_OF_RANK = re.compile(r"(?<=[^/])[._-]?(?:rank|shard)[._=-]?0{1,7}(?=\.\w{1,10}$)")
_INDEX = re.compile(r"\.index\.json$", re.IGNORECASE)
_SUFFIX = re.compile(
    r"(?:\.(?:pth|pt|ckpt))?\.tar$"
    r"|\.(?:safetensors|pth|pt|ckpt|bin|pkl|pickle|th|t7|ptl|jit|chkpt|checkpoint|model|mdl|weights|params|torch|dat)$",
    re.IGNORECASE,
)

_DIGITS = r"(?P<hash>[0-9a-f]{8,64})(?=\.[^/]*\Z|\Z)"
_USUAL = re.compile(rf"(?<=-){_DIGITS}")
_ANY = re.compile(rf"(?:(?<=[-_.])|(?<![^/])){_DIGITS}")
# Probably not a hash: a date, a step, a word. Only one in 40 hashes of 8 digits has no letter.
_NUMBER = re.compile(r"[0-9]+|[a-f]+")

# The lengths of MD5, UUIDs and SHA-1, as of commits: a SHA-256 is never shortened to them.
_OTHER_ALGORITHMS = (32, 40)


def output_name(name: str, form: str | None = None, template: str = MIRRORED, *, is_folder: bool = False) -> str:
    """Return the name of the output for a source with this name, both relative to their roots.

    ``form`` is the format to write: ``pth``, ``safetensors``, or ``universal``, a folder. None keeps that of the
    source. The name of a packed file loses the suffix of the packing; a folder or an index of shards becomes one file
    in the other formats. Raises ``UsageError`` if the template leads out of the root."""
    folder, _, own = name.rpartition("/")
    own = "model" if own == "." else own  # a folder that is the whole zoo
    stem, suffix = split_suffix(own, is_folder=is_folder)
    if form == "safetensors":
        suffix = ".safetensors"
    elif form == UNIVERSAL:
        suffix = ""
    elif not suffix or suffix.lower() == ".safetensors":
        becomes_file = is_folder or stem != own
        suffix = ".pth" if form == "pth" or (becomes_file and not suffix) else suffix
    made = normpath(template.format(folder=folder, stem=stem, suffix=suffix, name=own).lstrip("/"))
    if made in ("", ".", "..") or made.startswith("../"):
        raise UsageError(
            f"output = {template!r} does not give a file in the destination for {name}; write {MIRRORED!r}"
        )
    return made


def split_suffix(name: str, *, is_folder: bool = False) -> tuple[str, str]:
    """Return the stem and the suffix of a name. ``v1.5`` has no suffix; ``model.pth.tar.gz`` has ``.pth.tar``."""
    bare = _OF_RANK.sub("", _INDEX.sub("", name)) if is_folder else _PACKING.sub("", name) or name
    match = _SUFFIX.search(bare)
    return (bare, "") if match is None or match.start() == 0 else (bare[: match.start()], match[0])


def check_template(template: str) -> None:
    """Raise ``UsageError`` if a template for names of outputs is not valid."""
    try:
        fields = [(name, form, conversion) for _, name, form, conversion in Formatter().parse(template)]
    except ValueError as error:
        raise UsageError(f"output = {template!r} is not a template ({error}); write {MIRRORED!r}") from error
    for name, form, conversion in fields:
        if name is not None and (name not in FIELDS or form or conversion):
            close = nearest(name, FIELDS)
            known = ", ".join(f"{{{one}}}" for one in FIELDS)
            hint = f"did you mean {{{close}}}?" if close else f"the fields are {known}"
            raise UsageError(f"output = {template!r}: there is no {{{name}}}; {hint}")
    if template.startswith("/") or ".." in template.split("/"):
        raise UsageError(f"output = {template!r} leads outside the destination; name a place inside it")
    output_name("a/b.pth", None, template)


def hash_in_name(name: str, sha256: str | None = None) -> str | None:
    """Return the hash in a name, or None.

    Digits in the position that torch.hub uses are a hash unless they look like a number or a word. Digits in other
    positions are one if ``sha256``, the digest of the file, starts with them."""
    if sha256 is not None:
        for match in _ANY.finditer(name):
            if sha256.startswith(match["hash"]):
                return match["hash"]
    usual = _USUAL.search(name)
    if usual is None or _NUMBER.fullmatch(usual["hash"]) or len(usual["hash"]) in _OTHER_ALGORITHMS:
        return None
    return usual["hash"]


def name_with_hash(name: str, new_digest: str, old_digest: str | None = None) -> str:
    """Return the name with its hash replaced by as many digits of the new digest; unchanged if it has no hash.
    ``old_digest`` is that of the content to which the name belonged."""
    old = hash_in_name(name, old_digest)
    if old is None:
        return name
    place = next(match for match in _ANY.finditer(name) if match["hash"] == old)
    return name[: place.start()] + new_digest[: len(old)] + name[place.end() :]


def wrong_hash(name: str, sha256: str) -> Finding | None:
    """Return the finding that the hash in a name is not that of the content; None if it is, or if there is none."""
    claimed = hash_in_name(name, sha256)
    if claimed is None or sha256.startswith(claimed):
        return None
    return named("wrong-name-hash").finding(
        Level.WARNING,
        f"the name says that the sha256 begins with {claimed}, but it begins with {sha256[: len(claimed)]}",
        evidence={"in_name": claimed, "sha256": sha256},
        remedies=advise(
            "compare with its source: the file was changed or damaged since it was named, or the digits are not a "
            "hash of the content"
        ),
    )


def compile_patterns(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return one expression that fully matches the names that any of the patterns matches.

    A pattern without ``/`` matches the last part of a name, at any depth; one with ``/`` the whole name relative to the
    root. ``*`` and ``?`` match within one part, ``**/`` any number of folders, ``[…]`` one of the characters, and a
    trailing ``/`` everything in that folder."""
    return re.compile("|".join(map(_expression, patterns)) or r"(?!)", re.DOTALL)


def _expression(pattern: str) -> str:
    place = "" if "/" in pattern.rstrip("/") else "(?:.*/)?"
    below = ".*" if pattern.endswith("/") else ""
    return f"(?:{place}{_TOKEN.sub(_meaning, pattern.removeprefix('./').removeprefix('/'))}{below})"


_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_TOKEN = re.compile(r"\*\*/?|\*|\?|\[(?P<not>!?)(?P<set>\]?[^\]]*)\]|[^*?[]+|\[", re.DOTALL)


def _meaning(match: re.Match[str]) -> str:
    if characters := match["set"]:
        escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", characters)
        return f"[{'^/' if match['not'] else ''}{escaped}]"
    return _WILD.get(match[0]) or re.escape(match[0])
