"""Facts about a file that was read: damage and other observations, each kind with its words.

Readers create facts, and rules and reports decide by their kinds. A fact is put into words where it is shown: as a
clause that follows the name of the file (``is cut short``), or as a description of what is at a place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from string import Formatter
from typing import Any

from msgspec import Struct, field

from ckptfix.core.finding import counted
from ckptfix.core.wording import LISTED, first_names, shell_join


class _Template(Formatter):
    """Formats ``{keys:names}`` as a list, ``{ranks:rank}`` as a number with its noun, and a fact as its clause."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "names":
            return first_names(value)
        if isinstance(value, Fact):
            return clause(value)
        return counted(value, format_spec) if format_spec[:1].isalpha() else format(value, format_spec)


_CUT_ZIP = "is cut short: the zip archive has no directory at its end"


def _zip_record(fact: Fact) -> str:
    record = "the header of" if fact.data["record"] == "header" else "the directory's entry of"
    return f"is damaged: {record} member {fact.place}"


def _zip_directory(fact: Fact) -> str:
    fault = fact.data["fault"] or "it points to places without members"
    return f"is damaged: the directory of the zip archive ({fault}); its members were found by scanning"


def _zip_displaced(fact: Fact) -> str:
    displaced = fact.data["nbytes"]
    if displaced < 0:
        return f"lacks {-displaced} bytes before its zip directory"
    return (
        f"has its zip directory {displaced} bytes after the place that it states: data was inserted before the "
        "archive or into it"
    )


def _torch_zip_cut(fact: Fact) -> str:
    size, zeros, missing = (fact.data[name] for name in ("nbytes", "zeros", "missing"))
    reserved = f", the last {zeros} of them reserved but never filled (zeros)" if zeros else ""
    needed = f", and its tensors need at least {missing} more" if missing else ""
    return f"{_CUT_ZIP} (PyTorch says: failed finding central directory), it has {size} bytes{reserved}{needed}"


def _member_gone(fact: Fact) -> str:
    more = f", and of {fact.data['more']} more" if fact.data["more"] else ""
    return f"lacks the header and bytes of its member {fact.place} at the place in its directory{more}"


def _member_cut(fact: Fact) -> str:
    whole = f"of its {fact.data['size']} bytes" if fact.data["size"] else "bytes of an unknown size"
    return f"is cut short: the zip archive has {fact.data['there']} {whole}"


def _storage_size(fact: Fact) -> str:
    there, size = fact.data["there"], fact.data["size"]
    if there < size:
        return f"has {there} of the {size} bytes of its storage {fact.place}"
    return f"has {there} bytes for its storage {fact.place} of {size} bytes (torch: record size does not match)"


def _cut_short(fact: Fact) -> str:
    if "end" not in fact.data:
        return "is cut short"
    return f"is cut short: it has {fact.data['nbytes']} bytes and its storages end at byte {fact.data['end']}"


def _bytes_before(fact: Fact) -> str:
    if fact.data["surplus"] < 0:
        return "the missing bytes may be missing before them instead of at the end of the file"
    return "the surplus bytes may be before them instead of at the end of the file"


def _shards_missing(fact: Fact) -> str:
    names, keys, gone, total = (fact.data[name] for name in ("names", "keys", "nbytes", "total"))
    said = f"lacks {'the shard' if len(names) == 1 else f'{len(names)} shards:'} {first_names(names)}"
    said += f" with {counted(keys, 'key')}" if keys else ""
    return said + (f", {gone} of {total} bytes ({100 * gone / total:.3g} %)" if gone > 0 else "")


def _shard_misplaced(fact: Fact) -> str:
    other = fact.data["other"]
    has = f"the data of {other}" if other else "other data than the metadata describes"
    return f"has a shard that cannot be used ({fact.place} has {has})"


def _ranks_lacking(fact: Fact) -> str:
    absent, ranks, names = (fact.data[name] for name in ("absent", "ranks", "names"))
    more = f" and {absent - len(names)} more" if absent > len(names) else ""
    return f"lacks {counted(absent, 'rank')} of {ranks}: {', '.join(names)}{more}"


def _experts_lacking(fact: Fact) -> str:
    absent, experts, names = (fact.data[name] for name in ("absent", "experts", "names"))
    more = f" and {absent - len(names)} more" if absent > len(names) else ""
    files = f"the {'file' if absent == 1 else 'files'} of {absent} of {counted(experts, 'expert')}"
    return f"lacks {files}: {', '.join(names)}{more}"


