"""The statistics of a checkpoint's tensors, each computed on first use."""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from itertools import chain, islice

from msgspec.structs import replace

from ckptfix.core.checkpoint import Checkpoint
from ckptfix.core.dtypes import DTYPES
from ckptfix.core.lazy import np
from ckptfix.core.progress import Task
from ckptfix.core.spec import TensorSpec, TensorStatistics
from ckptfix.values.decode import Narrowing, encoding
from ckptfix.values.dequantising import are_codes
from ckptfix.values.merged_tensors import MergedBytes, is_merged
from ckptfix.values.scan import ScanPart, looks, parts_of
from ckptfix.values.tally import COUNTS, join
from ckptfix.values.walk import Walk

WriteDraft = Callable[[Checkpoint], None]
"""A function that writes a checkpoint to a temporary place, from which it may be delivered."""

AT_ONCE = 1 << 12  # tensors scanned at a time: until a batch is done, each takes more memory than its statistics


class Statistics(Mapping[str, TensorStatistics]):
    """The statistics of every tensor with stored numbers, by key, in the file's order; packed codes have none, whatever
    their dtype.

    Computed on first access and kept; keys that are the same view of one storage are computed once. The numbers are the
    stored ones: a lazy conjugation or negation is not applied, and a quantised tensor counts by its integers. Access
    raises ``UnreadableError`` if bytes are missing. ``narrowing`` is a cast whose losses are counted in the same
    pass."""

    def __init__(
        self, checkpoint: Checkpoint, narrowing: Narrowing | None = None, draft: WriteDraft | None = None
    ) -> None:
        self._checkpoint, self._draft = checkpoint, draft
        self._narrowing = narrowing
        specs = checkpoint.specs
        self._specs = {key: spec for key, spec in specs.items() if _is_numeric(spec) and not are_codes(key, specs)}
        self._of_key: dict[str, TensorStatistics] = {}
        self._of_spec: dict[TensorSpec, TensorStatistics] = {}
        total = sum(spec.nbytes for spec in self._specs.values())
        self._task = Task("scanning values", total)
        self._rarity = _rarity(total)
        self._asked: set[str] = set()
        self._is_whole = False

    def of(self, checkpoint: Checkpoint, draft: WriteDraft | None = None) -> Statistics:
        """Return the statistics of an edited view of the checkpoint. Tensors in both are not computed again."""
        other = Statistics(checkpoint, self._narrowing, draft)
        other._of_spec = self._of_spec
        other._task = self._task
        return other

    def __getitem__(self, key: str) -> TensorStatistics:
        figures = self._of_key.get(key)
        if figures is None:
            self._compute([key])
            figures = self._of_key[key]
        self._asked.add(key)
        return figures

    def items(self) -> ItemsView[str, TensorStatistics]:
        """Return all of them, computed in parallel."""
        self.compute()
        return self._of_key.items()

    def values(self) -> ValuesView[TensorStatistics]:
        """Return all of them, computed in parallel."""
        self.compute()
        return self._of_key.values()

    def compute(self) -> None:
        """Compute all of them, in parallel."""
        if not self._is_whole:
            if self._draft is not None and is_merged(self._checkpoint):
                self._watch_draft(self._draft)
            self._compute(self._specs)
            self._of_key = {key: self._of_key[key] for key in self._specs}
            self._asked.update(self._specs)
            self._is_whole = True

    def _compute(self, keys: Iterable[str]) -> None:
        """Compute the statistics of some keys, except the known ones."""
        known, keys = self._of_spec, list(keys)
        wanted = iter(dict.fromkeys(spec for spec in map(self._specs.__getitem__, keys) if spec not in known))
        while some := list(islice(wanted, AT_ONCE)):
            parts = [_parts(spec, self._narrowing, self._rarity) for spec in some]
            found = looks(list(chain.from_iterable(parts)))
            for spec, of_spec in zip(some, parts, strict=True):
                known[spec] = _assemble(spec, of_spec, found)
                self._task.advance(spec.nbytes)
        self._of_key.update((key, known[self._specs[key]]) for key in keys)

    def _watch_draft(self, draft: WriteDraft) -> None:
        """Write a draft of the checkpoint, and collect the statistics of merged tensors on the way: computing their
        products again for the statistics, a merge of 4 GB takes 7.3 s of user time rather than 4.7."""
        watched: list[tuple[TensorSpec, list[ScanPart], dict[int, TensorStatistics], MergedBytes]] = []
        for spec in self._specs.values():
            source = spec.storage.source if spec.storage is not None else None
            if isinstance(source, MergedBytes) and source.watch is None and spec.is_contiguous and spec.numel:
                parts, found = parts_of(spec, self._narrowing, source.edges), dict[int, TensorStatistics]()
                source.watch = partial(_look, parts, found)
                watched.append((spec, parts, found, source))
        draft(self._checkpoint)
        for spec, parts, found, source in watched:
            source.watch = None
            if len(found) == len(parts):
                in_order = (found[number] for number in range(len(parts)))
                self._of_spec[spec] = _assemble(spec, parts, in_order)
                self._task.advance(spec.nbytes)

    @property
    def known(self) -> Mapping[str, TensorStatistics]:
        """The statistics that were asked for so far, by key; reads nothing."""
        return {key: self._of_key[key] for key in self._specs if key in self._asked}

    def __contains__(self, key: object) -> bool:
        return key in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def _look(parts: Sequence[ScanPart], found: dict[int, TensorStatistics], number: int, block: memoryview) -> None:
    found[number] = parts[number].look([block])


