"""Archives and compressed files around a checkpoint: gzip, bzip2, xz, tar and ordinary zip, also nested.

They are recognised by content: a ``.pth.tar`` is seldom a tar, and a ``.zip`` may be the torch file itself."""

import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from ckptfix.bytes.decoders import BZIP2, FAULTS, LZMA, STORED, why_closed, zip_decoder
from ckptfix.bytes.sources import Content, filled_end
from ckptfix.core.facts import Fact, Kind, clause, clauses
from ckptfix.errors import Opt, UnreadableError, UsageError, Words, damaged, hostile
from ckptfix.reading.archives import tar_members, unpacking
from ckptfix.reading.archives.unpacking import Member, Stream, expand
from ckptfix.reading.archives.zip_directory import (
    RECORD,
    ZipMember,
    is_torch_package,
    is_torch_save,
    is_torchscript,
    member_names,
)
from ckptfix.reading.archives.zip_recovery import ZipIndex, list_members, names_in_row
from ckptfix.reading.folders.ranks.names import RANK_NAMES
from ckptfix.reading.foreign.signatures import BUNDLES, PART, PARTS, name_bundle
from ckptfix.reading.sniffing import PACKERS, SAFETENSORS_HEADER_LIMIT, is_torch_tar, is_zip

DEPTH_LIMIT = 4  # largest number of wrappers around a checkpoint: a `.zip` of a `.tar.gz` of a `.pth.gz` has four
_PATH_LIMIT = 4096  # characters of a member's path; no system has longer ones
_NAMED = 6  # files of an archive that an error lists
_IGNORED = re.compile(r"(^|/)(__MACOSX/|\.DS_Store$|\._)")
_NO_CHECKPOINT = re.compile(r"\.(npz|npy|docx|xlsx|pptx|jar|whl|egg|ipynb|json|ya?ml|md|txt|py|html?)$", re.IGNORECASE)
# Files of stable-baselines3 beside the weights, which are in `policy.pth`.
_BESIDE_POLICY = re.compile(r"(^|/)([\w.]*optimizer|pytorch_variables|tensors)\.pth$")

# The pickle of an unpacked checkpoint.
_UNPACKED = re.compile(r"(^|/)(\.metadata|data\.pkl)$")

# The magic number of torch's older files (`torch_legacy.MAGIC`) in a binary and a text pickle; plain pickles lack it.
_OF_TORCH_SAVE = re.compile(rb"\x8a\nl\xfc\x9cF\xf9|L119547037146038801333356L")

_PICKLE = re.compile(
    rb"\x80[\0-\5]"  # protocol 2 and later
    rb"|\(dp?\d*\n|\(lp?\d*\n|c[A-Za-z_][\w.]*\n\w+\n|\(i[A-Za-z_][\w.]*\n\w+\n"  # protocol 0
    rb"|[]}]q[\0-\xff]|c[A-Za-z_][\w.]*\nOrderedDict\nq"  # protocol 1
)


def unwrap(content: Content, member: str | None = None) -> Content:
    """Return the checkpoint inside compressed files and archives, or the content itself if it is not packed.

    ``member`` picks one of several files by its name in the archive. Of a damaged wrapper, the readable part is
    returned with ``Content.damage``. Raises ``UnreadableError`` if nothing is readable, ``HostileError`` for bombs, and
    ``UsageError`` if several files may be the checkpoint."""
    wanted, outer = member, content.path
    damage: list[Fact] = []
    wrapper = ""
    for _ in range(DEPTH_LIMIT + 1):
        archive = None
        if is_zip_of_files(content):
            archive, causes = _zip_members(content)
            damage += causes
        elif tar_members.sniff(content) and not is_torch_tar(content):
            archive, causes = tar_members.members(content)
            damage += causes
        if archive is not None:
            wrapper = wrapper or ("zip" if is_zip(content) else "tar")
            chosen, wanted = _choose(content.path, archive, wanted, damage)
            label = f"{content.path}!{chosen.name[-_PATH_LIMIT:]}"
            content = _replaced(content, expand(label, chosen.name, chosen.blocks))
            damage += content.damage
        elif (compression := unpacking.sniff(content)) is not None:
            wrapper = wrapper or compression.name
            name = compression.name_inside(content.member or outer)
            content = _replaced(content, expand(content.path, name, partial(compression.blocks, content)))
            damage += content.damage
        elif packer := next((PACKERS[magic] for magic in PACKERS if content[:8].startswith(magic)), ""):
            raise UnreadableError(
                f"{content.path}: is packed by {packer}, which ckptfix cannot unpack; unpack it first"
            )
        elif wanted is not None:
            raise UsageError(f"{content.path}: not an archive that holds {wanted!r}; correct or omit ", Opt("member"))
        else:
            content.damage, content.wrapper = damage, wrapper
            return content
    raise hostile(outer, f"archives are nested more than {DEPTH_LIMIT} deep")


