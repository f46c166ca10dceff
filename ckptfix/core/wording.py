"""The words for facts: a clause that follows the name of the file (``is cut short``), or what was found at a place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence

from ckptfix.core.facts import WRONG_BYTES, Fact, Kind
from ckptfix.core.finding import counted

_LISTED = 4  # names of a list that are given
KEEP_STATISTICS = (
    "they are what inputs and outputs were normalised with: convert the file with the library that wrote it (LeRobot"
    " has a migration), or normalise in your code; without them the model runs on other numbers"
)
_CUT_ZIP = "is cut short: the zip archive has no directory at its end"


def clause(fact: Fact) -> str:
    """Return the words for a fact: for damage, a clause that follows the file's name.

    >>> clause(Fact.of(Kind.ZIP_CUT, nbytes=12))
    'is cut short: the zip archive has no directory at its end, it has 12 bytes'"""
    words = _WORDS[fact.kind]
    return words.format(place=fact.place, **fact.data) if isinstance(words, str) else words(fact)


def clauses(facts: Iterable[Fact]) -> str:
    """Return the clauses of several facts as one, the first few in full."""
    found = list(facts)
    rest = len(found) - _LISTED
    return "; ".join(map(clause, found[:_LISTED])) + (f"; and {rest} more" if rest > 0 else "")


def first_names(names: Sequence[object], most: int = _LISTED) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {rest} more" if rest > 0 else "")


def _names(words: str) -> Callable[[Fact], str]:
    return lambda fact: words.format(first_names(fact.data["keys"]))


def _zip_record(fact: Fact) -> str:
    record = "the header of" if fact.data["record"] == "header" else "the directory's entry of"
    return f"is damaged: {record} member {fact.place}"


def _zip_directory(fact: Fact) -> str:
    fault = fact.data["fault"] or "it points at places where no members are"
    return f"is damaged: the directory of the zip archive ({fault}); its members were found without it"


def _zip_displaced(fact: Fact) -> str:
    displaced = fact.data["nbytes"]
    if displaced < 0:
        return f"lacks {-displaced} bytes before its zip directory"
    return (
        f"has its zip directory {displaced} bytes further on than that says: something was put before the archive or "
        "into it"
    )


def _torch_zip_cut(fact: Fact) -> str:
    size, zeros, missing = (fact.data[name] for name in ("nbytes", "zeros", "missing"))
    reserved = f", the last {zeros} of them zeros that were reserved and never filled" if zeros else ""
    needed = f", and its tensors need at least {missing} more" if missing else ""
    return f"{_CUT_ZIP} (PyTorch says: failed finding central directory), it has {size} bytes{reserved}{needed}"


def _member_gone(fact: Fact) -> str:
    more = f", nor those of {fact.data['more']} more" if fact.data["more"] else ""
    return f"has neither the header nor the bytes of its member {fact.place} where its directory says{more}"


def _member_cut(fact: Fact) -> str:
    whole = f"of its {fact.data['size']} bytes" if fact.data["size"] else "bytes of an unknown size"
    return f"is cut short: the zip archive has {fact.data['there']} {whole}"


def _storage_size(fact: Fact) -> str:
    there, size = fact.data["there"], fact.data["size"]
    if there < size:
        return f"has {there} of the {size} bytes of its storage {fact.place}"
    return f"has {there} bytes where its storage {fact.place} has {size} (torch: record size does not match)"


def _cut_short(fact: Fact) -> str:
    if "end" not in fact.data:
        return "is cut short"
    return f"is cut short: it has {fact.data['nbytes']} bytes and its storages end at byte {fact.data['end']}"


def _bytes_before(fact: Fact) -> str:
    if fact.data["surplus"] < 0:
        return "the missing bytes of the file may be missing before them, and not at its end"
    return "the surplus bytes of the file may be before them, and not at its end"


def _shards_missing(fact: Fact) -> str:
    names, keys, gone, total = (fact.data[name] for name in ("names", "keys", "nbytes", "total"))
    said = f"lacks {'the shard' if len(names) == 1 else f'{len(names)} shards:'} {first_names(names)}"
    said += f" with {counted(keys, 'key')}" if keys else ""
    return said + (f", {gone} of {total} bytes ({100 * gone / total:.3g} %)" if gone > 0 else "")


def _ranks_lacking(fact: Fact) -> str:
    absent, ranks, names = (fact.data[name] for name in ("absent", "ranks", "names"))
    more = f" and {absent - len(names)} more" if absent > len(names) else ""
    return f"lacks {counted(absent, 'rank')} of {ranks}: {', '.join(names)}{more}"


def _item_damaged(fact: Fact) -> str:
    causes = clauses(fact.data.get("causes", ()))
    return f"has damage: {fact.place}{causes and f' {causes}'} ({counted(fact.data['items'], 'item')})"


def _ranks_differ(fact: Fact) -> str:
    keys = fact.data["keys"]
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"holds different values of {keys[0]}{more} from several ranks, and those of the first count"


def _doubtful_values(fact: Fact) -> str:
    cause = fact.data["cause"]
    return f"the file {clause(cause)}" if cause.kind in WRONG_BYTES else clause(cause)


def _caused(fact: Fact) -> str:
    return clause(fact.data["cause"])


def _constants(fact: Fact) -> str:
    tensors, unnamed, named = (fact.data[name] for name in ("tensors", "unnamed", "named"))
    return f"{counted(tensors, 'tensor')} of {counted(unnamed, 'element')}, and {named} elements with names"


_WORDS: dict[Kind, str | Callable[[Fact], str]] = {
    Kind.ZIP_RECORD: _zip_record,
    Kind.ZIP_RECORDS: "has {more} more damaged members",
    Kind.ZIP_NAMES: "calls a member {place} in its directory and {header} before its data",
    Kind.ZIP_DIRECTORY: _zip_directory,
    Kind.ZIP_CUT: _CUT_ZIP + ", it has {nbytes} bytes",
    Kind.ZIP_DISPLACED: _zip_displaced,
    Kind.TORCH_ZIP_CUT: _torch_zip_cut,
    Kind.MEMBER_GONE: _member_gone,
    Kind.MEMBER_LOST: "is not where the directory of the archive says",
    Kind.MEMBER_DAMAGED: "is damaged ({fault})",
    Kind.MEMBER_CUT: _member_cut,
    Kind.PACKED_BYTES: (
        "is damaged: its packed bytes fail after {there} bytes were unpacked ({fault}), and the last of these may be "
        "wrong"
    ),
    Kind.ZIP_CHECKSUM: "fails the checksum of the zip archive: some of its bytes are wrong",
    Kind.STREAM_DAMAGED: (
        "is damaged: its {place} stream fails after {there} bytes were unpacked ({fault}), and the checkpoint in it "
        "may have wrong bytes"
    ),
    Kind.STREAM_CUT: ("is cut short: its {place} stream ends early, {there} bytes of an unknown size were unpacked"),
    Kind.TAR_HEADER: "is damaged: the tar archive has no sound header at offset {offset}",
    Kind.TAR_CUT: "is cut short: the tar archive has {nbytes} bytes and its file {place} ends at byte {end}",
    Kind.TAR_HEADER_CUT: "is cut short: the tar archive ends inside of a header, at byte {nbytes}",
    Kind.TAR_MEMBER_CUT: "has {there} of its {size} bytes",
    Kind.CRLF: (
        "was mangled: every line feed in it was turned into CR LF by a transfer in text mode, which can be undone"
    ),
    Kind.PRECEDED: "begins with {nbytes} bytes that do not belong to the checkpoint ({head!r})",
    Kind.MEMBER_CHECKSUM: "has a {place} that fails its checksum",
    Kind.MEMBERS_DAMAGED: "has {more} more damaged members",
    Kind.MEMBER_PACKED: "has a {place} that cannot be unpacked",
    Kind.BYTEORDER_LOST: "has lost its byteorder, so little-endian was assumed",
    Kind.BYTEORDER_ODD: "has a byteorder that is neither little nor big",
    Kind.STORAGE_LACKING: "lacks its storage {place}",
    Kind.STORAGE_SIZE: _storage_size,
    Kind.STORAGES_LACKING: "lacks {more} more",
    Kind.STORAGES_UNWRITTEN: lambda fact: f"lacks {counted(fact.data['storages'], 'storage')} that its tensors use",
    Kind.STORAGES_CUT: "is cut short inside of its storages",
    Kind.SOURCES_LOST: "has lost sources of its classes, so that every tensor in them counts as a weight",
    Kind.CUT_SHORT: _cut_short,
    Kind.ZEROS: "is zeros from byte {start} of {nbytes} on, which were never filled",
    Kind.UNFILLED: (
        "is not complete: of its {nbytes} bytes the last {zeros} are zeros that were reserved and never filled"
    ),
    Kind.STORAGE_COUNT: (
        "is damaged before byte {offset}: storage {place} is declared with {declared} bytes and stored with {stored}"
    ),
    Kind.PICKLE_CUT: "is cut short: its pickle ends at byte {end}, and what came after that has no name",
    Kind.PICKLE_DAMAGED: "is damaged in its pickle at byte {start}, and nothing after that can be read",
    Kind.EXTRAS_LOST: "has lost tensors of {place}, which is left out",
    Kind.HEADER_PADDING: ("is damaged: its header declares itself shorter than it is, without the padding after it"),
    Kind.HEADER_NOTES: _names(
        "has __metadata__ with values that are not texts ({}), which safetensors refuses (InvalidHeaderDeserialization)"
    ),
    Kind.DATA_CUT: (
        "is cut short: its header describes {needed} bytes of tensors and {there} are there (MetadataIncompleteBuffer)"
    ),
    Kind.DATA_SURPLUS: "has {surplus} bytes after its last tensor (incomplete metadata, file not fully covered)",
    Kind.BYTES_BEFORE: _bytes_before,
    Kind.ODD_STRIDES: "their strides make elements overlap, as one flipped bit of the pickle does",
    Kind.SHARD_UNREADABLE: "has a shard that cannot be read ({error})",
    Kind.SHARD_DAMAGED: lambda fact: f"has a shard {fact.place} that {_caused(fact)}",
    Kind.SHARDS_MISSING: _shards_missing,
    Kind.RANKS_MISSING: lambda fact: (
        f"lacks the shards of {counted(fact.data['ranks'], 'rank')}, the first shard-{fact.data['first']:05}"
    ),
    Kind.RANK_UNREADABLE: "has a rank that cannot be read ({error})",
    Kind.RANK_SHORT: "has a rank that lacks a part of its weights: {place} holds {there} of {size} numbers",
    Kind.RANKS_STRANGE: lambda fact: (
        f"has files of other ranks than the {fact.data['ranks']} that saved it: {first_names(fact.data['names'])}"
    ),
    Kind.RANKS_LACKING: _ranks_lacking,
    Kind.INDEX_UNREADABLE: "has an index that cannot be read ({error})",
    Kind.INDEX_BOM: "has an index that begins with a byte order mark, which json.loads refuses",
    Kind.INDEX_STALE: lambda fact: (
        f"has a stale index: {first_names(fact.data['names'])} are not there, and {fact.place} is complete"
    ),
    Kind.INDEX_PROMISES: _names("has an index that promises {}, which no shard holds"),
    Kind.INDEX_MOVED: _names("has a stale index: another shard than it says has {}"),
    Kind.INDEX_UNLISTED: _names("has a stale index: it does not know {} in the shards"),
    Kind.KEYS_DIFFER: _names("holds {} in two shards with different values"),
    Kind.CHUNKS_LACKING: "is not complete: {error}",
    Kind.TENSORS_LACKING: lambda fact: f"lacks chunks of {counted(fact.data['more'], 'more tensor')}",
    Kind.ITEM_DAMAGED: _item_damaged,
    Kind.RANKS_DIFFER: _ranks_differ,
    Kind.DOUBTFUL_NAMES: _caused,
    Kind.DOUBTFUL_VALUES: _doubtful_values,
    Kind.UNNAMED_LOSS: "{lost}",
    Kind.STRAY_FILE: "holds nothing of this checkpoint",
    Kind.LAST_SHARD: "is the last shard that can be read; no file says how many there should be",
    Kind.RANK_COPIES: "differs between ranks; that of the first is taken",
    Kind.RANKS_COMPUTED: "is the {rule} of those of {ranks} ranks, as GPT-NeoX has it",
    Kind.RANK_REPEATED: "holds the same values as {other}",
    Kind.RANK_RENAMED: "was saved as {other}, but comes after {before}",
    Kind.RANK_FOREIGN: lambda fact: f"was saved with another {first_names(fact.data['names'])} than most ranks",
    Kind.FLATTENED: "the weights are flattened: the files have their names, but not their shapes",
    Kind.MASTERS: "the weights are the fp32 masters of a training in {dtype}",
    Kind.RANK_LEFT_OUT: "has no names that are valid for the whole model, and is left out",
    Kind.PACKED_MEMBERS: lambda fact: f"{counted(fact.data['members'], 'member')} of the archive",
    Kind.PACKED_SHARD: "compressed by itself",
    Kind.OTHER_SUFFIX: "{reader} refuses it",
    Kind.INDEX_SIZE: "the index counts {total} bytes of tensors and its shards hold {held}",
    Kind.TRAILING_BYTES: "{nbytes}",
    Kind.LAST_STORAGE: "bytes follow it",
    Kind.ODD_LAYOUT: "{oddity}",
    Kind.ODD_METADATA: "{name}",
    Kind.NOTE: "{text}",
    Kind.DAMAGED_NOTE: "{fault}",
    Kind.PAYLOAD: "{name}",
    Kind.UNTRUSTED: "{name}",
    Kind.STORED_CODE: "{name}",
    Kind.HIDDEN_PICKLE: "a pickle that torch.load never reads",
    Kind.PROTOCOL: "{protocol}",
    Kind.PYTHON2_TEXT: "text of Python 2",
    Kind.PLAIN_PICKLE: "pickle.dump",
    Kind.TORCHSCRIPT: "a TorchScript archive",
    Kind.TORCH_PACKAGE: "a torch.package archive",
    Kind.TORCH_EXPORT: "a program of torch.export (its weights only)",
    Kind.UNPACKED_FOLDER: "a torch file that was unpacked into a folder",
    Kind.TORCH_TAR: "the tar format of torch 0.1",
    Kind.TENSOR_SUBCLASS: "{name}",
    Kind.NUMPY_WEIGHTS: "numpy arrays",
    Kind.NON_STRING_KEY: "{key}",
    Kind.UNINITIALIZED: "{name}",
    Kind.WEIGHTS_BESIDE: lambda fact: (
        f"{counted(fact.data['tensors'], 'tensor')}, {counted(fact.data['numel'], 'element')}"
    ),
    Kind.LISTED_AVERAGE: "a list of the parameters of {names} in their order, as averages are",
    Kind.MOST_UNREAD: "most of the file was not read: {unread} tensors beside the {read} of the state_dict",
    Kind.FROZEN: _constants,
    Kind.CONSTANTS: _constants,
    Kind.GUESSED_BUFFERS: "every tensor that is not a parameter counts as a buffer",
    Kind.TENSOR_ATTRIBUTE: "neither parameter nor buffer",
    Kind.ATTRIBUTE_OF_TENSOR: "an attribute of a tensor",
    Kind.MOST_IN_ATTRIBUTES: lambda fact: (
        f"{counted(fact.data['unnamed'], 'element')} in attributes, and "
        f"{counted(fact.data['named'], 'element')} with names"
    ),
}


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the one of the known names that a mistyped one is most like, from 0 to 1; empty if none is."""
    from difflib import get_close_matches  # which only a slip needs

    return next(iter(get_close_matches(name, list(known), 1, likeness)), "")


def folded_places(places: Iterable[str]) -> dict[str, list[str]]:
    """Return places in a container by what names them together: those that differ in the numbers of lists only are one,
    ``logging.ema[…] (1000)``."""
    groups: dict[str, list[str]] = {}
    for place in places:
        groups.setdefault(re.sub(r"\[\d+\]", "[…]", place), []).append(place)
    return {f"{name} ({len(group)})" if len(group) > 1 else group[0]: group for name, group in groups.items()}


def typed(words: Iterable[str]) -> str:
    """Return the command of these words, on one line that bash, zsh and ksh take apart into the same words again."""
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """Return one word of a command. Line breaks, bytes that are no text, and invisible characters become escapes."""
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def no_option(name: str) -> str:
    """Return the name of a file so that a command does not take it for an option."""
    return f"./{name}" if name.startswith("-") else name


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    is_byte = "\udc80" <= sign <= "\udcff"
    raw = sign.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in raw)