def _bytes_lacking(fact: Fact) -> str:
    tensors = counted(len(fact.data["keys"]), "tensor")
    held = [f"{nbytes} in {name}" for name, nbytes in fact.data.get("files", {}).items()]
    more = f" and {len(held) - LISTED} more" if len(held) > LISTED else ""
    of_files = f" ({', '.join(held[:LISTED])}{more})" if held else ""
    return f"lacks {counted(fact.data['nbytes'], 'byte')} of {tensors} that no other file has{of_files}"


def _rank_renamed(fact: Fact) -> str:
    place = f"after {fact.data['before']}" if "before" in fact.data else f"before {fact.data['after']}"
    return f"was saved as {fact.data['other']}, but comes {place}"


def _item_damaged(fact: Fact) -> str:
    causes = clauses(fact.data.get("causes", ()))
    return f"has damage: {fact.place}{causes and f' {causes}'} ({counted(fact.data['items'], 'item')})"


def _ranks_differ(fact: Fact) -> str:
    keys = first_names(fact.data["keys"], 1)
    if not (names := fact.data.get("names")):
        return f"holds different values of {keys} from several ranks"
    others = f"{'most others, ' if fact.data['is_minor'] else ''}{first_names(fact.data['others'])}"
    return f"holds different values of {keys} in {first_names(names)} than in {others}"


def _doubtful_values(fact: Fact) -> str:
    cause = fact.data["cause"]
    return f"the file {clause(cause)}" if cause.kind in WRONG_BYTES else clause(cause)


_CONSTANTS = "{tensors:tensor} of {unnamed:element}, and {named} elements with names"