def _replaced(old: Content, new: Content) -> Content:
    new.shared_bounds = old.bounds
    new.shared_bounds.unpack(len(new))
    return new


def _choose(path: str, archive: list[Member], wanted: str | None, damage: list[Fact]) -> tuple[Member, str | None]:
    """Return the member to read, and the name to look for in archives inside it."""
    named = [member for member in archive if member.name == wanted] or [
        member for member in archive if wanted is not None and member.name.endswith(f"/{wanted}")
    ]
    if len(named) == 1:
        return named[0], None
    likely = [member for member in archive if not _IGNORED.search(member.name) and looks_like_checkpoint(member.head)]
    likely = [member for member in likely if not _NO_CHECKPOINT.search(member.name)] or likely
    if any(member.name.rpartition("/")[2] == "policy.pth" for member in likely):
        likely = [member for member in likely if not _BESIDE_POLICY.search(member.name)]
    # Plain pickles beside weights have data to build the model or to prepare its input, unless they are part of an
    # unpacked checkpoint.
    likely = [
        member
        for member in likely
        if _UNPACKED.search(member.name) or not _PICKLE.match(member.head) or _OF_TORCH_SAVE.search(member.head[:32])
    ] or likely
    present = [member.name for member in archive if len(member.name) <= _PATH_LIMIT]
    whole = name_bundle(present, PARTS) if all(PART.search(member.name) for member in likely) else None
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
        shards = _are_ranks(likely) or any(re.search(r"\.index\.json$|-\d{5}-of-\d{5}\.\w+$", name) for name in present)
        advice = "unpack it and name the folder; it holds " if shards else "pick one: "
        pieces = [str(word.value) if isinstance(word, Opt) and shards else word for word in names]
        raise UsageError(f"{path}: an archive of {len(likely)} files that may be checkpoints; {advice}", *pieces)
    if (shut := next((member for member in archive if member.closed), None)) is not None:
        raise UnreadableError(f"{path}: {shut.name[-80:]!r} {shut.closed}")
    if (bundle := name_bundle(present, BUNDLES)) is not None:
        raise UnreadableError(f"{path}: an archive without a PyTorch checkpoint: {bundle}")
    some = ", ".join(member.name[-200:] for member in archive[:3]) or "nothing"
    if damage:
        causes = clauses(damage)
        raise damaged(path, f"{causes}; the readable part has no checkpoint ({some})")
    raise UnreadableError(f"{path}: an archive without a checkpoint in it: it holds {some}; is it the right file?")


def _are_ranks(members: list[Member]) -> bool:
    """Return whether all files are ranks of one checkpoint, by their names."""
    return all(
        any(
            kind.files.fullmatch("/".join(member.name.split("/")[-kind.depth :]))
            and (not kind.marks or any(mark in member.head for mark in kind.marks))
            for kind in RANK_NAMES
        )
        for member in members
    )


def looks_like_checkpoint(head: bytes) -> bool:
    """Return whether a file with these first bytes may be a checkpoint, or contain one."""
    if _wraps(head) or _PICKLE.match(head):
        return True
    # safetensors: the length of a JSON header, and the header.
    return len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= SAFETENSORS_HEADER_LIMIT


def _wraps(head: bytes) -> bool:
    content = Content("", head)
    return head[:4] == b"PK\x03\x04" or unpacking.sniff(content) is not None or tar_members.sniff(content)


BESIDE_LIMIT = 8  # total size of other files that are examined, as a multiple of the checkpoint's
OVERLAP_LIMIT = 4  # total size of files as a multiple of the archive's: a damaged entry or two may claim any size

# bzip2 members whose first bytes are read: each requires unpacking a block of 900 KB.
COSTLY_LIMIT = 100

_HEAD = 512


def is_zip_of_files(content: Content) -> bool:
    """Return whether the content is a zip archive that is not itself a torch file.

    Without its directory, it is recognised by the names in the headers of its members, as far as they can be
    followed."""
    if not is_zip(content):
        return False
    # A header with inserted bytes (CR before LF) may seem to have an empty name.
    names, first = member_names(content), [name for name in names_in_row(content) if name and not name.endswith("/")]
    if names:
        # A flipped bit in the directory may have changed the name that identifies the format.
        is_of_torch = is_torchscript(names) or is_torch_package(names)
        return not is_of_torch and not any(map(is_torch_save, (names, [*names, *first])))
    return bool(first) and not any(map(RECORD.fullmatch, first))


