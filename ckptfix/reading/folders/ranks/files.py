"""The files of ranks in a folder: which exist, their content, and which are missing or from another save."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ckptfix.bytes.files import small_text
from ckptfix.bytes.listing import list_folder, stamp_of
from ckptfix.bytes.sources import Content
from ckptfix.core.facts import MIXED_RANKS, Fact, Kind, clause, clauses
from ckptfix.core.objects import Opaque, tensors_in
from ckptfix.core.spec import TensorSpec
from ckptfix.core.wording import first_names
from ckptfix.errors import HostileError, MissingSaveError, Opt, UnreadableError, Words, damaged
from ckptfix.reading.archives.zip_directory import read_header
from ckptfix.reading.folders.ranks.names import MEGATRON_RANK
from ckptfix.reading.folders.shard_index import file_inside
from ckptfix.reading.formats import read_document
from ckptfix.reading.pickles.payload import refusing_payload
from ckptfix.reading.weights.document import Document

MOST_RANKS = 1 << 20  # ranks that a file may claim; no training has had as many

# The errors of reading inert data that a framework did not write.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)

# Keys of numbers that are equal on all ranks of a save.
COUNTERS = frozenset(("step", "epoch", "iteration", "global_step", "iter", "num_updates"))

LISTED = 4  # files of missing ranks that are named
MOST_ABSENT = 1024  # missing ranks whose parts of each weight are listed
_MOST_UNREADABLE = 256  # files that are opened until the first one that can be read
_FACTS = 4096
_LARGE = 1e15  # numbers that are longer than those of steps and ranks
# Bytes of a storage that are examined, and the largest number of distinct ones in a constant tensor.
_LOOKED_AT, _FEW = 4096, 8

_PICKLE = "data.pkl"  # the member that describes the tensors of a file

_NUMBER = re.compile(r"\d+")

# Names of settings that differ between ranks, the number of settings that are compared, and the suffix of tensors that
# differ between ranks.
_PRIVATE = re.compile(r"rank|rng|random|params$|padding|device|host|node|addr|time|path|dir")
_MOST_SETTINGS = 10_000
_OWN = "_extra_state"

_Rank = TypeVar("_Rank")


def by_rank(folder: Path, pattern: re.Pattern[str]) -> Mapping[tuple[int, ...], Path]:
    """Return the files whose names match, by the numbers in the groups of the pattern, in numerical order.

    Raises ``UnreadableError`` for two files with the same numbers."""
    stamp = stamp_of(folder)
    return _by_rank(folder, pattern) if stamp is None else _known_by_rank(folder, pattern, stamp)


@lru_cache(maxsize=4)  # called for every file of a folder, of which there may be thousands
def _known_by_rank(folder: Path, pattern: re.Pattern[str], stamp: int) -> Mapping[tuple[int, ...], Path]:
    return _by_rank(folder, pattern)


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> Mapping[tuple[int, ...], Path]:
    found: dict[tuple[int, ...], Path] = {}
    for match in filter(None, map(pattern.fullmatch, list_folder(folder).files)):
        add_rank(found, tuple(int(number or 0) for number in match.groups()), folder / match[0])
    return {numbers: found[numbers] for numbers in sorted(found)}


def add_rank(found: dict[_Rank, Path], rank: _Rank, path: Path) -> None:
    """Add the file of a rank. Raises ``UnreadableError`` if the rank has another one, of a second save."""
    if (other := found.setdefault(rank, path)) != path:
        names = first_names(sorted((other.name, path.name)))
        raise UnreadableError(f"{path.parent}: {names} are files of one rank; keep only those of one save")


def tagged(folder: Path, latest: str, is_one: Callable[[Path], bool], name: Callable[[str], str] = str) -> Path | None:
    """Return the folder of a save (``is_one``): this one, the one that the file ``latest`` names, or the only one in
    it; None if there is none.

    Raises ``UnreadableError`` if there are several."""
    if is_one(folder):
        return folder
    if (named := latest_of(folder, latest, is_one, name)) is not None:
        return named
    likely = (name for name in list_folder(folder).folders if not MEGATRON_RANK.fullmatch(name))  # no rank is a save
    tags = [child for name in likely if is_one(child := folder / name)]
    if len(tags) > 1:
        names = first_names([tag.name for tag in tags])
        raise UnreadableError(f"{folder}: holds {len(tags)} checkpoints ({names}); name one of them")
    return tags[0] if tags else None


def latest_of(
    folder: Path, latest: str, is_one: Callable[[Path], bool], name: Callable[[str], str] = str
) -> Path | None:
    """Return the folder of the save that the file ``latest`` names; ``name`` converts its text to a folder name.

    None if there is no such file, or if it names something else. Raises ``MissingSaveError`` if the save is missing and
    others exist."""
    file = folder / latest
    if not (word := small_text(file).strip()):
        return None
    named = file_inside(folder, name(word), str(file))
    if named.is_dir():
        return named if is_one(named) else None
    if others := [tag for tag in list_folder(folder).folders if is_one(folder / tag)]:
        names = first_names(others)
        raise MissingSaveError(f"{file}: names {named.name}, which is missing; fetch it, or name {names}")
    return None


def unlike_most(of_rank: Mapping[_Rank, object]) -> list[_Rank]:
    """Return the ranks whose facts differ from those of most ranks."""
    shown = {rank: repr(facts)[:_FACTS] for rank, facts in of_rank.items()}
    usual = Counter(shown.values()).most_common(1)
    return [rank for rank, facts in shown.items() if facts != usual[0][0]]


def _difference(of_rank: Mapping[_Rank, object], odd: Sequence[_Rank]) -> str:
    """Return in parentheses the numbers in which the first odd rank differs from the others; empty for other facts."""
    values = [of_rank[rank] for rank in (*odd[:1], *(rank for rank in of_rank if rank not in odd))][:2]
    one, other = (value if isinstance(value, tuple) else (value,) for value in values) if len(values) == 2 else ((), ())
    pairs = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
    are_numbers = all(_is_number(value) or _are_few(value) for pair in pairs for value in pair)
    return f" ({', '.join(f'{mine} instead of {usual}' for mine, usual in pairs)})" if pairs and are_numbers else ""


def _is_number(value: object) -> bool:
    return (type(value) is int or type(value) is float) and abs(value) < _LARGE


def _are_few(value: object) -> bool:
    return isinstance(value, list) and len(value) <= LISTED and all(map(_is_number, value))


def note_copies(remarks: dict[Fact, None], keys: Iterable[str], may_drift: bool = True) -> None:
    """Remark tensors whose copies differ between ranks, of which the first is taken; some may drift in training."""
    remarks.update({Fact.of(Kind.RANK_COPIES, key, drift=may_drift or key.endswith(_OWN)): None for key in keys})


def _settings(tree: Any) -> dict[str, object]:
    """Return the plain values in the settings of a rank by their paths, except those that differ between ranks."""
    found: dict[str, object] = {}
    pending = [("", tree)]
    for _ in range(_MOST_SETTINGS):
        if not pending:
            break
        path, value = pending.pop()
        value = value.attributes if isinstance(value, Opaque) else value
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            pending += [
                (f"{path}.{key}"[-_FACTS:], child) for key, child in value.items() if not _PRIVATE.search(str(key))
            ]
        elif isinstance(value, (str, int, float)) or value is None:
            found[path[1:]] = value
    return found


def sums_of(specs: Sequence[TensorSpec]) -> tuple[object, ...]:
    """Return the checksums of tensors' storages, each with the view of the tensor; empty if one has no checksum."""
    known = tuple(
        (stored.crc32, stored.nbytes, spec.offset, spec.shape, spec.strides)
        for spec in specs
        for storage in spec.storages
        for stored in storage.parts or (storage,)
    )
    return () if None in [crc for crc, *_ in known] else known


