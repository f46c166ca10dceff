"""Other copies of the same tensor: in another set of weights of the container, or under a second name in the
state_dict.

Trainers keep a moving average (EMA) of the weights. Most write it as a second state_dict into the container; some write
both into one, under other names. Writers that cannot store a tie write its tensor twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from msgspec import Struct

from ckptfix.core.checkpoint import Candidate, Checkpoint, path_name
from ckptfix.core.lazy import np
from ckptfix.core.spec import TensorSpec
from ckptfix.core.target import Target
from ckptfix.reading.weights.containers import is_averaged
from ckptfix.values.decode import is_plain
from ckptfix.values.scan import first_numbers

# First segments of the raw weights and of their average within one state_dict.
_PREFIXES = (("online_model.", "ema_model."), ("model.", "model_ema."), ("", "ema_model."), ("student.", "teacher."))

# Prefixes of averages next to the raw weights.
_BESIDE = ("ema_", *(averaged for _, averaged in _PREFIXES))

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "tok_embeddings.weight")
# Names of the input and the output embedding of language models, which most of them tie.
_HEADS = ("lm_head.weight", "decoder.weight", "output.weight", "embed_out.weight")

_TIED = (*_EMBEDDINGS, *_HEADS)

# Two networks of one architecture, such as two critics or the generators of a CycleGAN, have the same keys too, but
# only the values of a moving average correlate with the raw ones.
ALIKE = 0.5  # least correlation of the first numbers of two matrices from the same training
SAMPLE, FEWEST = 1024, 64  # numbers of a matrix that are compared, and the least number: fewer correlate by chance
COMPARED, LOOKED_AT = 8, 64  # matrices that are compared, and those that are read to find as many sound ones

SHARED = 0.9  # least share of common keys of two sets of weights of the same model


class Twin(Struct, frozen=True):
    """The other copy of a tensor: ``place`` is the name of its set in the container, empty for the same state_dict."""

    place: str
    key: str
    spec: TensorSpec

    @property
    def label(self) -> str:
        """The place and the key, for people."""
        return f"{self.place}: {self.key}" if self.place else self.key


def entry_at(checkpoint: Checkpoint, place: str, key: str) -> object:
    """Return the entry under a key in one of the container's sets of weights; None if there is none."""
    if not place:
        return checkpoint.entries.get(key)
    candidate = next((candidate for candidate in checkpoint.candidates if candidate.name == place), None)
    return None if candidate is None else checkpoint.members(candidate).get(key)


def twin_sets(checkpoint: Checkpoint) -> Iterator[tuple[str, Mapping[str, Twin]]]:
    """Yield the other sets of weights of the same model, by name, each with the twins of the keys."""
    specs = checkpoint.specs
    for candidate in checkpoint.candidates:
        if candidate.path == checkpoint.container:
            continue
        members = checkpoint.members(candidate)
        names = _matched(specs, {key: value for key, value in members.items() if isinstance(value, TensorSpec)})
        place = path_name(candidate.path)
        twins = {key: Twin(place, name, spec) for key, (name, spec) in names.items()}
        if specs and len(twins) >= SHARED * len(specs) and _are_copies(checkpoint, candidate, twins):
            yield place, twins


def twins_beside(checkpoint: Checkpoint, target: Target | None) -> Mapping[str, Twin]:
    """Return the twins inside the state_dict: averages under other names, and the two ends of a tie.

    Two names of one stored tensor are not twins, because they are broken together. If only names suggest a tie, the
    sound values of both have to correlate: other models do not tie them."""
    specs = checkpoint.specs
    averages = [key for key in specs if key.startswith(_BESIDE)]
    pairs = {key: other for key in specs for other in _average_names(key) if other in specs} if averages else {}
    groups = target.ties if target is not None else _embedding_ties(specs)
    for group in groups:
        stored = [key for key in group if key in specs]
        pairs.update(zip(stored, stored[1:] + stored[:1], strict=True))
    both = {**{other: key for key, other in pairs.items()}, **pairs}
    return {
        key: Twin("", other, specs[other])
        for key in specs
        if (other := both.get(key)) is not None
        if specs[key].shape == specs[other].shape and specs[key].view != specs[other].view
        if target is not None or not key.endswith(_TIED) or _are_alike(specs[key], specs[other])
    }


def _are_copies(checkpoint: Checkpoint, candidate: Candidate, twins: Mapping[str, Twin]) -> bool:
    """Return whether two sets of weights are from the same training: at least half of their matrices correlate. If none
    can be compared, one of the two has to have the name of an average."""
    pairs = [(checkpoint.specs[key], twin.spec) for key, twin in twins.items()]
    matrices = [pair for pair in pairs if all(map(_is_comparable, pair))]
    step = -(-len(matrices) // LOOKED_AT) or 1
    correlations = (_correlation(*pair) for pair in matrices[::step])
    if found := list(islice((each for each in correlations if each is not None), COMPARED)):
        return 2 * sum(each >= ALIKE for each in found) >= len(found)
    return is_averaged(*candidate.path, *checkpoint.container)


def _are_alike(one: TensorSpec, other: TensorSpec) -> bool:
    return _is_comparable(one) and _is_comparable(other) and (_correlation(one, other) or 0.0) >= ALIKE


def _is_comparable(spec: TensorSpec) -> bool:
    return is_plain(spec) and len(spec.shape) > 1 and spec.numel >= FEWEST


def _correlation(one: TensorSpec, other: TensorSpec) -> float | None:
    """Return the correlation of the first numbers of two matrices; None if too many are broken, or one is constant."""
    first, second = (first_numbers(spec, SAMPLE) for spec in (one, other))
    sound = np.isfinite(first) & np.isfinite(second)
    if np.count_nonzero(sound) < FEWEST:
        return None
    first, second = (numbers[sound] - numbers[sound].mean() for numbers in (first, second))
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / size if size else None


def _matched(specs: Mapping[str, TensorSpec], other: Mapping[str, TensorSpec]) -> dict[str, tuple[str, TensorSpec]]:
    """Return, for each key of one set, the other set's key and spec with the same name except for leading segments."""
    by_tail: dict[str, list[str]] = {}
    for name in other:
        parts = name.split(".")
        for start in range(1, min(len(parts), 4)):
            by_tail.setdefault(".".join(parts[start:]), []).append(name)
    found = {}
    for key, spec in specs.items():
        tails = by_tail.get(key, [])
        same = key if key in other else tails[0] if len(tails) == 1 else None
        if same is not None and other[same].shape == spec.shape and other[same].has_data:
            found[key] = (same, other[same])
    return found


def _average_names(key: str) -> Iterator[str]:
    """Yield the names that the average of a key may have in the same state_dict."""
    yield _BESIDE[0] + key.replace(".", "_")  # mmcv and mmengine register averages as buffers
    for raw, averaged in _PREFIXES:
        if key.startswith(raw) and not key.startswith(averaged):
            yield averaged + key.removeprefix(raw)


def _embedding_ties(specs: Mapping[str, TensorSpec]) -> tuple[tuple[str, ...], ...]:
    """Return the input and output embedding of a language model, if the file has one of each, alike in shape and
    dtype."""
    inputs = [key for key in specs if key.endswith(_EMBEDDINGS)]
    heads = [key for key in specs if key.endswith(_HEADS)]
    if len(inputs) != 1 or len(heads) != 1:
        return ()
    first, last = specs[inputs[0]], specs[heads[0]]
    return ((inputs[0], heads[0]),) if (first.shape, first.dtype) == (last.shape, last.dtype) else ()
