"""The rows of a head for other classes: the row of the file for each row of the model, by a map or by two lists."""

import re
from pathlib import Path

from ckptfix.core.adaptations import Adaptation
from ckptfix.core.wording import nearest
from ckptfix.errors import Opt, UsageError, Words

MEAN = "mean"  # the entry of a map for a class that the file lacks

_ONE_MORE = ", one more: the background (or no object) needs a name too"
_OUTPUTS = re.compile(
    r"(?:^|[._])(?:(bbox|box|boxes|reg)|(?:cls|class|classes|classification|conf|logits|scores?))(?=[._]|$)",
    re.IGNORECASE,
)
_YOLO = re.compile(r"(?:^|\.)m\.\d+\.(?:weight|bias)$")  # the outputs of YOLOv5 and YOLOv7
_BOX_AND_OBJECT = 5  # its rows before those of the classes


def class_rows(asked: Adaptation, old: int, new: int, key: str) -> tuple[int, ...]:
    """Return, for each row of the model, its row in the file; one past the file's last row means the mean of all.

    A map has one class of the file per line, by number, or ``mean``; two lists have the class names of the file and of
    the model. Raises ``UsageError`` if they do not fit the layer."""

    def refusal(*words: Words) -> UsageError:
        return UsageError(Opt("adapt", asked.text), ": ", *words)

    lists = [_lines(name) for name in asked.files()]
    if len(lists) > 2:
        raise refusal("give one map, or the class names of the file and of the model")
    if not all(lists):
        raise refusal("the list of classes is empty; write one class per line")
    groups, others = _groups(key, old, new, len(lists[-1]))
    if groups > 1 and len(lists) == 1:
        raise refusal(
            f"{key} seems to have {groups} rows per class; give the class names of the file and of the model, which "
            "also give the number of classes: ",
            Opt("adapt", asked.with_recipe("OLD.txt,NEW.txt")),
        )
    classes, wanted = old // groups - others, new // groups - others
    names = lists[0] if len(lists) == 2 else [str(row) for row in range(classes)]
    if len(names) != classes:
        raise refusal(
            f"{asked.files()[0]} has {len(names)} lines, and {key} {classes} classes in the file"
            f"{_ONE_MORE * (classes == len(names) + 1)}",
        )
    place = {MEAN: classes, **{name: row for row, name in enumerate(names)}}
    if len(lists[-1]) != wanted:
        raise refusal(
            f"{asked.files()[-1]} has {len(lists[-1])} lines, and {key} {wanted} classes in the model"
            f"{_ONE_MORE * (wanted == len(lists[-1]) + 1)}",
        )
    for number, name in enumerate(lists[-1], 1):
        if name not in place:
            close = nearest(name, names)
            hint = f"did you mean {close!r}? " if close and len(lists) == 2 else ""
            rows = "a class of the file" if len(lists) == 2 else f"a row of the file, 0 to {classes - 1}"
            raise refusal(
                f"line {number} of {asked.files()[-1]}, {name!r:.60}, is not {rows}; {hint}write mean for a new class"
            )
        # A name that the model does not use, such as N/A in lists of COCO, may be repeated.
        for file, of in zip(asked.files(), lists, strict=True) if len(lists) == 2 and name != MEAN else ():
            if of.count(name) > 1:
                raise refusal(f"{file} has {name!r:.60} {of.count(name)} times; give each class its own name")
    found = tuple(place[name] for name in lists[-1])
    if groups == 1:
        return found
    if classes in found:
        raise refusal(
            f"{key} has {groups} rows per class, so mean is not defined for a new class; leave new classes out, or "
            "use a fresh head with ",
            Opt("drop_mismatched", True),
            " and ",
            Opt("fill", "target"),
        )
    if is_of_boxes(key):  # a class has its coordinates together; an anchor has its classes together
        return tuple(row * groups + part for row in found for part in range(groups))
    kept = (*range(others), *(others + row for row in found))
    return tuple(group * (others + classes) + row for group in range(groups) for row in kept)


def _groups(key: str, old: int, new: int, classes: int) -> tuple[int, int]:
    """Return how many groups (boxes, anchors) an output layer's rows form, and how many of each are not classes."""
    others = _BOX_AND_OBJECT if _YOLO.search(key) else 0
    groups = new // (classes + others)
    is_whole = groups > 0 and new == groups * (classes + others) and old % groups == 0 and old > groups * others
    return (groups, others) if is_whole and (others or is_of_boxes(key) is not None) else (1, 0)


def is_of_boxes(key: str) -> bool | None:
    """Return whether an output layer predicts boxes rather than classes; None if its name does not say."""
    found = [match[1] is not None for match in _OUTPUTS.finditer(key)]
    return found[-1] if found else None


def _lines(file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot read the list of classes: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
