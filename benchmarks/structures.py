"""Writes the table of known structures: ``python -m benchmarks.structures`` with torchvision and timm installed.

Each model is built twice on the meta device, with two numbers of classes: the tensors that differ are its head. The
rest is told by a digest of its names and shapes, so that `ckptfix migrate --init` knows an architecture without either
library."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckptfix.zoo.drafting.recognition import PATH, head_widths, structure_digest

Shapes = dict[str, tuple[int, ...]]
Build = Callable[[int], torch.nn.Module]


def torchvision_models() -> Iterator[tuple[str, Build]]:
    """The classifiers of torchvision that are no quantised ones."""
    from torchvision import models

    for name in models.list_models(module=models):
        yield (
            f"torchvision:{name}",
            lambda classes, name=name: models.get_model(name, weights=None, num_classes=classes),
        )


def timm_models() -> Iterator[tuple[str, Build]]:
    """Every architecture of timm."""
    import timm

    for name in timm.list_models():
        yield f"timm:{name}", lambda classes, name=name: timm.create_model(name, num_classes=classes)


def shapes_of(build: Build, classes: int) -> Shapes:
    """Names and shapes of a model's state_dict."""
    try:
        with torch.device("meta"):
            model = build(classes)
    except (NotImplementedError, RuntimeError):  # it computes with its weights when it is built
        model = build(classes)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def rows() -> Iterator[tuple[str, str, str]]:
    """Digest, head with its widths, and name of each model."""
    for name, build in (*torchvision_models(), *timm_models()):
        try:
            one, other = shapes_of(build, 1000), shapes_of(build, 7)
        except Exception as error:  # noqa: BLE001 - whatever a model wants that is not there: it is left out, and told
            print(f"{name}: {error!r:.100}", file=sys.stderr)
            continue
        head = sorted({key for key in one if one[key] != other.get(key)})
        if not head or set(one) != set(other):
            print(f"{name}: has no plain head", file=sys.stderr)
            continue
        modules = list(dict.fromkeys(key.rpartition(".")[0] for key in head))
        yield structure_digest(one, modules), f"{','.join(modules)} {head_widths(one, modules)}", name


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    # torchvision without its own operators, as where it is built for another torch: the models stand without them.
    library: Any = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    found: dict[tuple[str, str], list[str]] = {}
    for digest, head, name in rows():
        found.setdefault((digest, head), []).append(name)
    lines = [
        f"{digest} {head} {' '.join(names)}\n"
        for (digest, head), names in sorted(found.items(), key=lambda row: row[1])
    ]
    PATH.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} structures of {sum(map(len, found.values()))} models")


if __name__ == "__main__":
    main()
