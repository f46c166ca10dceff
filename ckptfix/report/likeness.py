"""Which known architecture a file looks like, in words, and the command that compares the two."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ckptfix.core.finding import counted
from ckptfix.core.likeness import Fit, Likeness
from ckptfix.report.style import Line, Span

_FEW = 2  # other models of the same structure to name; more are counted
_MODULES = 3  # modules that a difference names

_SIZES: Mapping[str, Callable[[int], str]] = {
    "num_classes": lambda size: f"{size} class{'es' if size != 1 else ''}",
    "in_chans": lambda size: counted(size, "input channel"),
    "vocab_size": lambda size: f"a vocabulary of {size}",
    "img_size": lambda size: f"images of {size} x {size}",
}


FormatCommand = Callable[[Mapping[str, Any]], str]  # returns the command, or the call, with these options


def likeness_lines(likeness: Likeness, command: FormatCommand, choices: Mapping[str, Any]) -> Iterator[Line]:
    """Yield what a file looks like, and the commands to continue with."""
    text = likeness_text(likeness)
    yield ("looks like: ", Span(text, "strong") if likeness.is_named else text)
    for number, line in enumerate(likeness_commands(likeness, command, choices)):
        yield ("       or: " if number else "  compare: ", Span(line, "command"))


def likeness_commands(likeness: Likeness, command: FormatCommand, choices: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command that compares a file with the known model, and the one that builds the model if its library is
    installed; nothing for a model that is only near. Several models in one file each have their own."""
    for each in (likeness, *likeness.others) if likeness.is_named else ():
        own = {**choices, "weights": each.prefix.rstrip(".")} if likeness.others else choices
        yield command({**own, "like": each.target})
        if (model := each.model) is not None and _is_installed(model.partition(":")[0]):
            yield command({**own, "model": model})


def _is_installed(library: str) -> bool:
    return find_spec({"smp": "segmentation_models_pytorch"}.get(library, library)) is not None


def likeness_text(likeness: Likeness) -> str:
    """Return the name of the model, or of each model in the file, and how the file differs from it."""
    if likeness.fit is Fit.NEAR:
        return f"no known model; the nearest is {_names(likeness)}: {', '.join(_differences(likeness))}"
    text = "; and ".join(map(_model_text, (likeness, *likeness.others)))
    if not likeness.outside:
        return text
    are = "is" if likeness.outside == 1 else "are"
    return f"{text}; {counted(likeness.outside, 'key')} of the file {are} outside {'them' if likeness.others else 'it'}"


def _names(likeness: Likeness) -> str:
    first, *others = (name.replace("/", " ", 1) for name in likeness.names)
    if len(others) > _FEW:
        return f"{first} (one of {len(likeness.names)} with this structure: {', '.join(others[:_FEW])} …)"
    return first + (f" (also {', '.join(others)})" if others else "")


def _model_text(likeness: Likeness) -> str:
    parts = [f"{_names(likeness)}{_head(likeness)}"]
    parts += [_SIZES[name](size) for name, size in likeness.sizes.items()]
    if likeness.prefix:
        parts.append(f"under `{likeness.prefix}`")
    if likeness.fit is not Fit.PIECE and likeness.renamed:
        few = [f"`{name}` for `{known}`" for name, known in likeness.renamed.items()][:_MODULES]
        more = ", …" if len(likeness.renamed) > len(few) else ""
        parts.append(f"with other names ({', '.join(few)}{more})")
    return ", ".join(parts)


def _head(likeness: Likeness) -> str:
    """Return how the file's head differs from the model's."""
    if likeness.fit is Fit.PIECE:
        return f", only its `{likeness.renamed['']}`"
    added, changed = likeness.added, (*likeness.missing, *likeness.differing)
    if added:
        return f" with {_modules(added)} " + (f"instead of {_modules(changed)}" if changed else "added")
    if likeness.differing:
        return f" with another {_modules(likeness.differing)}"
    return " without its head" if changed else ""


def _differences(likeness: Likeness) -> Iterator[str]:
    """Yield how a file differs from the nearest model."""
    if likeness.prefix:
        yield f"under `{likeness.prefix}`"
    if likeness.missing:
        yield f"{len(likeness.missing)} of its {likeness.tensors} keys missing ({_modules(likeness.missing)})"
    if likeness.differing:
        yield f"{counted(len(likeness.differing), 'key')} with a different shape ({_modules(likeness.differing)})"
    if likeness.added or likeness.outside:
        yield f"{counted(len(likeness.added) + likeness.outside, 'key')} that it lacks" + (
            f" ({_modules(likeness.added)})" if likeness.added else ""
        )


def _modules(keys: Collection[str]) -> str:
    """Return the modules of keys, at the first depth that has more than one."""
    for depth in (1, 2, 3):
        counts = Counter(".".join(key.split(".")[:depth]) for key in keys)
        if len(counts) > 1 or depth == 3 or all(key.count(".") <= depth for key in keys):
            break
    more = ", …" if len(counts) > _MODULES else ""
    return ", ".join(f"`{name}`" for name, _ in counts.most_common(_MODULES)) + more