def are_varied(specs: Sequence[TensorSpec]) -> bool:
    """Return whether any tensor begins with more than a few distinct bytes: constant tensors may be equal on several
    ranks."""
    stored = (storage for spec in specs for storage in spec.storages)
    return any(len({*storage.source.read(0, min(storage.nbytes, _LOOKED_AT))}) > _FEW for storage in stored)


class RankFiles:
    """A reader of the files of a folder, with their damage and remarks."""

    def __init__(self, folder: Path, salvage: bool, named: Path | None = None) -> None:
        self.folder, self.salvage = folder, salvage
        self.named = named  # the file that was opened, if not the folder
        self.is_by_name = False  # whether the folder by itself is read as another checkpoint or as none
        self.names: set[str] = set()
        self._home: Path | None = None
        self._opened: tuple[Path, Content] | None = None  # the last opened file
        self._saved_as: dict[Path, str] = {}  # the original names of files
        self._misplaced: dict[str, str] = {}  # ranks that may have the data of another one, which is named
        self.left_out: Mapping[str, str] = {}  # such ranks, whose files are not read
        self._has_readable = False
        self.remarks: dict[Fact, None] = {}
        self.damage: list[Fact] = []
        self.lacking: Counter[str] = Counter()  # bytes of tensors that are in no file, by the tensor's place
        self.held_by: Counter[str] = Counter()  # those of them that a missing file had, by the file's name

    def root(self, file: Path) -> Any:
        """Return the root object of a file, and keep its remarks; None if it cannot be read, which is damage.

        Raises ``HostileError`` for a link that leads outside the folder."""
        if (document := self.opened(file)) is None:
            return None
        self.remarks.update(dict.fromkeys(document.remarks))
        return document.root

    def opened(self, file: Path) -> Document | None:
        """Return the document of a file; None if it cannot be read, which is damage.

        Raises ``UnreadableError`` if none of the first files can be read, unless the others are to be salvaged."""
        # A rank may have a folder of its own, by which it is known.
        for place in {name := self.name(file), name.partition("/")[0]} & self.left_out.keys():
            self.damage.append(Fact.of(Kind.RANK_MISPLACED, place, other=self.left_out[place]))
            return None
        try:
            document = read_document(self.content(file))
        except UnreadableError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EMFILE:
                raise  # the process has too many open files, which is not the file's fault
            self.damage.append(Fact.of(Kind.RANK_UNREADABLE, self.name(file), error=str(error)))
            if not (self._has_readable or self.salvage) and len(self.damage) == _MOST_UNREADABLE:
                raise damaged(self.folder, f"{clauses(self.damage)}; no rank can be read") from error
            return None
        if (fault := next(filter(is_of_pickle, document.damage), None)) is not None:
            # A tensor may have another name, shape or place in it, and the ranks are joined by these.
            self.damage.append(Fact.of(Kind.RANK_UNREADABLE, self.name(file), error=f"{file}: {clause(fault)}"))
            return None
        self._has_readable = True
        self.names |= document.names
        self.damage += [Fact.of(Kind.SHARD_DAMAGED, self.name(file), cause=fact) for fact in document.damage]
        return document

    def name(self, file: Path) -> str:
        """Return the name of a file in the folder; files of ranks that have folders of their own share a name."""
        return file.relative_to(self.folder).as_posix()

    def content(self, file: Path) -> Content:
        """Return the bytes of a file. Raises ``UnreadableError`` if it cannot be opened, ``HostileError`` if it is a
        link that leads outside the folder and the real folder of the first file, in which the cache of the Hugging Face
        hub keeps all files."""
        if self._opened is None or self._opened[0] != file:
            self._home = self._home or file
            found = file_inside(self.folder, self.name(file), str(self._home))
            self._opened = file, Content.of_file(str(found))
            self._opened[1].is_verified = self.salvage
            self._saved_as[file] = _saved_as(self._opened[1])
        return self._opened[1]

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Turn errors of malformed data in the body into ``UnreadableError``, or ``HostileError`` if the files are
        built to run code. Errors name the files that were copied over others or renamed."""
        with refusing_payload(str(self.folder), self.names):
            try:
                yield
            except UnreadableError as error:
                if type(error) is UnreadableError and (moved := self._moved()):
                    raise UnreadableError(*error.args, *moved, data=error.data) from error
                raise
            except MALFORMED as error:
                if moved := self._moved():
                    what = f" ({error})" if isinstance(error, ValueError) else ""
                    raise UnreadableError(f"{self.folder}: its files do not fit together{what}", *moved) from error
                why = f"its files are not what their framework writes ({type(error).__name__}: {error})"
                raise UnreadableError(f"{self.folder}: {why}; they are damaged or from an unknown release") from error

    def _moved(self) -> tuple[Words, ...]:
        """Return in words which files are copies of others or were renamed; empty if there are none."""
        self.note_renamed()
        if not (found := [f"{fact.place} {clause(fact)}" for fact in self.remarks if fact.kind in MIXED_RANKS]):
            return ()
        told = f"; {'; '.join(found[:LISTED])}: fetch the files with wrong names again"
        is_known = not self.salvage and self.without_misplaced() is not None
        return told, *((", or take what the others have whole with ", Opt("salvage", True)) if is_known else ())

    def without_misplaced(self) -> RankFiles | None:
        """Return a reader that takes ranks with the data of another one for missing; None if there are none, or if it
        is unknown which they are."""
        odd = {fact.place: fact.kind for fact in self.remarks if fact.kind in MIXED_RANKS}
        known = {*self._misplaced, *(place.rpartition("/")[2] for place in self._misplaced)}
        if not odd or any(kind is Kind.RANK_RENAMED and place not in known for place, kind in odd.items()):
            return None
        rest = RankFiles(self.folder, self.salvage, self.named)
        rest.left_out, rest.is_by_name = self._misplaced, self.is_by_name
        return rest

    def note_missing(self, world: int, present: Mapping[int, Path], pattern: str, groups: int = 1) -> None:
        """Record as damage the ranks of ``world`` without a file; ``pattern`` formats the name of a rank's file.

        ``groups`` is the number of such groups of ranks, each of which is noted by itself."""
        if not 0 < world <= MOST_RANKS:
            raise HostileError(f"{self.folder}: claims {world} ranks; do not use this checkpoint")
        extra = [path.name for rank, path in present.items() if rank >= world]
        if extra:
            self.damage.append(Fact.of(Kind.RANKS_STRANGE, ranks=world, names=tuple(extra)))
        if absent := world - sum(rank < world for rank in present):
            names = (pattern.format(rank) for rank in range(world) if rank not in present)
            first = tuple(next(names) for _ in range(min(absent, LISTED)))
            self.damage.append(Fact.of(Kind.RANKS_LACKING, absent=absent, ranks=world * groups, names=first))

    def check_absent(self, absent: int) -> None:
        """Raise ``UnreadableError`` if too many ranks or stages are missing to list the parts of every weight."""
        if absent > MOST_ABSENT:
            raise damaged(self.folder, clauses(self.damage))

    def of_another_save(self, of_rank: Mapping[_Rank, object], names: Mapping[_Rank, str], what: str) -> list[_Rank]:
        """Return the ranks of another save than most, by facts that are equal on all ranks of a save.

        With ``salvage``, they are recorded as damage. Otherwise, or if they are not a minority, raises
        ``UnreadableError`` with their names."""
        odd = unlike_most(of_rank)
        named = tuple(names[rank] for rank in odd)
        seen = _difference(of_rank, odd)
        is_minor = 2 * len(odd) < len(of_rank)
        if odd and not (self.salvage and is_minor):
            raise UnreadableError(
                f"{self.folder}: its ranks are from different saves: {first_names(named)}, unlike the other"
                f" {len(of_rank) - len(odd)}, by the {what}{seen}; put the files of one save together",
                *((", or take what the others have whole with ", Opt("salvage", True)) if is_minor else ()),
            )
        if odd:
            self.damage.append(Fact.of(Kind.RANKS_OF_ANOTHER_SAVE, names=named))
        return odd

    def note_repeated(
        self, held: Mapping[str, Any], misplaced: Container[str] = (), processes: Mapping[str, object] | None = None
    ) -> None:
        """Remark files whose tensors have the same checksums as another file's: one was copied over the other.

        ``misplaced`` are those that cannot be at their place, if known; so are those with the name of another rank.
        ``processes`` are the numbers of the processes that saved the files, if these have them: files of two processes
        are not copies, although their tensors may be equal, as experts are at the start of a training."""
        wrong = {name for name in held if name in misplaced}
        wrong |= {self.name(file) for file, saved in self._saved_as.items() if _is_of_another(file, saved)}
        seen: dict[tuple[object, ...], str] = {}
        for name, tree in held.items():
            specs = [spec for spec in tensors_in(tree) if spec.storage is not None]
            if not (sums := sums_of(specs)):
                continue
            other = seen.setdefault(((processes or {}).get(name), *sums), name)
            if other != name and are_varied(specs):
                odd, twin = (other, name) if other in wrong and name not in wrong else (name, other)
                self.remarks[Fact.of(Kind.RANK_REPEATED, odd, other=twin)] = None
                self._misplaced.update({odd: twin} if odd in wrong else {odd: twin, twin: odd})

    def note_foreign(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Remark files whose settings differ from those of most files: they are from another run at the same step."""
        said = {
            name: _settings({key: value for key, value in parts.items() if value is not None})
            for name, parts in saved.items()
        }
        tops = {name: {path.partition(".")[0] for path in settings} for name, settings in said.items()}
        odd: dict[str, list[str]] = {}
        for path in dict.fromkeys(path for settings in said.values() for path in settings):
            top = path.partition(".")[0]
            values = {name: settings.get(path, ...) for name, settings in said.items() if top in tops[name]}
            for name in unlike_most(values):
                odd.setdefault(name, []).append(path)
        self.remarks.update({Fact.of(Kind.RANK_FOREIGN, name, names=tuple(paths)): None for name, paths in odd.items()})

    def note_odd_copies(self, held: Mapping[str, Mapping[str, Any]], keys: Iterable[str]) -> None:
        """Remark a minority of files in which copies differ from those in most files, by their checksums."""
        odd: dict[str, list[str]] = {}
        for key in keys:
            sums = {
                name: sums_of([spec]) for name, state in held.items() if isinstance(spec := state.get(key), TensorSpec)
            }
            for name in unlike_most(sums) if all(sums.values()) else ():
                odd.setdefault(name, []).append(key)
        if 2 * len(odd) < len(held):
            self.remarks.update({Fact.of(Kind.RANK_FOREIGN, name, names=tuple(own)): None for name, own in odd.items()})

    def note_order(
        self, numbers_of: Mapping[str, tuple[int, ...]], words: Mapping[str, object], kept: Container[str] = ()
    ) -> None:
        """Remark files whose order differs from that of the numbers in their content; ``words`` are for the message.
        Of two files, the one that has its own name (``kept``) is not the renamed one.

        Files that were renumbered in the same order are fine."""
        last: tuple[str, tuple[int, ...]] | None = None
        for name, numbers in numbers_of.items():
            if last is not None and numbers <= last[1]:
                is_last = name in kept and last[0] not in kept
                odd, data = (last[0], {"after": name}) if is_last else (name, {"before": last[0]})
                self.remarks[Fact.of(Kind.RANK_RENAMED, odd, other=str(words[odd]), **data)] = None
                last = None if is_last else last
            last = max(last or (name, numbers), (name, numbers), key=lambda each: each[1])

    def note_renamed(self) -> None:
        """Remark files that were saved under the name of another rank, which torch stores in the archive. For formats
        in which only the name tells which part of the weights a file has."""
        alike: dict[tuple[Path, str], list[tuple[tuple[int, ...], str, str]]] = {}
        for file, saved in self._saved_as.items():
            if (form := _form(saved)) == _form(file.stem):
                alike.setdefault((file.parent, form), []).append((_numbers(file.stem), file.name, saved))
        for (folder, _), files in alike.items():
            words, known = {name: saved for _, name, saved in sorted(files)}, len(self.remarks)
            kept = {name for name, saved in words.items() if Path(name).stem == saved}
            self.note_order({name: _numbers(saved) for name, saved in words.items()}, words, kept)
            if len(self.remarks) > known:  # then no file is right only because its neighbours are in order
                self._misplaced.update({self.name(folder / name): words[name] for name in words.keys() - kept})

    def document(self, form: str, root: Any, producer: str, copies: Mapping[str, TensorSpec] | None = None) -> Document:
        if nbytes := self.lacking.total():
            keys = tuple(key for key, lost in self.lacking.items() if lost)
            are_known = len(self.held_by) > 1 and self.held_by.total() == nbytes
            files: dict[str, Any] = {"files": dict(self.held_by)} if are_known else {}
            self.damage.append(Fact(Kind.BYTES_LACKING, data={"nbytes": nbytes, "keys": keys, **files}))
        return Document(
            str(self.named if self.is_by_name else self.folder),
            form,
            root,
            names=self.names,
            remarks=list(self.remarks),
            damage=self.damage,
            producer=producer,
            copies=copies or {},
            folder=str(self.folder),
        )


def _saved_as(content: Content) -> str:
    """Return the name under which ``torch.save`` wrote a zip, which is the folder in it; empty if unknown."""
    header = read_header(content, 0)
    return header.name.partition(b"/")[0].decode("utf-8", "replace") if header and header.is_signed else ""


def is_of_pickle(fault: Fact) -> bool:
    """Return whether damage is in the pickle that describes the tensors of a file."""
    is_member = fault.kind is Kind.MEMBER_CHECKSUM and fault.place == _PICKLE
    return is_member or fault.kind in (Kind.PICKLE_CUT, Kind.PICKLE_DAMAGED)


def _is_of_another(file: Path, saved: str) -> bool:
    """Return whether the name under which a file was saved is that of another rank."""
    return saved != file.stem and _form(saved) == _form(file.stem)


def _form(name: str) -> str:
    return _NUMBER.sub("0", name)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(text)))
