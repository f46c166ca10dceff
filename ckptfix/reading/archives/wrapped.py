"""Archives and compressed files around a checkpoint: gzip, bzip2, xz, tar, an ordinary zip, the chunks of an HTTP
answer, and one inside of another.

They are told apart by their bytes; ``.pth.tar`` is seldom a tar, and a ``.zip`` may be the torch file itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Fact
from ckptfix.core.wording import clauses
from ckptfix.errors import HostileError, Opt, UnreadableError, UsageError, Words
from ckptfix.reading.archives import tar_members, unpacking, zip_members
from ckptfix.reading.archives.unpacking import Blocks, expand
from ckptfix.reading.foreign.known import BUNDLES, PARTS, is_part, name_bundle
from ckptfix.reading.sniffing import is_torch_tar

DEPTH_LIMIT = 4
"""How many wrappers may be around a checkpoint: a ``.zip`` of a ``.tar.gz`` of a ``.pth.gz`` has four."""

_PATH_LIMIT = 4096
"""Characters of a name that may tell what an archive is; no system makes a file of a longer path."""

_NAMED = 6
"""Files of an archive that an error names."""

_IGNORED = re.compile(r"(^|/)(__MACOSX/|\.DS_Store$|\._)")
_NO_CHECKPOINT = re.compile(r"\.(npz|npy|docx|xlsx|pptx|jar|whl|egg|ipynb|json|ya?ml|md|txt|py|html?)$", re.IGNORECASE)
_BESIDE_POLICY = re.compile(r"(^|/)([\w.]*optimizer|pytorch_variables)\.pth$")
"""What stable-baselines3 puts beside the weights, which it calls ``policy.pth``."""

_PICKLE = re.compile(
    rb"\x80[\0-\5]"  # protocol 2 and on
    rb"|\(dp?\d*\n|\(lp?\d*\n|c[A-Za-z_][\w.]*\n\w+\n|\(i[A-Za-z_][\w.]*\n\w+\n"  # protocol 0
    rb"|[]}]q[\0-\xff]|c[A-Za-z_][\w.]*\nOrderedDict\nq"  # protocol 1
)


FOREIGN = {
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"Rar!\x1a\x07": "RAR",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "LZ4",
    b"\x5d\0\0\x80\0": "LZMA without xz (.lzma)",
    b"\x1f\x9d": "compress (.Z)",
}
"""How files of packers begin that are named and not unpacked."""


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name, its first bytes, what gives its blocks, and why it is closed, if it is."""

    name: str
    head: bytes
    blocks: Blocks
    closed: str = ""


def unwrap(content: Content, member: str | None = None) -> Content:
    """Return the checkpoint inside of a compressed file or archive; the content itself where there is nothing around
    it.

    ``member`` picks one of several files by its name in the archive. What could be had of a damaged wrapper is given,
    and ``Content.damage`` says what is wrong. Raises ``UnreadableError`` if nothing could be had, ``HostileError``
    for bombs, and ``UsageError`` where several files could be meant.
    """
    wanted, outer = member, content.path
    damage: list[Fact] = []
    for _ in range(DEPTH_LIMIT + 1):
        archive = _archive(content, damage)
        if archive is not None:
            chosen, wanted = _choose(content.path, archive, wanted, damage)
            label = f"{content.path}!{_printable(chosen.name[-_PATH_LIMIT:])}"
            content = _replaced(content, expand(label, chosen.name, chosen.blocks))
            damage += content.damage
        elif (compression := unpacking.sniff(content)) is not None:
            name = compression.name_inside(content.member or outer)
            content = _replaced(content, expand(content.path, name, partial(compression.blocks, content)))
            damage += content.damage
        elif (packer := _foreign(content)) is not None:
            raise UnreadableError(
                f"{content.path}: is packed by {packer}, which ckptfix does not unpack; unpack it first"
            )
        elif wanted is not None:
            raise UsageError(
                f"{content.path}: not an archive that holds {wanted!r}; correct or leave out ", Opt("member")
            )
        else:
            content.damage = damage
            return content
    raise HostileError(f"{outer}: archives are nested more than {DEPTH_LIMIT} deep; do not use this file")


