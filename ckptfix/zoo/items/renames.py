"""Names with a hash of the content: ``resnet50-19c8e357.pth``.

torch.hub, torchvision and timm put the first 8 or more digits of the file's sha256 behind the last ``-`` of its name,
and ``load_state_dict_from_url(check_hash=True)`` compares them. A repaired file has other content, and so another
name."""

from __future__ import annotations

import re

from ckptfix.core.finding import Finding, Level
from ckptfix.rules.wrong_name_hash import wrong_name_hash

_DIGITS = r"(?P<hash>[0-9a-f]{8,64})(?=\.[^/]*\Z|\Z)"
_USUAL = re.compile(rf"(?<=-){_DIGITS}")
_ANY = re.compile(rf"(?:(?<=[-_.])|(?<![^/])){_DIGITS}")
_NUMBER = re.compile(r"[0-9]+|[a-f]+")
"""What is hardly a hash: a date, a step, a word. One in 40 hashes of 8 digits has no letter in it."""

_OTHER_ALGORITHMS = (32, 40)
"""The lengths of md5, of uuid, and of sha1, which commits have too: nobody shortens a sha256 to them."""


def hash_in_name(name: str, sha256: str | None = None) -> str | None:
    """The hash in a name; None where it has none.

    What stands there by the usage of torch.hub is taken for a hash unless it is a number or a word. ``sha256``, the
    digest of the file, proves a hash wherever it stands and whatever it looks like."""
    if sha256 is not None:
        for match in _ANY.finditer(name):
            if sha256.startswith(match["hash"]):
                return match["hash"]
    claimed = _claimed(name)
    return None if claimed is None else claimed["hash"]


def name_with_hash(name: str, new_digest: str, old_digest: str | None = None) -> str:
    """The name with as many digits of the digest of other content in place of its hash; the name itself where it has
    none. ``old_digest`` is that of the content to which the name belonged."""
    old = hash_in_name(name, old_digest)
    if old is None:
        return name
    place = next(match for match in _ANY.finditer(name) if match["hash"] == old)
    return name[: place.start()] + new_digest[: len(old)] + name[place.end() :]


def wrong_hash(name: str, sha256: str) -> Finding | None:
    """The finding that the hash in the name of a file is none of its content; None where it is right, or no hash."""
    claimed = hash_in_name(name, sha256)
    if claimed is None or sha256.startswith(claimed):
        return None
    return wrong_name_hash.finding(
        Level.WARNING,
        f"the name says that the sha256 begins with {claimed}, and it begins with {sha256[: len(claimed)]}",
        evidence={"in_name": claimed, "sha256": sha256},
        remedy="compare with the place where it came from: the file was changed or damaged since it was named, or the"
        " digits are no hash of the content",
    )


def _claimed(name: str) -> re.Match[str] | None:
    match = _USUAL.search(name)
    if match is None or _NUMBER.fullmatch(match["hash"]) or len(match["hash"]) in _OTHER_ALGORITHMS:
        return None
    return match
