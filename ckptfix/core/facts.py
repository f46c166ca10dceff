"""Facts about a file that was read: what is damaged in it, and what else was noticed.

Readers make facts, and rules and reports decide by their kinds. Only ``wording`` turns them into words."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field


class Kind(Enum):
    """What a fact is about. The values are names for JSON: they never change their meaning."""

    # What is around a checkpoint: archives and compressed files.
    ZIP_RECORD = "zip-record"
    ZIP_RECORDS = "zip-records"
    ZIP_NAMES = "zip-names"
    ZIP_DIRECTORY = "zip-directory"
    ZIP_CUT = "zip-cut"
    ZIP_DISPLACED = "zip-displaced"
    TORCH_ZIP_CUT = "torch-zip-cut"
    MEMBER_GONE = "member-gone"
    MEMBER_LOST = "member-lost"
    MEMBER_DAMAGED = "member-damaged"
    MEMBER_CUT = "member-cut"
    PACKED_BYTES = "packed-bytes"
    ZIP_CHECKSUM = "zip-checksum"
    STREAM_DAMAGED = "stream-damaged"
    STREAM_CUT = "stream-cut"
    TAR_HEADER = "tar-header"
    TAR_CUT = "tar-cut"
    TAR_HEADER_CUT = "tar-header-cut"
    TAR_MEMBER_CUT = "tar-member-cut"
    # Damage that can be undone.
    CRLF = "crlf"
    PRECEDED = "preceded"
    # The members of a torch file.
    MEMBER_CHECKSUM = "member-checksum"
    MEMBERS_DAMAGED = "members-damaged"
    MEMBER_PACKED = "member-packed"
    BYTEORDER_LOST = "byteorder-lost"
    BYTEORDER_ODD = "byteorder-odd"
    STORAGE_LACKING = "storage-lacking"
    STORAGE_SIZE = "storage-size"
    STORAGES_LACKING = "storages-lacking"
    STORAGES_UNWRITTEN = "storages-unwritten"
    STORAGES_CUT = "storages-cut"
    SOURCES_LOST = "sources-lost"
    # A file as a whole, and its pickles.
    CUT_SHORT = "cut-short"
    ZEROS = "zeros"
    UNFILLED = "unfilled"
    STORAGE_COUNT = "storage-count"
    PICKLE_CUT = "pickle-cut"
    PICKLE_DAMAGED = "pickle-damaged"
    EXTRAS_LOST = "extras-lost"
    # safetensors.
    HEADER_PADDING = "header-padding"
    HEADER_NOTES = "header-notes"
    DATA_CUT = "data-cut"
    DATA_SURPLUS = "data-surplus"
    BYTES_BEFORE = "bytes-before"
    ODD_STRIDES = "odd-strides"
    # Checkpoints of several files.
    SHARD_UNREADABLE = "shard-unreadable"
    SHARD_DAMAGED = "shard-damaged"
    SHARDS_MISSING = "shards-missing"
    RANKS_MISSING = "ranks-missing"
    INDEX_UNREADABLE = "index-unreadable"
    INDEX_BOM = "index-bom"
    INDEX_STALE = "index-stale"
    INDEX_PROMISES = "index-promises"
    INDEX_MOVED = "index-moved"
    INDEX_UNLISTED = "index-unlisted"
    KEYS_DIFFER = "keys-differ"
    CHUNKS_LACKING = "chunks-lacking"
    TENSORS_LACKING = "tensors-lacking"
    RANK_UNREADABLE = "rank-unreadable"
    RANK_SHORT = "rank-short"
    RANKS_LACKING = "ranks-lacking"
    RANKS_STRANGE = "ranks-strange"
    ITEM_DAMAGED = "item-damaged"
    RANKS_DIFFER = "ranks-differ"
    # What rules look at beside the damage.
    DOUBTFUL_NAMES = "doubtful-names"
    DOUBTFUL_VALUES = "doubtful-values"
    UNNAMED_LOSS = "unnamed-loss"
    STRAY_FILE = "stray-file"
    LAST_SHARD = "last-shard"
    RANK_COPIES = "rank-copies"
    RANKS_COMPUTED = "ranks-computed"
    RANK_LEFT_OUT = "rank-left-out"
    RANK_REPEATED = "rank-repeated"
    RANK_RENAMED = "rank-renamed"
    RANK_FOREIGN = "rank-foreign"
    MASTERS = "masters"
    PACKED_MEMBERS = "packed-members"
    FLATTENED = "flattened"
    PACKED_SHARD = "packed-shard"
    OTHER_SUFFIX = "other-suffix"
    INDEX_SIZE = "index-size"
    TRAILING_BYTES = "trailing-bytes"
    LAST_STORAGE = "last-storage"
    ODD_LAYOUT = "odd-layout"
    ODD_METADATA = "odd-metadata"
    NOTE = "note"
    DAMAGED_NOTE = "damaged-note"
    PAYLOAD = "payload"
    UNTRUSTED = "untrusted"
    STORED_CODE = "stored-code"
    HIDDEN_PICKLE = "hidden-pickle"
    PROTOCOL = "protocol"
    PYTHON2_TEXT = "python2-text"
    PLAIN_PICKLE = "plain-pickle"
    TORCHSCRIPT = "torchscript"
    TORCH_PACKAGE = "torch-package"
    TORCH_EXPORT = "torch-export"
    UNPACKED_FOLDER = "unpacked-folder"
    TORCH_TAR = "torch-tar"
    TENSOR_SUBCLASS = "tensor-subclass"
    NUMPY_WEIGHTS = "numpy-weights"
    NON_STRING_KEY = "non-string-key"
    UNINITIALIZED = "uninitialized"
    WEIGHTS_BESIDE = "weights-beside"
    LISTED_AVERAGE = "listed-average"
    MOST_UNREAD = "most-unread"
    FROZEN = "frozen"
    CONSTANTS = "constants"
    GUESSED_BUFFERS = "guessed-buffers"
    TENSOR_ATTRIBUTE = "tensor-attribute"
    ATTRIBUTE_OF_TENSOR = "attribute-of-tensor"
    MOST_IN_ATTRIBUTES = "most-in-attributes"


class Fact(Struct, frozen=True):
    """Something that is true of a file: its kind, the place (a key, a file, a place in the container; ``.`` is the
    whole), and the numbers and names that belong to it, as the words of the kind in ``wording`` use them.

    >>> Fact.of(Kind.CUT_SHORT, nbytes=10, end=12).data["end"]
    12"""

    kind: Kind
    place: str = "."
    data: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.kind, self.place))

    @classmethod
    def of(cls, kind: Kind, place: str = ".", **data: Any) -> Fact:
        """Make a fact with its numbers and names as keyword arguments."""
        return cls(kind, place, data)


def first_facts(facts: list[Fact], rest: Kind, most: int = 3) -> list[Fact]:
    """Return the first few facts, and one of the kind ``rest`` with the number of the others, if there are any."""
    more = len(facts) - most
    return facts[:most] + ([Fact.of(rest, more=more)] if more > 0 else [])


# What is wrong beside tensors that are whole, and right once the file is written again.
BESIDE = frozenset({Kind.INDEX_STALE, Kind.INDEX_MOVED, Kind.HEADER_NOTES})

# After these a tensor may be another one than was saved.
DOUBTS = frozenset({Kind.DOUBTFUL_NAMES, Kind.DOUBTFUL_VALUES})

# Damage of a packed file that may have left wrong bytes, and has not only cut it short.
WRONG_BYTES = frozenset({Kind.PACKED_BYTES, Kind.ZIP_CHECKSUM, Kind.STREAM_DAMAGED})
