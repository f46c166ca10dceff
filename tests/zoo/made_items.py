"""Writes small zoos, and lists them."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ckptfix.zoo.items import Item, ItemKind, list_zoo
from ckptfix.zoo.places import LocalPlace, Place

FILE, FOLDER, OTHER = ItemKind.FILE, ItemKind.FOLDER, ItemKind.OTHER


def weights(*keys: str) -> bytes:
    return save({key: torch.ones(2) for key in keys or ("w",)})


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def index(**files: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 16}, "weight_map": files}).encode()


def fill(root: Path, files: dict[str, bytes]) -> LocalPlace:
    for name, raw in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return LocalPlace(str(root))


def kinds(place: Place, *args: Any) -> dict[str, ItemKind]:
    return {item.name: item.kind for item in list_zoo(place, *args)}


def parts(item: Item) -> list[str]:
    return [part.name for part in item.parts]


def the_folder(place: Place) -> Item:
    (item,) = [item for item in list_zoo(place) if item.kind is FOLDER]
    return item


SHARDED = {
    "llm/model.safetensors.index.json": index(
        a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors"
    ),
    "llm/model-00001-of-00002.safetensors": weights("a"),
    "llm/model-00002-of-00002.safetensors": weights("b"),
    "llm/config.json": b"{}",
}