class Kind(Enum):
    """The kind of a fact: its name in JSON, whose meaning never changes, and its words, either a template that is
    filled in with the place and the data, or a function of the fact."""

    words: str | Callable[[Fact], str]

    def __new__(cls, name: str, words: str | Callable[[Fact], str]) -> Kind:
        kind = object.__new__(cls)
        kind._value_, kind.words = name, words
        return kind

    # Archives and compressed files around a checkpoint.
    ZIP_RECORD = ("zip-record", _zip_record)
    ZIP_RECORDS = ("zip-records", "has {more} more damaged members")
    ZIP_NAMES = ("zip-names", "names a member {place} in its directory and {header} before its data")
    ZIP_DIRECTORY = ("zip-directory", _zip_directory)
    ZIP_CUT = ("zip-cut", _CUT_ZIP + ", it has {nbytes} bytes")
    ZIP_DISPLACED = ("zip-displaced", _zip_displaced)
    TORCH_ZIP_CUT = ("torch-zip-cut", _torch_zip_cut)
    MEMBER_GONE = ("member-gone", _member_gone)
    MEMBER_LOST = ("member-lost", "is not where the archive's directory says")
    MEMBER_DAMAGED = ("member-damaged", "is damaged ({fault})")
    MEMBER_CUT = ("member-cut", _member_cut)
    PACKED_BYTES = (
        "packed-bytes",
        "is damaged: decompression failed after {there} bytes ({fault}), and the last of these may be wrong",
    )
    ZIP_CHECKSUM = ("zip-checksum", "fails the checksum of the zip archive: some of its bytes are wrong")
    STREAM_DAMAGED = (
        "stream-damaged",
        "is damaged: its {place} stream fails after {there} bytes ({fault}), and the checkpoint in it may have wrong "
        "bytes",
    )
    STREAM_CUT = ("stream-cut", "is cut short: its {place} stream ends early, after {there} bytes")
    TAR_HEADER = ("tar-header", "is damaged: the tar archive has no valid header at offset {offset}")
    TAR_CUT = ("tar-cut", "is cut short: the tar archive has {nbytes} bytes and its file {place} ends at byte {end}")
    TAR_HEADER_CUT = ("tar-header-cut", "is cut short: the tar archive ends inside a header, at byte {nbytes}")
    TAR_MEMBER_CUT = ("tar-member-cut", "has {there} of its {size} bytes")
    # Damage that can be undone.
    CRLF = (
        "crlf",
        "was mangled by a transfer in text mode, which turned every line feed into CR LF; this can be undone",
    )
    PRECEDED = ("preceded", "begins with {nbytes} bytes that do not belong to the checkpoint ({head!r})")
    # The members of a torch file.
    MEMBER_CHECKSUM = ("member-checksum", "has a {place} that fails its checksum")
    MEMBERS_DAMAGED = ("members-damaged", "has {more} more damaged members")
    MEMBER_PACKED = ("member-packed", "has a {place} that cannot be unpacked")
    BYTEORDER_LOST = ("byteorder-lost", "lacks its byteorder; little-endian was assumed")
    BYTEORDER_ODD = ("byteorder-odd", "has a byteorder that is neither little nor big")
    STORAGE_LACKING = ("storage-lacking", "lacks its storage {place}")
    STORAGE_SIZE = ("storage-size", _storage_size)
    STORAGES_LACKING = ("storages-lacking", "lacks {more} more")
    STORAGE_UNNAMED = ("storage-unnamed", "has {place}, which its list of weights does not name")
    STORAGES_UNWRITTEN = ("storages-unwritten", "lacks {storages:storage} that its tensors use")
    STORAGES_CUT = ("storages-cut", "is cut short inside its storages")
    SOURCES_LOST = ("sources-lost", "lacks the source of some classes, so every tensor in them counts as a weight")
    # A file as a whole, and its pickles.
    CUT_SHORT = ("cut-short", _cut_short)
    ZEROS = ("zeros", "is zeros from byte {start} of {nbytes} on: the rest was never written")
    UNFILLED = (
        "unfilled",
        "is not complete: the last {zeros} of its {nbytes} bytes are zeros, reserved but never filled",
    )
    STORAGE_COUNT = (
        "storage-count",
        "is damaged before byte {offset}: storage {place} is declared with {declared} bytes and stored with {stored}",
    )
    PICKLE_CUT = ("pickle-cut", "is cut short: its pickle ends at byte {end}, and nothing after that has a name")
    PICKLE_DAMAGED = ("pickle-damaged", "is damaged in its pickle at byte {start}, and nothing after that can be read")
    EXTRAS_LOST = ("extras-lost", "has lost tensors in {place}, which is left out")
    STATES_LOST = ("states-lost", "has lost the state of {keys:names} in {place}, which is left out")
    # safetensors.
    HEADER_PADDING = ("header-padding", "is damaged: the length of its header leaves out the padding")
    HEADER_NOTES = (
        "header-notes",
        "has values other than strings in __metadata__ ({keys:names}), which safetensors refuses "
        "(InvalidHeaderDeserialization)",
    )
    DATA_CUT = (
        "data-cut",
        "is cut short: its header describes {needed} bytes of tensors, but it has {there} (MetadataIncompleteBuffer)",
    )
    DATA_SURPLUS = (
        "data-surplus",
        "has {surplus} bytes after its last tensor (incomplete metadata, file not fully covered)",
    )
    BYTES_BEFORE = ("bytes-before", _bytes_before)
    ODD_STRIDES = (
        "odd-strides",
        "their strides make elements overlap, probably because of a flipped bit in the pickle",
    )
    # Checkpoints of several files.
    SHARD_UNREADABLE = ("shard-unreadable", "has a shard that cannot be read ({error})")
    SHARD_DAMAGED = ("shard-damaged", "has a shard {place} that {cause}")
    SHARDS_MISSING = ("shards-missing", _shards_missing)
    SHARD_MISPLACED = ("shard-misplaced", _shard_misplaced)
    RANKS_MISSING = ("ranks-missing", "lacks the shards of {ranks:rank}, the first shard-{first:05}")
    INDEX_UNREADABLE = ("index-unreadable", "has an index that cannot be read ({error})")
    INDEX_BOM = ("index-bom", "has an index that begins with a byte order mark, which json.loads refuses")
    INDEX_STALE = ("index-stale", "has a stale index: {names:names} are missing, but {place} is complete")
    INDEX_PROMISES = ("index-promises", "has an index that lists {keys:names}, which no shard has")
    INDEX_MOVED = ("index-moved", "has a stale index that lists another shard for {keys:names}")
    INDEX_UNLISTED = ("index-unlisted", "has a stale index: it does not list {keys:names}")
    KEYS_DIFFER = ("keys-differ", "has {keys:names} in two shards with different values")
    CHUNKS_LACKING = ("chunks-lacking", "is not complete: {error}")
    TENSORS_LACKING = ("tensors-lacking", "lacks chunks of {more:more tensor}")
    RANK_UNREADABLE = ("rank-unreadable", "has a rank that cannot be read ({error})")
    RANK_MISPLACED = ("rank-misplaced", "has a rank that cannot be used ({place} has the data of {other})")
    RANK_SHORT = ("rank-short", "has an incomplete rank: {place} has {there} of {size} numbers")
    RANKS_LACKING = ("ranks-lacking", _ranks_lacking)
    STATES_LACKING = ("states-lacking", "lacks the model states {names:names}")
    EXPERTS_LACKING = ("experts-lacking", _experts_lacking)
    EXPERTS_DAMAGED = ("experts-damaged", "has damaged files of experts: {names:names}")
    BYTES_LACKING = ("bytes-lacking", _bytes_lacking)
    RANKS_STRANGE = ("ranks-strange", "has files of ranks beyond the {ranks} that saved it: {names:names}")
    RANKS_OF_ANOTHER_SAVE = ("ranks-of-another-save", "has ranks from another save than most: {names:names}")
    COPIES_TAKEN = ("copies-taken", "has lost fp32 masters: its weights are the copies in {dtypes:names}")
    ITEM_DAMAGED = ("item-damaged", _item_damaged)
    RANKS_DIFFER = ("ranks-differ", _ranks_differ)
    # Observations other than damage.
    DOUBTFUL_NAMES = ("doubtful-names", "{cause}")
    DOUBTFUL_VALUES = ("doubtful-values", _doubtful_values)
    UNNAMED_LOSS = ("unnamed-loss", "{lost}")
    STRAY_FILE = ("stray-file", "holds nothing of this checkpoint")
    LAST_SHARD = ("last-shard", "is the last readable shard; no file says how many there should be")
    RANK_COPIES = ("rank-copies", "differs between ranks; the first rank's is used")
    RANKS_COMPUTED = ("ranks-computed", "is the {rule} over {ranks} ranks, as in GPT-NeoX")
    RANK_LEFT_OUT = ("rank-left-out", "has no names for the whole model, and is left out")
    RANK_REPEATED = ("rank-repeated", "holds the same values as {other}")
    RANK_RENAMED = ("rank-renamed", _rank_renamed)
    COPY_RENAMED = ("copy-renamed", _rank_renamed)
    LAYER_SKIPPED = (
        "layer-skipped",
        "{place} is not there, between the files of two layers with equal names and shapes",
    )
    LAYER_LACKING = ("layer-lacking", "is in every layer except layer {number}")
    RANK_FOREIGN = ("rank-foreign", "was saved with a different {names:names} than most ranks")
    COMPLETE_COPY = ("complete-copy", "{place} has all weights in {dtype}")
    STATES_OF = ("states-of", "the buffers and settings are those of {place}")
    MASTERS = ("masters", "the weights are the fp32 masters of training in {dtype}")
    PACKED_MEMBERS = ("packed-members", "{members:member} of the archive")
    FLATTENED = ("flattened", "the weights are flattened: the files have their names but not their shapes")
    PACKED_SHARD = ("packed-shard", "compressed by itself")
    OTHER_SUFFIX = ("other-suffix", "{reader} refuses it")
    INDEX_SIZE = ("index-size", "the index says {total} bytes of tensors, and its shards have {held}")
    TRAILING_BYTES = ("trailing-bytes", "{nbytes}")
    LAST_STORAGE = ("last-storage", "bytes follow it")
    ODD_LAYOUT = ("odd-layout", "{oddity}")
    ODD_METADATA = ("odd-metadata", "{name}")
    NOTE = ("note", "{text}")
    DAMAGED_NOTE = ("damaged-note", "{fault}")
    PAYLOAD = ("payload", "{name}")
    UNTRUSTED = ("untrusted", "{name}")
    STORED_CODE = ("stored-code", "{name}")
    HIDDEN_PICKLE = ("hidden-pickle", "a pickle that torch.load never reads")
    PROTOCOL = ("protocol", "{protocol}")
    PYTHON2_TEXT = ("python2-text", "text of Python 2")
    PLAIN_PICKLE = ("plain-pickle", "pickle.dump")
    TORCHSCRIPT = ("torchscript", "a TorchScript archive")
    TORCH_PACKAGE = ("torch-package", "a torch.package archive")
    TORCH_EXPORT = ("torch-export", "a torch.export program (only its weights)")
    UNPACKED_FOLDER = ("unpacked-folder", "a torch file unpacked into a folder")
    TORCH_TAR = ("torch-tar", "the tar format of torch 0.1")
    TENSOR_SUBCLASS = ("tensor-subclass", "{name}")
    NUMPY_WEIGHTS = ("numpy-weights", "numpy arrays")
    NON_STRING_KEY = ("non-string-key", "{key}")
    UNINITIALIZED = ("uninitialized", "{name}")
    WEIGHTS_BESIDE = ("weights-beside", "{tensors:tensor}, {numel:element}")
    LISTED_AVERAGE = ("listed-average", "a list of the parameters of {names} in order, like an average")
    MOST_UNREAD = ("most-unread", "most of the file was not read: {unread} tensors besides the state_dict's {read}")
    FROZEN = ("frozen", _CONSTANTS)
    CONSTANTS = ("constants", _CONSTANTS)
    GUESSED_BUFFERS = ("guessed-buffers", "tensors other than parameters count as buffers")
    TENSOR_ATTRIBUTE = ("tensor-attribute", "neither parameter nor buffer")
    SCALES_OF_CODES = ("scales-of-codes", "an attribute, with tensors, of a quantised tensor")
    ATTRIBUTE_OF_TENSOR = ("attribute-of-tensor", "an attribute of a tensor")
    MOST_IN_ATTRIBUTES = ("most-in-attributes", "{unnamed:element} in attributes, and {named:element} with names")