BINS = 16
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def histogram(figures: TensorStatistics) -> str:
    """Return the distribution of a tensor's numbers: a base-36 digit for each of ``BINS`` equal parts of its range,
    proportional to the part's share of the sample; the fullest is ``z``.

    Empty for a tensor without a sample, or with a single value."""
    if not figures.sample or figures.minimum >= figures.maximum:
        return ""
    low, high = figures.minimum / 2, figures.maximum / 2  # halved, because the range may overflow float64
    numbers = np.frombuffer(figures.sample, np.float32).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    places = ((numbers / 2 - low) / (high - low) * BINS).astype(np.int64).clip(0, BINS - 1)
    counts = np.bincount(places, minlength=BINS)
    heights = -(-35 * counts // max(counts.max(), 1))
    return "".join(_DIGITS[height] for height in heights.tolist()) if counts.any() else ""


def _rarity(nbytes: int) -> int:
    """Return the rarity of a checkpoint's marks: one word in 2^8 up to 32 MiB, which hardly misses a copy of 4 KiB, and
    one in 2^12 from 512 MiB on, which hardly misses one of 64 KiB.

    More marks there would take more than a tenth of a check's time; from 16 GiB on, their memory is bounded."""
    return max(min(max((nbytes >> 17).bit_length(), 8), 12), (nbytes >> 23).bit_length())


def _is_numeric(spec: TensorSpec) -> bool:
    values = _values(spec)
    if values is None or encoding(values.dtype) is None:
        return False
    if values.numel == 0:
        return True
    return values.storage is not None and (values.is_contiguous or Walk(values).is_bounded)


def _values(spec: TensorSpec) -> TensorSpec | None:
    """Return the strided tensor that holds the numbers: the tensor itself, or the values of a sparse one."""
    return spec.parts.get("values") if spec.parts else spec if spec.has_data else None


def tensor_statistics(spec: TensorSpec) -> TensorStatistics:
    """Return the statistics of one numeric tensor that has data, in bounded memory whatever its size.

    Raises ``UnreadableError`` if the bytes are not in the file."""
    parts = _parts(spec)
    return _assemble(spec, parts, looks(parts))


def _parts(spec: TensorSpec, narrowing: Narrowing | None = None, rarity: int = 0) -> list[ScanPart]:
    """Return the parts of a tensor to scan; none for a tensor without elements."""
    values = _values(spec)
    assert values is not None, "a tensor without data has no statistics"
    return parts_of(values, narrowing, rarity=rarity) if values.numel else []


def _assemble(spec: TensorSpec, parts: Sequence[ScanPart], looks: Iterator[TensorStatistics]) -> TensorStatistics:
    figures = next(looks) if parts else TensorStatistics()
    for _, found in zip(parts[1:], looks, strict=False):  # the rest belongs to other tensors
        join(figures, found)
    figures.minimum, figures.maximum = figures.minimum + 0.0, figures.maximum + 0.0  # -0.0 is 0.0
    figures = _repeated(figures, parts[0].walk) if parts else figures
    if not spec.parts:
        return figures
    numbers = spec.numel * (2 if DTYPES[spec.dtype].is_complex else 1)
    return _with_implicit_zeros(figures, max(numbers - figures.numel, 0))


def _repeated(figures: TensorStatistics, walk: Walk) -> TensorStatistics:
    """Return the statistics of all elements from those of the distinct ones."""
    times, first = walk.repetition, figures.first_nonfinite
    if times == 1 and first is None:
        return figures
    return replace(
        figures,
        **{name: getattr(figures, name) * times for name in COUNTS},
        first_nonfinite=None if first is None else walk.flat_index(first),
    )


def _with_implicit_zeros(figures: TensorStatistics, implicit: int) -> TensorStatistics:
    """Return the statistics of a sparse tensor from those of its stored values and the number of other zeros."""
    share = figures.finite / (figures.finite + implicit) if figures.finite + implicit else 0.0
    return replace(
        figures,
        numel=figures.numel + implicit,
        zeros=figures.zeros + implicit,
        minimum=min(figures.minimum, 0.0) if implicit else figures.minimum,
        maximum=max(figures.maximum, 0.0) if implicit else figures.maximum,
        mean=figures.mean * share,
        rms=figures.rms * math.sqrt(share),
        first_nonfinite=None,
        sample=b"",
    )