def _foreign(content: Content) -> str | None:
    head = bytes(content.buffer[:8])
    return next((packer for magic, packer in FOREIGN.items() if head.startswith(magic)), None)


def _archive(content: Content, damage: list[Fact]) -> list[Member] | None:
    """Return the files of a tar or of an ordinary zip archive, None if the content is none; ``damage`` is told its
    own."""
    if zip_members.sniff(content):
        found, causes = zip_members.members(content)
        members = [Member(*parts) for parts in found]
    elif tar_members.sniff(content) and not is_torch_tar(content):
        files, causes = tar_members.members(content)
        members = [Member(*parts) for parts in files]
    else:
        return None
    damage += causes
    return members


def _replaced(old: Content, new: Content) -> Content:
    new.account = old.bounds
    new.account.unpack(len(new))
    return new


def _choose(path: str, archive: list[Member], wanted: str | None, damage: list[Fact]) -> tuple[Member, str | None]:
    """Return the member to read, and what is still wanted of the archives inside of it."""
    named = [member for member in archive if member.name == wanted] or [
        member for member in archive if wanted is not None and member.name.endswith(f"/{wanted}")
    ]
    if len(named) == 1:
        return named[0], None
    likely = [member for member in archive if not _IGNORED.search(member.name) and looks_like_checkpoint(member.head)]
    likely = [member for member in likely if not _NO_CHECKPOINT.search(member.name)] or likely
    if any(member.name.rpartition("/")[2] == "policy.pth" for member in likely):
        likely = [member for member in likely if not _BESIDE_POLICY.search(member.name)]
    present = [member.name for member in archive if len(member.name) <= _PATH_LIMIT]
    whole = name_bundle(present, PARTS) if all(is_part(member.name) for member in likely) else None
    if wanted is None and whole is not None:
        raise UnreadableError(f"{path}: an archive that holds {whole}")
    choices = [Opt("member", member.name) for member in likely[:_NAMED] if len(member.name) <= _PATH_LIMIT]
    names: list[Words] = [word for choice in choices for word in (", ", choice)][1:]
    names += [" …"] * (len(likely) > len(choices))
    if len(likely) == 1 and (wanted is None or _wraps(likely[0].head)):
        return likely[0], wanted
    if likely and wanted is not None:
        raise UsageError(f"{path}: it holds no single file {wanted!r}; give one of these: ", *names)
    if likely:
        shards = any(re.search(r"\.index\.json$|-\d{5}-of-\d{5}\.\w+$", name) for name in present)
        advice = "unpack it and name the folder; it holds " if shards else "pick one: "
        pieces = [str(word.value) if isinstance(word, Opt) and shards else word for word in names]
        raise UsageError(f"{path}: an archive of {len(likely)} files that may be checkpoints; {advice}", *pieces)
    if (shut := next((member for member in archive if member.closed), None)) is not None:
        raise UnreadableError(f"{path}: {_printable(shut.name)!r:.80} {shut.closed}")
    if (bundle := name_bundle(present, BUNDLES)) is not None:
        raise UnreadableError(f"{path}: an archive without a checkpoint of PyTorch in it: {bundle}")
    some = ", ".join(_printable(member.name[-200:]) for member in archive[:3]) or "nothing"
    if damage:
        causes = clauses(damage)
        raise UnreadableError(f"{path}: {causes}; no checkpoint is in what is left of it ({some}): fetch it again")
    raise UnreadableError(f"{path}: an archive without a checkpoint in it: it holds {some}; is it the right file?")


def looks_like_checkpoint(head: bytes) -> bool:
    """Return whether a file that begins so may be a checkpoint, or hold one."""
    if _wraps(head) or _PICKLE.match(head):
        return True
    # safetensors: the length of a JSON header, and the header.
    return len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000


def _wraps(head: bytes) -> bool:
    content = Content("", head)
    return head[:4] == b"PK\x03\x04" or unpacking.sniff(content) is not None or tar_members.sniff(content)


def _printable(name: str) -> str:
    """Return a name from an archive, safe to print on one line."""
    return "".join(sign if sign.isprintable() else "?" for sign in name)
