"""Which architecture a layout is, how sure that is, and what says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptfix.core.finding import counted
from ckptfix.zoo.drafting.families import describe_family
from ckptfix.zoo.drafting.hints import CLASS, Hint, plain_word
from ckptfix.zoo.drafting.known import Known, Shapes, find_known, named_models
from ckptfix.zoo.drafting.likeness import Confidence, Likeness

_SHOWN = 4
_LEAST_PART = 0.2
"""Of all tensors: a smaller part of a model is not worth a name."""


def liken(shapes: Shapes, hints: Sequence[Hint], names: Iterable[str]) -> Likeness:
    """The likeness of a layout, of the words that its files say, and of the files' names."""
    words = Counter(hint.plain for hint in hints)
    stems = [plain_word(name.rpartition("/")[2]) for name in names]
    if (known := find_known(shapes)) is not None:
        return _with_words(_exact(known, words, stems), hints, stems)
    found = describe_family(shapes)
    if found is None or found.confidence is Confidence.GUESS:
        found = _by_part(shapes, found)
    if found is None:
        found = _by_words(hints, stems)
    return _with_words(found, hints, stems)


def _exact(known: Known, words: Counter[str], stems: Sequence[str]) -> Likeness:
    """One of the models that are built exactly so: torchvision's, or the one whose name the files say."""
    models = [tuple(name.split(":")) for name in known.names]

    def rank(model: tuple[str, ...]) -> tuple[bool, bool, bool, int]:
        library, name = model
        is_said = words[name] > 0 or any(name in stem for stem in stems)
        # Of names for one structure the shortest is the plainest: resnet18 and not resnetblur18.
        return (known.classes is None and library != "timm", not is_said, library != "torchvision", len(name))

    (library, name), *others = sorted(models, key=rank)
    also = [f"{each}'s {other}" if each != library else other for each, other in others]
    head = "without a head" if known.classes is None else f"with {known.classes} classes"
    evidence = [f"every name and shape is that of {library}'s {name} {head}"]
    if also:
        more = f" and {len(also) - _SHOWN} more" if len(also) > _SHOWN else ""
        evidence.append(f"so are those of {', '.join(also[:_SHOWN])}{more}")
    found = Likeness(name, Confidence.EXACT, tuple(evidence), needs=library)
    if library == "timm":
        arguments = {"model_name": name, "num_classes": known.classes or 0}
        return replace(found, model="timm:create_model", arguments=arguments)
    if known.classes is None:
        evidence.append(f"torchvision builds it with its head ({', '.join(known.head)}), which these files do not have")
        found = replace(found, confidence=Confidence.LIKELY, evidence=tuple(evidence))
    arguments = {} if known.classes in (None, 1000) else {"num_classes": known.classes}
    return replace(found, model=f"torchvision.models:{name}", arguments=arguments)


def _by_part(shapes: Shapes, found: Likeness | None) -> Likeness | None:
    """A known model inside of another: a detector's backbone, a segmentation's encoder."""
    sizes = Counter(
        key[: position + 1]
        for key in shapes
        for position, char in enumerate(key)
        if char == "." and key.count(".", 0, position) < 3
    )
    for prefix, count in sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0])):
        if count < max(_LEAST_PART * len(shapes), 8) or (count == len(shapes) and found is not None):
            continue
        part = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
        known = find_known(part)
        if known is not None:
            library, name = sorted(
                (tuple(each.split(":")) for each in known.names), key=lambda each: each[0] != "torchvision"
            )[0]
            line = f"{prefix}* is exactly {library}'s {name}{'' if known.classes else ' without its head'}"
            rest = Counter(key.partition(".")[0] for key in shapes if not key.startswith(prefix))
            if rest:
                listed = ", ".join(f"{part} ({count})" for part, count in rest.most_common(6))
                line += f"; beside it {listed} tensors"
            base = found or Likeness(f"a model around {name}", Confidence.GUESS)
            return replace(base, evidence=(*base.evidence, line))
    return found


def _by_words(hints: Sequence[Hint], stems: Sequence[str]) -> Likeness:
    """What the words alone say: the class of a whole model, an entry, a name in the files' names."""
    unknown = Likeness("unknown", Confidence.UNKNOWN, ("names and shapes are of no architecture that is known here",))
    classes = Counter(hint.word for hint in hints if hint.place == CLASS and "." in hint.word)
    if classes:
        word = classes.most_common(1)[0][0]
        module, _, own = word.rpartition(".")
        return replace(
            unknown,
            title=own,
            confidence=Confidence.GUESS,
            model=f"{'your_script' if module == '__main__' else module}:{own}",
        )
    said = Counter(hint.plain for hint in hints)
    library_names = named_models()
    for word, _ in said.most_common():
        if word in library_names:
            return _named(unknown, word, library_names[word])
    for stem in stems:
        if (name := name_in(stem)) is not None:
            return _named(unknown, name, library_names[name])
    if said:
        return replace(unknown, title=said.most_common(1)[0][0], confidence=Confidence.GUESS)
    return unknown


def _named(unknown: Likeness, name: str, library: str) -> Likeness:
    line = f"their words say {name}, but names and shapes are not those of {library}'s {name}"
    found = replace(unknown, title=name, confidence=Confidence.GUESS, evidence=(line,), needs=library)
    if library == "timm":
        return replace(found, model="timm:create_model", arguments={"model_name": name})
    return replace(found, model=f"torchvision.models:{name}")


def name_in(stem: str) -> str | None:
    """The longest name of a model that a file's name holds, as words of its own."""
    text = f"_{stem}_"
    found = [name for name in named_models() if f"_{name}_" in text]
    return max(found, key=len, default=None)


def _with_words(found: Likeness, hints: Sequence[Hint], stems: Sequence[str]) -> Likeness:
    """The likeness with what the files say of it themselves, for and against."""
    plain = plain_word(found.title)
    is_sure = found.confidence in (Confidence.EXACT, Confidence.LIKELY)
    lines = []
    for hint, count in sorted(Counter(hints).items(), key=lambda entry: (-entry[1], entry[0]))[:_SHOWN]:
        against = is_sure and hint.plain in named_models() and not _agree(hint.plain, plain)
        said = f"saved whole, as a {hint.word}" if hint.place == CLASS else f"{hint.place} says {hint.word}"
        lines.append(f"{'BUT ' if against else ''}{said} ({counted(count, 'file')})")
    named = Counter(name for stem in stems if (name := name_in(stem)) is not None)
    for name, count in sorted(named.items(), key=lambda entry: (-entry[1], entry[0]))[:_SHOWN]:
        against = is_sure and not _agree(name, plain)
        lines.append(f"{'BUT ' if against else ''}{counted(count, 'file')} with {name} in the name")
    return replace(found, evidence=(*found.evidence, *lines))


def _agree(word: str, name: str) -> bool:
    """Whether two names mean one architecture: ``resnet_50``, ``resnet50``, ``ResNet``."""
    one, other = word.replace("_", ""), name.replace("_", "")
    return bool(one) and bool(other) and (one in other or other in one)