# Files of ranks that have the data of others, with which the merged weights are wrong.
MIXED_RANKS = (Kind.RANK_REPEATED, Kind.RANK_RENAMED)


class Fact(Struct, frozen=True):
    """An observation about a file: its kind, its place (a key, a file, a place in the container; ``.`` is the whole),
    and the numbers and names that the words of its kind use.

    >>> Fact.of(Kind.CUT_SHORT, nbytes=10, end=12).data["end"]
    12"""

    kind: Kind
    place: str = "."
    data: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.kind, self.place))

    @classmethod
    def of(cls, kind: Kind, place: str = ".", **data: Any) -> Fact:
        """Return a fact with its numbers and names as keyword arguments."""
        return cls(kind, place, data)


def clause(fact: Fact) -> str:
    """Return the words for a fact: for damage, a clause that follows the file's name.

    >>> clause(Fact.of(Kind.ZIP_CUT, nbytes=12))
    'is cut short: the zip archive has no directory at its end, it has 12 bytes'"""
    words = fact.kind.words
    return _Template().format(words, place=fact.place, **fact.data) if isinstance(words, str) else words(fact)


def clauses(facts: Iterable[Fact]) -> str:
    """Join the clauses of the first few facts, followed by the number of others."""
    found = list(facts)
    rest = len(found) - LISTED
    return "; ".join(map(clause, found[:LISTED])) + (f"; and {rest} more" if rest > 0 else "")


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """Return a fact as data, with its words as ``text``."""
    data = {name: fact_to_json(value) if isinstance(value, Fact) else value for name, value in fact.data.items()}
    return {"kind": fact.kind.value, "place": fact.place, "text": clause(fact), "data": data}