def _zip_members(content: Content) -> tuple[list[Member], list[Fact]]:
    index = list_members(content)
    packed = sum(min(info.packed, len(content)) for info in index.members)
    if packed > OVERLAP_LIMIT * len(content):
        raise hostile(
            content.path,
            f"the files in the zip archive take {packed} bytes and it has {len(content)}: they overlap, in order to "
            "fill a disk",
        )
    damage = list(index.damage)
    if index.found is not None and not damage:
        damage = [Fact.of(Kind.ZIP_CUT, nbytes=len(content))]
    found: list[Member] = []
    costly = 0
    for info in index.members:
        if not info.name.endswith("/"):
            costly += info.method == BZIP2
            blocks = partial(_blocks, content, index, info)
            closed = why_closed(info.flags, info.method)
            head = b""
            if not closed and costly <= COSTLY_LIMIT:
                head, closed = _head(content, index, info)
            found.append(Member(info.name, head, blocks, closed))
        if index.found is not None and info.name in index.found.open_at:
            break  # any further headers are inside this member
    return found, damage


def damaged_beside(content: Content, chosen: str) -> list[str]:
    """Return the files of a zip archive, except for the chosen one, whose bytes are damaged.

    The smallest files are examined, up to ``BESIDE_LIMIT`` times the size of the chosen one together: an optimizer, but
    not all checkpoints of a large archive for each of them."""
    index = list_members(content) if is_zip_of_files(content) else None
    members = {info.name: info for info in index.members} if index is not None else {}
    if index is None or chosen not in members:  # the chosen one may be in an archive inside this one
        return []
    left = BESIDE_LIMIT * members.pop(chosen).size
    found: list[str] = []
    for name, info in sorted(members.items(), key=lambda item: item[1].size):
        damage: list[Fact] = []
        with suppress(UnreadableError):  # packed or encrypted in a way that cannot be read
            for block, _ in _blocks(content, index, info, damage) if info.size <= left else ():
                left -= len(block)
                if left < 0:
                    return found
            found += [name] * bool(damage)
    return found


def _stream(content: Content, index: ZipIndex, info: ZipMember) -> Stream | Fact:
    """Return the packed bytes of a member, as far as they exist; or the damage, if there are none."""
    start = index.data_start(content, info)
    if start is None:
        return Fact(Kind.MEMBER_LOST)
    is_open = index.found is not None and info.name in index.found.open_at
    packed = max(info.packed, len(content) - start) if is_open else info.packed
    # A decoder would decode zeros that were never filled; stored members are checked by their own format.
    end = filled_end(content) if is_open and info.method != STORED else len(content)
    stop = min(start + packed, end)
    try:
        head = content[start : min(start + 9, stop)]
        decoder, skipped = zip_decoder(info.method, packed, max(info.size, packed), head)
    except FAULTS as error:
        return Fact.of(Kind.MEMBER_DAMAGED, fault=str(error))
    return Stream(content, start + skipped, stop, decoder)


def _head(content: Content, index: ZipIndex, info: ZipMember) -> tuple[bytes, str]:
    """Return the first bytes of a member, or if there are none because of damage, why, as the end of a sentence."""
    stream = _stream(content, index, info)
    if isinstance(stream, Fact):
        return b"", f"{clause(stream)}; fetch the archive again"
    head = b""
    for block, _ in stream.blocks():
        head += block
        if len(head) >= _HEAD:
            break
    why = f"is damaged from its first bytes on ({stream.fault}); fetch the archive again" if stream.fault else ""
    return head, "" if head else why


def _blocks(content: Content, index: ZipIndex, info: ZipMember, damage: list[Fact]) -> Iterator[tuple[bytes, int]]:
    closed = why_closed(info.flags, info.method)
    if closed:
        raise UnreadableError(f"{content.path}: {info.name!r:.80} {closed}")
    stream = _stream(content, index, info)
    if isinstance(stream, Fact):
        damage.append(stream)
        return
    crc = 0
    for block, packed in stream.blocks():
        crc = zlib.crc32(block, crc)
        yield block, packed
    is_known = index.found is None or info.name not in index.found.open_at
    if stream.fault:
        damage.append(Fact.of(Kind.PACKED_BYTES, there=stream.expanded, fault=stream.fault))
    # An LZMA stream ends at its size; an end marker is optional.
    elif not is_known or not (stream.ended or (info.method == LZMA and stream.expanded == info.size)):
        damage.append(Fact.of(Kind.MEMBER_CUT, there=stream.expanded, size=info.size))
    elif crc != info.crc:
        damage.append(Fact(Kind.ZIP_CHECKSUM))