def in_copy(fact: Fact) -> str:
    """Return in words how to get the weights of a ``COMPLETE_COPY``."""
    command = shell_join(["ckptfix", "repair", fact.place, "-o", "model.pth"])
    masters = "" if fact.data["dtype"] == "float32" else "the fp32 masters and "
    return f"take all weights in {fact.data['dtype']}, without {masters}the optimizer: {command}"


def first_facts(facts: list[Fact], rest: Kind, most: int = 3) -> list[Fact]:
    """Return the first few facts, and one of the kind ``rest`` with the number of others, if any."""
    more = len(facts) - most
    return facts[:most] + ([Fact.of(rest, more=more)] if more > 0 else [])


# Faults outside intact tensors, which are fixed when the file is written again.
BESIDE = frozenset({Kind.INDEX_STALE, Kind.INDEX_MOVED, Kind.HEADER_NOTES})

# The existing files are intact, and others have to be fetched.
ABSENT = frozenset(
    {Kind.RANKS_LACKING, Kind.RANKS_MISSING, Kind.SHARDS_MISSING, Kind.EXPERTS_LACKING, Kind.STATES_LACKING}
)

# What such a fact says about its files: their number, or their names.
_ABSENT_FILES = ("absent", "ranks", "names")


def to_fetch(damage: Iterable[Fact]) -> str:
    """Return in words what to fetch: the missing files, if any, or else the damaged file."""
    said = [
        next(fact.data[name] for name in _ABSENT_FILES if name in fact.data) for fact in damage if fact.kind in ABSENT
    ]
    count = sum(files if isinstance(files, int) else len(files) for files in said)
    return f"the missing {'file' if count == 1 else 'files'}" if said else "the file again"


# A tensor may differ from what was saved.
DOUBTS = frozenset({Kind.DOUBTFUL_NAMES, Kind.DOUBTFUL_VALUES})

# Damage of a compressed file that may have left wrong bytes, instead of only truncating it.
WRONG_BYTES = frozenset({Kind.PACKED_BYTES, Kind.ZIP_CHECKSUM, Kind.STREAM_DAMAGED})
